"""Policies: which codec stores which residual."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp

from jact import codecs
from jact.codecs import Codec
from jact.codecs.offload import on_device
from jact.spelling import must_be_one_of

#: What a rule may say besides a codec.
type Action = Codec | Literal["keep", "recompute"]

#: The codecs that name a policy, which stores every residual with that one; and "off", which leaves
#: the function alone. `jact.presets` has further policies.
PRESETS = (
    "off",
    *("int8", "int6", "int5", "int4", "int3", "int2", "int1", "avg4-int2"),
    *("bf16", "fp8", "fp8_e5m2"),
    *("offload", "offload-int4"),
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Says how the residuals that match it are stored.

    Attributes:
        name: a pattern (as in `fnmatch`) for the residual's name or for its last parts:
            `"Conv_1/*"` matches `Net/Block_3/Conv_1/conv_general_dilated`.
        codec: a codec, a preset's name, `"keep"` (save exactly) or `"recompute"` (run the operation
            again in the backward pass, however expensive it is).
        dtype: only residuals of this dtype; any when None.
        rank: only residuals of this number of axes; any when None.
        min_size: only residuals of at least this many elements.
        max_size: only residuals of at most this many elements; any when None.
        required: whether to warn where no residual matches.

    >>> import jact
    >>> rule = jact.Rule("attention/*", "int8", rank=4)
    >>> rule.matches("Model/attention/dot_general", (8, 16, 2, 32), "float32")
    True
    """

    name: str
    codec: Action | str
    dtype: Any = None
    rank: int | None = None
    min_size: int = 0
    max_size: int | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if self.codec not in ("keep", "recompute"):
            object.__setattr__(self, "codec", _resolve(self.codec, "codec", ("keep", "recompute")))
        if self.dtype is not None:
            try:
                object.__setattr__(self, "dtype", str(jnp.dtype(self.dtype)))
            except TypeError as error:
                raise ValueError(f"dtype must be a dtype, got {self.dtype!r}") from error
        if not (self.rank is None or isinstance(self.rank, int)):
            raise TypeError(f"rank must be a number of axes or None, got {self.rank!r}")
        if self.max_size is not None and self.max_size < self.min_size:
            raise ValueError(
                f"max_size must be at least min_size, got {self.max_size} and {self.min_size}"
            )

    def matches(self, name: str, shape: tuple[int, ...], dtype: Any) -> bool:
        """Whether a residual of this name, shape and dtype falls under the rule."""
        size = 1
        for n in shape:
            size *= n
        return (
            (self.dtype is None or self.dtype == str(dtype))
            and (self.rank is None or self.rank == len(shape))
            and self.min_size <= size
            and (self.max_size is None or size <= self.max_size)
            and (
                fnmatch.fnmatchcase(name, self.name) or fnmatch.fnmatchcase(name, "*/" + self.name)
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Ordered rules and a default: the first rule that matches a residual decides.

    Attributes:
        rules: the rules, most important first.
        default: the codec (or preset name, or `"keep"`) of residuals that no rule matches.
        min_bytes: residuals of fewer bytes are saved exactly. Under `jax.vmap` the bytes are those
            of one example, so lower it there. Small arrays cost little, and are often what the
            gradient is most sensitive to (biases, statistics, logits).
        derivatives: whether what the backward pass reads of a nonlinear function (the derivative of
            GELU, and its result where a product reads it) is saved itself, rather than made again
            from a decoded argument. What is saved enters the gradient linearly, so that rounding it
            at random leaves the gradient unbiased; but more is saved. None for where it pays: where
            the default codec has two bits or fewer, and half as many bytes again are enough.

    Raises:
        ValueError: for an unknown preset or a negative `min_bytes`.

    >>> import jact
    >>> policy = jact.Policy(rules=[jact.Rule("head/*", "keep")], default="int4")
    >>> policy.action("Model/head/dot_general", (128, 1000), "float32")
    'keep'
    >>> policy.action("Model/body/dot_general", (128, 1000), "float32").name
    'int4'
    """

    rules: tuple[Rule, ...] = ()
    default: Action | str = "int4"
    min_bytes: int = 16384
    derivatives: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Iterable):
            raise TypeError(f"rules must be a sequence of jact.Rule objects, got {self.rules!r}")
        rules = tuple(self.rules)
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"rules must be jact.Rule objects, got {rule!r}")
        object.__setattr__(self, "rules", rules)
        if self.default == "recompute":
            raise ValueError(
                'default must be a codec, a preset or "keep"; "recompute" is for rules'
            )
        if self.default != "keep":
            object.__setattr__(self, "default", _resolve(self.default, "default", ("keep",)))
        if not (self.derivatives is None or isinstance(self.derivatives, bool)):
            raise TypeError(f"derivatives must be a bool or None, got {self.derivatives!r}")
        if self.min_bytes < 0:
            raise ValueError(f"min_bytes must not be negative, got {self.min_bytes}")

    @property
    def derivative_choices(self) -> tuple[bool, ...]:
        """The values of `derivatives` to choose from: its own, or those that None stands for."""
        if self.derivatives is not None:
            return (self.derivatives,)
        codec = on_device(self.default)  # type: ignore[arg-type]
        return (False, True) if getattr(codec, "bits", 8) <= 2 else (False,)

    def action(self, name: str, shape: tuple[int, ...], dtype: Any) -> Action:
        """What the policy says of a residual: a codec, `"keep"` or `"recompute"`."""
        for rule in self.rules:
            if rule.matches(name, shape, dtype):
                return rule.codec  # type: ignore[return-value]
        return self.default  # type: ignore[return-value]

    def unused_rules(self, residuals: Iterable[tuple[str, tuple[int, ...], Any]]) -> list[Rule]:
        """The required rules that match none of the residuals, each a (name, shape, dtype)."""
        residuals = list(residuals)
        required = (rule for rule in self.rules if rule.required)
        return [rule for rule in required if not any(rule.matches(*r) for r in residuals)]

    def preempted_rules(
        self, residuals: Iterable[tuple[str, tuple[int, ...], Any]]
    ) -> list[tuple[Rule, list[Rule]]]:
        """The required rules that match residuals but decide none, with those that do decide."""
        residuals = list(residuals)
        result = []
        for i, rule in enumerate(self.rules):
            if not rule.required:
                continue
            matched = [r for r in residuals if rule.matches(*r)]
            # The first that matches decides; None where that is the rule itself.
            deciding = [
                next((e for e in self.rules[:i] if e.matches(*residual)), None)
                for residual in matched
            ]
            if matched and None not in deciding:
                result.append((rule, list(dict.fromkeys(filter(None, deciding)))))
        return result


def _resolve(codec: Any, argument: str, words: tuple[str, ...]) -> Codec:
    """The codec that a preset names; the message on any other name lists the words, too."""
    if isinstance(codec, str) and codec not in codecs.PRESETS:
        choices = dict.fromkeys((*codecs.PRESETS, *words))
        hint = '; to leave residuals as they are, say "keep"' if codec == "off" else None
        raise ValueError(f"{argument} {must_be_one_of(codec, choices, ', or a codec', hint)}")
    return codecs.resolve(codec)


def to_json(policy: Policy) -> dict[str, Any]:
    """A policy as JSON objects; `from_json` is its inverse."""

    def action(value: Any) -> Any:
        return value if isinstance(value, str) else codecs.to_json(value)

    rules = [dataclasses.asdict(r) | {"codec": action(r.codec)} for r in policy.rules]
    return {
        "rules": rules,
        "default": action(policy.default),
        "min_bytes": policy.min_bytes,
        "derivatives": policy.derivatives,
    }


def from_json(data: dict[str, Any]) -> Policy:
    """The policy that `to_json` wrote."""

    def action(value: Any) -> Any:
        return value if isinstance(value, str) else codecs.from_json(value)

    rules = tuple(Rule(**(r | {"codec": action(r["codec"])})) for r in data["rules"])
    return Policy(
        rules=rules,
        default=action(data["default"]),
        min_bytes=data["min_bytes"],
        derivatives=data.get("derivatives"),
    )
