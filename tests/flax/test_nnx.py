"""NNX modules: every form that `jact.compress` takes, and `jact.nnx`, against the plain model."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import errors, nnx

import jact
from tests.flax import checks
from tests.flax.checks import HIDDEN, WIDTH, X

compress = functools.partial(jact.compress, policy="int8")


class Count(nnx.Variable):
    """A kind of state that Flax does not know."""


class Scale(nnx.Variable):
    """A running scale, as a quantiser has."""


class Block(nnx.Module):
    """A residual block with every kind of state."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.calls = Count(jnp.zeros((), jnp.int32))
        self.scale = Scale(jnp.ones(()))

    def __call__(self, x: jax.Array, *, factor: float = 1.0) -> jax.Array:
        self.calls[...] += 1
        self.scale[...] = 0.9 * self.scale[...] + 0.1 * jnp.abs(x).max()
        y = self.dropout(nnx.gelu(self.norm(self.first(x / self.scale[...]))))
        return x + factor * self.last(y)

    def plainly(self, x: jax.Array) -> jax.Array:
        return self(x)


class Decorated(Block):
    @jact.compress(policy="int8")
    def __call__(self, x: jax.Array, *, factor: float = 1.0) -> jax.Array:
        return super().__call__(x, factor=factor)


#: How a block is called, given the block.
FORMS: dict[str, Callable[[Any], Callable[..., jax.Array]]] = {
    "plain": lambda block: block,
    "instance": compress,
    "bound method": lambda block: compress(block.__call__),
    "another method": lambda block: compress(block.plainly),
    "unbound method": lambda block: functools.partial(compress(Block.__call__), block),
    "function": lambda block: functools.partial(compress(lambda m, x: m(x)), block),
    "keyword": lambda block: functools.partial(compress(lambda x, m: m(x), keep=()), m=block),
    "in a list": lambda block: functools.partial(compress(lambda ms, x: ms[0](x)), [block]),
    "decorator": lambda block: _as(Decorated, block),
    "class": lambda block: _as(compress(Block), block),
    "inside out": lambda block: compress(compress(block)),
    "remat around": lambda block: functools.partial(nnx.remat(lambda m, x: m(x)), compress(block)),
    "remat inside": lambda block: functools.partial(compress(nnx.remat(lambda m, x: m(x))), block),
    "jit around": lambda block: functools.partial(nnx.jit(lambda m, x: m(x)), compress(block)),
    "jit inside": lambda block: functools.partial(compress(nnx.jit(lambda m, x: m(x))), block),
}


def _as(cls: type, block: Block) -> Any:
    """The block as an object of another class."""
    made = object.__new__(cls)
    object.__setattr__(made, "__dict__", vars(block))
    return made


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.block = Block(rngs)
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs)


def forward(net: Net, x: jax.Array, form: str) -> jax.Array:
    return net.head(FORMS[form](net.block)(nnx.tanh(net.stem(x))))


def loss(net: Net, x: jax.Array, form: str = "plain") -> jax.Array:
    return jnp.mean(forward(net, x, form) ** 2)


def run(form: str, gradient: Callable[..., Any] = nnx.value_and_grad, train: bool = True) -> Any:
    """Three steps of one net; returns values and gradients, and the net's state."""
    net = Net(nnx.Rngs(0))
    if not train:
        net.eval()
    step = nnx.jit(gradient(functools.partial(loss, form=form)))
    results = [step(net, X) for _ in range(3)]
    return results, nnx.to_pure_dict(nnx.state(net))


@functools.cache
def plain_run(train: bool) -> Any:
    return run("plain", train=train)


def assert_same_run(got: Any, want: Any) -> None:
    for one, other in zip(got[0], want[0], strict=True):
        checks.assert_same_step(one, other)
    checks.assert_equal(got[1], want[1])


@checks.parametrize_forms(FORMS, in_evaluation=("instance", "function"))
def test_forms(form: str, train: bool) -> None:
    got, want = run(form, train=train), plain_run(train)
    assert_same_run(got, want)
    assert int(got[1]["block"]["calls"]) == 3
    definition, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def of_params(params: Any, rest: Any, x: jax.Array) -> jax.Array:
        return loss(nnx.merge(definition, params, rest, copy=True), x, form)

    count = len(checks.codes(jax.grad(of_params), params, rest, X))
    assert (count > 0) == (form != "plain")


@pytest.mark.parametrize("train", [True, False])
def test_value_and_grad(train: bool) -> None:
    int8 = functools.partial(jact.nnx.value_and_grad, policy="int8")
    assert_same_run(run("plain", int8, train), run("plain", train=train))
    # A block that is compressed already is left alone.
    assert_same_run(run("instance", int8, train), run("plain", train=train))


