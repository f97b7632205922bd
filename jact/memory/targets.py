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
import os
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import topologies

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
        extra: the extra of `jact-jax` that installs the platform's compiler.
        topology: the name of a TPU topology; its first device is used. Empty for a GPU, which is
            described by the file `devices/<name>.txtpb`.
    """

    platform: str
    device: str
    extra: str
    topology: str = ""


TARGETS: Mapping[str, Target] = {
    "h100": Target(platform="cuda", device="NVIDIA H100 SXM5 80 GB", extra="cuda12"),
    "a100": Target(platform="cuda", device="NVIDIA A100 SXM4 80 GB", extra="cuda12"),
    "t4": Target(platform="cuda", device="NVIDIA T4 16 GB", extra="cuda12"),
    "v5e": Target(platform="tpu", device="Google TPU v5e", extra="tpu", topology="v5e:2x2"),
}


@functools.cache
def sharding(name: str) -> jax.sharding.Sharding:
    """Returns the sharding that places an array on one device of a target.

    Args:
        name: one of `TARGETS`.

    Returns:
        A sharding over a single device that exists for the compiler alone: shape-dtype structs may
        carry it into `jax.jit(...).lower`, but no array can be put there.

    Raises:
        ValueError: no target has this name.
        MissingPluginError: the target's compiler is not installed.
    """
    if name not in TARGETS:
        raise ValueError(
            f"target must be None or one of {', '.join(map(repr, TARGETS))}; got {name!r}."
        )
    target = TARGETS[name]
    if not _has_compiler(target.platform):
        raise MissingPluginError(
            f"target={name!r} ({target.device}) needs JAX's {target.platform} plugin, which is not "
            f'installed: pip install "jact-jax[{target.extra}]". The device itself is not needed.'
        )
    topology = _tpu_topology(target) if target.topology else _cuda_topology(name)
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _has_compiler(platform: str) -> bool:
    if platform == "tpu":
        return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    return bool(_cuda_plugins())


def _cuda_plugins() -> list[importlib.metadata.EntryPoint]:
    plugins = importlib.metadata.entry_points(group=_PLUGIN_GROUP)
    return [plugin for plugin in plugins if plugin.name.startswith(_CUDA_PLUGIN_PREFIX)]


def _tpu_topology(target: Target) -> topologies.TopologyDescription:
    # On importing, JAX sets TPU_SKIP_MDS_QUERY where it sees no TPU. Where there is one, its
    # environment is not ours to change.
    absent = "TPU_SKIP_MDS_QUERY" in os.environ
    with _environment(_NO_TPU_DEVICE if absent else {}):
        return topologies.get_topology_desc(target.topology, platform="tpu")


def _cuda_topology(name: str) -> topologies.TopologyDescription:
    spec = importlib.resources.files(__package__).joinpath("devices", f"{name}.txtpb").read_text()
    describe = functools.partial(
        topologies.get_topology_desc, platform="cuda", target_config=spec, topology="1x1x1"
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
