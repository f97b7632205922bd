"""Codecs: one table of codecs, one table of arrays, the same promises for all."""

import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jact
from jact import codecs
from jact.codecs import PRESETS, Cast, Codec, Keep, Mask, Offload, Pool, PoolResidual, Quantize
from jact.testing import check_codec

FLOATS = ("float32", "bfloat16", "float16")
OTHERS = ("bool", "int32", "uint8", "complex64")
ALL: list[Codec] = [
    *PRESETS.values(),
    Quantize(bits=4, group_size=16, stochastic=False),
    Quantize(bits=4, zero_edge=True),
    Quantize(bits=2, axis=-1, ranges="float32"),
    Quantize(bits=8, ranges="uint8", zero_edge=True, stochastic=False),
    Pool(window=3, axes=(-2, -1), inner=Cast()),
    PoolResidual(window=8, average=Cast()),
    Offload(inner=Mask()),
]

#: What these combine is checked with the others, and by itself.
COMBINED = [
    *(PRESETS[name] for name in ("int5", "int6", "pool2-int4", "pool2-int8", "offload-int4")),
    *ALL[len(PRESETS) :],
]

parametrize_codec = pytest.mark.parametrize("codec", ALL, ids=lambda codec: codec.name)


def sample(shape: tuple[int, ...], dtype: str, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) * 3
    return jnp.asarray(values > 0 if dtype == "bool" else values.astype(dtype))


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[pytest.mark.slow] * (codec in COMBINED), id=codec.name)
        for codec in ALL
    ],
)
def test_codec_keeps_its_promises(codec: Codec) -> None:
    check_codec(codec)


@pytest.mark.parametrize(
    ("codec", "supported"),
    [
        (Quantize(), FLOATS),
        (Cast(), FLOATS),
        (Mask(), ("bool",)),
        (Keep(), FLOATS + OTHERS),
    ],
)
def test_supports(codec: Codec, supported: tuple[str, ...]) -> None:
    for dtype in FLOATS + OTHERS:
        assert codec.supports((2, 64, 3), dtype) == (dtype in supported)
    for dtype in (jax.random.key(0).dtype, jax.dtypes.float0):
        assert codec.supports((2, 64, 3), dtype) == isinstance(codec, Keep)


def test_quantize_refuses_what_does_not_divide_into_groups() -> None:
    for shape in [(), (0,), (3, 0, 4), (3,), (64, 2), (64, 1, 3)]:
        assert not Quantize().supports(shape, jnp.float32)


def test_keep_counts_packed_integers_and_keys() -> None:
    assert Keep().nbytes((3, 5), jnp.uint4) == 8
    assert Keep().nbytes((3, 5), jnp.uint2) == 4
    assert Keep().nbytes((3, 5), bool) == 15
    assert Keep().nbytes((3,), jax.random.key(0).dtype) == 24
    assert Keep().nbytes((3,), jax.dtypes.float0) == 0


@pytest.mark.parametrize("name", ["int1", "int2", "int4", "int8"])
def test_traced_seeds(name: str) -> None:
    x, codec = sample((2, 64, 6), "float32"), PRESETS[name]
    encode = jax.jit(codec.encode)
    for seed in (3, 2**32 - 1):
        expected = jax.jit(functools.partial(codec.encode, seed=seed))(x)
        jax.tree.map(np.testing.assert_array_equal, encode(x, jnp.uint32(seed)), expected)
    assert (encode(x, jnp.uint32(3))[0] != encode(x, jnp.uint32(4))[0]).any()


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_saturates(name: str, dtype: str) -> None:
    codec = PRESETS[name]
    limit = float(jnp.finfo(dtype).max)
    x = jnp.asarray([limit, -limit, 0.0, 1.0, math.nan, math.inf, -math.inf], dtype)
    stored_dtype = codec.encode(x, 0).dtype
    stored = np.asarray(codec.encode(x, 0), np.float32)
    assert np.isfinite(stored[:4]).all()
    assert stored[0] == min(limit, float(jnp.finfo(stored_dtype).max)) or dtype == "float16"
    assert stored[2:4].tolist() == [0.0, 1.0]
    assert not np.isfinite(stored[4:]).any()
    values = jnp.asarray([0.3, -1.7, 1e9], jnp.float32)
    error = codec.decode(codec.encode(values, 0), values.shape, values.dtype) - values
    np.testing.assert_allclose(codec.variance(values), jnp.square(error))


def test_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 3)))
        for codec in ALL:
            if isinstance(codec, Mask) or codec == Offload(inner=Mask()):
                continue
            if codec == Quantize(bits=2, axis=-1, ranges="float32"):
                continue  # Three channels are too few for a group.
            assert codec.supports(x.shape, x.dtype)
            code = jax.jit(codec.encode)(x, jnp.uint32(1))
            y = jax.jit(codec.decode, static_argnums=(1, 2))(code, x.shape, x.dtype)
            assert y.dtype == jnp.float64
            assert jax.eval_shape(codec.variance, x).dtype == jnp.float32
        assert PRESETS["fp8"].encode(jnp.asarray(1e300), 0) == 448


