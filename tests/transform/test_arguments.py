"""What may be passed to a differentiated function, and what it may return."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jact
from tests.transform import cases
from tests.transform.cases import PARAMS, V, W, X, net

pytestmark = pytest.mark.oldest

value_and_grad = functools.partial(jact.value_and_grad, policy="int8")


def check(
    fun: Any,
    *args: Any,
    tolerance: float = 0.01,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Both under `jit`, with everything but arrays static."""
    leaves, tree = jax.tree.flatten((args, kwargs or {}))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    def run(transform: Any) -> Any:
        def call(*arrays: Any) -> Any:
            full = list(leaves)
            for i, array in zip(where, arrays, strict=True):
                full[i] = array
            new_args, new_kwargs = jax.tree.unflatten(tree, full)
            return transform(fun, **options)(*new_args, **new_kwargs)

        return jax.jit(call)(*[leaves[i] for i in where])

    cases.assert_matches(run(value_and_grad), run(jax.value_and_grad), tolerance)


@pytest.mark.parametrize("argnums", [0, 1, -1, (1, 0), (1,), [0, 1], np.int64(1)], ids=repr)
def test_argnums(argnums: Any) -> None:
    check(net, PARAMS, X, argnums=argnums)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"scale": jnp.float32(2.0)},
        {"scale": 2.0},
        {"scale": 2.0, "flip": True},
        {"scale": 2.0, "extra": {"x": X}},
    ],
    ids=["array", "number", "bool", "tree"],
)
def test_keyword_arguments(kwargs: dict[str, Any]) -> None:
    def loss(
        params: Any, x: jax.Array, *, scale: Any, flip: bool = False, extra: Any = None
    ) -> jax.Array:
        value = net(params, x if extra is None else extra["x"] * x) * scale
        return -value if flip else value

    check(loss, PARAMS, X, kwargs=kwargs)


def test_static_arguments() -> None:
    """Python numbers, strings, functions, None, bools and slices stay what they are."""

    def loss(
        params: Any, x: Any, act: Any, name: str, count: int, flag: bool, none: None, rows: slice
    ) -> Any:
        assert name == "a" and none is None and flag is True
        h = act(x @ params[0])[rows]
        for _ in range(count):
            h = h @ params[1]
        return jnp.sum(h**2)

    check(loss, PARAMS, X, jax.nn.gelu, "a", 2, True, None, slice(0, 200))


def test_numpy_arguments() -> None:
    index, chosen = np.arange(cases.ROWS) % 7, np.ones((cases.ROWS, cases.WIDTH), bool)
    check(cases.gathered, PARAMS, np.asarray(X), index, chosen)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.bool_, jnp.float8_e4m3fn])
def test_narrow_inputs(dtype: Any) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return net(params, x.astype(jnp.float32))

    check(loss, PARAMS, (X > 0).astype(dtype))


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_allow_int_gives_float0(argnums: Any) -> None:
    def loss(tree: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x[tree["index"]] @ tree["w"])) / cases.ROWS

    tree = {"w": W, "index": jnp.arange(cases.ROWS) % 5, "flag": jnp.bool_(True)}
    got = value_and_grad(loss, argnums, allow_int=True)(tree, X)
    want = jax.value_and_grad(loss, argnums, allow_int=True)(tree, X)
    cases.assert_matches(got, want, 0.01, exact=False)
    gradient = got[1] if argnums == 0 else got[1][0]
    assert gradient["index"].dtype == gradient["flag"].dtype == jax.dtypes.float0


@pytest.mark.parametrize("holomorphic", [False, True])
def test_complex(holomorphic: bool) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.sin(x @ w)
        return jnp.sum(h * h) / cases.ROWS if holomorphic else jnp.sum(jnp.abs(h) ** 2) / cases.ROWS

    w, x = (jax.lax.complex(a, a[::-1] * 0.5) for a in (W, X * 0.3))
    check(loss, w, x, holomorphic=holomorphic)


