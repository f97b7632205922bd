"""Sharded training of a transformer: the plain program's gradients, and its collectives exactly.

Every layout that people train with, in the three ways in which JAX lets one say it: automatic axes,
explicit axes and `shard_map`.
"""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jact
from tests.transform import cases

BATCH, TOKENS, WIDTH, HEADS, HIDDEN, LAYERS = 16, 64, 64, 4, 128, 2
POLICY = jact.Policy(default="int8", min_bytes=1024)
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)

SHAPES = {
    "q": (WIDTH, HEADS, WIDTH // HEADS),
    "k": (WIDTH, HEADS, WIDTH // HEADS),
    "v": (WIDTH, HEADS, WIDTH // HEADS),
    "o": (HEADS, WIDTH // HEADS, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
#: The mesh's sizes along "d" and "t", and how each weight lies on it. The batch lies along "d".
LAYOUTS: dict[str, tuple[tuple[int, int], dict[str, P]]] = {
    "data": ((8, 1), dict.fromkeys(SHAPES, P())),
    "fsdp": (
        (8, 1),
        dict.fromkeys("qkv", P("d"))
        | {"o": P(None, None, "d"), "up": P("d"), "down": P(None, "d")},
    ),
    "tensor": (
        (2, 4),
        dict.fromkeys("qkv", P(None, "t")) | {"o": P("t"), "up": P(None, "t"), "down": P("t")},
    ),
    "mixed": (
        (2, 4),
        dict.fromkeys("qkv", P("d", "t"))
        | {"o": P("t", None, "d"), "up": P("d", "t"), "down": P("t", "d")},
    ),
}


def params() -> list[dict[str, jax.Array]]:
    index = iter(range(100))
    return [
        {name: cases.normal(next(index), *shape, scale=0.1) for name, shape in SHAPES.items()}
        for _ in range(LAYERS)
    ]


def batch() -> jax.Array:
    return cases.normal(100, BATCH, TOKENS, WIDTH)


def normalise(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


class Model:
    """A transformer, as one writes it for automatic axes."""

    def weight(self, layer: dict[str, jax.Array], name: str) -> jax.Array:
        return layer[name]

    def project(self, spec: str, *args: Any) -> jax.Array:
        """A product whose result is the same on all devices that share a batch."""
        return jnp.einsum(spec, *args)

    def block(self, layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        weight = functools.partial(self.weight, layer)
        h = normalise(x)
        q, k, v = (jnp.einsum("bsd,dhe->bshe", h, weight(name)) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k) / 4.0)
        mixed = jnp.einsum("bhst,bthe->bshe", scores, v)
        x = x + self.project("bshe,hed->bsd", mixed, weight("o"))
        return x + self.project(
            "bsf,fd->bsd", jax.nn.gelu(normalise(x) @ weight("up")), weight("down")
        )

    def loss(self, layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = self.block(layer, x)
        return jnp.mean(x**2)


class Explicit(Model):
    """The same for explicit axes: weights are gathered, and ambiguous results given a sharding."""

    def weight(self, layer: dict[str, jax.Array], name: str) -> jax.Array:
        spec = [axis if axis == "t" else None for axis in jax.typeof(layer[name]).sharding.spec]
        return jax.sharding.reshard(layer[name], P(*spec))

    def project(self, spec: str, *args: Any) -> jax.Array:
        return jnp.einsum(spec, *args, out_sharding=P("d"))


class Manual(Model):
    """The same for `shard_map`: every collective is written out."""

    def __init__(self, specs: dict[str, P]):
        self.specs = specs

    def weight(self, layer: dict[str, jax.Array], name: str) -> jax.Array:
        if "d" not in self.specs[name]:
            return layer[name]
        return lax.all_gather(layer[name], "d", axis=self.specs[name].index("d"), tiled=True)

    def project(self, spec: str, *args: Any) -> jax.Array:
        return lax.psum(jnp.einsum(spec, *args), "t")

    def loss(self, layers: Any, x: jax.Array) -> jax.Array:
        return lax.pmean(super().loss(layers, x), "d")


def count(compiled: Any) -> dict[str, int]:
    """The number of collectives of each kind in a compiled program."""
    return dict(collections.Counter(COLLECTIVE.findall(compiled.as_text())))


@pytest.fixture(scope="module")
def alone() -> Any:
    """Loss and gradients on one device."""
    return jax.jit(jax.value_and_grad(Model().loss))(params(), batch())


@pytest.mark.parametrize("way", ["automatic", "explicit", "manual"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_and_gradients_are_the_plain_ones(layout: str, way: str, alone: Any) -> None:
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    sizes, specs = LAYOUTS[layout]
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(sizes, ("d", "t"), axis_types=(kind, kind))
    shardings = [{name: NamedSharding(mesh, spec) for name, spec in specs.items()}] * LAYERS
    args = jax.device_put((params(), batch()), (shardings, NamedSharding(mesh, P("d"))))
    options = {} if way == "explicit" else {"out_shardings": (NamedSharding(mesh, P()), shardings)}
    loss = {"automatic": Model(), "explicit": Explicit(), "manual": Manual(specs)}[way].loss
    if way == "manual":
        loss = jax.shard_map(loss, mesh=mesh, in_specs=([specs] * LAYERS, P("d")), out_specs=P())
    with jax.set_mesh(mesh):
        plain = jax.jit(jax.value_and_grad(loss), **options).lower(*args).compile()
        ours = jax.jit(jact.value_and_grad(loss, policy=POLICY), **options).lower(*args).compile()
    assert count(plain) and count(ours) == count(plain)
    want, got = plain(*args), ours(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    cases.assert_close(jax.device_get(got[1]), jax.device_get(alone[1]), 0.01)
