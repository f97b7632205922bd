"""How the values of a function and of the bodies inside of it are to be stored: rules and plans.

Bodies of loops and branches are analysed one by one, and know their values by names of their own.
Rules and plans go by full names: those that reports show.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jact import compat
from jact.codecs import Codec
from jact.plan import Plan
from jact.policy import Policy, Rule


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What a function and the bodies inside of it turn out to hold, by full names.

    Attributes:
        candidates: name, shape and dtype of all that the policy may be asked about at some size.
        operations: the expensive operations, whatever is saved of them; they do not depend on
            sizes.
        names: what a value that is saved may be called.
        encoded: what is saved and not exactly.
        inside: what the bodies save.
    """

    candidates: list[tuple[str, tuple[int, ...], Any]] = dataclasses.field(default_factory=list)
    operations: dict[str, None] = dataclasses.field(default_factory=dict)
    names: set[str] = dataclasses.field(default_factory=set)
    encoded: dict[str, None] = dataclasses.field(default_factory=dict)
    inside: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, eq=False)
class Directions:
    """A policy or plan as it is for one body of a function.

    Attributes:
        policy: the policy or plan of the whole function.
        scope: what the full names of the body's values begin with: the names of the loops and
            branches around them, each ending in a slash. Empty for the function itself.
        found: what was found so far, in all bodies together.
    """

    policy: Policy | Plan
    scope: str = ""
    found: Found = dataclasses.field(default_factory=Found)

    @property
    def basis(self) -> Policy:
        """The policy that chooses which values are saved."""
        return self.policy.basis if isinstance(self.policy, Plan) else self.policy

    def within(self, scope: str) -> Directions:
        """Those for a body inside of this one."""
        return dataclasses.replace(self, scope=self.scope + scope)

    @functools.cached_property
    def _codecs(self) -> Mapping[str, Codec]:
        """Those of a plan, by full names; none of a policy."""
        return self.policy.codecs if isinstance(self.policy, Plan) else {}

    def planned(self, name: str) -> Codec | None:
        """The codec that a plan has for one of the body's values; None if there is none."""
        return self._codecs.get(self.scope + name)

    def unknown(self) -> list[str]:
        """What a plan names and the function has no value for, at these sizes at least."""
        return [name for name in self._codecs if name not in self.found.names]

    def check(self, known: Container[str] = ()) -> None:
        """Makes sure that a plan is one for the function.

        What a plan has no entry for may have been small, or not worth saving, in the batch that the
        plan was made for. It is stored as the basis says, unless the function has operations that
        the plan's has not.

        Args:
            known: names that the function's values have at other sizes.

        Raises:
            ValueError: when it was made for another function; names what differs.
        """
        if not isinstance(self.policy, Plan):
            return
        operations = self.policy.operations
        unknown = [name for name in self.unknown() if name not in known]
        missing: list[str] = []
        if operations is None or not self.found.operations.keys() <= set(operations):
            missing = [name for name in self.found.encoded if name not in self._codecs]
        if missing or unknown:
            parts = ["the plan was made for another function"]
            parts += [f"this one also saves {', '.join(missing)}"] if missing else []
            parts += [f"this one has no {', '.join(sorted(unknown))}"] if unknown else []
            raise ValueError("; ".join(parts))

    def warn_of_unused_rules(self) -> None:
        """Warns of rules that have no effect on the function, bodies and all."""
        candidates = self.found.candidates
        names = list(dict.fromkeys(name for name, _, _ in candidates))
        known = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for rule in self.basis.unused_rules(candidates):
            _warn(
                f"the rule for {rule.name!r} matches no residual of the function, whose values are "
                f"{known or 'all kept by reference'}"
            )
        for rule, earlier in self.basis.preempted_rules(candidates):
            _warn(
                f"every residual that the rule for {rule.name!r} matches is decided by an earlier "
                f"one: {_listed(earlier)}"
            )


def _listed(rules: Sequence[Rule]) -> str:
    return "that for " + " or ".join(repr(rule.name) for rule in rules)


def _warn(message: str) -> None:
    warnings.warn(message, skip_file_prefixes=compat.LIBRARY_FOLDERS)
