"""Runs Triton kernels in Triton's own interpreter, on NumPy arrays, without a GPU or PyTorch."""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact_kernels
from jact_kernels import compat


class HostTensor:
    """A NumPy array with what the interpreter asks of a tensor; it is its own storage."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "HostTensor":
        return self

    def cpu(self) -> "HostTensor":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "HostTensor":
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def set_(self, *_: Any) -> None: ...

    def copy_(self, *_: Any) -> None: ...


def call(*arrays: Any, kernel: Any, out_type: Any, grid: int, **constants: Any) -> Any:
    """Stands in for `compat.triton_call`."""
    outs = [HostTensor(np.zeros(out.shape, out.dtype)) for out in jax.tree.leaves(out_type)]
    # NumPy warns of infinity less infinity, a GPU does not.
    with np.errstate(all="ignore"):
        kernel[(grid,)](*(HostTensor(np.array(array)) for array in arrays), *outs, **constants)
    results = [jnp.asarray(out.array) for out in outs]
    return jax.tree.unflatten(jax.tree.structure(out_type), results)


def load(folder: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Triton kernels of an operation, loaded anew such that they are interpreted.

    Triton decides that when a kernel is defined. The real ones, under their own name, stay as is.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(compat, "triton_call", call)
    name = f"interpreted_{folder}"
    path = pathlib.Path(str(jact_kernels.__file__)).parent / folder / "triton_gpu.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The interpreter reads the source of a kernel's module.
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def compile_to_cubin(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int
) -> Any:
    """Compiles a kernel for an architecture, such as 90, that need not be here."""
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    source: Callable[..., Any] = compiler.ASTSource
    return compiler.compile(source(kernel, types, constants), target=target)
