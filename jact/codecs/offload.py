"""Codes of any kind, in host memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jact.codecs.base import Codec
from jact.codecs.keep import Keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Keeps another codec's code in host memory between the forward and the backward pass.

    The code is put into `jax.memory.Space.Host` when it is made and fetched back before it is
    decoded; XLA's scheduler decides how much of the copying overlaps with computing. An inner code
    of 4 bits crosses the bus eight times faster than a float32 array. This is what Liu et al.,
    "GACT" (ICML 2022) call swapping.

    It is for loops (`lax.scan`). For layers written out one by one XLA for GPUs drops the
    transfers, which `jact.report` and `jact.memory.analyze` say, and XLA for TPUs keeps them
    without a lower peak. On a CPU the host's memory is the device's, and nothing changes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jact.codecs import Offload, Quantize
      >>> codec = Offload(inner=Quantize(bits=4))
      >>> x = jnp.ones((4, 64, 2))
      >>> codec.encode(x, 0)[0].sharding.memory_kind
      'pinned_host'
      >>> bool((codec.decode(codec.encode(x, 0), x.shape, x.dtype) == x).all())
      True
    """

    #: What makes the code; the array itself is offloaded when it is `Keep()`.
    inner: Codec = Keep()

    @property
    def name(self) -> str:
        """Such as "offload-int4"; "offload" for arrays as they are."""
        return "offload" if isinstance(self.inner, Keep) else f"offload-{self.inner.name}"

    def supports(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Whether the inner codec supports it and it is an array of numbers."""
        numeric = not jnp.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0
        return numeric and self.inner.supports(shape, dtype)

    def encode(self, x: jax.Array, seed: int | jax.Array) -> Any:
        """Returns the inner code, in host memory."""
        return self.send(self.inner.encode(x, seed))

    def decode(self, code: Any, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        """Fetches the code and decodes it."""
        return self.inner.decode(self.fetch(code), shape, dtype)

    def send(self, code: Any) -> Any:
        """Puts an inner code into host memory."""
        return jax.device_put(code, jax.memory.Space.Host)

    def fetch(self, code: Any) -> Any:
        """Puts a code from host memory into the device's."""
        return jax.device_put(code, jax.memory.Space.Device)

    def nbytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """The bytes of the inner code: in host memory, and over the bus twice."""
        return self.inner.nbytes(shape, dtype)

    def variance(self, x: jax.Array) -> jax.Array:
        """That of the inner codec."""
        return self.inner.variance(x)


def on_device(codec: Codec) -> Codec:
    """The codec that makes and reads the code on the device: what is offloaded moves beside it."""
    return codec.inner if isinstance(codec, Offload) else codec
