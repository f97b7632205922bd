"""Linen modules: every form that `jact.compress` takes, against the plain model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import errors
from flax.training import train_state

import jact
from tests.flax import checks
from tests.flax.checks import HIDDEN, WIDTH, X

compress = functools.partial(jact.compress, policy="int8")


def body(module: nn.Module, x: jax.Array, train: bool) -> jax.Array:
    """A residual block with every kind of state: statistics, random numbers, sown values."""
    y = nn.Dense(HIDDEN)(x)
    y = nn.gelu(nn.BatchNorm(use_running_average=not train)(y))
    module.sow("intermediates", "mean", y.mean())
    y = nn.Dropout(0.5, deterministic=not train)(y)
    noise = 0.1 * jax.random.normal(module.make_rng("noise"), (1, WIDTH)) if train else 0.0
    return x + nn.Dense(WIDTH)(y) + noise


class Block(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool | None = None) -> jax.Array:
        return body(self, x, self.train if train is None else train)


class Above(nn.Module):
    train: bool = True

    @compress
    @nn.compact
    def __call__(self, x: jax.Array, train: bool | None = None) -> jax.Array:
        return body(self, x, self.train if train is None else train)


class Below(nn.Module):
    train: bool = True

    @nn.compact
    @jact.compress(policy="int8")
    def __call__(self, x: jax.Array, train: bool | None = None) -> jax.Array:
        return body(self, x, self.train if train is None else train)


def _renamed(cls: type[nn.Module]) -> type[nn.Module]:
    cls.__name__ = "Block"  # It stands for the plain class here.
    return cls


def _by_function(module: nn.Module, x: jax.Array, train: bool) -> jax.Array:
    return Block(name="Block_0", parent=module)(x, train=train)


#: How a parent module calls one block.
FORMS: dict[str, Callable[[nn.Module, jax.Array, bool], jax.Array]] = {
    "plain": lambda _, x, train: Block()(x, train=train),
    "class": lambda _, x, train: compress(Block)(name=None)(x, train=train),
    "positional": lambda _, x, train: compress(Block)()(x, train),
    "attribute": lambda _, x, train: compress(Block)(train=train)(x),
    "partial": lambda _, x, train: compress(functools.partial(Block, train=train))()(x),
    "decorator": lambda _, x, train: _renamed(Above)()(x, train=train),
    "decorator below": lambda _, x, train: _renamed(Below)()(x, train),
    "instance": lambda _, x, train: compress(Block())(x, train=train),
    "bound method": lambda _, x, train: compress(Block().__call__)(x, train=train),
    "unbound method": lambda _, x, train: compress(Block.__call__)(Block(), x, train=train),
    "function": lambda _, x, train: compress(lambda m, x, train: m(x, train))(Block(), x, train),
    "keyword": lambda _, x, train: compress(lambda x, m: m(x, train), keep=())(x, m=Block()),
    "inner": lambda m, x, train: compress(_by_function)(m, x, train),
    "closure": lambda _, x, train: compress(lambda m, x: m(x * scale(x), train))(Block(), x),
}


def scale(x: jax.Array) -> jax.Array:
    return jnp.ones((), x.dtype)


class Net(nn.Module):
    form: str = "plain"

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        return nn.Dense(8)(FORMS[self.form](self, x, train))


def init(net: nn.Module, **options: Any) -> Any:
    keys = {"params": jax.random.key(0), "noise": jax.random.key(1), "dropout": jax.random.key(2)}
    variables = net.init(keys, X, **options)
    variables.pop("intermediates", None)
    return variables


def make_loss(net: nn.Module, **options: Any) -> Callable[..., Any]:
    def loss(params: Any, rest: Any, key: jax.Array) -> Any:
        y, new = net.apply(
            {"params": params, **rest},
            X,
            rngs={"noise": key, "dropout": key},
            mutable=["batch_stats", "intermediates", "cache", "losses"],
            **options,
        )
        total = sum(jax.tree.leaves(new.get("losses", {})), jnp.zeros(()))
        return jnp.mean(y**2) + total, new

    return loss


def step(net: nn.Module, variables: Any, **options: Any) -> Any:
    rest = dict(variables)
    gradient = jax.jit(jax.value_and_grad(make_loss(net, **options), has_aux=True))
    return gradient(rest.pop("params"), rest, jax.random.key(3))


@functools.cache
def plain_results(plain: nn.Module, **options: Any) -> tuple[Any, Any, Any]:
    """The variables of a plain model, made outside and inside of `jax.jit`, and a step of it."""
    variables = init(plain)
    compiled = jax.jit(functools.partial(init, plain))()
    return variables, compiled, step(plain, variables, **options)


def assert_like_plain(net: nn.Module, plain: nn.Module, count: int, **options: Any) -> None:
    """Checks parameters, value, state, gradient, and how many values the net saves encoded."""
    variables, compiled, expected = plain_results(plain, **options)
    checks.assert_equal(init(net), variables)
    checks.assert_equal(jax.jit(functools.partial(init, net))(), compiled)
    checks.assert_same_step(step(net, variables, **options), expected)
    rest = dict(variables)
    arguments = rest.pop("params"), rest, jax.random.key(3)
    gradient = jax.grad(make_loss(net, **options), has_aux=True)
    assert len(checks.codes(gradient, *arguments)) == count


@checks.parametrize_forms(FORMS, in_evaluation=("class", "function"))
def test_forms(form: str, train: bool) -> None:
    # The block's input and its hidden layer, before normalisation.
    count = 0 if form == "plain" else 2
    assert_like_plain(Net(form), Net(), count, train=train)


def test_names_and_repeated_use() -> None:
    """Names count up as they do without jact, whichever of the blocks are compressed."""

    class Mixed(nn.Module):
        wrap: Callable[[Any], Any]

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            shared = self.wrap(Block)()
            return Block()(self.wrap(Block)()(shared(Block()(shared(x)))))

    assert_like_plain(Mixed(compress), Mixed(lambda cls: cls), 6)
    assert compress(Block) is compress(Block)
    assert compress(Block).__qualname__ == Block.__qualname__
    assert issubclass(compress(Block), Block)


class Setup(nn.Module):
    wrap: Callable[[Any], Any]
    by_instance: bool = False

    def setup(self) -> None:
        make = (lambda: self.wrap(Block())) if self.by_instance else self.wrap(Block)
        self.first = make()
        self.blocks = [make() for _ in range(2)]
        self.tail = nn.Sequential([make(), nn.relu])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


@pytest.mark.parametrize("by_instance", [False, True])
def test_setup(by_instance: bool) -> None:
    assert_like_plain(Setup(compress, by_instance), Setup(lambda m: m), 8)


class Autoencoder(nn.Module):
    def setup(self) -> None:
        self.encoder = nn.Dense(HIDDEN)
        self.decoder = nn.Dense(WIDTH)

    def encode(self, x: jax.Array) -> jax.Array:
        return nn.tanh(self.encoder(x))

    def decode(self, z: jax.Array) -> jax.Array:
        return nn.tanh(self.decoder(z))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decode(self.encode(x))


def test_several_methods() -> None:
    wrapped = jact.compress(Autoencoder, "int8", methods=("encode", "decode"))
    # Input and output of each of the two layers.
    assert_like_plain(wrapped(), Autoencoder(), 4)
    assert_like_plain(compress(Autoencoder)(), Autoencoder(), 3)
    assert_like_plain(jact.compress(Autoencoder(), "int8", methods=["decode"]), Autoencoder(), 2)
    variables = init(wrapped())
    for method in ("encode", wrapped.encode):
        want = Autoencoder().apply(variables, X, method="encode")
        checks.assert_equal(wrapped().apply(variables, X, method=method), want)


class Decorated(Autoencoder):
    @compress
    def encode(self, x: jax.Array) -> jax.Array:
        return nn.tanh(self.encoder(x))

    @jact.compress(policy="int8")
    def decode(self, z: jax.Array) -> jax.Array:
        return nn.tanh(self.decoder(z))


def test_decorated_methods_of_a_module_with_setup() -> None:
    assert_like_plain(Decorated(), Autoencoder(), 4)


class Inherited(Above):
    """`super().__call__` of a compressed method."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool | None = None) -> jax.Array:
        return super().__call__(x, train)


