"""Sensitivities: against closed forms, against each other, under every transformation."""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jact
import jact.memory
from jact import codecs
from jact.adapt import Probe, Sensitivities
from jact.codecs import Average, Quantize
from tests.transform import cases
from tests.transform.cases import PARAMS, ROWS, WIDTH, W, X, normal

KEY = jax.random.key(3)


def quadratic(w: jax.Array, x: jax.Array) -> jax.Array:
    """Its gradient `2 x' (x w)` is linear in what is saved, which is `x w`."""
    return jnp.sum((x @ w) ** 2)


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    out, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
    return jnp.sum(out**2) / ROWS


def mapped(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(lambda row: jnp.tanh(jnp.tanh(row @ w) @ w))(x) ** 2) / ROWS


def branching(w: jax.Array, x: jax.Array) -> jax.Array:
    h = lax.cond(x[0, 0] > 100, lambda h: h @ w, lambda h: jnp.tanh(h @ w) @ w, x)
    return jnp.sum(h**2) / ROWS


LOSSES = {"looped": looped, "mapped": mapped, "branching": branching, "shared": cases.shared}


# Closed forms.


def test_variance_of_a_linear_gradient() -> None:
    """Each element's rounding reaches the gradient by itself, multiplied by twice its row of x."""
    table = jact.sensitivity(quadratic, ["int8", "int4", "int2", "int1"], samples=8)(W, X)
    assert table.names == ("dot_general",)
    for codec, error, bias in zip(
        table.codecs[1:], table.error[0, 1:], table.bias[0, 1:], strict=True
    ):
        variance = codec.variance(X @ W)
        expected = float(jnp.sum(4 * jnp.sum(X**2, 1, keepdims=True) * variance))
        assert error == pytest.approx(expected, rel=0.1), codec
        assert bias <= 0.1 * error, codec
    gradient = jax.grad(quadratic)(W, X)
    assert table.gradient == pytest.approx(float(jnp.sum(gradient**2)), rel=1e-3)


@pytest.mark.parametrize("method", ["local", "exact"])
@pytest.mark.parametrize(
    "codec",
    [Quantize(bits=2, stochastic=False), Quantize(bits=1, stochastic=False)],
    ids=lambda codec: codec.name,
)
def test_bias_of_a_linear_gradient(codec: codecs.Codec, method: Any) -> None:
    """What is rounded the same way each time moves the gradient to where it can be computed."""
    h = X @ W
    change = codec.decode(codec.encode(h, 0), h.shape, h.dtype) - h
    expected = float(jnp.sum((2 * X.T @ change) ** 2))
    table = jact.sensitivity(quadratic, [codec], method=method)(W, X)
    tolerance = 1e-3 if method == "exact" else 0.15
    assert table.error[0, 1] == pytest.approx(expected, rel=tolerance)
    assert table.bias[0, 1] == pytest.approx(expected, rel=tolerance)


def test_averages_are_random_and_biased() -> None:
    local = jact.sensitivity(quadratic, [Average()], samples=4)(W, X)
    exact = jact.sensitivity(quadratic, [Average()], method="exact", samples=16)(W, X)
    assert 0.3 < exact.bias[0, 1] / exact.error[0, 1] < 1
    assert local.error[0, 1] == pytest.approx(exact.error[0, 1], rel=0.2)
    assert local.bias[0, 1] == pytest.approx(exact.bias[0, 1], rel=0.3)


