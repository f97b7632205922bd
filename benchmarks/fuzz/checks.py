"""What must hold of every program, whatever it computes."""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

import jact
from benchmarks.fuzz.program import Program
from jact import codecs
from jact.codecs.base import dtype_of

FORWARD = 1e-5
"""Relative error allowed to the value; XLA may fuse two programs differently."""
KEPT = {"float32": 1e-4, "bfloat16": 0.03}
"""Relative error allowed to the gradient where everything is kept, by the least exact dtype: the
sums of a backward pass are in another order."""
NEAR = 100
"""How many times the 2**-16 of `Shortened` the gradient may err by, before this needs a reason."""
COARSE = 0.1
"""Relative error of the gradient at 8 bits that needs a reason."""


def jitted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit`, in which bfloat16 is rounded wherever the program says so.

    XLA otherwise leaves out some roundings between operations that it fuses, other ones in each of
    two programs, so that equal programs differ by a bit of bfloat16.
    """
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": False})


@dataclasses.dataclass(frozen=True)
class Shortened:
    """Float32 in three bytes, the last 8 bits of the fraction dropped.

    Nearly exact, so that what a gradient is wrong by under this codec is no rounding error: either
    the program amplifies errors a thousandfold, or jact is wrong.
    """

    @property
    def name(self) -> str:
        return "shortened"

    def supports(self, shape: tuple[int, ...], dtype: Any) -> bool:
        del shape
        return dtype_of(dtype).name == "float32"

    def encode(self, x: jax.Array, seed: Any) -> tuple[jax.Array, jax.Array]:
        del seed
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return (bits >> 16).astype(jnp.uint16), ((bits >> 8) & 0xFF).astype(jnp.uint8)

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del shape
        high, low = (part.astype(jnp.uint32) for part in code)
        # Half of what is dropped, so that the error has no preferred sign.
        bits = (high << 16) | (low << 8)
        # Not of zero, infinity and NaN.
        plain = (bits == 0) | (bits & 0x7F800000 == 0x7F800000)
        bits = jnp.where(plain, bits, bits | 0x80)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)

    def nbytes(self, shape: tuple[int, ...], dtype: Any) -> int:
        del dtype
        return 3 * math.prod(shape)

    def variance(self, x: jax.Array) -> jax.Array:
        return jnp.square(self.decode(self.encode(x, 0), x.shape, jnp.float32) - x)


codecs.register("shortened", Shortened)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has to say.

    Attributes:
        kind: Which check; shrinking looks for the same one.
        text: The figures.
        fault: Whether it is one of jact; else it is counted only.
    """

    kind: str
    text: str
    fault: bool = True


def check(program: Program) -> Finding | None:
    """Runs all checks on a program, and returns the first that fails."""
    arguments = program.arguments()
    plain = jitted(jax.value_and_grad(program.loss(), (0, 1)))
    try:
        value, gradient = jax.device_get(plain(*arguments))
    except Exception as error:  # JAX itself has no gradient of this, so there is none to compare.
        text = str(error).partition("\n")[0]
        return Finding("unusable", f"plain JAX raises {type(error).__name__}: {text}", fault=False)
    if not (np.isfinite(value) and 1e-6 < norm(gradient) < 1e6):
        return Finding("unusable", "the plain gradient is zero, huge or no number", fault=False)
    try:
        return first_finding(program, arguments, value, gradient)
    except Exception as error:  # Whatever it is, it is the fault that is looked for.
        return Finding(f"raises {type(error).__name__}", str(error).partition("\n")[0])


def first_finding(
    program: Program, arguments: Any, value: np.ndarray, gradient: Any
) -> Finding | None:
    """The checks themselves, the cheapest first."""
    kept_value, kept = jax.device_get(jitted(differentiated(program, "keep"))(*arguments))
    if abs(kept_value - value) > FORWARD * max(1.0, abs(value)):
        return Finding("forward", f"the value is {kept_value}, and {value} in plain JAX")
    for got, want in zip(jax.tree.leaves(kept), jax.tree.leaves(gradient), strict=True):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return Finding("types", f"{got.dtype}{got.shape} for {want.dtype}{want.shape}")
    half = "bfloat16" in program.source() or "bfloat16" in str(program.inputs)
    error = relative_error(kept, gradient)
    if error > KEPT["bfloat16" if half else "float32"]:
        return Finding("keep", f'the gradient under "keep" errs by {error:.1e}')
    twins = find_twins(program, arguments)
    if twins:
        return Finding("twin", twins)
    return rounding(program, arguments, value, gradient, half)


def rounding(
    program: Program, arguments: Any, value: np.ndarray, gradient: Any, half: bool
) -> Finding | None:
    """Whether 8 bits come near to the gradient, and as near as the program lets them."""
    coded_value, coded = jax.device_get(jitted(differentiated(program, "int8"))(*arguments))
    if abs(coded_value - value) > FORWARD * max(1.0, abs(value)):
        return Finding("forward", f"the value at 8 bits is {coded_value}, not {value}")
    coarse = relative_error(coded, gradient)
    if not np.isfinite(coarse):
        return Finding("int8", "the gradient at 8 bits is no number")
    if half:
        # Nothing is nearer to bfloat16 than itself, so there is nothing to compare 8 bits with.
        return Finding("int8", f"errs by {coarse:.1e}") if coarse > 1 else None
    near_gradient = jax.device_get(jitted(differentiated(program, Shortened()))(*arguments))[1]
    near = relative_error(near_gradient, gradient)
    if near > NEAR * 2**-16:
        text = f"the gradient at 24 bits errs by {near:.1e}, at 8 bits by {coarse:.1e}"
        return Finding("near", text)
    if coarse > COARSE:
        text = f"the gradient at 8 bits errs by {coarse:.1e}, at 24 bits by {near:.1e}"
        # Eight bits of a group's range are about 2**10 times coarser than 24 of an element.
        return Finding("int8", text, fault=coarse > 2**14 * max(near, 1e-6))
    return None


def differentiated(program: Program, policy: Any) -> Callable[..., Any]:
    """The program's value and gradient under a policy that encodes arrays of any size."""
    policy = jact.Policy(default=policy, min_bytes=0)
    if program.wrapped:
        loss = program.loss(lambda outputs: jact.compress(outputs, policy))
        return jax.value_and_grad(loss, (0, 1))
    return jact.value_and_grad(program.loss(), (0, 1), policy=policy)


def find_twins(program: Program, arguments: Any) -> str:
    """Says which full-size float arrays are saved beside their codes, if any.

    The backward pass's arrays are read from the traced program, and what jact's report says of
    them from the report: what is saved as it is has to be listed there.
    """
    policy = jact.Policy(default="int8", min_bytes=0)
    if program.wrapped:
        fun: Any = program.outputs()
        report = jact.report(jact.compress(fun, policy))(*arguments)
        fun = jact.compress(fun, policy)
    else:
        report = jact.report(program.loss(), policy, argnums=(0, 1))(*arguments)
        fun = jact.compress(program.loss(), policy, keep=(0, 1))
    if report.saved_bytes > report.plain_bytes:
        return f"{report.saved_bytes} bytes are saved, and {report.plain_bytes} in plain JAX"
    kept: collections.Counter[Any] = collections.Counter()
    coded = set()
    for row in report.rows:
        if row.codec == "keep":
            kept[row.shape, row.dtype] += 1
            continue
        coded.add((row.shape, row.dtype))
        # The code of a wider array, and as large as a bfloat16 array that is saved beside its own.
        if row.codec == "bf16":
            kept[row.shape, "bfloat16"] += 1
    for key in residuals(fun, arguments):
        if key in coded:
            kept[key] -= 1
    extra = [f"{dtype}{shape}" for (shape, dtype), left in kept.items() if left < 0]
    return f"saved as they are, beside codes: {', '.join(extra)}" if extra else ""


def residuals(fun: Callable[..., Any], arguments: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what `jax.vjp` keeps of a function, arguments and constants aside."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*arguments).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    saved = {v for v in jaxpr.outvars if isinstance(v, jex.Var) and v not in given}
    return [(tuple(v.aval.shape), v.aval.dtype.name) for v in saved]  # type: ignore[attr-defined]


def norm(tree: Any) -> float:
    """The norm of all arrays of a tree together."""
    return math.sqrt(sum(np.sum(np.square(np.asarray(a, float))) for a in jax.tree.leaves(tree)))


def relative_error(got: Any, want: Any) -> float:
    """The norm of the difference, relative to that of `want`, over all arrays of a tree."""
    difference = jax.tree.map(lambda a, b: np.asarray(a, float) - np.asarray(b, float), got, want)
    return norm(difference) / norm(want)
