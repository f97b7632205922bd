"""A user's training step, compiled once for each set of plans, and traced for probing."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jact import compat, doors
from jact.adapt import hoist
from jact.adapt.modes import Comparing, Fixed, Listing, Plans, Probing
from jact.memory.sizes import format_bytes
from jact.policy import Policy

#: Options of `jax.jit` that a probe does without: it leaves its arguments alone, and has other
#: results.
_STEP_ONLY = ("donate_argnums", "donate_argnames", "out_shardings", "keep_unused")


class Arguments:
    """Arguments of a step as types: what it is compiled for.

    Attributes:
        shapes: tells arguments of these shapes and dtypes from others.
        nbytes: bytes of all arrays.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        found: list[Any] = []
        self.nbytes = 0

        def to_type(leaf: Any) -> Any:
            result = _type(leaf)
            if isinstance(result, jax.ShapeDtypeStruct):
                found.append((result.shape, str(result.dtype)))
                self.nbytes += math.prod(result.shape) * result.dtype.itemsize
            elif isinstance(leaf, str | bool):
                found.append(leaf)
            return result

        door = doors.of_call(args, kwargs)
        to_types = _types if door is None or not hasattr(door, "map_arrays") else door.map_arrays
        self.args, self.kwargs = to_types((args, kwargs), to_type)
        self.shapes = f"{zlib.crc32(repr(found).encode()):08x}"


def _types(tree: Any, fun: Callable[[Any], Any]) -> Any:
    return jax.tree.map(fun, tree)


def _type(leaf: Any) -> Any:
    """The type of an array, with its sharding if that is fixed; anything else stays."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf
    aval = jax.typeof(leaf)
    sharding = None
    if isinstance(leaf, jax.Array) and leaf.committed:  # type: ignore[attr-defined]
        sharding = leaf.sharding
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


class Program:
    """The step under one set of plans.

    Attributes:
        plans: the plans.
        mode: what the step is traced in.
        peak: the compiled peak in bytes; None before it was compiled ahead.
        seconds: what compiling took.
        cpu_seconds: what it took of all cores, and whatever else the process did meanwhile.
    """

    def __init__(self, jitted: Any, mode: Fixed):
        self.plans = mode.plans
        self.peak: int | None = None
        self.seconds = self.cpu_seconds = 0.0
        self.jitted = jitted
        self.mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        with compat.trace_in(self.mode):
            return self.jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step, as `jax.jit` does."""
        with compat.trace_in(self.mode):
            return self.jitted.lower(*args, **kwargs)

    def compile(self, arguments: Arguments) -> int:
        """Compiles the step ahead of time, so that the next call finds it; returns the peak."""
        if self.peak is None:
            start, cpu_start = time.perf_counter(), time.process_time()
            compiled = self.lower(*arguments.args, **arguments.kwargs).compile()
            # Flax wraps what JAX has compiled.
            compiled = getattr(compiled, "compiled", compiled)
            stats = compiled.memory_analysis()
            self.seconds = time.perf_counter() - start
            self.cpu_seconds = time.process_time() - cpu_start
            self.peak = 0 if stats is None else int(stats.temp_size_in_bytes)
        return self.peak


