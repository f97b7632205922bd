"""Where values come from, as far as that is known before a function is linearised."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from jact import compat
from jact.engine import costs, fills
from jact.engine import program as programs
from jact.engine.program import Atom, Equation, Program, Var


class Origin(enum.Enum):
    """Where a value comes from, when it is not from a single differentiated argument."""

    GENERATED = "made from no input at all"
    DATA = "made from data"


@dataclasses.dataclass(frozen=True)
class Input:
    """What the engine needs to know of one input of a function.

    Attributes:
        name: how the user would write it, such as `args[1]['image']`.
        argument: identifies the differentiated argument that the input belongs to; None for every
            other input.
        encoded: whether it is an activation, to be encoded, rather than kept by reference.
        inexact: whether whoever keeps it by reference may do so inexactly, so that the backward
            pass reads something else than the forward pass did.
        wanted: whether its gradient may be asked for.
        filled: whether it holds infinities or huge constants; see `fills`.
    """

    name: str
    argument: int | None = None
    encoded: bool = False
    inexact: bool = False
    wanted: bool = True
    filled: bool = False


def origin_of_input(spec: Input) -> Origin | int:
    """The origin of an input."""
    return Origin.DATA if spec.argument is None or spec.encoded else spec.argument


def origin_of_result(operands: Iterable[Origin | int], expensive: bool) -> Origin | int:
    """The origin of an equation's results: weights stay weights, alone or with what is generated.

    Args:
        operands: the origins of the equation's operands.
        expensive: whether the equation is too expensive to run again.
    """
    origins = set(operands)
    if not expensive:
        origins.discard(Origin.GENERATED)
    if not origins:
        return Origin.DATA if expensive else Origin.GENERATED
    origin = origins.pop()
    return Origin.DATA if origins or origin is Origin.GENERATED else origin


class Operands:
    """What is known of the operands of a program's equations, for those that are entered.

    Bodies of loops and branches are analysed by themselves, before the program around them is; so
    this errs on the safe side.
    """

    def __init__(self, program: Program, inputs: Sequence[Input]):
        """Goes through a program.

        Args:
            program: the program.
            inputs: what is known of the constants of its own and of its inputs.
        """
        self._origins: dict[Var, Origin | int] = dict.fromkeys(program.consts, Origin.DATA)
        self._inexact: set[Var] = set()
        self._wanted: set[Var] = set()
        self._filled = fills.of_constants(program.consts)
        own_consts = list(program.consts)[: len(inputs) - len(program.invars)]
        for var, spec in zip([*own_consts, *program.invars], inputs, strict=True):
            self._origins[var] = origin_of_input(spec)
            if spec.encoded or spec.inexact:
                self._inexact.add(var)
            if spec.wanted:
                self._wanted.add(var)
            if spec.filled:
                self._filled.add(var)
        for eqn in program.eqns:
            self._visit(eqn, self._origins)

    def _visit(self, eqn: Equation, origins: Mapping[Var, Origin | int]) -> None:
        operands = programs.operands(eqn)
        expensive = costs.is_expensive(eqn)
        origin = origin_of_result((origins[v] for v in operands), expensive)
        # What an expensive operation makes of weights alone is saved exactly.
        inexact = any(v in self._inexact for v in operands) or (expensive and origin is Origin.DATA)
        wanted = any(v in self._wanted for v in operands)
        for out in eqn.outvars:
            self._origins[out] = origin
            if inexact:
                self._inexact.add(out)
            if wanted:
                self._wanted.add(out)
        fills.follow(eqn, self._filled, lambda v: v not in self._inexact)

    def describe(self, atom: Atom, name: str, encoded: bool = False) -> Input:
        """What is known of an operand, as an input of the body that it is passed to.

        Args:
            atom: the operand.
            name: what to call it in the body.
            encoded: whether the body should encode it.
        """
        if not compat.is_var(atom):
            return Input(name, encoded=encoded, wanted=encoded, filled=fills.is_fill(atom))
        origin = self._origins[atom]
        return Input(
            name,
            argument=origin if isinstance(origin, int) and not encoded else None,
            encoded=encoded,
            inexact=atom in self._inexact,
            # A loop may put something to be differentiated into a place that began as a constant.
            wanted=encoded or atom in self._wanted,
            filled=atom in self._filled,
        )
