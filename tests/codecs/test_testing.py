"""`check_codec` finds what is wrong with a codec."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jact.codecs import Keep, Quantize, register
from jact.testing import check_codec

SHAPES = ((3, 4, 32),)


@dataclasses.dataclass
class Thawed:
    name = Keep.name
    supports, encode, decode = Keep.supports, Keep.encode, Keep.decode
    nbytes, variance = Keep.nbytes, Keep.variance


@dataclasses.dataclass(frozen=True)
class Unhashable(Keep):
    sizes: Any = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Forgetful(Keep):
    """A field that JSON changes."""

    sizes: tuple[int, ...] = (1, 2)


register("forgetful", Forgetful)


@dataclasses.dataclass(frozen=True)
class Nameless(Keep):
    name: str = ""  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclasses.dataclass(frozen=True)
class Optimist(Keep):
    def nbytes(self, shape: Any, dtype: Any) -> int:
        return super().nbytes(shape, dtype) // 2


@dataclasses.dataclass(frozen=True)
class Picky(Keep):
    def supports(self, shape: Any, dtype: Any) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Widening(Keep):
    def decode(self, code: Any, shape: Any, dtype: Any) -> jax.Array:
        return code.astype(jnp.complex64 if dtype == jnp.complex64 else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Flat(Keep):
    def decode(self, code: Any, shape: Any, dtype: Any) -> jax.Array:
        return code.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Lossy(Quantize):
    """An error that its model does not know of."""

    def decode(self, code: Any, shape: Any, dtype: Any) -> jax.Array:
        y = super().decode(code, shape, dtype)
        return y * jnp.asarray(1.1, y.dtype)


@dataclasses.dataclass(frozen=True)
class Moody(Quantize):
    """Another code for a seed that is an integer."""

    def encode(self, x: jax.Array, seed: Any) -> Any:
        return super().encode(x, seed + 1 if isinstance(seed, int) else seed)


@dataclasses.dataclass(frozen=True)
class Sociable(Keep):
    """A decision for the whole batch."""

    def supports(self, shape: Any, dtype: Any) -> bool:
        return len(shape) > 1 and jnp.issubdtype(dtype, jnp.floating) and 0 not in shape

    def decode(self, code: Any, shape: Any, dtype: Any) -> jax.Array:
        return jnp.where(jnp.isfinite(code).all(), code, jnp.zeros_like(code))


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Thawed(), "is not frozen"),
        (Unhashable(), "is not hashable"),
        (Forgetful(), r"comes back from JSON as Forgetful\(sizes=\[1, 2\]\)"),
        (Nameless(), "has no name"),
        (Optimist(), r"says 768 bytes for float32\[3, 4, 32\], but XLA stores 1536"),
        (Picky(), "supports none of the shapes"),
        (Widening(), r"decodes to the dtype float32 for bfloat16\[3, 4, 32\]"),
        (Flat(), r"decodes to the shape \(384,\) for float32\[3, 4, 32\]"),
        (Lossy(), "mean squared error of .* where its variance says"),
        (Moody(), "gives another code outside of jit"),
        (Sociable(), "lets an entry of .* change the other entries of a batch"),
        ("int4", "lacks a method"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_broken_codecs_are_found(codec: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_codec(codec, shapes=SHAPES)


@pytest.mark.slow
def test_codecs_along_the_batch_are_allowed_on_request() -> None:
    codec = Quantize(axis=0, group_size=4)
    check_codec(codec, shapes=[(4, 3, 8)], independent=False)
    with pytest.raises(AssertionError, match="change the other entries of a batch"):
        check_codec(codec, shapes=[(4, 3, 8)])
