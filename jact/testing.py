"""Tests that a user's own codec can run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jact import codecs
from jact.codecs import Codec

__all__ = ["DTYPES", "SHAPES", "check_codec"]

SHAPES = (
    (),
    (0,),
    (3, 0, 4),
    (5,),
    (4, 96),
    (2, 64, 3),
    (3, 35, 5),
    (2, 9, 7, 16),
    (2, 3, 4, 5, 6),
)
"""The shapes that `check_codec` tries: empty, scalar, odd, and of up to five axes."""

DTYPES = ("float32", "bfloat16", "float16", "bool", "int32", "complex64")
"""The dtypes that `check_codec` tries."""

_BATCH = (3, 2, 64, 24)
"""Entries, and a shape in which most codecs support an entry."""

_HOSTILE: dict[str, Any] = {
    "zeros": 0.0,
    "a constant": 3.3,
    "subnormal numbers": np.float32(1e-40),
    "the greatest finite numbers": math.inf,  # Stands for the dtype's own.
    "an infinity": math.inf,
    "NaN": math.nan,
}

_DRAWS = 48
"""How many seeds the error is averaged over."""


def check_codec(
    codec: Codec,
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[str] = DTYPES,
    independent: bool = True,
) -> None:
    """Checks that a codec keeps what `jact.codecs.Codec` promises, by running it.

    It must be frozen and hashable, survive JSON if its class is registered, say truly what it
    supports and how many bytes a compiled program stores, return arrays of the right shape and
    dtype under `jit`, `vmap` and `scan` alike, give the same code for the same seed, make the error
    that `variance` says, and keep constant, zero, subnormal, huge, infinite and NaN entries of a
    batch from changing others. It takes seconds.

    Args:
      codec: the codec.
      shapes: shapes to try; those that the codec does not support are skipped.
      dtypes: dtypes to try.
      independent: whether the entries of the first axis must not depend on each other. False for a
        codec that compresses along the batch.

    Raises:
      AssertionError: the codec breaks a promise; the message says which.

    Example:
      >>> import jact
      >>> from jact.testing import check_codec
      >>> check_codec(jact.codecs.Cast(dtype="bfloat16"), shapes=[(4, 96)])
    """
    _check_identity(codec)
    cases = list(_cases(codec, shapes, dtypes))
    _check(cases, codec, f"supports none of the shapes {shapes} in any of {dtypes}")
    for shape, dtype in cases:
        _check_round_trip(codec, shape, dtype)
    _check_other_dtypes(codec)
    shape, dtype = max(cases, key=lambda case: math.prod(case[0]))
    if codec.supports(_BATCH[1:], dtype):
        shape = _BATCH[1:]
    _check_deterministic(codec, shape, dtype)
    _check_transformations(codec, shape, dtype)
    _check_error(codec, (4, *shape[1:]) if shape else shape, dtype)
    if independent and len(shape) > 1 and jnp.issubdtype(dtype, jnp.floating):
        _check_hostile_entries(codec, shape, dtype)


def _check(condition: Any, codec: Codec, message: str) -> None:
    if not condition:
        raise AssertionError(f"{codec!r} {message}")


def _check_identity(codec: Codec) -> None:
    _check(isinstance(codec, Codec), codec, "lacks a method of jact.codecs.Codec")
    _check(isinstance(codec.name, str) and codec.name, codec, "has no name")
    _check(dataclasses.is_dataclass(codec), codec, "is not a dataclass")
    assert dataclasses.is_dataclass(codec) and not isinstance(codec, type)
    frozen = type(codec).__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
    _check(frozen, codec, "is not frozen: say @dataclasses.dataclass(frozen=True)")
    try:
        same = hash(codec) == hash(dataclasses.replace(codec))
    except TypeError as error:
        raise AssertionError(f"{codec!r} is not hashable: {error}") from error
    _check(same and codec == dataclasses.replace(codec), codec, "does not equal its copy")
    try:
        data = codecs.to_json(codec)
    except ValueError:  # A class that is not registered cannot be part of a stored plan.
        return
    try:
        restored = codecs.from_json(json.loads(json.dumps(data)))
    except TypeError as error:
        raise AssertionError(f"{codec!r} has a field that JSON cannot store: {error}") from error
    _check(restored == codec, codec, f"comes back from JSON as {restored!r}")


def _cases(
    codec: Codec, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Every shape in one dtype, and every dtype in the last shape."""
    last = None
    for shape in shapes:
        supported = [dtype for dtype in dtypes if _supports(codec, shape, dtype)]
        if supported:
            last = shape
            yield shape, supported[0]
    if last is not None:
        others = [dtype for dtype in dtypes if _supports(codec, last, dtype)]
        yield from ((last, dtype) for dtype in others[1:])


def _supports(codec: Codec, shape: tuple[int, ...], dtype: Any) -> bool:
    answer = codec.supports(shape, dtype)
    _check(isinstance(answer, bool), codec, f"supports({shape}, {dtype}) is {answer!r}, no bool")
    return answer


def _check_other_dtypes(codec: Codec) -> None:
    for dtype in (jax.random.key(0).dtype, jax.dtypes.float0, np.dtype("uint8")):
        _supports(codec, (4, 64, 24), dtype)


