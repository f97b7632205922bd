"""The public transformations: `compress`, `grad` and `value_and_grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from jact import doors, guidance
from jact.compressed_function import Compressed
from jact.engine.select import plan_of
from jact.engine.trace import keep_filter
from jact.plan import Plan, PolicyLike, resolve


@overload
def compress[**P, R](
    fun: Callable[P, R],
    policy: PolicyLike = "int4",
    *,
    keep: int | str | Sequence[int | str] = (0,),
    methods: Sequence[str] | None = None,
) -> Callable[P, R]: ...


@overload
def compress(
    *,
    policy: PolicyLike = "int4",
    keep: int | str | Sequence[int | str] = (0,),
    methods: Sequence[str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def compress(
    fun: Callable[..., Any] | None = None,
    policy: PolicyLike = "int4",
    *,
    keep: int | str | Sequence[int | str] = (0,),
    methods: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Makes a part of a model save its residuals compressed when it is differentiated.

    The result is called like `fun` and returns exactly what `fun` returns. When it is
    differentiated in reverse mode, by `jax.grad` or `jax.vjp`, its backward pass reads codes in the
    place of full activations. Arguments that are arrays (at any depth of a pytree) are traced; all
    others, such as Python numbers, strings and functions, are static, as they are for `fun` itself.

    Of Flax, it takes what `flax.linen.remat` and `flax.nnx.remat` take, and more: a Linen class, a
    `functools.partial` of one, or an instance; an NNX instance or class; a method, bound or not, or
    as a decorator; a function with modules among its arguments. Parameters, names, state and random
    numbers are those of the plain model. A module's variables are kept by reference.

    Args:
        fun: the function, method, class or module. Omitted, the result is a decorator.
        policy: how residuals are stored: a preset ("int8", "int4", "int2", "int1", "bf16", "fp8",
            "fp8_e5m2", "off"), a codec, a `jact.Policy`, a `jact.Plan` or a `jact.Controller`.
        keep: positions of positional arguments, or names of keyword arguments, that outlive the
            call (parameters) and are kept by reference, as is what `fun` closes over. The
            floating-point arrays in all other arguments are activations, and are encoded where the
            backward pass needs them. For a method, position 0 is the module.
        methods: which methods of a class or of an instance to compress; `__call__` when None.

    Returns:
        The function, with `fun` as its `__wrapped__`; it works as a method, too. For a class, a
        subclass of the same name; for an instance, one of that subclass, which of NNX shares all
        its state with the instance given.

    Raises:
        TypeError: when `fun` is none of these, or `policy` or `keep` is of the wrong type.
        ValueError: for an unknown preset.
        NotImplementedError: when differentiated at symbolic shapes (`jax.export.symbolic_shape`).

    References:
        Liu et al., GACT: Activation Compressed Training for Generic Network Architectures, ICML
        2022, section 3.

    >>> import jax, jax.numpy as jnp, jact
    >>> def layer(w, x):
    ...     return jax.nn.gelu(x @ w)
    >>> w, x = jnp.ones((64, 64)) / 64, jnp.ones((128, 64))
    >>> loss = lambda w: jact.compress(layer, "int8")(w, x).sum()
    >>> bool(jnp.allclose(jax.grad(loss)(w), jax.grad(lambda w: layer(w, x).sum())(w), rtol=1e-2))
    True
    """
    if fun is None:
        return functools.partial(compress, policy=policy, keep=keep, methods=methods)
    door = doors.of_target(fun)
    if door is not None:
        return door.compress(fun, resolve(policy), keep, methods)
    if isinstance(fun, type) or not callable(fun):
        raise TypeError(
            "fun must be callable: a function, a method, a Linen class (or a partial of one) or "
            f"instance, or an NNX class or instance; got {fun!r}. Of modules of another kind, "
            "compress a function or a method: jact.compress(lambda module, x: module(x))."
        )
    if methods is not None:
        raise ValueError(f"methods is for modules and their classes, got it with {fun!r}")
    method = doors.unbound(fun)
    if method is not None:
        module = fun.__self__  # type: ignore[attr-defined]
        return Compressed(method, resolve(policy), keep_filter(method, keep)).__get__(module)
    return Compressed(fun, resolve(policy), keep_filter(fun, keep))


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    policy: PolicyLike = "int4",
) -> Callable[..., Any]:
    """`jax.value_and_grad` with compressed residuals.

    The value is exact. The gradient is computed from the codes of the activations, and has the
    structure, shapes and dtypes of the plain gradient. Every argument outlives the call, so
    arguments are never encoded. The gradient can be differentiated again; second derivatives are
    those of the plain function, exactly.

    Args:
        fun: the function to differentiate; returns a scalar, or a pair of a scalar and auxiliary
            data.
        argnums: which positional arguments to differentiate with respect to.
        has_aux: whether `fun` returns auxiliary data as well.
        holomorphic: as in `jax.value_and_grad`.
        allow_int: as in `jax.value_and_grad`.
        reduce_axes: as in `jax.value_and_grad`.
        policy: how residuals are stored; see `jact.compress`.

    Returns:
        A function with the arguments of `fun`, returning `(value, gradient)`, or `((value, aux),
        gradient)`.

    Raises:
        TypeError: as `jax.value_and_grad` does, and for a policy of the wrong type.
        ValueError: for an unknown preset.
        NotImplementedError: when called at symbolic shapes (`jax.export.symbolic_shape`).

    References:
        Chakrabarti and Moseley, Backprop with Approximate Activations for Memory-efficient Network
        Training, NeurIPS 2019, section 3.

    >>> import jax.numpy as jnp, jact
    >>> def loss(w, x, y):
    ...     return jnp.mean((jnp.tanh(x @ w).sum(-1) - y) ** 2)
    >>> w, x, y = jnp.ones((32, 4)), jnp.ones((256, 32)), jnp.ones(256)
    >>> value, gradient = jact.value_and_grad(loss, policy="int8")(w, x, y)
    >>> value, gradient.shape
    (Array(9., dtype=float32), (32, 4))
    """
    function = _differentiated(fun, argnums, has_aux, policy)
    options = _options(argnums, has_aux, holomorphic, allow_int, reduce_axes)
    return guidance.on_modules(jax.value_and_grad(function, **options), argnums, allow_int)


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    policy: PolicyLike = "int4",
) -> Callable[..., Any]:
    """`jax.grad` with compressed residuals; see `jact.value_and_grad`.

    >>> import jax.numpy as jnp, jact
    >>> jact.grad(lambda x: jnp.sum(x**2))(jnp.arange(3.0))
    Array([0., 2., 4.], dtype=float32)
    """
    function = _differentiated(fun, argnums, has_aux, policy)
    options = _options(argnums, has_aux, holomorphic, allow_int, reduce_axes)
    return guidance.on_modules(jax.grad(function, **options), argnums, allow_int)