def _steps(transform: Any, train: Callable[[Any, Any, Any], Any]) -> Any:
    net = Net(nnx.Rngs(0))
    return [nnx.jit(functools.partial(train, transform))(net, X) for _ in range(2)], nnx.state(net)


ARGUMENTS: dict[str, Any] = {
    "int": 0,
    "sequence": (0, 1),
    "data": 1,
    "filter": nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains("block"))),
    "type": nnx.DiffState(0, (nnx.Param, Scale)),
    "mixed": (nnx.DiffState(0, nnx.PathContains("kernel")), 1),
}


@pytest.mark.parametrize("argnums", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("name", ["grad", "value_and_grad"])
def test_argnums(name: str, argnums: Any) -> None:
    def both(module: Any, **options: Any) -> Any:
        net = Net(nnx.Rngs(0))
        gradient = getattr(module, name)(loss, argnums=argnums, **options)
        return nnx.jit(gradient)(net, X), nnx.to_pure_dict(nnx.state(net))

    (got, state), (want, plain) = both(jact.nnx, policy="int8"), both(nnx)
    checks.assert_equal(state, plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    checks.assert_close(got, want, checks.TOLERANCE)


def test_auxiliary_data_and_keywords() -> None:
    """Modules, arrays and static values may be auxiliary data."""

    def with_aux(net: Net, x: jax.Array, note: str) -> Any:
        y = forward(net, x, "plain")
        return jnp.mean(y**2), {"y": y, "head": net.head, "twice": 2 * net.block.calls[...]}

    def both(module: Any, **options: Any) -> Any:
        net = Net(nnx.Rngs(0))
        gradient = module.value_and_grad(with_aux, has_aux=True, **options)
        (value, aux), grads = nnx.jit(gradient, static_argnames="note")(net, X, note="any")
        assert aux.pop("head") is net.head
        return (value, aux), grads

    checks.assert_same_step(both(jact.nnx, policy="int8"), both(nnx))
    assert callable(jact.nnx.grad(policy="int2", has_aux=True))


def test_frozen_layers_save_nothing() -> None:
    """What only the gradient of a frozen layer would read is not saved."""
    net = Net(nnx.Rngs(0))
    head = nnx.DiffState(0, nnx.PathContains("head"))

    def saved(argnums: Any) -> int:
        definition, state = nnx.split(net)

        def gradient(state: Any, x: jax.Array) -> Any:
            net = nnx.merge(definition, state, copy=True)
            return jact.nnx.grad(loss, argnums=argnums)(net, x)

        return len(checks.codes(gradient, state, X))

    assert saved(head) == 1 < saved(0)


def test_tree_mode() -> None:
    """Modules as plain pytrees: the gradient is a module, and updates still arrive."""

    class Small(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.scale = Scale(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.scale[...] = 0.9 * self.scale[...] + 0.1 * jnp.abs(x).max()
            return nnx.tanh(self.layer(x)) * self.scale[...]

    def both(module: Any, wrap: Any = lambda m: m, **options: Any) -> Any:
        net = Small(nnx.Rngs(0))

        def of_small(net: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(wrap(net)(x) ** 2)

        gradient = module.value_and_grad(of_small, graph=False, **options)
        value, grads = gradient(net, X)
        assert isinstance(grads, Small)
        return (value, nnx.to_pure_dict(nnx.state(net))), nnx.to_pure_dict(nnx.state(grads))

    want = both(nnx)
    checks.assert_same_step(both(jact.nnx, policy="int8"), want)
    checks.assert_same_step(both(nnx, compress), want)
    with nnx.set_graph_mode(False):
        net = Small(nnx.Rngs(0))
        value, _ = jact.nnx.value_and_grad(lambda net, x: jnp.mean(net(x) ** 2))(net, X)
        checks.assert_equal(value, want[0][0])


def test_the_same_instance() -> None:
    """A compressed instance is used like the model, and is the model as far as state goes."""
    net = Net(nnx.Rngs(0))
    wrapped = compress(net.block)
    assert isinstance(wrapped, Block)
    assert type(wrapped).__name__ == "Block"
    assert wrapped.first is net.block.first
    wrapped.note = "set on one"
    assert net.block.note == "set on one"
    net.block.factor = 3
    assert wrapped.factor == 3
    checks.assert_equal(nnx.state(wrapped), nnx.state(net.block))
    wrapped.eval()
    assert net.block.dropout.deterministic
    net.block = wrapped
    assert [path for path, _ in nnx.to_flat_state(nnx.state(net))] == [
        path for path, _ in nnx.to_flat_state(nnx.state(Net(nnx.Rngs(0))))
    ]
    merged = nnx.merge(*nnx.split(net))
    assert type(merged.block) is type(wrapped) is type(compress(Block(nnx.Rngs(1))))
    assert isinstance(copy.deepcopy(wrapped), Block)
    assert isinstance(nnx.clone(wrapped), Block)
    definition, state = nnx.split(wrapped)

    def of_state(state: Any) -> jax.Array:
        return nnx.merge(definition, state, copy=True)(X).sum()

    gradient = jax.grad(of_state, allow_int=True)
    assert len(checks.codes(gradient, state)) == 2


@pytest.mark.parametrize("compressed", [False, True])
def test_optimizer(compressed: bool) -> None:
    """Whole training steps, with the compressed instance in the optimizer and in the checkpoint."""

    def train(wrap: Any) -> Any:
        net = Net(nnx.Rngs(0))
        net.block = wrap(net.block)
        optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(net: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
            def of_net(net: Net) -> jax.Array:
                return jnp.mean(net.head(net.block(net.stem(x))) ** 2)

            value, grads = nnx.value_and_grad(of_net)(net)
            optimizer.update(net, grads)
            return value

        losses = [step(net, optimizer, X) for _ in range(3)]
        return losses, nnx.to_pure_dict(nnx.state(net, nnx.Not(nnx.RngState)))

    want = train(lambda block: block)
    got = train(compress if compressed else lambda block: compress(block, policy="off"))
    checks.assert_close(got, want, 0.01)
    assert want[0][-1] < want[0][0]


def test_checkpoint(tmp_path: Any) -> None:
    """A checkpoint of the plain model is read into a compressed one, and back."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    plain, wrapped = Block(nnx.Rngs(0)), compress(Block(nnx.Rngs(1)))
    for source, target, name in ((plain, wrapped, "one"), (wrapped, Block(nnx.Rngs(2)), "two")):
        definition, state = (
            nnx.split(target, nnx.Not(nnx.RngState), ...)[0],
            nnx.state(source, nnx.Not(nnx.RngState)),
        )
        del definition
        with checkpoint.StandardCheckpointer() as saver:
            saver.save(tmp_path / name, nnx.to_pure_dict(state))
            saver.wait_until_finished()
            read = saver.restore(tmp_path / name, nnx.to_pure_dict(state))
        target_state = nnx.state(target, nnx.Not(nnx.RngState))
        nnx.replace_by_pure_dict(target_state, read)
        nnx.update(target, target_state)
        checks.assert_equal(
            nnx.to_pure_dict(nnx.state(target, nnx.Not(nnx.RngState))), nnx.to_pure_dict(state)
        )


def test_scan_and_vmap() -> None:
    """Stacked blocks, scanned and mapped, with state in each."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    def both(wrap: Any) -> Any:
        blocks = make(nnx.Rngs(0))

        def of_blocks(blocks: Any, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def layers(block: Block, x: jax.Array) -> jax.Array:
                return wrap(block)(x)

            @nnx.vmap(in_axes=(0, None), out_axes=0)
            def ensemble(block: Block, x: jax.Array) -> jax.Array:
                return wrap(block)(x)

            return jnp.mean(layers(blocks, x) ** 2) + jnp.mean(ensemble(blocks, x) ** 2)

        value, grads = nnx.jit(nnx.value_and_grad(of_blocks))(blocks, X)
        state = nnx.to_pure_dict(nnx.state(blocks))
        return (value, state), grads

    checks.assert_same_step(both(compress), both(lambda block: block))


def test_shared_variables() -> None:
    """One layer in two places of a module, and in two arguments, stays one."""

    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.second.kernel = self.first.kernel
            self.again = self.first

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.again(nnx.tanh(self.second(nnx.tanh(self.first(x)))))

    def both(wrap: Any, gradient: Any = nnx.value_and_grad) -> Any:
        tied = Tied(nnx.Rngs(0))

        def of_tied(tied: Tied, x: jax.Array) -> jax.Array:
            def use(tied: Tied, layer: nnx.Linear, x: jax.Array) -> jax.Array:
                return layer(nnx.tanh(tied(x)))

            return jnp.mean(wrap(use)(tied, tied.first, x) ** 2)

        value, grads = nnx.jit(gradient(of_tied))(tied, X)
        assert tied.second.kernel is tied.first.kernel
        return (value, nnx.to_pure_dict(nnx.state(tied))), grads

    want = both(lambda fun: fun)
    checks.assert_same_step(both(functools.partial(compress, keep=(0, 1))), want)
    int8 = functools.partial(jact.nnx.value_and_grad, policy="int8")
    checks.assert_same_step(both(lambda fun: fun, int8), want)


def test_new_variables_and_returned_modules() -> None:
    """What a call adds to a module, and a module that it returns, arrive."""

    class Sowing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = nnx.tanh(self.layer(x))
            self.activity = nnx.Intermediate(jnp.mean(y**2))
            return y

    def both(wrap: Any) -> Any:
        net = Sowing(nnx.Rngs(0))

        def of_net(net: Sowing, x: jax.Array) -> Any:
            y = wrap(net)(x)
            # It is differentiated, too.
            return jnp.mean(y) + nnx.pop(net, nnx.Intermediate)["activity"][...]

        return nnx.jit(nnx.value_and_grad(of_net))(net, X)

    checks.assert_same_step(both(compress), both(lambda net: net))

    def first(net: Net, x: jax.Array) -> Any:
        return net.block, net.block(x)

    net = Net(nnx.Rngs(0))

    @nnx.jit
    def identity(net: Net, x: jax.Array) -> jax.Array:
        block, y = compress(first)(net, x)
        assert block is net.block
        return y

    assert identity(net, X).shape == X.shape
    assert int(net.block.calls[...]) == 1


def test_initialisation_and_outside_of_traces() -> None:
    """Without tracers nothing is traced: breakpoints and Python control flow work."""
    seen = []

    def look(block: Block, x: jax.Array) -> jax.Array:
        seen.append(float(x.sum()))
        return block(x)

    block = Block(nnx.Rngs(0))
    checks.assert_equal(compress(look)(block, X), Block(nnx.Rngs(0))(X))
    assert seen == [float(X.sum())]


def test_state_of_another_trace() -> None:
    """A module that is closed over may be read; writing to it raises, as in plain NNX."""
    block = Block(nnx.Rngs(0))
    plain = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    wrapped = compress(plain)
    checks.assert_equal(jax.jit(lambda x: wrapped(x))(X), jax.jit(lambda x: plain(x))(X))
    for model in (block, compress(block)):
        with pytest.raises(errors.TraceContextError):
            jax.jit(lambda x, model=model: model(x))(X)


def test_plan_and_report() -> None:
    net = compress(Block(nnx.Rngs(0)))
    report = jact.report(net)(X)
    names = [row.name for row in report.rows if not row.exact]
    assert names == ["args[1]", "Block/first/dot_general"]
    plan = jact.make_plan(net)(X).replace({"Block/first/dot_general": "int2"})

    def both(policy: Any) -> Any:
        model = Block(nnx.Rngs(0))
        wrapped = jact.compress(model, policy)
        gradient = nnx.value_and_grad(lambda m, x: jnp.mean(wrapped_like(m, policy)(x) ** 2))
        del wrapped
        return nnx.jit(gradient)(model, X)

    def wrapped_like(model: Block, policy: Any) -> Any:
        return jact.compress(model, policy)

    checks.assert_equal(both(plan)[0], both("off")[0])


@pytest.mark.parametrize("transform", [jact.grad, jact.value_and_grad])
@pytest.mark.parametrize("inside", [False, True])
def test_state_that_has_no_gradient(transform: Any, inside: bool) -> None:
    """The counts and keys of dropout, which JAX refuses before the function is called."""
    model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    model = [nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), model)] if inside else model

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model[0] if inside else model)(x) ** 2)

    with pytest.raises(TypeError, match=r"uint32.*Use jact\.nnx\.value_and_grad"):
        transform(loss)(model, jnp.ones((32, 8)))
    with pytest.raises(TypeError, match="real- or complex-valued") as plain:
        transform(lambda i, x: loss(model, x))(jnp.arange(3), jnp.ones((32, 8)))
    assert "nnx" not in str(plain.value)
    argnums = nnx.DiffState(0, nnx.Param)
    value, _ = jact.nnx.value_and_grad(lambda m, x: m(x).sum(), argnums=argnums)(
        model[0] if inside else model, jnp.ones((32, 8))
    )
    assert jnp.isfinite(value)


def test_errors() -> None:
    class Silent(nnx.Module):
        pass

    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def of_model(model: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return jnp.sum(model(x) ** 2)

    with pytest.raises(TypeError, match="Silent has no method '__call__' to compress"):
        jact.compress(Silent())
    for transform in (jact.value_and_grad, jact.grad):
        with pytest.raises(ValueError, match="Use jact.nnx.value_and_grad"):
            transform(of_model)(model, jnp.ones((32, 8)))
    with pytest.raises(ValueError, match="argnum 0 is repeated"):
        jact.nnx.grad(of_model, argnums=(0, 0))(model, X)
    with pytest.raises(ValueError, match="policy"):
        jact.nnx.grad(of_model, policy="int9")
