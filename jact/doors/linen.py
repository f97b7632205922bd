"""The Linen door: modules, their methods and functions of modules, by Flax's own lifting.

A lifted function sees the variables and random streams of its modules as arguments, and what it
writes to them as results. So all of a module's state comes out as in the plain model, and its
variables are inputs that jact keeps by reference, whatever collection they are in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import lift

from jact import compat
from jact.compressed_function import Compressed
from jact.engine.trace import function_name, keep_filter
from jact.plan import Resolved

type Keep = int | str | Sequence[int | str]
type IsKept = Callable[[int | str], bool]

#: The attribute of a compressed class that has the plain class, and each method's policy.
_CHOSEN = "_jact_chosen"

#: The name under which a lifted function takes variables and random streams.
_STATE = "variables and random streams"


def is_target(target: Any) -> bool:
    """Whether `target` is a Linen class, a partial of one, or an instance."""
    if isinstance(target, functools.partial):
        target = target.func
    return isinstance(target, nn.Module) or (
        isinstance(target, type) and issubclass(target, nn.Module)
    )


def compress(
    target: Any, policy: Resolved | None, keep: Keep, methods: Sequence[str] | None
) -> Any:
    """Compresses a Linen class, a partial of one, or an instance; see `jact.compress`."""
    if isinstance(target, nn.Module):
        return _instance(target, policy, keep, methods)
    if isinstance(target, functools.partial):
        cls = compress(target.func, policy, keep, methods)
        return functools.partial(cls, *target.args, **target.keywords)
    if policy is None:
        return target
    # Of a class that is compressed already, methods take the new policy instead of the old one.
    plain, chosen = vars(target).get(_CHOSEN, (target, ()))
    new = dict.fromkeys(methods or ("__call__",), (policy, _hashable(keep)))
    # A class of its own for every call of `nn.compact` would be slow, and never equal to itself.
    return _class(plain, tuple((dict(chosen) | new).items()))


def takes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module that is bound to variables is an argument."""
    return any(_is_bound(x) for x in (*args, *kwargs.values()))


def call(function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a compressed function of a bound module and other arguments."""
    fun = function.__wrapped__
    if args and _is_bound(args[0]):
        return method(function, type(args[0]))(*args, **kwargs)
    # Flax lifts functions whose first argument is the module.
    module = next(x for x in (*args, *kwargs.values()) if _is_bound(x))

    @functools.wraps(fun)
    def module_first(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    def is_kept(where: int | str) -> bool:
        return function.is_kept(where - 1 if isinstance(where, int) else where)

    lifted = nn.transforms.lift_transform(_lift, module_first, function.policy, is_kept, fun)
    return lifted(module, *args, **kwargs)


def prepare(
    function: Compressed, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: bool
) -> Any:
    """Analysing a function of a bound module is not possible: it lives within a call of `apply`."""
    raise TypeError(
        f"{function_name(function)} was given a module that is bound to variables, which exists "
        "within a call of `apply` alone: analyse a function that calls `apply`"
    )


def is_method(method: Any) -> bool:
    """Whether a bound method is a user's, of a module, rather than `apply`, `init` and the like."""
    module = method.__self__
    own = getattr(nn.Module, method.__name__, None)
    return isinstance(module, nn.Module) and method.__func__ is not own


def method(function: Compressed, owner: type) -> Callable[..., Any]:
    """The method that a compressed function is in a class of modules."""
    del owner
    fun = function.__wrapped__
    if hasattr(function, "compact") and not hasattr(fun, "compact"):
        fun = nn.compact(fun)  # `nn.compact` was written above `jact.compress`.
    return nn.transforms.lift_transform(_lift, fun, function.policy, function.is_kept, fun)


def _lift(
    fun: Callable[..., Any],
    policy: Resolved | None,
    is_kept: IsKept,
    target: Callable[..., Any],
) -> Callable[..., Any]:
    """Lifts a function of scopes and other arguments, as `flax.core.lift.checkpoint` does.

    Args:
        fun: the function.
        policy: how its residuals are stored.
        is_kept: whether an argument is kept by reference.
        target: the user's own function that it stands for, for messages.
    """

    def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        # Initialising differentiates nothing; and `nn.RNN` wants the parameters that a scanned cell
        # makes to depend on nothing that is scanned.
        initialising = any(s.get_flag("initializing", False) for s in jax.tree.leaves(scopes))
        inner = functools.partial(run, initialising or policy is None)
        pack = lift.pack(inner, (True,), (True,), (True,), name="compress", enable_kwargs=True)
        return pack(scopes, *args, **kwargs)

    def run(
        plain: bool,
        scope_fn: Any,
        repack_fn: Any,
        variables: Any,
        rngs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Outside of any trace there is nothing to differentiate, either.
        if plain or not compat.any_tracer((variables, rngs, args, kwargs)):
            scopes = scope_fn(variables, rngs)
            return fun(scopes, *args, **kwargs), repack_fn(scopes)

        # The place of the module stays empty, so that the other arguments keep theirs.
        @functools.wraps(target)
        def pure(_: None, /, *args: Any, **kwargs: Any) -> Any:
            scopes = scope_fn(*kwargs.pop(_STATE))
            return fun(scopes, *args, **kwargs), repack_fn(scopes)

        assert policy is not None
        function = Compressed(pure, policy, lambda where: where == _STATE or is_kept(where))
        return function.run((None, *args), kwargs | {_STATE: (variables, rngs)})

    return lifted


@functools.lru_cache(maxsize=256)
def _class(
    cls: type[nn.Module], methods: tuple[tuple[str, tuple[Resolved, Any]], ...]
) -> type[nn.Module]:
    options = {}
    for name, (policy, keep) in methods:
        if not any(callable(vars(base).get(name)) for base in cls.__mro__):
            raise TypeError(
                f"{cls.__name__} has no method {name!r} to compress; name those to compress: "
                f"jact.compress({cls.__name__}, methods=[...])"
            )
        fun = getattr(cls, name)
        options[name] = {"policy": policy, "is_kept": keep_filter(fun, keep), "target": fun}
    lifted: Any = nn.transforms.lift_transform(_lift, cls, methods=options)
    # Flax names modules after their class, and draws their parameters by that name.
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(lifted, attribute, getattr(cls, attribute))
    setattr(lifted, _CHOSEN, (cls, methods))
    return lifted


def _instance(
    module: nn.Module, policy: Resolved | None, keep: Keep, methods: Sequence[str] | None
) -> Any:
    if policy is None:
        return module
    if not _is_bound(module):
        fields = {f.name for f in dataclasses.fields(module) if f.init} - {"parent"}
        cls = compress(type(module), policy, keep, methods)
        return cls(parent=module.parent, **{name: getattr(module, name) for name in fields})
    # It has its place and its name in the module that made it, and must keep them.
    if methods is not None:
        raise ValueError(
            f"methods cannot be chosen for {type(module).__name__}, which is part of a module "
            "already: compress its class, or the method: jact.compress(module.method)"
        )
    fun = type(module).__call__
    return Compressed(fun, policy, keep_filter(fun, keep)).__get__(module)


def _is_bound(x: Any) -> bool:
    return isinstance(x, nn.Module) and x.scope is not None


def _hashable(keep: Keep) -> Any:
    return keep if isinstance(keep, int | str) else tuple(keep)