def test_inheritance() -> None:
    assert_like_plain(Inherited(), Block(), 2)
    # The outer one marks once more what the inner one saves.
    assert_like_plain(compress(Inherited)(), Block(), 4)


class Shared(nn.Module):
    """One submodule passed to two blocks, as an attribute and as an argument."""

    wrap: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense(WIDTH)
        x = self.wrap(Uses)(dense)(x)
        x = self.wrap(Uses)(dense)(x)
        return self.wrap(UsesArgument)()(x, dense)


class Uses(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.tanh(nn.Dense(WIDTH)(nn.tanh(self.inner(x))))


class UsesArgument(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, inner: nn.Module) -> jax.Array:
        return nn.tanh(inner(nn.tanh(nn.Dense(WIDTH)(x))))


def test_shared_submodules() -> None:
    assert_like_plain(Shared(compress), Shared(lambda cls: cls), 9)


class Scanned(nn.Module):
    wrap: Callable[[Any], Any]
    outside: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def lift(cls: Any) -> Any:
            return nn.scan(
                cls,
                variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True, "noise": True},
                length=3,
            )

        cls = self.wrap(lift(Step)) if self.outside else lift(self.wrap(Step))
        return cls(name="layers")(x, None)[0]


class Step(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return body(self, x, True), None


@pytest.mark.parametrize("outside", [False, True])
def test_scan(outside: bool) -> None:
    # What the loop saves is marked in its body and, from outside, as what it stacks up.
    count = 4 if outside else 2
    assert_like_plain(Scanned(compress, outside), Scanned(lambda cls: cls), count)


class Mapped(nn.Module):
    wrap: Callable[[Any], Any]
    outside: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def lift(cls: Any) -> Any:
            return nn.vmap(
                cls,
                variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True, "noise": True},
            )

        cls = self.wrap(lift(Block)) if self.outside else lift(self.wrap(Block))
        return cls(name="ensemble")(jnp.stack([x, 2 * x]))


