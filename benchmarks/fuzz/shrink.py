"""Makes a program that fails a check as short as it goes."""

import dataclasses
import time
from collections.abc import Callable, Iterator

from benchmarks.fuzz.generate import without_unused
from benchmarks.fuzz.program import Program, Step


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 120) -> Program:
    """Returns the shortest program found that still fails.

    Args:
        program: One that fails.
        fails: Whether another one does.
        seconds: When to stop trying.
    """
    end = time.monotonic() + seconds
    tried = {program.source()}
    while True:
        for smaller in candidates(program):
            if time.monotonic() > end:
                return program
            if smaller.source() not in tried:
                tried.add(smaller.source())
                if fails(smaller):
                    program = smaller
                    break
        else:
            return program


def candidates(program: Program) -> Iterator[Program]:
    """Programs with a step less: the last ones first."""
    for index in reversed(range(len(program.steps))):
        step = program.steps[index]
        rest = (*program.steps[:index], *program.steps[index + 1 :])
        read = any(step.result in other.operands for other in rest)
        if not read and rest:
            yield cleaned(program, rest)
        # What reads the result reads one of the operands instead, where JAX lets it.
        for operand in dict.fromkeys(step.operands):
            if read and operand not in program.weights:
                yield cleaned(program, tuple(redirected(s, step.result, operand) for s in rest))
    if program.wrapped:
        yield dataclasses.replace(program, wrapped=False)


def redirected(step: Step, old: int, new: int) -> Step:
    """The step with another operand."""
    operands = tuple(new if i == old else i for i in step.operands)
    return dataclasses.replace(step, operands=operands)


def cleaned(program: Program, steps: tuple[Step, ...]) -> Program:
    return without_unused(dataclasses.replace(program, steps=steps))