def _sample(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * 3 + 0.5
    return jnp.asarray(values > 0 if dtype == "bool" else values.astype(jnp.dtype(dtype)))


def _round_trip(codec: Codec, x: jax.Array, seed: Any) -> jax.Array:
    return codec.decode(codec.encode(x, seed), x.shape, x.dtype)


def _check_round_trip(codec: Codec, shape: tuple[int, ...], dtype: str) -> None:
    what = f"for {dtype}{list(shape)}"
    x, seed = _sample(shape, dtype), jnp.uint32(1)
    encode = jax.jit(codec.encode).lower(x, seed).compile()
    code = encode(x, seed)
    arrays = jax.tree.leaves(code)
    _check(all(isinstance(a, jax.Array) for a in arrays), codec, f"returns no arrays {what}")
    nbytes = codec.nbytes(shape, jnp.dtype(dtype))
    _check(isinstance(nbytes, int), codec, f"nbytes is {nbytes!r} {what}, no int")
    if (memory := encode.memory_analysis()) is not None:
        stored = memory.output_size_in_bytes + memory.host_output_size_in_bytes
        # XLA adds a tuple of pointers to the arrays.
        allowed = range(nbytes, nbytes + 8 * len(arrays) + 1)
        _check(stored in allowed, codec, f"says {nbytes} bytes {what}, but XLA stores {stored}")
    decode = jax.jit(codec.decode, static_argnums=(1, 2))
    y = decode(code, shape, jnp.dtype(dtype))
    _check(y.shape == shape, codec, f"decodes to the shape {y.shape} {what}")
    _check(y.dtype == x.dtype, codec, f"decodes to the dtype {y.dtype} {what}")
    model = jax.eval_shape(codec.variance, x)
    right = model.shape == shape and model.dtype == jnp.float32
    _check(right, codec, f"has a variance of {model.dtype}{list(model.shape)} {what}, not float32")


def _check_deterministic(codec: Codec, shape: tuple[int, ...], dtype: str) -> None:
    x = _sample(shape, dtype)
    encode = jax.jit(codec.encode)
    first, again, static = encode(x, jnp.uint32(3)), encode(x, jnp.uint32(3)), codec.encode(x, 3)
    _check(_equal(first, again), codec, "gives two codes for the same array and seed")
    same = _equal(first, static)
    _check(same, codec, "gives another code outside of jit, or for a seed that is an integer")


def _check_transformations(codec: Codec, shape: tuple[int, ...], dtype: str) -> None:
    x = _sample((_BATCH[0], *shape), dtype)

    def round_trip(row: jax.Array) -> jax.Array:
        return _round_trip(codec, row, jnp.uint32(1))

    expected = jnp.stack([jax.jit(round_trip)(row) for row in x])
    _check(_equal(jax.jit(jax.vmap(round_trip))(x), expected), codec, "differs under vmap")
    _, scanned = jax.lax.scan(lambda carry, row: (carry, round_trip(row)), None, x)
    _check(_equal(scanned, expected), codec, "differs under scan")


def _check_error(codec: Codec, shape: tuple[int, ...], dtype: str) -> None:
    x = _sample(shape, dtype)
    seeds = jnp.arange(_DRAWS, dtype=jnp.uint32)
    draws = jax.jit(jax.vmap(lambda seed: _round_trip(codec, x, seed)))(seeds)
    exact = np.asarray(x, np.complex128)
    actual = float(np.mean(np.abs(np.asarray(draws, np.complex128) - exact) ** 2))
    model = float(np.mean(np.asarray(jax.jit(codec.variance)(x), np.float64)))
    # What is decoded is rounded to the dtype once more.
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    rounding = float(jnp.finfo(dtype).eps) if inexact else 0.0
    floor = rounding**2 * float(np.mean(np.abs(exact) ** 2))
    low, high = 0.9 * model - floor, 1.1 * model + floor
    words = f"makes a mean squared error of {actual:.4g} where its variance says {model:.4g}"
    _check(low <= actual <= high, codec, words)


def _check_hostile_entries(codec: Codec, shape: tuple[int, ...], dtype: str) -> None:
    x = np.asarray(_sample((4, *shape[1:]), dtype))
    round_trip = jax.jit(lambda x: _round_trip(codec, x, jnp.uint32(1)))
    if not codec.supports(x.shape, dtype):
        return
    expected = np.asarray(round_trip(jnp.asarray(x)))
    for name, value in _HOSTILE.items():
        spoilt = x.copy()
        finite = name.startswith("the greatest")
        if finite:
            limit = float(jnp.finfo(dtype).max)
            spoilt[1] = np.where(np.arange(x[1].size).reshape(x[1].shape) % 2, limit, -limit)
        elif np.isfinite(value):
            spoilt[1] = value
        else:
            spoilt[1].flat[:: x[1].size // 3] = value
        y = np.asarray(round_trip(jnp.asarray(spoilt)))
        same = np.array_equal(y[[0, 2, 3]], expected[[0, 2, 3]])
        _check(same, codec, f"lets an entry of {name} change the other entries of a batch")
        if finite or np.isfinite(value):
            bounded = np.isfinite(y[1].astype(np.float32)).all()
            _check(bounded, codec, f"makes infinities or NaN of {name}")


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
