"""Functions that random programs call: custom derivatives, and the projection to a scalar."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.custom_vjp
def clipped_gradient(x: jax.Array) -> jax.Array:
    """The identity, whose gradient is clipped; the rule saves nothing."""
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


@jax.custom_vjp
def gated(x: jax.Array, y: jax.Array) -> jax.Array:
    """`tanh(x) * sigmoid(y)`, whose rule saves three arrays, one of them its own result."""
    return jnp.tanh(x) * jax.nn.sigmoid(y)


def _gated_forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    value, gate = jnp.tanh(x), jax.nn.sigmoid(y)
    return value * gate, (value, gate, value * gate)


def _gated_backward(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, gate, result = saved
    one = jnp.ones((), value.dtype)
    return g * gate * (one - value * value), g * result * (one - gate)


gated.defvjp(_gated_forward, _gated_backward)


@jax.custom_vjp
def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product over the last axis, whose rule saves both arguments, as a kernel's would."""
    return jnp.einsum("...d,de->...e", x, w)


def _dense_backward(
    saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return jnp.einsum("...e,de->...d", g, w), jnp.einsum("...d,...e->de", x, g)


dense.defvjp(lambda x, w: (dense(x, w), (x, w)), _dense_backward)


@jax.custom_jvp
def soft_absolute(x: jax.Array) -> jax.Array:
    """`sqrt(x**2 + 0.1)`, with a derivative that is written by hand."""
    return jnp.sqrt(x * x + jnp.asarray(0.1, x.dtype))


@soft_absolute.defjvp
def _soft_absolute_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple:
    (x,), (t,) = primals, tangents
    y = soft_absolute(x)
    return y, t * x / y


def straight_through(x: jax.Array) -> jax.Array:
    """Rounds to quarters; the gradient passes as if it did not."""
    quarters = jnp.round(x * 4) / 4
    return x + lax.stop_gradient(quarters - x)


def counted(x: jax.Array) -> jax.Array:
    """Divides by what a `while` loop finds, which no derivative passes through."""
    largest = lax.stop_gradient(jnp.max(jnp.abs(x))).astype(jnp.float32)
    power = lax.while_loop(lambda p: p < largest, lambda p: p * 2, jnp.float32(1))
    return x / power.astype(x.dtype)


def masked(x: jax.Array) -> jax.Array:
    """An infinity in the place of every third element of the last axis."""
    return jnp.where(jnp.arange(x.shape[-1]) % 3 > 0, x, jnp.asarray(-jnp.inf, x.dtype))


def running_maximum(highest: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step of a loop that begins with no maximum at all, as in flash attention."""
    new = jnp.maximum(highest, x)
    return new, jnp.exp(x - new) + jnp.exp(highest - new)


def inverse(x: jax.Array) -> jax.Array:
    """Of a positive matrix, one row for each element of the first axis."""
    rows = jnp.tanh(x.reshape(len(x), -1).astype(jnp.float32))
    return jnp.linalg.inv(jnp.eye(len(x)) + rows @ rows.T / rows.shape[1]).astype(x.dtype)


def max_pool(x: jax.Array) -> jax.Array:
    """The greatest of each window of 2 x 2 of `[batch, height, width, channels]`."""
    # A NumPy scalar: JAX has a derivative only where it sees what the initial value is.
    lowest = np.asarray(-np.inf, x.dtype)
    return lax.reduce_window(x, lowest, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mean_pool(x: jax.Array) -> jax.Array:
    """The mean of each window of 2 x 2, windows overlapping."""
    zero = np.zeros((), x.dtype)
    return lax.reduce_window(x, zero, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME") / 4


def convolve(x: jax.Array, w: jax.Array, stride: int, padding: str) -> jax.Array:
    """Convolves `[batch, ..., channels]` with `[..., channels, features]`."""
    numbers = ("NWC", "WIO", "NWC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x,
        w,
        (stride,) * (x.ndim - 2),
        padding,
        dimension_numbers=numbers,
    )


def project(x: jax.Array) -> jax.Array:
    """A scalar that every element has another weight in, about as large as one element."""
    weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return jnp.sum(x.astype(jnp.float32) * weights) / max(x.size, 1) ** 0.5
