"""Controllers in loops over micro-batches, under sharding, and with Flax's training states."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jact
from tests.adapt.steps import batch, controller, loss, params, sgd

# Each compiles a training step and its probe more than once.
pytestmark = pytest.mark.slow


def accumulating(policy, jit):
    @jit
    def step(params, xs):
        def body(total, x):
            value, grads = jact.value_and_grad(loss, policy=policy)(params, x)
            return jax.tree.map(jnp.add, total, grads), value

        total, values = lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total), values

    return step


def micro_batches(i):
    return jnp.stack([batch(4 * i + j) for j in range(4)])


def test_in_a_scan_over_micro_batches():
    c = controller(bits=3, every=4)
    step = accumulating(c, c.jit)
    values, first = params(), None
    for i in range(7):
        values, losses = step(values, micro_batches(i))
        first = losses.mean() if first is None else first
    assert losses.mean() < first
    assert [a.reason for a in c.history][:2] == ["first", "confirm"]
    # Four micro-batches tell the gradient's variance at once.
    assert c.history[0].noise is not None and c.history[0].noise > 0
    fixed, _ = accumulating(c.plan, jax.jit)(values, micro_batches(9))
    adaptive, _ = step(values, micro_batches(9))
    np.testing.assert_array_equal(fixed[0], adaptive[0])


def test_the_variance_is_that_of_the_gradients():
    c = controller(bits=1, codecs=("int1",))
    c_step = accumulating(c, c.jit)
    c_step(params(), micro_batches(0))
    plain = jax.jit(jax.grad(loss))
    exact = [jnp.concatenate([g.ravel() for g in plain(params(), x)]) for x in micro_batches(0)]
    variance = np.sum(np.var(np.stack(exact), axis=0, ddof=1))
    errors = []
    for x in micro_batches(0):
        coded = jax.jit(jact.grad(loss, policy=c.plan))(params(), x)
        exact = plain(params(), x)
        errors.append(sum(jnp.sum((a - b) ** 2) for a, b in zip(coded, exact, strict=True)))
    assert c.history[0].noise == pytest.approx(np.mean(errors) / variance, rel=0.6)


@pytest.mark.parametrize("explicit", [False, True])
def test_sharded_over_eight_devices(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    c = controller(bits=3, every=4)

    def body(values, x):
        value, grads = jact.value_and_grad(loss, policy=c)(values, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, values, grads), value

    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        step = c.jit(
            body,
            in_shardings=None if explicit else (replicated, split),
            out_shardings=None if explicit else (replicated, None),
        )
        values = jax.device_put(params(), replicated)
        for i in range(7):
            values, value = step(values, jax.device_put(batch(i, 2048), split))
    assert values[0].sharding.is_equivalent_to(replicated, 2)
    single = controller(bits=3, every=4)
    one = single.jit(lambda values, x: jact.value_and_grad(loss, policy=single)(values, x)[::-1])
    one(params(), batch(0, 2048))
    assert c.history[0].plan == single.history[0].plan
    assert c.history[0].predicted_error == pytest.approx(single.history[0].predicted_error, rel=0.5)
    assert np.isfinite(value)


@pytest.mark.parametrize("shared", [False, True])
def test_in_shard_map(shared):
    """Each device measures its own gradient, or its part in the one of parameters they share."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    c = controller(bits=3, every=4)

    @c.jit
    def step(values, x):
        def on_each(values, x):
            if not shared:
                values = jax.tree.map(lambda v: lax.pcast(v, "data", to="varying"), values)
            return lax.pmean(jact.grad(loss, policy=c)(values, x), "data")

        mapped = jax.shard_map(on_each, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.tree.map(lambda p, g: p - 0.1 * g, values, mapped(values, x))

    values = params()
    for i in range(3):
        values = step(values, batch(i, 1024))
    assert c.history[0].noise is not None
    if shared:
        whole = controller(bits=3, every=4)
        sgd(whole)(params(), batch(0, 1024))
        expected = whole.history[0].predicted_error
        assert c.history[0].predicted_error == pytest.approx(expected, rel=0.2)
    assert np.isfinite(values[0]).all()


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x)))
            x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(4)(x)


class State(TrainState):
    batch_stats: dict


