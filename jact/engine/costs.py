"""What an operation costs to run again, as data: the one place that says what is expensive.

The backward pass runs cheap operations again rather than saving their results. It never runs a
*expensive* one again, unless the policy says so.
"""

from __future__ import annotations

import math

from jax.extend import core as jex

from jact import compat
from jact.engine.program import Equation

#: Matrix factorisations. Their factors are saved exactly: backward passes multiply by inverses of
#: them, and of triangular ones the small elements beside large ones count.
FACTORISATIONS = {
    "cholesky",
    "eig",
    "eigh",
    "hessenberg",
    "householder_product",
    "lu",
    "qr",
    "schur",
    "svd",
    "tridiagonal",
}

#: Operations that are never run again: products, convolutions, solvers, sorts, loops, foreign calls
#: and communication.
EXPENSIVE = FACTORISATIONS | {
    "dot_general",
    "ragged_dot",
    "ragged_dot_general",
    "scaled_dot",
    "conv_general_dilated",
    "custom_call",
    "ffi_call",
    "pallas_call",
    "mosaic_gpu",
    "tpu_custom_call",
    "triton_kernel_call",
    "scan",
    "while",
    "cond",
    "sort",
    "top_k",
    "approx_top_k",
    "fft",
    "tridiagonal_solve",
    "triangular_solve",
    "scatter",
    "scatter-add",
    "scatter_add",
    "scatter_mul",
    "scatter_min",
    "scatter_max",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "cumlogsumexp",
    "pure_callback",
    "io_callback",
    "debug_callback",
    "custom_partitioning",
    "rng_uniform",
    "random_gamma",
    "shard_map",
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "ppermute",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "ragged_all_to_all",
    "reduce_scatter",
}

#: Operations that grow without bound near some argument: the result of one is never made from a
#: decoded argument.
SINGULAR = {
    "log",
    "log1p",
    "rsqrt",
    "sqrt",
    "cbrt",
    "pow",
    "tan",
    "asin",
    "acos",
    "atanh",
    "acosh",
    "erf_inv",
    "lgamma",
    "digamma",
    "polygamma",
}

#: Those of them that are singular at zero, and smooth beyond.
SINGULAR_AT_ZERO = {"log", "rsqrt", "sqrt", "cbrt", "pow", "div", "integer_pow"}

#: Operations that come close to a constant for large arguments: what is left to it, which a
#: singular function may read, is far smaller than the error of a code of the result.
SATURATING = {"erf", "erfc", "exp", "exp2", "expm1", "logistic", "tanh"}

#: Operations whose result jumps, though it is a float: it is never made from a decoded argument.
STEPS = {"ceil", "floor", "nextafter", "rem", "round", "sign"}

#: Operations that add two values of the same size: where two streams meet, the sum is saved, not
#: its parts.
JOINS = {"add", "add_any", "sub"}

#: Operations that put a result together of pieces.
ASSEMBLING = {"concatenate", "pad", "dynamic_update_slice", "select_n"}

#: Operations that move elements. A broadcast is one where it adds an axis of one element.
ARRANGING = {"broadcast_in_dim", "reshape", "rev", "squeeze", "transpose"}

#: Operations on one element at a time.
ELEMENTWISE = {
    "abs",
    "add",
    "add_any",
    "asinh",
    "atan",
    "convert_element_type",
    "copy",
    "cos",
    "cosh",
    "div",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "integer_pow",
    "log",
    "log1p",
    "logistic",
    "max",
    "min",
    "mul",
    "name",
    "neg",
    "pow",
    "rsqrt",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "sub",
    "tan",
    "tanh",
}

#: The same, with truth values among operands or results.
COMPARING = {"and", "eq", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "select_n"}

#: Operations that are linear in all their operands together.
LINEAR = {
    "add",
    "add_any",
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "copy_p",
    "cumsum",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "gather",
    "imag",
    "name",
    "neg",
    "optimization_barrier",
    "pad",
    "real",
    "reduce_sum",
    "reshape",
    "rev",
    "select_n",
    "sharding_constraint",
    "slice",
    "squeeze",
    "sub",
    "transpose",
}

#: Operations that are linear between some borders.
PIECEWISE_LINEAR = {"abs", "clamp", "max", "min", "select_n"}

#: Operations that are linear in each operand by itself.
MULTILINEAR = {"mul", "dot_general", "conv_general_dilated"}

#: A reduction to less than this fraction of its operand makes a statistic (a mean, a variance),
#: which is saved exactly.
STATISTIC_FRACTION = 1 / 16


def is_expensive(eqn: Equation) -> bool:
    """Whether an equation, or one inside of it, is too expensive to run again."""
    return bool(eqn.effects) or eqn.primitive.name in EXPENSIVE or _holds_expensive(eqn)


def is_cheap_branch(eqn: Equation) -> bool:
    """Whether an equation is a `cond` of cheap branches, such as a codec's choice of rounding."""
    return eqn.primitive.name == "cond" and not eqn.effects and not _holds_expensive(eqn)


def _holds_expensive(eqn: Equation) -> bool:
    return any(
        is_expensive(inner)
        for jaxpr in jex.jaxprs_in_params(eqn.params)
        for inner in compat.equations(jaxpr)
    )


def is_batched_product(eqn: Equation) -> bool:
    """Whether an equation is a product with batch dimensions, such as attention scores."""
    return eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0])


def singular_operand(eqn: Equation, inexact: set[jex.Var]) -> jex.Var | None:
    """Which of its `inexact` operands an equation has a singularity in; None where it has none.

    Args:
        eqn: the equation.
        inexact: the variables that would be made from decoded values.
    """
    name = eqn.primitive.name
    singular = name in SINGULAR or name == "div"
    if not singular and not (name == "integer_pow" and eqn.params["y"] < 0):
        return None
    operand = eqn.invars[1 if name == "div" else 0]
    return operand if compat.is_var(operand) and operand in inexact else None


def is_linear(eqn: Equation, inexact: set[jex.Var]) -> bool:
    """Whether an equation is linear in its `inexact` operands."""
    if eqn.primitive.name in LINEAR:
        return True
    operands = [a for a in eqn.invars if compat.is_var(a) and a in inexact]
    if eqn.primitive.name == "div":
        return operands == eqn.invars[:1]
    return eqn.primitive.name in MULTILINEAR and len(operands) == 1


def is_piecewise_linear(eqn: Equation) -> bool:
    """Whether an equation, or all inside of it, is linear between some borders, as ReLU is."""
    if inner := list(jex.jaxprs_in_params(eqn.params)):
        return all(is_piecewise_linear(e) for jaxpr in inner for e in compat.equations(jaxpr))
    return eqn.primitive.name in PIECEWISE_LINEAR | LINEAR | COMPARING


def is_statistic(eqn: Equation) -> bool:
    """Whether an equation reduces an array to a much smaller one, as a mean does."""
    if not eqn.primitive.name.startswith(("reduce_", "argm")):
        return False
    largest = max((math.prod(a.aval.shape) for a in eqn.invars), default=0)
    return math.prod(eqn.outvars[0].aval.shape) <= largest * STATISTIC_FRACTION


def sums_over_batch(eqn: Equation) -> bool:
    """Whether an equation sums over the leading axis and not the last, as BatchNorm does."""
    if eqn.primitive.name != "reduce_sum":
        return False
    axes, ndim = eqn.params["axes"], eqn.invars[0].aval.ndim
    return 0 in axes and ndim - 1 not in axes
