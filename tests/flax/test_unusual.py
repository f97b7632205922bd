"""Modules of unusual arguments, results, attributes and lifting, against the plain model."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jact
import jact.nnx
from tests.flax import checks
from tests.flax.checks import WIDTH, X

compress = functools.partial(jact.compress, policy="int8")


class Result(NamedTuple):
    y: jax.Array
    nothing: None = None


class Arguments(nn.Module):
    """Flags and counts of NumPy, static keywords, an array as an attribute, a tree as a result."""

    scale: Any

    @nn.compact
    def __call__(
        self, x: jax.Array, on: Any, times: Any, *, fun: Any, axes: Any, options: Any = None
    ) -> Any:
        y = nn.Dense(WIDTH)(x * self.scale)
        for _ in range(times):
            y = fun(y) if on else y
        y = y - y.mean(axes, keepdims=True)
        self.sow("losses", "size", jnp.mean(y**2))
        return {"y": y, "result": Result(y), "static": (times, options["name"], None)}


class Lifted(nn.Module):
    """A block within two loops."""

    wrap: Callable[..., Any]

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        y = nn.Dropout(0.5, deterministic=False)(nn.gelu(self.wrap(nn.Dense)(WIDTH)(x)))
        return x + y, None


class Branches(nn.Module):
    """Blocks in the branches of a `cond` and a `switch`."""

    wrap: Callable[..., Any]

    def setup(self) -> None:
        self.one = self.wrap(nn.Sequential)([nn.Dense(WIDTH), jnp.sin])
        self.two = self.wrap(nn.Dense)(WIDTH)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.is_initializing():
            return self.one(x) + self.two(x)
        first, second = (lambda m, x: m.one(x)), (lambda m, x: m.two(x))
        y = nn.cond(x.sum() > 1e9, first, second, self, x)
        return nn.switch(jnp.int32(0), [first, second], self, y)


def arguments(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    scale = module.param("scale", nn.initializers.ones, (WIDTH,))
    block = wrap(Arguments)(scale[None])
    keywords = {"fun": jnp.sin, "axes": [1], "options": {"name": "s"}}
    out = block(x, np.bool_(True), np.int32(2), **keywords)
    assert out["static"] == (2, "s", None)
    assert out["result"].nothing is None
    return out["y"] + out["result"].y


class Sower(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> None:
        self.sow("losses", "mean", jnp.mean(jnp.tanh(nn.Dense(WIDTH)(x)) ** 2))


def nothing(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    """A block that returns nothing, for what it sows."""
    assert wrap(Sower)()(x) is None
    return x


def loops(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    del module
    repeated = functools.partial(
        nn.scan,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
    )
    return repeated(repeated(Lifted, length=2), length=3)(wrap)(x, None)[0]


def ensemble(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    mapped = nn.vmap(
        nn.Dense,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=3,
    )
    return jnp.tanh(wrap(mapped)(WIDTH)(jnp.tanh(x)))


def shapes(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    """One block, called with arrays of two shapes, and with none."""
    block = wrap(nn.Sequential)([nn.Dense(WIDTH), nn.gelu])
    return block(x) + block(2 * x[:128, None]).sum() + block(x[:0]).sum()


def integers(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    tokens = wrap(nn.Embed)(16, WIDTH)
    return tokens.attend(wrap(nn.Dense)(WIDTH)(tokens(jnp.arange(len(x)) % 16)))


def half(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    dense = functools.partial(nn.Dense, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    return wrap(dense)(WIDTH)(nn.gelu(wrap(dense)(WIDTH)(x.astype(jnp.bfloat16))))


def partitioned(wrap: Any, module: nn.Module, x: jax.Array) -> jax.Array:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    return wrap(nn.Dense)(WIDTH, kernel_init=init)(jnp.tanh(x))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(arguments, marks=pytest.mark.oldest),
        nothing,
        loops,
        ensemble,
        shapes,
        integers,
        half,
        partitioned,
        lambda wrap, module, x: Branches(wrap)(x),
    ],
)
def test_linen(call: Callable[[Any, nn.Module, jax.Array], jax.Array]) -> None:
    class Model(nn.Module):
        wrap: Callable[..., Any]

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return call(self.wrap, self, x)

    def step(wrap: Callable[..., Any]) -> Any:
        model = Model(wrap)
        variables = model.init(jax.random.key(0), X)

        def loss(params: Any) -> Any:
            rngs = {"dropout": jax.random.key(1)}
            y, new = model.apply({"params": params}, X, rngs=rngs, mutable=["losses"])
            sown = sum(map(jnp.sum, jax.tree.leaves(new)), jnp.float32(0))
            return jnp.mean(y.astype(jnp.float32) ** 2) + sown, new

        return variables, jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    (want_variables, want), (variables, got) = step(lambda cls: cls), step(compress)
    checks.assert_equal(variables, want_variables)
    checks.assert_same_step(got, want)


def test_what_cannot_be_static_is_named() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: Any) -> jax.Array:
            return nn.Dense(WIDTH)(x) if train else x

    layer = compress(Layer)()
    variables = layer.init(jax.random.key(0), X, True)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"Layer at .*args\[2\]"):
        jax.jit(layer.apply)(variables, X, jnp.array(True))
    with pytest.raises(TypeError, match=r"jact.compress\(Layer\) .* forward mode"):
        jax.jvp(lambda v: layer.apply(v, X, True), (variables,), (variables,))


class Attributes(nnx.Module):
    """Arrays among its variables, which are no variables, and one that a call replaces."""

    def __init__(self, rngs: nnx.Rngs):
        self.offset = jnp.ones(WIDTH)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.data(jnp.zeros(WIDTH))
        self.middle = jnp.arange(3)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.zeros = nnx.data({"a": jnp.zeros(())})

    def __call__(self, x: jax.Array, on: Any = True, *, fun: Any = jnp.sin) -> Any:
        if not on:
            return None
        self.last = x.mean(0)
        y = fun(self.norm(self.linear(x))) + self.offset[None] + self.zeros["a"]
        return {"y": y, "none": None, "static": fun}


class Variables(Attributes):
    """The same, of which a call changes variables alone."""

    def __call__(self, x: jax.Array, on: Any = True, *, fun: Any = jnp.sin) -> Any:
        last = self.last
        out = super().__call__(x, on, fun=fun)
        self.last = last
        return out


@pytest.mark.oldest
@pytest.mark.parametrize("cls", [Attributes, Variables])
def test_nnx(cls: type[Attributes]) -> None:
    def step(wrap: Callable[..., Any]) -> Any:
        model = wrap(cls(nnx.Rngs(0)))

        def loss(model: Any, x: jax.Array) -> jax.Array:
            assert model(x, np.bool_(False)) is None
            out = model(model(x)["y"][: len(x) // 2], on=np.True_, fun=jnp.cos)
            assert out["static"] is jnp.cos
            return jnp.mean(out["y"] ** 2)

        run = nnx.jit(nnx.value_and_grad(loss))
        results = [run(model, X) for _ in range(2)]
        return (results[1][0], nnx.to_pure_dict(nnx.state(model))), results[1][1]

    checks.assert_same_step(step(compress), step(lambda model: model))


def test_reports_and_plans_of_a_model_that_writes_to_its_state() -> None:
    """They stand for the gradient of `jact.nnx`, and leave the model alone."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(jnp.sin(self.norm(self.linear(x))))

    model = Model(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    report = jact.report(loss, "int8", peak=True)(model, X)
    assert 0 < report.saved_bytes < report.plain_bytes
    gradient = jact.nnx.grad(loss, policy="int8")
    for_gradient = jact.report(gradient)(model, X)
    assert (for_gradient.policy, for_gradient.rows) == ("int8", report.rows)
    assert jact.report(jact.nnx.grad(loss, policy="off"))(model, X).policy == "off"
    plan = jact.make_plan(loss, "int8")(model, X)
    assert plan == jact.make_plan(gradient)(model, X)
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    assert jact.make_plan(gradient)(abstract, jax.eval_shape(lambda: X)) == plan
    checks.assert_equal(jax.tree.leaves(nnx.state(model)), before)
    # The gradient itself draws new random numbers.
    other = Model(nnx.Rngs(0))
    got, want = jact.nnx.grad(loss, policy=plan)(model, X), nnx.grad(loss)(other, X)
    checks.assert_close(got, want, checks.TOLERANCE)
    with pytest.raises(ValueError, match="Use jact.nnx.value_and_grad"):
        jact.report(jact.value_and_grad(loss))(model, X)
