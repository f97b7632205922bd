"""Plans: the frozen result of applying a policy to a function."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jact import codecs, policy, presets
from jact.codecs import Codec
from jact.policy import Policy
from jact.spelling import did_you_mean, must_be_one_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which residuals of a function are saved, and how each is stored.

    Plans are hashable, equal when they say the same, and can take the place of a policy. A plan
    made for one batch serves for any other. What is smaller there than the basis' `min_bytes` is
    saved exactly; what was smaller in the batch that the plan was made for, or was not worth saving
    there, is stored as the basis says.

    Attributes:
        entries: pairs of a residual's name and its codec, in the order in which the forward pass
            makes them.
        basis: the policy that chose *which* values are saved. Replacing an entry's codec does not
            change that choice.
        operations: names of all expensive operations (products, convolutions, loops) of the
            function that the plan was made for. By these it is told from others where it saves what
            the plan has no entry for. None where they are unknown, as for a plan made by hand,
            which has to have an entry for all that is encoded. Plans that differ in this alone are
            equal.

    >>> import jact, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
    >>> plan = jact.make_plan(loss, "int4")(jnp.ones((64, 64)), jnp.ones((256, 64)))
    >>> plan.bits
    {'dot_general': 'int4'}
    >>> jact.Plan.from_json(plan.to_json()) == plan
    True
    """

    entries: tuple[tuple[str, Codec], ...]
    basis: Policy
    operations: tuple[str, ...] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.entries]
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise ValueError(f"entries name residuals more than once: {', '.join(repeated)}")

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codec of each residual, by name."""
        return dict(self.entries)

    @property
    def bits(self) -> dict[str, str]:
        """The codec's short name for each residual, by name."""
        return {name: codec.name for name, codec in self.entries}

    def replace(self, changes: Mapping[str, Codec | str]) -> Plan:
        """The plan with other codecs for some residuals.

        Raises:
            ValueError: when a name is not in the plan.
        """
        unknown = sorted(set(changes) - set(self.codecs))
        if unknown:
            raise ValueError(
                f"the plan has no residual named {', '.join(unknown)}; "
                f"it has {', '.join(self.codecs)}{did_you_mean(unknown[0], self.codecs)}"
            )
        entries = ((n, codecs.resolve(changes[n]) if n in changes else c) for n, c in self.entries)
        return Plan(tuple(entries), self.basis, self.operations)

    def __str__(self) -> str:
        """A table: the name of each residual and of its codec."""
        width = max((len(name) for name, _ in self.entries), default=0)
        lines = [f"plan of {len(self.entries)} residuals"]
        lines += [f"  {name:<{width}}  {codec.name}" for name, codec in self.entries]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as a JSON document."""
        entries = [{"name": name, "codec": codecs.to_json(codec)} for name, codec in self.entries]
        data = {"basis": policy.to_json(self.basis), "entries": entries}
        if self.operations is not None:
            data["operations"] = list(self.operations)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: when the text is something else.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            entries = tuple((e["name"], codecs.from_json(e["codec"])) for e in data["entries"])
            operations = data.get("operations")
            known = None if operations is None else tuple(operations)
            return cls(entries, policy.from_json(data["basis"]), known)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"the text is not that of a plan: {error}") from error


class NeverAdapts(UserWarning):
    """Warns of a controller whose training step something else has compiled."""


@runtime_checkable
class Adaptive(Protocol):
    """What chooses a policy anew whenever a function is traced, such as a `jact.Controller`."""

    @property
    def current(self) -> Policy | Plan:
        """The policy or plan for a function that is looked at rather than run."""
        ...

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function under the policy for this trace.

        Args:
            function: a `jact.compressed_function.Compressed` with this policy.
            args: its positional arguments: pytrees of arrays.
            kwargs: its keyword arguments, likewise.
        """
        ...


#: What a policy argument stands for, unless it is "off".
type Resolved = Policy | Plan | Adaptive

#: What may be given as a policy.
type PolicyLike = str | Codec | Resolved


def resolve(policy: PolicyLike) -> Resolved | None:
    """The policy that a user's `policy` argument stands for; None for "off".

    Raises:
        ValueError: for an unknown preset; names the presets.
        TypeError: for anything that is not a preset, codec, policy, plan or controller.
    """
    if isinstance(policy, Policy | Plan):
        return policy
    if isinstance(policy, str):
        if policy == "off":
            return None
        if policy not in presets.NAMES:
            others = ", or a codec, a jact.Policy, a jact.Plan or a jact.Controller"
            raise ValueError(f"policy {must_be_one_of(policy, presets.NAMES, others)}")
        if policy in presets.POLICIES:
            return presets.POLICIES[policy]
        return Policy(default=policy)
    if isinstance(policy, Codec):
        return Policy(default=policy)
    if isinstance(policy, Adaptive) and not isinstance(policy, type):
        return policy
    raise TypeError(
        "policy must be a preset's name, a codec, a jact.Policy, a jact.Plan or a jact.Controller; "
        f"got {policy!r}"
    )