@pytest.mark.parametrize("outside", [False, True])
def test_vmap(outside: bool) -> None:
    assert_like_plain(Mapped(compress, outside), Mapped(lambda cls: cls), 2)


class Rematerialised(nn.Module):
    wrap: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wrap(Block)(name="Block_0")(x)


def test_remat_around_and_inside() -> None:
    plain = Rematerialised(lambda cls: cls)
    assert_like_plain(Rematerialised(lambda cls: nn.remat(compress(cls))), plain, 2)
    assert_like_plain(Rematerialised(lambda cls: compress(nn.remat(cls))), plain, 1)


class Transposed(nn.Module):
    wrap: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def transpose(variables: Any) -> Any:
            return jax.tree.map(jnp.transpose, variables)

        dense = nn.map_variables(
            self.wrap(nn.Dense), "params", transpose, transpose, init=self.is_initializing()
        )
        return nn.tanh(dense(WIDTH, use_bias=False, name="dense")(x))


def test_map_variables() -> None:
    assert_like_plain(Transposed(compress), Transposed(lambda cls: cls), 1)


class Cached(nn.Module):
    """A block with a collection of its own and a loss of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cache = self.variable("cache", "calls", lambda: jnp.zeros((), jnp.int32))
        average = self.variable("cache", "average", jnp.zeros, (1, WIDTH))
        if not self.is_initializing():
            cache.value += 1
            average.value = 0.9 * average.value + 0.1 * x.mean(0, keepdims=True)
        y = nn.tanh(nn.Dense(WIDTH)(x))
        self.sow("losses", "activity", jnp.mean(y**2))
        return nn.Dense(WIDTH)(nn.tanh(y - average.value))


def test_custom_collections_and_sown_losses() -> None:
    """A loss that is sown is differentiated, as in the plain model."""
    net, plain = compress(Cached)(), Cached()
    assert_like_plain(net, plain, 2)
    cache, key = {"cache": init(plain)["cache"]}, jax.random.key(0)
    sown = jax.grad(lambda params: make_loss(plain)(params, cache, key)[1]["losses"]["activity"][0])
    assert float(jnp.abs(sown(init(plain)["params"])["Dense_0"]["kernel"]).max()) > 0


def test_attention_with_a_cache() -> None:
    """Autoregressive decoding writes its cache through a compressed module."""

    def decode(cls: Any) -> Any:
        module = cls(num_heads=2, qkv_features=16, decode=True)
        x = jax.random.normal(jax.random.key(0), (4, 6, 16))
        variables = module.init(jax.random.key(1), x)
        apply = jax.jit(functools.partial(module.apply, mutable=["cache"]))
        out = []
        for i in range(3):
            y, new = apply(variables, x[:, i : i + 1])
            variables = {**variables, **new}
            out.append(y)
        return out, variables

    checks.assert_equal(
        decode(compress(nn.MultiHeadDotProductAttention)), decode(nn.MultiHeadDotProductAttention)
    )


def test_tabulate() -> None:
    def table(net: nn.Module) -> str:
        keys = {name: jax.random.key(0) for name in ("params", "noise", "dropout")}
        return net.tabulate(keys, X, console_kwargs={"width": 200, "force_terminal": False})

    assert table(Net("class")) == table(Net())


def test_train_state() -> None:
    def train(net: nn.Module) -> Any:
        variables = init(net)
        state = train_state.TrainState.create(
            apply_fn=net.apply, params=variables.pop("params"), tx=optax.sgd(0.1)
        )
        losses = []
        for key in jax.random.split(jax.random.key(5), 3):

            @jax.jit
            def update(state: Any, stats: Any, key: jax.Array) -> Any:
                gradient = jax.value_and_grad(make_loss(net), has_aux=True)
                (loss, new), grads = gradient(state.params, stats, key)
                return state.apply_gradients(grads=grads), new, loss

            state, variables, loss = update(state, variables, key)
            variables.pop("intermediates")
            losses.append(loss)
        return losses, variables, state.params

    got, want = train(Net("class")), train(Net())
    checks.assert_close(got, want, 0.01)
    assert want[0][-1] < want[0][0]


def test_call_in_method_and_static_arguments() -> None:
    """Strings, functions, None and numbers pass through, whether positional or by keyword."""

    class Choosy(nn.Module):
        @nn.compact
        def __call__(
            self, x: jax.Array, kind: str, *, act: Callable[..., Any], mask: Any = None, n: int = 1
        ) -> tuple[jax.Array, str]:
            for _ in range(n):
                x = act(nn.Dense(WIDTH, use_bias=kind == "bias")(x))
            return (x if mask is None else x * mask), kind

    def run(cls: Any) -> Any:
        module = cls()
        options = {"act": nn.tanh, "n": 2, "mask": None}
        variables = module.init(jax.random.key(0), X, "bias", **options)

        @jax.jit
        def gradient(variables: Any) -> Any:
            def loss(variables: Any) -> jax.Array:
                y, kind = module.apply(variables, X, "bias", **options)
                assert kind == "bias"
                return jnp.sum(y**2)

            return jax.grad(loss)(variables)

        return gradient(variables)

    checks.assert_close(run(compress(Choosy)), run(Choosy), checks.TOLERANCE)


def test_compressed_twice() -> None:
    """The outer policy holds, method by method; a class that inherits has its own."""
    once = jact.compress(Autoencoder, policy="int8", methods=["encode"])
    assert jact.compress(once, policy="int2", methods=["encode"]) is jact.compress(
        Autoencoder, policy="int2", methods=["encode"]
    )
    both = jact.compress(once, policy="int8", methods=["decode"])
    assert both is jact.compress(Autoencoder, policy="int8", methods=["encode", "decode"])

    Inner = jact.compress(nn.Dense, policy="int2")  # noqa: N806

    class Heir(Inner):
        pass

    assert issubclass(jact.compress(Heir, policy="int8"), Heir)
    exact = jact.Policy(default="keep")
    outer = jact.compress(jact.compress(nn.Dense(WIDTH), policy="int2"), policy=exact)
    params = outer.init(jax.random.key(0), X)

    def loss(model: nn.Module) -> Callable[..., jax.Array]:
        # What the block reads is made within the loss: its own argument would live anyway.
        return lambda params, x: jnp.sum(model.apply(params, jnp.tanh(x)) ** 2)

    got = jax.grad(loss(outer))(params, X)
    want = jax.grad(loss(nn.Dense(WIDTH)))(params, X)
    checks.assert_close(got, want, 1e-6)


def test_off_is_the_module_itself() -> None:
    assert jact.compress(Block, "off") is Block
    module = Block()
    assert jact.compress(module, "off") is module
    assert_like_plain(
        Rematerialised(lambda cls: jact.compress(cls, "off")), Rematerialised(lambda cls: cls), 0
    )


def test_a_module_keeps_its_dataclass() -> None:
    wrapped = compress(Block)
    assert [f.name for f in dataclasses.fields(wrapped)] == [
        f.name for f in dataclasses.fields(Block)
    ]
    assert wrapped(train=False).clone() == wrapped(train=False)


def test_errors() -> None:
    class Silent(nn.Module):
        pass

    with pytest.raises(TypeError, match=r"Silent has no method '__call__'.*methods="):
        jact.compress(Silent)
    with pytest.raises(TypeError, match="Block has no method 'encode'"):
        jact.compress(Block, methods=["encode"])
    with pytest.raises(TypeError, match=r"a Linen class .*; got <class 'dict'>"):
        jact.compress(dict)
    with pytest.raises(ValueError, match="methods is for modules"):
        jact.compress(lambda x: x, methods=["encode"])
    with pytest.raises(errors.CallCompactUnboundModuleError):
        compress(Block)()(X)
    with pytest.raises(ValueError, match="keep names the argument 'z'"):
        jact.compress(Block, keep="z")


def test_statistics_over_a_mapped_axis() -> None:
    """BatchNorm that averages over devices does so in a compressed block, too."""

    class Synchronised(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = nn.BatchNorm(use_running_average=False, axis_name="batch")(nn.Dense(HIDDEN)(x))
            return nn.Dense(WIDTH)(nn.relu(y))

    def run(cls: Any, gradient: Any = jax.value_and_grad) -> Any:
        plain = nn.Dense(HIDDEN).init(jax.random.key(0), X)
        last = nn.Dense(WIDTH).init(jax.random.key(1), jnp.ones((1, HIDDEN)))
        scale = {"scale": jnp.ones(HIDDEN), "bias": jnp.zeros(HIDDEN)}
        stats = {"BatchNorm_0": {"mean": jnp.zeros(HIDDEN), "var": jnp.ones(HIDDEN)}}
        params = {"Dense_0": plain["params"], "Dense_1": last["params"], "BatchNorm_0": scale}

        def step(params: Any, x: jax.Array) -> Any:
            def loss(params: Any) -> Any:
                y, new = cls().apply(
                    {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
                )
                return jnp.mean(y**2), new

            value, grads = gradient(loss, has_aux=True)(params)
            return value, jax.lax.pmean(grads, "batch")

        halves = X.reshape(2, -1, WIDTH)
        return jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="batch"))(params, halves)

    want = run(Synchronised)
    checks.assert_same_step(run(compress(Synchronised)), want)
    int8 = functools.partial(jact.value_and_grad, policy="int8")
    checks.assert_same_step(run(Synchronised, int8), want)


def test_a_recurrent_cell_that_samples() -> None:
    """What a scanned cell draws from its random stream is what the plain one draws."""

    class Sampler(nn.RNNCellBase):
        features: int
        wrap: Callable[[Any], Any]

        @nn.compact
        def __call__(self, carry: Any, x: jax.Array) -> Any:
            cell = self.wrap(nn.GRUCell)(self.features)
            state, last = carry
            state, y = cell(state, x + last)
            logits = self.wrap(nn.Dense)(x.shape[-1])(y)
            drawn = jax.random.categorical(self.make_rng("sample"), logits)
            last = jax.nn.one_hot(drawn, x.shape[-1], dtype=x.dtype)
            return (state, last), (logits, drawn)

        @property
        def num_feature_axes(self) -> int:
            return 1

    x = X.reshape(32, 8, WIDTH)

    def run(wrap: Any) -> Any:
        rnn = nn.RNN(Sampler(WIDTH, wrap), split_rngs={"params": False, "sample": True})
        carry = jnp.zeros((32, WIDTH)), jnp.zeros((32, WIDTH))
        keys = {"params": jax.random.key(0), "sample": jax.random.key(1)}
        variables = rnn.init(keys, x, initial_carry=carry)

        @jax.jit
        def gradient(variables: Any) -> Any:
            def loss(variables: Any) -> Any:
                logits, drawn = rnn.apply(
                    variables, x, initial_carry=carry, rngs={"sample": jax.random.key(2)}
                )
                return jnp.mean(logits**2), drawn

            return jax.value_and_grad(loss, has_aux=True)(variables)

        return gradient(variables)

    policy = jact.Policy(default="int8", min_bytes=0)
    checks.assert_same_step(run(lambda cls: jact.compress(cls, policy)), run(lambda cls: cls))