def test_a_linen_train_state():
    """Random streams and statistics are those of the same steps without any probe."""
    model, x = Net(), batch(0)
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def make(jit, policy):
        def step(state, x, key):
            def loss(params):
                out, new = state.apply_fn(
                    {"params": params, "batch_stats": state.batch_stats},
                    x,
                    mutable=["batch_stats"],
                    rngs={"dropout": key},
                )
                return jnp.mean((out - x[:, :4]) ** 2), new

            (value, new), grads = jact.value_and_grad(loss, has_aux=True, policy=policy)(
                state.params
            )
            state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
            return state, value

        return jit(step)

    def start():
        return State.create(
            apply_fn=model.apply,
            params=variables["params"],
            batch_stats=variables["batch_stats"],
            tx=optax.sgd(0.1),
        )

    c = controller(bits=3, every=4, switch_after=4)
    step, state = make(c.jit, c), start()
    keys = jax.random.split(jax.random.key(2), 4)
    for i in range(4):
        state, _ = step(state, batch(i), keys[i])
    fixed, reference = make(jax.jit, c.history[0].plan), start()
    for i in range(4):
        reference, _ = fixed(reference, batch(i), keys[i])
    assert int(state.step) == 4
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(reference), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any("Dense_0" in name for name in c.plan.codecs)


def test_compressed_linen_modules():
    c = controller(bits=4, codecs=("int8", "int2"))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(64)(nn.gelu(nn.Dense(128)(x)))

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = jact.compress(Block, policy=c)(name=f"Block_{i}")(x)
            return jnp.mean(x**2)

    variables = Stack().init(jax.random.key(0), batch(0))

    @c.jit
    def step(variables, x):
        return jax.grad(Stack().apply)(variables, x)

    grads = step(variables, batch(0))
    assert np.isfinite(jax.tree.leaves(grads)[0]).all()
    assert all("Block_" in name for name in c.plan.codecs)
    assert any("Block_0/" in n for n in c.plan.codecs) and any(
        "Block_1/" in n for n in c.plan.codecs
    )
    plain = jax.jit(jax.grad(Stack().apply))(variables, batch(0))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        assert np.linalg.norm(a - b) < 0.3 * np.linalg.norm(b)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def test_an_nnx_optimizer():
    def make(jit, policy):
        @jit
        def step(model, optimizer, x):
            def loss(model):
                return jnp.mean((model(x) - x[:, :4]) ** 2)

            value, grads = jact.nnx.value_and_grad(loss, policy=policy)(model)
            optimizer.update(model, grads)
            return value

        return step

    def start():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    c = controller(every=4, switch_after=4, bits=3)
    step, (model, optimizer) = make(c.jit, c), start()
    model.train()
    for i in range(4):
        step(model, optimizer, batch(i))
    reference, other = start()
    reference.train()
    fixed = make(nnx.jit, c.history[0].plan)
    for i in range(4):
        fixed(reference, other, batch(i))
    assert int(optimizer.step[...]) == 4
    for a, b in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(reference)), strict=True
    ):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
    for i in range(4, 15):
        step(model, optimizer, batch(i))
    assert any("first" in name for name in c.plan.codecs)
    assert [a.reason for a in c.history][:3] == ["first", "confirm", "periodic"]


def test_two_functions_in_one_step():
    c = controller(bits=4, codecs=("int8", "int2"))

    def other(params, x):
        return loss(params, x) ** 2

    @c.jit
    def step(values, x):
        return jact.grad(loss, policy=c)(values, x), jact.grad(other, policy=c)(values, x)

    step(params(), batch(0))
    assert any(name.startswith("loss/") for name in c.plan.codecs)
    assert any(name.startswith("other/") for name in c.plan.codecs)


def test_a_scaled_loss_gives_the_same_plan():
    plans = []
    for scale in (1.0, 1024.0):
        c = controller(bits=3)

        @c.jit
        def step(values, x):
            return jax.grad(lambda v: scale * jact.compress(loss, policy=c)(v, x))(values)  # noqa: B023

        step(params(), batch(0))
        plans.append(c.history[0])
    assert plans[0].plan == plans[1].plan
    assert plans[0].predicted_error == pytest.approx(plans[1].predicted_error, rel=1e-3)
