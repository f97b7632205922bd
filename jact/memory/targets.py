"""Devices to compile for that need not be on this machine.

XLA compiles for a GPU from a text description of it, and for a TPU from the name of a topology. The
compiler itself comes with JAX's plugin for that platform, so a target needs the plugin installed
but neither the device nor its driver.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.resources
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jact.spelling import did_you_mean

# The entry-point group by which JAX itself discovers its plugins.
_PLUGIN_GROUP = "jax_plugins"
_CUDA_PLUGIN_PREFIX = "xla_cuda"

# The CUDA plugin refuses to register itself where it finds no GPU, unless it is told not to look.
_NO_CUDA_DEVICE = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}

# Without a TPU, libtpu would guess its host's name and kind from a metadata server, and would
# keep a second process from loading it, which only makes sense where there is a device to share.
_NO_TPU_DEVICE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


class MissingPluginError(ImportError):
    """The JAX plugin that holds a target's compiler is not installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A device that can be compiled for without being here.

    Attributes:
        platform: JAX's name of the platform, "cuda" or "tpu".
        device: what the name stands for, for people.
        extra: the extra of `jax` that installs the platform's compiler; jact has one of that name.
        topology: the smallest TPU topology with this device; its first device is used where one is
            asked for. Empty for a GPU, which is described by the file `devices/<name>.txtpb`.
    """

    platform: str
    device: str
    extra: str
    topology: str = ""


def _gpu(device: str) -> Target:
    return Target(platform="cuda", device=device, extra="cuda12")


def _tpu(device: str, topology: str) -> Target:
    return Target(platform="tpu", device=device, extra="tpu", topology=topology)


TARGETS: Mapping[str, Target] = {
    "h100": _gpu("NVIDIA H100 SXM5 80 GB"),
    "h200": _gpu("NVIDIA H200 SXM 141 GB"),
    "a100": _gpu("NVIDIA A100 SXM4 80 GB"),
    "b200": _gpu("NVIDIA B200 180 GB"),
    "t4": _gpu("NVIDIA T4 16 GB"),
    "l4": _gpu("NVIDIA L4 24 GB"),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090 24 GB"),
    "v5e": _tpu("Google TPU v5e", "v5e:2x2"),
    "v5p": _tpu("Google TPU v5p", "v5p:2x2x1"),
    "v6e": _tpu("Google TPU v6e (Trillium)", "v6e:2x2"),
}

# How many GPUs share a host, in a mesh of more.
_GPUS_PER_HOST = 8


@functools.cache
def sharding(name: str) -> jax.sharding.NamedSharding:
    """Returns the sharding that places an array on the devices of a target, on each in full.

    Args:
        name: as for `devices`.

    Returns:
        A sharding over devices that exist for the compiler alone: shape-dtype structs may carry it
        into `jax.jit(...).lower`, but no array can be put there.

    Raises:
        ValueError: no target has this name.
        MissingPluginError: the target's compiler is not installed.
    """
    mesh = jax.sharding.Mesh(np.array(devices(name)), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def mesh(name: str, shape: Sequence[int], axes: Sequence[str]) -> jax.sharding.Mesh:
    """Returns a mesh of a target's devices, to place the arguments of a step on.

    Args:
        name: several devices, such as "h100x8" or "v5e:2x4".
        shape: the sizes of the mesh's axes; their product is the number of devices.
        axes: the names of the axes.

    Returns:
        A mesh that exists for the compiler alone.

    Raises:
        ValueError: no target has this name, or it has another number of devices.
        MissingPluginError: the target's compiler is not installed.
    """
    return _mesh(name, tuple(shape), tuple(axes), None)


def place(leaf_sharding: Any, name: str) -> jax.sharding.NamedSharding:
    """Returns the sharding on a target of an array that has a sharding elsewhere.

    Args:
        leaf_sharding: a `NamedSharding` over any mesh, also one of devices that are here or an
            abstract one; its axes are those of the target's mesh. Anything else is replicated.
        name: as for `devices`. On a single device, shardings are dropped.

    Raises:
        ValueError: no target has this name, or the mesh has another number of devices.
        MissingPluginError: the target's compiler is not installed.
    """
    if len(devices(name)) == 1 or not isinstance(leaf_sharding, jax.sharding.NamedSharding):
        return sharding(name)
    old = leaf_sharding.mesh
    sizes = tuple(old.shape[axis] for axis in old.axis_names)
    new = _mesh(name, sizes, old.axis_names, old.axis_types)
    return jax.sharding.NamedSharding(new, leaf_sharding.spec)


@functools.cache
def _mesh(
    name: str, shape: tuple[int, ...], axes: tuple[str, ...], types: tuple[Any, ...] | None
) -> jax.sharding.Mesh:
    found = devices(name)
    if math.prod(shape) != len(found):
        raise ValueError(
            f"the mesh {dict(zip(axes, shape, strict=True))} has {math.prod(shape)} devices, but "
            f"target={name!r} has {len(found)}."
        )
    return jax.sharding.Mesh(np.array(found).reshape(shape), axes, axis_types=types)


@functools.cache
def devices(name: str) -> tuple[Any, ...]:
    """Returns the devices of a target, which exist for the compiler alone.

    Args:
        name: one of `TARGETS`, which is a single device; or several: GPUs as "h100x8", with up to 8
            in a host, TPUs by the name of their topology, as "v5e:2x4".

    Raises:
        ValueError: no target has this name, or there is no such topology.
        MissingPluginError: the target's compiler is not installed.
    """
    kind, count, topology = _parsed(name)
    target = TARGETS[kind]
    if not _has_compiler(target.platform):
        raise MissingPluginError(
            f"target={name!r} ({target.device}) needs JAX's {target.platform} plugin, which is not "
            f'installed: pip install "jax[{target.extra}]", or in a checkout of jact '
            f'pip install -e ".[{target.extra}]". The device itself is not needed.'
        )
    if target.topology:
        found = _tpu_topology(topology or target.topology).devices
        return tuple(found if topology else found[:1])
    hosts = -(-count // _GPUS_PER_HOST)
    return tuple(_cuda_topology(kind, f"1x{hosts}x{count // hosts}").devices)


def _parsed(name: str) -> tuple[str, int, str]:
    """The target that a name begins with, the number of GPUs, and the topology of TPUs."""
    for kind, target in TARGETS.items() if isinstance(name, str) else ():
        if name == kind:
            return kind, 1, ""
        if target.topology and re.fullmatch(rf"{kind}:\d+(x\d+){{1,2}}", name):
            return kind, 1, name
        if not target.topology and (match := re.fullmatch(rf"{kind}x([1-9]\d*)", name)):
            count = int(match[1])
            if count > _GPUS_PER_HOST and count % _GPUS_PER_HOST:
                raise ValueError(
                    f"target must have at most {_GPUS_PER_HOST} GPUs or a multiple of that, "
                    f"got {name!r}."
                )
            return kind, count, ""
    raise ValueError(
        f"target must be None, one of {', '.join(map(repr, TARGETS))}, or several of them, as in "
        f"'h100x8' or 'v5e:2x4'; got {name!r}{did_you_mean(name, TARGETS)}."
    )


def _has_compiler(platform: str) -> bool:
    if platform == "tpu":
        return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    return bool(_cuda_plugins())


def _cuda_plugins() -> list[importlib.metadata.EntryPoint]:
    plugins = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    return [plugin for plugin in plugins if plugin.name.startswith(_CUDA_PLUGIN_PREFIX)]


def _tpu_topology(topology: str) -> topologies.TopologyDescription:
    # On importing, JAX sets TPU_SKIP_MDS_QUERY where it sees no TPU. Where there is one, its
    # environment is not ours to change.
    absent = "TPU_SKIP_MDS_QUERY" in os.environ
    with _environment(_NO_TPU_DEVICE if absent else {}):
        try:
            return topologies.get_topology_desc(topology, platform="tpu")
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"target={topology!r} is no topology of TPUs: {error}") from error


def _cuda_topology(name: str, topology: str) -> topologies.TopologyDescription:
    spec = importlib.resources.files(__package__).joinpath("devices", f"{name}.txtpb").read_text()
    describe = functools.partial(
        topologies.get_topology_desc, platform="cuda", target_config=spec, topology=topology
    )
    try:
        return describe()
    except NotImplementedError:
        # JAX found the plugin, but the plugin found no GPU and did not register. JAX must choose
        # its backends before we register it, or it would later try to run on the missing GPU.
        jax.default_backend()
        with _environment(_NO_CUDA_DEVICE):
            for plugin in _cuda_plugins():
                plugin.load().initialize()
        return describe()


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Sets those environment variables that are unset, and unsets them again afterwards."""
    added = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]