class Steps:
    """A step's programs, by plans; the ones used last, up to a number.

    Attributes:
        fun: the user's function.
        compilations: how many sets of plans it was compiled for.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        options: Mapping[str, Any],
        owner: object,
        basis: Policy,
        max_compiled: int,
    ):
        self.fun = fun
        self.compilations = 0
        self._options = dict(options)
        self._owner = owner
        self._basis = basis
        self._max = max_compiled
        self._programs: collections.OrderedDict[Plans, Program] = collections.OrderedDict()
        # Plans are long, and looked up at each step.
        self._last: Program | None = None
        self._probes: dict[str, tuple[Probing, Any]] = {}
        self._lock = threading.Lock()
        self._jit: Callable[..., Any] | None = None

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def name(self) -> str:
        """What the step is called, for messages."""
        return getattr(self.fun, "__qualname__", type(self.fun).__name__)

    def find(self, plans: Plans) -> Program | None:
        """The program for some plans, if there is one."""
        if self._last is None or self._last.plans is not plans:
            self._last = self._programs.get(plans)
        return self._last

    def get(self, plans: Plans, arguments: Arguments, keep: Plans | None = None) -> Program:
        """The program for some plans; made, though not compiled, when there is none.

        Args:
            plans: the plans.
            arguments: what the step is called with.
            keep: the plans in use, whose program is not to be dropped.
        """
        with self._lock:
            if plans not in self._programs:
                mode = Fixed(self._owner, plans, self._basis)
                # A function of its own, since JAX keeps what it has compiled by the function.
                fun = functools.wraps(self.fun)(lambda *a, **k: self.fun(*a, **k))
                jitted = self._jitted(arguments.args, arguments.kwargs)(fun, **self._options)
                self._programs[plans] = Program(jitted, mode)
                self.compilations += 1
            self._programs.move_to_end(plans)
            for old in list(self._programs):
                if len(self._programs) <= self._max:
                    break
                if old not in (plans, keep):
                    del self._programs[old]
                    self._last = None
            return self._programs[plans]

    def probe(
        self, mode: Probing, arguments: Arguments, full: bool, args: Any, kwargs: Any
    ) -> tuple[hoist.Figures, Probing]:
        """Runs the step for the figures that a controller wants; compiled when called first.

        Args:
            mode: what to measure.
            arguments: the types of what follows.
            full: whether biases are measured, too.
            args: the arguments of the step.
            kwargs: its keyword arguments.

        Returns:
            The figures, and the mode with what is known of the functions at such arguments.
        """
        if arguments.shapes not in self._probes:
            options = {k: v for k, v in self._options.items() if k not in _STEP_ONLY}
            # Residuals, and their sizes, are others for other shapes.
            own = dataclasses.replace(mode, layouts={}, uniform={}, calls={})
            probe = _with_flag(self._probing(own), self._jitted(args, kwargs), options, len(args))
            self._probes[arguments.shapes] = own, probe
        own, probe = self._probes[arguments.shapes]
        # What follows from the flag is no transfer of the user's.
        with jax.transfer_guard_host_to_device("allow"):
            return probe(np.bool_(full), args, kwargs), own

    def compare(self, program: Program, args: Any, kwargs: Any) -> hoist.Figures:
        """Runs the step for sketches of its gradients and of exact ones; compiles for that."""
        options = {k: v for k, v in self._options.items() if k not in _STEP_ONLY}
        mode = Comparing(program.mode)
        return self._jitted(args, kwargs)(self._probing(mode), **options)(*args, **kwargs)

    def _probing(self, mode: Probing | Comparing) -> Callable[..., hoist.Figures]:
        @functools.wraps(self.fun)
        def probe(*args: Any, jact_flag: Any = True, **kwargs: Any) -> hoist.Figures:
            door = doors.of_call(args, kwargs)
            if door is not None and hasattr(door, "functional"):
                with door.functional(self.fun, args, kwargs) as (pure, args, kwargs):
                    return _figures(pure, args, kwargs, mode, jact_flag)
            return _figures(self.fun, args, kwargs, mode, jact_flag)

        return probe

    def what_holds(self, mode: Probing, arguments: Arguments) -> str:
        """Says what the step saves besides codes, for a message."""
        listing = Listing(mode.owner, mode.basis)
        args, kwargs = arguments.args, arguments.kwargs
        options = {k: v for k, v in self._options.items() if k not in _STEP_ONLY}
        fun = functools.wraps(self.fun)(lambda *a, **k: self.fun(*a, **k))
        with compat.trace_in(listing):
            self._jitted(args, kwargs)(fun, **options).lower(*args, **kwargs)
        exact = sorted(listing.exact, reverse=True)
        total = format_bytes(sum(nbytes for nbytes, _, _ in exact))
        largest = ", ".join(f"{name} ({why}, {format_bytes(n)})" for n, name, why in exact[:5])
        return (
            f". Besides, {total} of residuals are saved exactly (the largest: "
            f"{largest or 'none'}); the rest are values in passing: decoded residuals, cotangents "
            "and gradients. A smaller batch, more codecs to choose from (int1, pool2), or "
            "jax.checkpoint around a block makes it smaller"
        )

    def _jitted(self, args: Any, kwargs: Any) -> Callable[..., Any]:
        """`jax.jit`, or what a library has in its place for such arguments."""
        jit = self._jit or getattr(doors.of_call(args, kwargs), "jit", jax.jit)
        self._jit = jit
        return jit


def _with_flag(
    probe: Callable[..., hoist.Figures],
    jit: Callable[..., Any],
    options: Mapping[str, Any],
    num_args: int,
) -> Callable[[Any, Any, Any], hoist.Figures]:
    """Compiles a probe so that it takes the flag of `hoist.collect`, before its own arguments.

    With `in_shardings`, JAX takes no arguments by name: the flag is the last by position then. With
    static arguments besides, positions have two meanings, and the flag stays True.
    """
    if "in_shardings" not in options:
        named = jit(probe, **options)
        return lambda flag, args, kwargs: named(*args, jact_flag=flag, **kwargs)
    if any(name.startswith("static_arg") for name in options):
        always = jit(probe, **options)
        return lambda _, args, kwargs: always(*args, **kwargs)
    shardings = options["in_shardings"]
    each = shardings if isinstance(shardings, tuple | list) else [shardings] * num_args

    @functools.wraps(probe)
    def flag_last(*args: Any) -> hoist.Figures:
        return probe(*args[:-1], jact_flag=args[-1])

    placed = jit(flag_last, **dict(options) | {"in_shardings": (*each, None)})
    return lambda flag, args, _: placed(*args, flag)


def _figures(
    fun: Callable[..., Any], args: Any, kwargs: Any, mode: Probing | Comparing, flag: Any
) -> hoist.Figures:
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [i for i, leaf in enumerate(leaves) if compat.is_tracer(leaf)]

    def of_arrays(*arrays: Any) -> tuple[()]:
        full = list(leaves)
        for i, array in zip(traced, arrays, strict=True):
            full[i] = array
        args, kwargs = jax.tree.unflatten(tree, full)
        fun(*args, **kwargs)
        return ()

    arrays = [leaves[i] for i in traced]
    with compat.trace_in(mode):
        closed = jax.make_jaxpr(of_arrays)(*map(compat.type_of, arrays))
        if isinstance(mode, Probing):
            mode.calls.update(hoist.count(closed))
        return hoist.collect(closed, arrays, flag)