def test_bias_of_a_nonlinear_function() -> None:
    """GELU and its derivative are made again from a decoded argument; their mean moves with it."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.gelu(x @ params[0]) @ params[1]) ** 2)

    params = [normal(i, WIDTH, WIDTH, scale=0.125) for i in (1, 2)]
    local = jact.sensitivity(loss, ["int4", "int2"])(params, X)
    exact = jact.sensitivity(loss, ["int4", "int2"], method="exact", samples=16)(params, X)
    assert exact.bias[0, 2] > 0.3 * exact.error[0, 2]
    np.testing.assert_allclose(local.bias[0, 2], exact.bias[0, 2], rtol=0.3)
    np.testing.assert_allclose(local.error[:, 1:], exact.error[:, 1:], rtol=0.3)
    # The other product is read by a linear function: no bias.
    assert local.bias[1, 2] < 0.25 * local.error[1, 2]


# One method against the other.


@pytest.mark.parametrize("name", LOSSES)
def test_local_is_near_exact(name: str) -> None:
    """In loops and where weights are shared, too, where errors meet again in one gradient."""
    fun = LOSSES[name]
    policy = jact.Policy(default="int4", min_bytes=0 if name == "mapped" else 16384)
    options: dict[str, Any] = {"codecs": ["int4", "int2"], "policy": policy}
    local = jact.sensitivity(fun, **options, samples=2)(W, X)
    exact = jact.sensitivity(fun, **options, method="exact", samples=8)(W, X)
    assert local.names == exact.names == tuple(jact.make_plan(fun, policy)(W, X).codecs)
    used = exact.error[:, 1] > 0
    assert used.any()
    np.testing.assert_allclose(local.error[used, 1:], exact.error[used, 1:], rtol=0.5)
    assert not local.error[~used].any()


@pytest.mark.parametrize("method", ["local", "exact"])
def test_loop_is_counted_whole(method: Any) -> None:
    table = jact.sensitivity(looped, ["int4"], method=method)(W, X)
    entries = jact.make_plan(looped, "int4")(W, X).entries
    assert table.names == tuple(name for name, _ in entries)
    assert sum(name.startswith("scan/") for name in table.names) == 2
    # What comes out of the loop is saved once, what it does in each iteration three times.
    times = np.array([3 if name.startswith("scan/") else 1 for name in table.names])
    code = Quantize(bits=4).nbytes(X.shape, X.dtype)
    np.testing.assert_array_equal(table.raw_bytes, times * X.nbytes)
    np.testing.assert_array_equal(table.nbytes, times[:, None] * np.array([[X.nbytes, code]]))


@cases.parametrize(cases.FUNCTIONS, cases.MODELS)
def test_names_are_those_of_plans(case: cases.Case) -> None:
    args = jax.eval_shape(case.make)
    probe = Probe(case.fun, ["int4", "int2"], has_aux=case.has_aux)
    layout = probe.layout(*args)
    plan = jact.make_plan(case.fun, "int4", has_aux=case.has_aux)(*args)
    assert layout.names == tuple(name for name, _ in plan.entries)
    table = Sensitivities.from_statistics(
        layout,
        {
            "error": np.ones(layout.nbytes.shape),
            "bias": np.zeros(layout.nbytes.shape),
            "gradient": 1,
        },
    )
    assert jact.make_plan(case.fun, table.plan([1] * len(table.names)), has_aux=case.has_aux)(
        *args
    ).bits == dict.fromkeys(layout.names, "int4")


@pytest.mark.parametrize("name", ["net", "normalised", "attention", "convolution", "float16"])
def test_functions(name: str) -> None:
    case = cases.FUNCTIONS[name]
    args = case.make()
    options: dict[str, Any] = {"codecs": ["int4"]}
    local = jact.sensitivity(case.fun, **options)(*args)
    exact = jact.sensitivity(case.fun, **options, method="exact", samples=8)(*args)
    np.testing.assert_allclose(local.error[:, 1], exact.error[:, 1], rtol=0.5)


def blocks(params: Any, x: jax.Array) -> jax.Array:
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def peak_of_blocks(fun: Any, number: int, *first: Any) -> int:
    x = jax.ShapeDtypeStruct((4, 128, 64), jnp.float32)
    layer = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256), (256, 64))]
    return jact.memory.peak(fun, *first, [layer] * number, x)


def peak_of_probe(number: int, codecs: list[str], bias: bool = True) -> int:
    def probe(key: jax.Array, *args: Any) -> Any:
        return Probe(blocks, codecs, bias=bias)(key, *args)[2]

    return peak_of_blocks(probe, number, jax.eval_shape(lambda: KEY))


@pytest.mark.parametrize(("codecs", "part"), [(["int4"], 0.42), (["int4", "int2"], 0.66)])
def test_memory_grows_slower_with_depth_than_plain_jax(codecs: list[str], part: float) -> None:
    """Where plain JAX does not fit, a probe does: it goes from layer to layer, and reads codes."""
    few, many = (peak_of_probe(n, codecs) for n in (2, 6))
    plain_few, plain_many = (peak_of_blocks(jax.value_and_grad(blocks), n) for n in (2, 6))
    assert many - few < part * (plain_many - plain_few)


def test_memory_does_not_depend_on_the_number_of_candidates() -> None:
    one = peak_of_probe(2, ["int4"], bias=False)
    assert peak_of_probe(2, ["int8", "int6", "int5", "int4", "int3"], bias=False) < 1.1 * one


# Nothing is touched, and what comes out is the plain function's.


@pytest.mark.parametrize("name", [pytest.param("convnet_small", marks=pytest.mark.slow), "gcn"])
def test_value_state_and_gradient(name: str) -> None:
    """BatchNorm statistics are those of one step; the gradient is that of 8 bits."""
    case = cases.MODELS[name]
    args = case.make()
    before = jax.tree.map(jnp.copy, args)
    probe = Probe(case.fun, ["int4"], has_aux=True, bias=False)
    value, gradient, statistics = jax.jit(probe)(KEY, *args)
    plain = jax.jit(jax.value_and_grad(case.fun, has_aux=True))(*args)
    cases.assert_matches((value, gradient), plain, 0.02)
    cases.assert_equal(args, before)
    shape = (len(probe.layout(*args).names), 2)
    assert statistics["error"].shape == statistics["bias"].shape == shape
    assert bool((statistics["error"][:, 1] > 0).all())


@pytest.mark.parametrize("argnums", [0, (0,), (0, 1), -1])
def test_gradient_has_the_form_of_jax(argnums: Any) -> None:
    probe = Probe(quadratic, ["int4"], argnums=argnums, bias=False)
    _, gradient, _ = probe(KEY, W, X)
    plain = jax.grad(quadratic, argnums)(W, X)
    cases.assert_close(gradient, plain, 0.01)


@pytest.mark.slow
def test_same_seed_same_table() -> None:
    def errors(seed: int, method: Any = "local") -> Any:
        return jact.sensitivity(cases.net, ["int2"], method=method, seed=seed)(PARAMS, X).error

    np.testing.assert_array_equal(errors(1), errors(1))
    assert (errors(1) != errors(2)).any()
    np.testing.assert_array_equal(errors(1, "exact"), errors(1, "exact"))
    assert (errors(1, "exact") != errors(2, "exact")).any()


def test_unread_arguments_and_static_ones() -> None:
    def loss(w: jax.Array, x: jax.Array, power: int, *, scale: float) -> jax.Array:
        return jnp.sum(jnp.abs(x @ w) ** power) * scale

    for method in ("local", "exact"):
        table = jact.sensitivity(loss, ["int4"], method=method)(W, X, 2, scale=0.5)
        assert table.error[0, 1] > 0


# Under transformations.


def test_inside_a_loop_over_micro_batches() -> None:
    probe = Probe(cases.net, ["int4"], bias=False)
    parts = X.reshape(2, ROWS // 2, WIDTH)

    @jax.jit
    def accumulate(params: Any, parts: jax.Array) -> Any:
        def step(total: Any, part_and_key: Any) -> tuple[Any, Any]:
            part, key = part_and_key
            _, gradient, statistics = probe(key, params, part)
            return jax.tree.map(jnp.add, total, gradient), statistics

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(step, zeros, (parts, jax.random.split(KEY, 2)))

    _, statistics = accumulate(PARAMS, parts)
    layout = probe.layout(PARAMS, parts[0])
    for i, part in enumerate(parts):
        here = jax.tree.map(lambda a, i=i: a[i], statistics)
        got = Sensitivities.from_statistics(layout, here).error
        want = jact.sensitivity(cases.net, ["int4"])(PARAMS, part).error
        np.testing.assert_allclose(got[:, 1], want[:, 1], rtol=0.3)


def test_on_several_devices() -> None:
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    probe = Probe(cases.net, ["int4"], bias=False)
    run = jax.jit(probe)
    _, gradient, together = run(KEY, PARAMS, X)
    _, spread_gradient, apart = run(KEY, PARAMS, jax.device_put(X, spread))
    np.testing.assert_allclose(apart["error"], together["error"], rtol=1e-3)
    cases.assert_close(spread_gradient, gradient, 1e-3)


def test_in_a_mapped_region() -> None:
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.shard_map(
            lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w),
            mesh=mesh,
            in_specs=(spec(), spec("batch")),
            out_specs=spec("batch"),
        )
        return jnp.sum(layer(w, x) ** 2) / ROWS

    policy = jact.Policy(default="int4", min_bytes=0)
    exact = jact.sensitivity(loss, ["int4"], policy=policy, method="exact")(W, X)
    assert (exact.error[:, 1] > 0).all()
    with pytest.raises(NotImplementedError, match="does not reach into shard_map"):
        jact.sensitivity(loss, ["int4"], policy=policy)(W, X)
    # A controller does not take the silence of such residuals for harmlessness.
    c = jact.Controller(bits=8, codecs=("int8", "int4"), policy=policy)
    step = c.jit(lambda w, x: jact.grad(loss, policy=c)(w, x))
    with pytest.raises(NotImplementedError, match='sensitivity="exact"'):
        step(W, X)


# The table.


def table(errors: np.ndarray) -> Sensitivities:
    count = len(errors)
    chosen = (codecs.Keep(), Quantize(bits=4), Quantize(bits=2))
    return Sensitivities(
        tuple(f"layer_{i}/dot_general" for i in range(count)),
        chosen,
        errors,
        errors / 2,
        np.full(errors.shape, 10),
        np.full(count, 100),
        4.0,
        jact.Policy(),
    )


@hypothesis.given(
    st.lists(
        st.tuples(*[st.floats(0, 1e30) | st.just(np.inf)] * 2),
        max_size=5,
    )
)
def test_json_round_trip(errors: list[tuple[float, float]]) -> None:
    full = np.array([(0.0, *row) for row in errors]).reshape(-1, 3)
    before = table(full)
    after = Sensitivities.from_json(before.to_json())
    assert (after.names, after.codecs, after.basis) == (before.names, before.codecs, before.basis)
    for field in ("error", "bias", "nbytes", "raw_bytes", "gradient", "cosine"):
        np.testing.assert_array_equal(getattr(after, field), getattr(before, field))


def test_plans_from_choices() -> None:
    errors = np.array([[0, 1, 2], [0, 1, np.inf]])
    sensitivities = table(errors)
    one, two = sensitivities.names
    assert sensitivities.plan([2, 1]).bits == {one: "int2", two: "int4"}
    assert sensitivities.plan({two: "int8"}).bits == {one: "keep", two: "int8"}
    assert sensitivities.plan({one: 2}).bits == {one: "int2", two: "keep"}
    with pytest.raises(ValueError, match="int2 cannot store layer_1/dot_general"):
        sensitivities.plan([0, 2])
    with pytest.raises(ValueError, match="one entry for each of 2 residuals, got 1"):
        sensitivities.plan([0])
    with pytest.raises(ValueError, match="positions below 3, got 3"):
        sensitivities.plan([0, 3])
    with pytest.raises(ValueError, match="choice names nowhere"):
        sensitivities.plan({"nowhere": 1})


def test_table_is_shown() -> None:
    sensitivities = table(np.array([[0, 1, 4], [0, 1, np.inf]]))
    text = str(sensitivities)
    assert "layer_1/dot_general" in text and "5.0e-01" in text and "1.0e+00" in text
    assert len(sensitivities.rows()) == 5
    assert sensitivities.rows()[2]["error"] == 1.0
    labels = [t.get_text() for t in sensitivities.plot().axes[0].get_yticklabels()]
    assert labels == list(sensitivities.names)
    assert sensitivities.cosine[0, 2] == pytest.approx(2**-0.5)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"codecs": "int4"}, TypeError, "codecs must be a sequence"),
        ({"codecs": ["int9"]}, ValueError, "int9"),
        ({"method": "fast"}, ValueError, "method must be one of local, exact, got 'fast'"),
        ({"samples": 0}, ValueError, "samples must be at least 1, got 0"),
        ({"policy": "off"}, ValueError, "there is nothing to measure"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        jact.sensitivity(quadratic, **options)(W, X)


def test_nothing_to_encode() -> None:
    for method in ("local", "exact"):
        sensitivities = jact.sensitivity(quadratic, ["int4"], method=method)(W[:2, :2], X[:2, :2])
        assert sensitivities.names == ()
        assert sensitivities.plan([]).entries == ()