def make_plan(
    fun: Callable[..., Any],
    policy: PolicyLike = "int4",
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Plan]:
    """Makes the plan that a policy amounts to for a function, without running the function.

    Args:
        fun: a function to differentiate, or the result of `jact.compress`, or of jact's `grad` or
            `value_and_grad`, those of `jact.nnx` too, which bring their own policy and arguments to
            differentiate. Of an NNX module, the parameters are differentiated.
        policy: how residuals are stored; see `jact.compress`.
        argnums: as in `jact.value_and_grad`.
        has_aux: as in `jact.value_and_grad`.

    Returns:
        A function with the arguments of `fun`, which may be arrays or `jax.ShapeDtypeStruct`s, that
        returns the plan.

    Raises:
        ValueError: when the policy is "off".

    >>> import jax, jax.numpy as jnp, jact
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> x = jax.ShapeDtypeStruct((256, 64), "float32")
    >>> jact.make_plan(loss, "int4")(jax.ShapeDtypeStruct((64, 64), "float32"), x).bits
    {'dot_general': 'int4'}
    """
    function = as_compressed(fun, policy, argnums, has_aux)

    def planner(*args: Any, **kwargs: Any) -> Plan:
        return plan_of(function.prepare(args, kwargs).selection, function.basis)

    return planner


def as_compressed(
    fun: Callable[..., Any], policy: PolicyLike, argnums: int | Sequence[int], has_aux: bool
) -> Compressed:
    """The `Compressed` inside a function that jact made, or one for differentiating `fun`."""
    method = vars(type(fun)).get("__call__")
    inner: Any = method.__get__(fun) if isinstance(method, Compressed) else fun
    while inner is not None and not isinstance(inner, Compressed):
        inner = getattr(inner, "__wrapped__", None)
    if inner is not None:
        return inner
    function = _differentiated(fun, argnums, has_aux, policy)
    function.any_library = True
    return function


def _differentiated(
    fun: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, policy: PolicyLike
) -> Compressed:
    """The function to hand to JAX's own differentiation, which checks its other arguments."""
    if not callable(fun):
        raise TypeError(f"fun must be callable, got {fun!r}")
    if isinstance(argnums, str):
        raise TypeError(
            f"argnums must be an integer or a sequence of integers, got {argnums!r}; "
            f"to choose a policy, say policy={argnums!r}"
        )
    return Compressed(
        fun, resolve(policy), lambda where: True, has_aux, guidance.positions(argnums)
    )


def _options(
    argnums: int | Sequence[int],
    has_aux: bool,
    holomorphic: bool,
    allow_int: bool,
    reduce_axes: Sequence[Any],
) -> dict[str, Any]:
    """The options of JAX's own differentiation; one that JAX is about to drop only when used."""
    options = {
        "argnums": argnums,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
    }
    return options | ({"reduce_axes": tuple(reduce_axes)} if reduce_axes else {})