@pytest.mark.parametrize(
    ("w", "x"),
    [
        ((64, 3), (0, 64)),
        ((64, 0), (256, 64)),
        ((64, 1), (8191, 64)),
        ((67, 101), (333, 67)),
        ((64, 64), (3, 5, 7, 11, 64)),
        ((64, 64), (1, 64)),
        ((70001,), (70001,)),
        ((), (70001,)),
        ((), ()),
    ],
    ids=repr,
)
@pytest.mark.parametrize("how", ["whole", "part"])
def test_shapes(w: tuple[int, ...], x: tuple[int, ...], how: str) -> None:
    """Empty, scalar, 1-d, 5-d and odd arrays."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.dot(x, w)
        return jnp.sum(jnp.tanh(h) * jnp.sin(h))

    policy = jact.Policy(default="int8", min_bytes=0)
    args = cases.normal(0, *w, scale=0.1), cases.normal(1, *x)
    if how == "whole":
        transformed = jact.value_and_grad(loss, (0, 1), policy=policy)
    else:
        transformed = jax.value_and_grad(jact.compress(loss, policy), (0, 1))
    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(*args)
    cases.assert_matches(jax.jit(transformed)(*args), want, 0.03, exact=False)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_x64(dtype: Any) -> None:
    with jax.enable_x64(True):
        args = jax.tree.map(lambda a: a.astype(dtype), (PARAMS, X))
        check(net, *args)


def test_python_scalars_and_weak_types() -> None:
    for x in (2.0, np.float32(2.0), jnp.asarray(2.0), jnp.float32(2.0)):
        got, want = (
            value_and_grad(lambda x: x * x * x)(x),
            jax.value_and_grad(lambda x: x * x * x)(x),
        )
        cases.assert_equal(got, want)


def test_constant_and_forwarded_outputs() -> None:
    for fun in (lambda w, x: x[0, 0], lambda w, x: w[0, 0], lambda w, x: 1.0):
        cases.assert_equal(value_and_grad(fun)(W, X), jax.value_and_grad(fun)(W, X))
    check(lambda w, x: (jnp.sum(w), (w, x)), W, X, has_aux=True)


def test_aux_of_arrays() -> None:
    def loss(params: Any, x: jax.Array) -> Any:
        return net(params, x), {
            "h": x @ params[0],
            "count": jnp.arange(3),
            "key": jax.random.key(1),
            "none": None,
        }

    check(loss, PARAMS, X, has_aux=True)


def test_aux_of_anything() -> None:
    def loss(params: Any, x: jax.Array) -> Any:
        return net(params, x), {
            "name": "a",
            "none": None,
            "count": 3,
            "rate": 2.5,
            "flag": True,
            "fun": net,
            "x": x,
        }

    got, want = (
        f(loss, has_aux=True)(PARAMS, X)[0][1] for f in (value_and_grad, jax.value_and_grad)
    )
    assert got["fun"] is net
    for name in ("name", "none", "count", "rate", "flag"):
        assert got[name] == want[name] and type(got[name]) is type(want[name])


def test_aux_in_a_list() -> None:
    """JAX takes a list for a pair, too."""
    got, want = (f(lambda w: [jnp.sum(w**2), 3], has_aux=True)(W) for f in (jact.grad, jax.grad))
    cases.assert_equal(got[0], want[0])


def test_custom_pytrees() -> None:
    @jax.tree_util.register_pytree_node_class
    class Params:
        def __init__(self, w: Any):
            self.w = w

        def tree_flatten(self) -> Any:
            return (self.w,), None

        @classmethod
        def tree_unflatten(cls, _: None, leaves: Any) -> Any:
            return cls(*leaves)

    got, want = (
        f(lambda p: jnp.sum(jnp.tanh(X @ p.w)))(Params(W))
        for f in (value_and_grad, jax.value_and_grad)
    )
    assert type(got[1]) is Params
    cases.assert_matches(got, want, 0.01, exact=False)


def test_the_same_array_twice() -> None:
    check(lambda a, b: jnp.sum(jnp.tanh(X @ a) @ b) / cases.ROWS, W, W, argnums=(0, 1))


@pytest.mark.parametrize("where", ["arrays", "tracers", "numpy"])
def test_closures_save_as_much(where: str) -> None:
    """A loss that closes over its batch saves what one saves that takes it."""
    want = jact.make_plan(net, "int4")(PARAMS, X)
    assert len(want.bits) == 2
    batch = np.asarray(X) if where == "numpy" else X
    plans = []

    def step(params: Any, x: Any) -> Any:
        plans.append(jact.make_plan(lambda params: net(params, x), "int4")(params))
        return value_and_grad(lambda params: net(params, x))(params)

    got = (
        jax.jit(step)(PARAMS, X)
        if where == "tracers"
        else jax.jit(lambda p: step(p, batch))(PARAMS)
    )
    assert plans == [want]
    cases.assert_matches(got, jax.jit(jax.value_and_grad(net))(PARAMS, X), 0.01)


def test_closure_over_parameters() -> None:
    """What is closed over is kept by reference, whatever it is."""
    got = jax.jit(lambda w, v: value_and_grad(lambda w: net((w, v), X))(w))(W, V)
    cases.assert_matches(
        got, jax.jit(jax.value_and_grad(lambda w: net((w, V), X)))(W), 0.01, exact=False
    )


def test_donated_arguments() -> None:
    def step(grad: Any, params: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grad(net)(params, X))

    got = jax.jit(
        functools.partial(step, functools.partial(jact.grad, policy="int8")), donate_argnums=0
    )
    donated = jax.tree.map(jnp.copy, PARAMS)
    cases.assert_close(got(donated), step(jax.grad, PARAMS), 1e-3)
    assert all(a.is_deleted() for a in donated)


def test_shapes_without_arrays() -> None:
    """`jax.eval_shape` and ahead-of-time compilation."""
    shapes = jax.eval_shape(lambda: (PARAMS, X))
    cases.assert_same_types(
        jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(jact.grad(net), *shapes)
        ),
        PARAMS,
    )
    compiled = jax.jit(jact.grad(net, policy="int8")).lower(*shapes).compile()
    cases.assert_close(compiled(PARAMS, X), jax.grad(net)(PARAMS, X), 0.01)
    assert jact.make_plan(net, "int4")(*shapes) == jact.make_plan(net, "int4")(PARAMS, X)
