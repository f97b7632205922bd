"""A compiled training step that follows a controller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jact.adapt.schedule import Schedule
from jact.adapt.steps import Steps

if TYPE_CHECKING:
    from jact.adapt.controller import Controller


class AdaptiveStep:
    """A compiled training step that follows a controller: what `Controller.jit` returns.

    Attributes:
        __wrapped__: the step as it was.
        controller: the controller.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, steps: Steps, controller: Controller, schedule: Schedule):
        functools.update_wrapper(self, steps.fun)
        self.controller = controller
        self._schedule = schedule
        self._steps = steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step, after whatever the controller does before it."""
        result = self._schedule.before(self._steps, args, kwargs)(*args, **kwargs)
        self._schedule.at.step += 1
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step under the present plan, as the result of `jax.jit` does.

        Raises:
            ValueError: before the first step, when there is no plan yet.
        """
        return self._schedule.present(args, kwargs).lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)
