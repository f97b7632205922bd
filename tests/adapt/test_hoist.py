"""Figures come out of whatever the step is made of, and only what they need is run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jact.adapt import hoist

P = jax.sharding.PartitionSpec
W = jnp.ones(4)
XS = jnp.arange(24.0).reshape(6, 4)


@jax.custom_vjp
def tap(y, x):
    return y


def tap_backward(x, ct):
    (ct,) = hoist.emit([ct], "tap", {"sum": jnp.sum(x), "count": jnp.ones(())})
    return ct, jnp.zeros_like(x)


tap.defvjp(lambda y, x: (y, x), tap_backward)


def plain_loss(w, x):
    return jnp.sum(jnp.tanh(x * jnp.broadcast_to(w, x.shape)))


def loss(w, x):
    return tap(plain_loss(w, x), x)


@jax.custom_vjp
def flag_tap(y, x):
    return y


def flag_tap_backward(x, ct):
    total = lax.cond(hoist.flag(), jnp.sum, lambda x: jnp.zeros_like(jnp.sum(x)), x)
    (ct,) = hoist.emit([ct], "flagged", {"sum": total, "count": jnp.ones(())})
    return ct, jnp.zeros_like(x)


flag_tap.defvjp(lambda y, x: (y, x), flag_tap_backward)


def flagged(w, x):
    return flag_tap(plain_loss(w, x), x)


def figures(fun, *args):
    def run(*args):
        closed = jax.make_jaxpr(fun)(*args)
        return hoist.collect(closed, jax.tree.leaves(args)), hoist.count(closed)

    found = {}

    def collected(*args):
        values, found["count"] = run(*args)
        return values

    values = jax.jit(collected)(*args)
    return {k: float(v) for k, v in values["tap"].items()}, found["count"]["tap"]


def in_scan(w, xs, loss=loss):
    def body(total, x):
        return total + jax.grad(loss)(w, x), None

    return lax.scan(body, jnp.zeros(4), xs)[0]


def in_while(w, xs, count, loss=loss):
    return lax.fori_loop(0, count, lambda i, g: g + jax.grad(loss)(w, xs[i]), jnp.zeros(4))


def in_cond(w, xs, chosen, loss=loss):
    return lax.cond(chosen, lambda: jax.grad(loss)(w, xs[1]), lambda: jnp.zeros(4))


def in_jit(w, xs, loss=loss):
    return jax.jit(jax.jit(jax.grad(loss)))(w, xs[1])


def in_checkpoint(w, xs, loss=loss):
    return jax.grad(lambda w: jax.checkpoint(loss)(w, xs))(w)


def in_vmap(w, xs, loss=loss):
    return jax.vmap(jax.grad(loss), (None, 0))(w, xs)


def in_scan_of_cond(w, xs):
    def body(total, x):
        step = lax.cond(x[0] > 8, lambda: jax.grad(loss)(w, x), lambda: jnp.zeros(4))
        return total + step, None

    return lax.scan(body, jnp.zeros(4), xs)[0]


def in_custom_jvp(w, xs):
    @jax.custom_jvp
    def gradient(w):
        return jax.grad(loss)(w, xs[1])

    gradient.defjvp(lambda p, t: (gradient(*p), t[0]))
    return gradient(w)


@pytest.mark.parametrize(
    ("fun", "more", "total", "count"),
    [
        (lambda w, xs: jax.grad(loss)(w, xs[1]), (), 22, 1),
        (in_scan, (), 276, 6),
        (in_while, (3,), 66, 3),
        (in_cond, (True,), 22, 1),
        (in_cond, (False,), 0, 0),
        (in_jit, (), 22, 1),
        (in_checkpoint, (), 276, 1),
        (in_vmap, (), 276, 6),
        (in_scan_of_cond, (), sum(range(12, 24)), 3),
        (in_custom_jvp, (), 22, 1),
    ],
)
def test_found_and_added_up(fun, more, total, count):
    found, marks = figures(fun, W, XS, *more)
    assert found == {"sum": total, "count": count}
    assert marks == 1


def in_shard_map(w, xs, check_vma, loss=loss):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_each(w, xs):
        return lax.pmean(jax.grad(loss)(lax.pcast(w, "d", to="varying"), xs), "d")

    mapped = jax.shard_map(
        on_each, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check_vma
    )
    return mapped(w, xs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_found_in_shard_map(check_vma):
    xs = jnp.arange(32.0).reshape(8, 4)
    found, _ = figures(lambda w, xs: in_shard_map(w, xs, check_vma), W, xs)
    assert found == {"sum": 496, "count": 4}


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, xs: jax.grad(flagged)(w, xs[1]),
        lambda w, xs: in_scan(w, xs, flagged),
        lambda w, xs: in_while(w, xs, 3, flagged),
        lambda w, xs: in_cond(w, xs, True, flagged),
        lambda w, xs: in_jit(w, xs, flagged),
        lambda w, xs: in_checkpoint(w, xs, flagged),
        lambda w, xs: in_vmap(w, xs, flagged),
        lambda w, xs: in_shard_map(w, xs, True, flagged),
        lambda w, xs: in_shard_map(w, xs, False, flagged),
    ],
)
def test_a_flag_reaches_every_part(fun):
    @jax.jit
    def collected(flag, w, xs):
        return hoist.collect(jax.make_jaxpr(fun)(w, xs), [w, xs], flag)["flagged"]

    xs = jnp.arange(32.0).reshape(8, 4)
    found = collected(True, W, xs)
    assert found["sum"] > 0 and found["count"] > 0
    assert collected(False, W, xs) == {"sum": 0, "count": found["count"]}


def test_a_flag_is_true_where_nothing_is_collected():
    def step(w, x):
        return lax.cond(hoist.flag(), lambda: jnp.sum(w * x), lambda: jnp.zeros(()))

    assert step(W, XS[0]) == jax.jit(step)(W, XS[0]) == 6


def test_marks_change_no_values():
    np.testing.assert_array_equal(jax.grad(loss)(W, XS), jax.grad(plain_loss)(W, XS))
    plain = jax.jit(jax.grad(plain_loss))(W, XS)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(W, XS), plain)
    _, tangent = jax.jvp(lambda w: jax.grad(loss)(w, XS), (W,), (W,))
    _, expected = jax.jvp(lambda w: jax.grad(plain_loss)(w, XS), (W,), (W,))
    np.testing.assert_allclose(tangent, expected)


def test_what_figures_do_not_need_is_not_run():
    called = []

    def step(w, x):
        g = jax.grad(loss)(w, x)
        jax.debug.callback(lambda _: called.append("debug"), g)
        jax.experimental.io_callback(lambda _: called.append("io"), None, g)
        return lax.scan(lambda c, _: (jnp.sin(c @ c.T) @ c, None), jnp.outer(g, g), None, 3)

    def run(w, x):
        return hoist.collect(jax.make_jaxpr(step)(w, x), [w, x])

    jaxpr = str(jax.make_jaxpr(run)(W, XS[0]))
    assert "scan" not in jaxpr and "callback" not in jaxpr
    jax.block_until_ready(jax.jit(run)(W, XS[0]))
    assert not called


def test_references_are_refused():
    def step(ref, w):
        ref[...] = jax.grad(loss)(w, w)

    ref = jax.new_ref(W)
    with pytest.raises(NotImplementedError, match="mutable references"):
        hoist.collect(jax.make_jaxpr(step)(ref, W), [ref, W])


def test_references_made_inside_are_followed():
    def step(w, xs):
        ref = jax.new_ref(jnp.zeros(4))
        ref[...] = xs[2]
        return jax.grad(loss)(w, ref[...])

    assert figures(step, W, XS)[0] == {"sum": 38, "count": 1}


def test_an_operation_that_cannot_be_entered_is_named():
    @jax.custom_batching.custom_vmap
    def gradient(w):
        return jax.grad(loss)(w, w)

    gradient.def_vmap(lambda size, batched, w: (gradient(w[0]), False))
    closed = jax.make_jaxpr(gradient)(W)
    with pytest.raises(NotImplementedError, match="custom_vmap_call"):
        hoist.collect(closed, [W])