def test_names_are_unique_and_short() -> None:
    for name, codec in PRESETS.items():
        assert codec.name == name
    assert Quantize(bits=2, group_size=32, stochastic=False).name == "int2/32-nearest"


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 8), st.integers(4, 10**6), st.booleans())
def test_json_round_trip_of_any_quantizer(bits: int, group_size: int, stochastic: bool) -> None:
    codec = Quantize(bits=bits, group_size=group_size, stochastic=stochastic)
    assert codecs.from_json(json.loads(json.dumps(codecs.to_json(codec)))) == codec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twice(Keep):
    """A user's codec that holds another one."""

    inner: Any = Keep()


def test_users_codec_that_holds_another() -> None:
    with pytest.raises(ValueError, match="Twice is not registered"):
        codecs.to_json(Twice())
    codecs.register("twice", Twice)
    codec = Twice(inner=Quantize(bits=2))
    data = codecs.to_json(codec)
    assert data["inner"]["kind"] == "quantize"
    assert codecs.from_json(json.loads(json.dumps(data))) == codec
    with pytest.raises(ValueError, match="'twice' already names Twice"):
        codecs.register("twice", Keep)
    with pytest.raises(TypeError, match="cls must be a dataclass"):
        codecs.register("int", int)


class Rounded:
    """A user's codec that is registered nowhere, and no dataclass either."""

    name = "rounded"

    def supports(self, shape: Any, dtype: Any) -> bool:
        return jnp.issubdtype(dtype, jnp.floating)

    def encode(self, x: jax.Array, seed: Any) -> jax.Array:
        return x.astype(jnp.bfloat16)

    def decode(self, code: jax.Array, shape: Any, dtype: Any) -> jax.Array:
        return code.astype(dtype)

    def nbytes(self, shape: Any, dtype: Any) -> int:
        return 2 * math.prod(shape)

    def variance(self, x: jax.Array) -> jax.Array:
        return jnp.square(self.encode(x, 0).astype(jnp.float32) - x.astype(jnp.float32))


def test_a_codec_needs_no_name_to_be_a_policy() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda h, u: (jnp.tanh(h @ u), None), x, w)[0] ** 2)

    w = jnp.stack([jnp.eye(64)] * 3)
    x = jax.random.normal(jax.random.key(0), (128, 64))
    codec = Rounded()
    grads = jax.jit(jact.grad(loss, policy=codec))(w, x)
    assert jnp.allclose(grads, jax.grad(loss)(w, x), rtol=0.02, atol=0.5)
    plan = jact.make_plan(loss, codec)(w, x)
    assert set(plan.codecs.values()) == {codec}
    names = [row.codec for row in jact.report(loss, codec)(w, x).rows if row.kind == "code"]
    assert names and set(names) == {"rounded"}
    with pytest.raises(ValueError, match="Rounded is not registered"):
        plan.to_json()


def test_what_a_codec_lacks_is_named() -> None:
    class Halfway:
        name = "halfway"
        supports, encode = Rounded.supports, Rounded.encode

    lacks = r"Halfway object at .*, which lacks decode, nbytes, variance"
    with pytest.raises(TypeError, match=lacks):
        codecs.resolve(Halfway())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=lacks):
        jact.Policy(default=Halfway())  # pyright: ignore[reportArgumentType]


def test_resolve() -> None:
    assert codecs.resolve("int4") == Quantize(bits=4)
    assert codecs.resolve(Mask()) == Mask()
    with pytest.raises(ValueError, match="codec must be one of .*int4.*; got 'int9'; did you"):
        codecs.resolve("int9")
    for wrong in (4, None, Quantize):
        with pytest.raises(TypeError, match="codec must be the name of a preset or a Codec"):
            codecs.resolve(wrong)  # pyright: ignore[reportArgumentType]


def test_errors() -> None:
    with pytest.raises(ValueError, match="bits must be 1 to 8, got 9"):
        Quantize(bits=9)
    with pytest.raises(ValueError, match="group_size must be at least 4, got 1"):
        Quantize(group_size=1)
    for dtype in ("float32", "int8", "nonsense"):
        with pytest.raises(ValueError, match=f"dtype must be one of .*, got .*{dtype}"):
            Cast(dtype=dtype)
    with pytest.raises(ValueError, match="kind must be one of .*'cast'.*, got 'zip'"):
        codecs.from_json({"kind": "zip"})
    with pytest.raises(ValueError, match=r"the fields of 'mask' are \(\), got \['bits'\]"):
        codecs.from_json({"kind": "mask", "bits": 3})
