"""The controller: measures now and then, and trains with the plan that the measurements ask for."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jact import compat
from jact.adapt import decide, defaults, history, modes
from jact.adapt.adaptive_step import AdaptiveStep
from jact.adapt.budget import Budget
from jact.adapt.history import Adaptation, joined
from jact.adapt.modes import Comparing, Fixed, Listing, Probing
from jact.adapt.probe import Probe
from jact.adapt.schedule import Schedule
from jact.adapt.state import Progress
from jact.adapt.steps import Steps
from jact.codecs import Codec
from jact.plan import NeverAdapts, Plan, PolicyLike
from jact.policy import Policy


class _Owner:
    """Identifies a controller, and says how one is saved, as it cannot be pickled."""

    def __deepcopy__(self, memo: Any) -> _Owner:
        return _Owner()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a jact.Controller cannot be pickled, as it holds compiled steps: use "
            "controller.save(path), or controller.state, and load or restore it in another one"
        )


class Controller:
    """A policy that follows the training: it measures, and spends the bytes where they matter.

    Give it as the `policy` of `jact.value_and_grad`, `jact.grad` or `jact.compress` (or of
    `jact.nnx.value_and_grad`), inside of a training step that `controller.jit` compiles::

        controller = jact.Controller(bits=4)

        @controller.jit
        def train_step(state, batch):
            loss, grads = jact.value_and_grad(loss_fn, policy=controller)(state.params, batch)
            return state.apply_gradients(grads=grads), loss

    At the first step, at every `every`-th and when asked, it *probes*: it runs a second function,
    traced from the same step on the same arguments, of which only the sensitivities are results.
    XLA drops the optimizer from that, it donates nothing, and it returns nothing of the user's; so
    parameters, random streams, gradients and statistics stay what they are. From the sensitivities
    follows the plan of least error within the budget. A second batch confirms the first plan.

    A new plan is taken only where its expected squared error is lower by more than `min_gain`. The
    step is compiled for it in a thread, while training goes on with the old plan, and is taken
    exactly `switch_after` steps after the probe. Were it taken as soon as it is ready, two runs of
    the same seed could differ. Only where it is not ready by then, training waits for it.

    Outside of a step compiled by `jit`, functions with this policy follow the present plan. Where
    no step was given to `jit`, a gradient that `jax.jit` compiles warns: it would never adapt.

    Args:
        bits: average bits per element, as `Budget` has it. With neither `fraction` nor `memory`
            the default is 4.
        fraction: of the residuals' uncompressed bytes.
        memory: the step's compiled peak (temporary memory, as `jact.memory.peak` tells): bytes, or
            a text such as "2 GiB". The first step is compiled up to five times to find the plan.
        every: steps between adaptations.
        codecs: the candidates, besides keeping a residual as it is. None is "int8", "int6", "int5",
            "int4", "int3" and "int2", and for up to 2.5 bits "int6", "int4", "int3", "int2" and
            "int1".
        sensitivity: "local" takes all residuals from one backward pass, "exact" takes two backward
            passes for each residual and codec.
        policy: chooses *which* values are residuals, and keeps what its rules keep. None is "int2"
            for up to 2.5 bits, and "int4" for more.
        min_gain: the part of the expected squared error that a new plan has to save.
        switch_after: steps from a probe to the switch; None is half of `every`.
        max_compiled: how many compiled steps are kept; the one used last is dropped first.
        seed: of the random directions that sensitivities are measured along.

    Raises:
        ValueError: for more than one budget, or an argument out of range.
        TypeError: for an argument of the wrong type.

    References:
        Liu et al., GACT: Activation Compressed Training for Generic Network Architectures, ICML
        2022, sections 4 and 5.

    >>> import jax, jax.numpy as jnp, jact
    >>> controller = jact.Controller(bits=4)
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x**2)
    >>> @controller.jit
    ... def step(params, x):
    ...     grads = jact.grad(loss, policy=controller)(params, x)
    ...     return jax.tree.map(lambda p, g: p - g, params, grads)
    >>> params = [jnp.eye(64) * s for s in (1.0, 0.1)]
    >>> for i in range(3):
    ...     params = step(params, jax.random.normal(jax.random.key(i), (256, 64)))
    >>> len(controller.plan.entries), controller.history[0].reason
    (2, 'first')
    """

    def __init__(
        self,
        *,
        bits: float | None = None,
        fraction: float | None = None,
        memory: int | str | None = None,
        every: int = 500,
        codecs: Sequence[Codec | str] | None = None,
        sensitivity: Literal["local", "exact"] = "local",
        policy: PolicyLike | None = None,
        min_gain: float = 0.1,
        switch_after: int | None = None,
        max_compiled: int = 4,
        seed: int = 0,
    ):
        # First, so that pickling fails with its message.
        self._owner = _Owner()
        if bits is None and fraction is None and memory is None:
            bits = 4
        self.budget = Budget(bits=bits, fraction=fraction, memory=memory)
        defaults.at_least(2, every, "every")
        wait = every // 2 if switch_after is None else switch_after
        if not 1 <= defaults.at_least(1, wait, "switch_after") <= every:
            raise ValueError(f"switch_after must be at most every={every}, got {switch_after}")
        if sensitivity not in ("local", "exact"):
            raise ValueError(f'sensitivity must be "local" or "exact", got {sensitivity!r}')
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain must be at least 0 and below 1, got {min_gain!r}")
        self.max_compiled = defaults.at_least(2, max_compiled, "max_compiled")
        self._basis = defaults.basis(policy, bits)
        candidates = defaults.candidates(codecs, bits)
        mode = Probing(
            owner=self._owner,
            basis=self._basis,
            probe=Probe(_nothing, candidates, policy=self._basis),
            method=sensitivity,
            seed=defaults.at_least(0, seed, "seed"),
        )
        self._schedule = Schedule(self.budget, every, wait, min_gain, mode)

    @property
    def _at(self) -> Progress:
        return self._schedule.at

    # What users see of it.

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first step.

        Where the step has several functions with this policy, the names of residuals begin with
        those of the functions.
        """
        return None if self._at.plans is None else joined(self._at.plans)

    @property
    def history(self) -> list[Adaptation]:
        """One record for each time that it measured."""
        return self._at.history

    @property
    def current(self) -> Policy | Plan:
        """The plan in use, or the policy that chooses residuals before there is one."""
        plans = self._at.plans or ()
        return plans[0][1] if len(plans) == 1 else self._basis

    @property
    def step(self) -> int:
        """How many steps were run."""
        return self._at.step

    @property
    def compilations(self) -> int:
        """How many plans the step was compiled for."""
        return 0 if self._schedule.steps is None else self._schedule.steps.compilations

    @property
    def metrics(self) -> dict[str, float]:
        """Figures for TensorBoard, clu or Weights & Biases, by name; cheap at every step."""
        return history.metrics(self._at.history, self._at.step, self.compilations)

    def report(self) -> str:
        """A text: the budget, every adaptation, and the present plan residual by residual."""
        return history.report(
            self._at.history, f"controller with {self.budget}, step {self._at.step}"
        )

    def adapt(self) -> None:
        """Has the controller measure at the next step, whatever the period says.

        A batch that is smaller than the one measured last is passed over.
        """
        self._at.asked = "asked"

    def measure(self, *args: Any, **kwargs: Any) -> float:
        """Measures how far the gradient errs under the present plan, for one batch.

        It is compiled for that, in the foreground, and takes the memory of plain JAX. The result
        becomes the `measured_error` of the last record in `history`. Nothing is changed by it.

        Args:
            *args: the arguments of the step.
            **kwargs: its keyword arguments.

        Returns:
            The relative error `|g - g0| / |g0|`, from random projections to 256 numbers (10 %).

        Raises:
            ValueError: before the first step, when there is no plan yet.
        """
        program = self._schedule.present(args, kwargs)
        assert self._schedule.steps is not None
        error = decide.measured_error(self._schedule.steps.compare(program, args, kwargs))
        self._at.history[-1] = dataclasses.replace(self._at.history[-1], measured_error=error)
        return error

    def jit(self, fun: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Compiles a training step that follows this controller; takes the place of `jax.jit`.

        Args:
            fun: the step. Omitted, the result is a decorator.
            **options: those of `jax.jit` (static_argnums, donate_argnums, in_shardings, ...); of
                `flax.nnx.jit` where the step is called with NNX modules, whose state is then
                updated as `nnx.jit` updates it.

        Returns:
            A function like the step.

        Raises:
            ValueError: when the controller already follows another step.
        """
        if fun is None:
            return functools.partial(self.jit, **options)
        if not callable(fun):
            raise TypeError(f"fun must be callable, got {fun!r}")
        steps = Steps(fun, options, self._owner, self._basis, self.max_compiled)
        old = self._schedule.steps
        # A notebook's cell may define its step anew.
        if old is not None and old.name != steps.name:
            raise ValueError(
                f"the controller already follows {old.name}; make another controller for "
                f"{steps.name}"
            )
        self._schedule.steps = steps
        return AdaptiveStep(steps, self, self._schedule)

    # What `jact.plan.Adaptive` asks for.

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a compressed function whose policy this is; see `jact.plan.Adaptive`."""
        mode = compat.trace_mode()
        if isinstance(mode, Probing) and mode.owner is self._owner:
            return modes.run_probing(function, args, kwargs, mode)
        if isinstance(mode, Comparing) and mode.owner is self._owner:
            return modes.run_comparing(function, args, kwargs, mode)
        if isinstance(mode, Listing) and mode.owner is self._owner:
            return modes.run_listing(function, args, kwargs, mode)
        if not (isinstance(mode, Fixed) and mode.owner is self._owner):
            self._warn_if_stuck(function, (args, kwargs))
            mode = Fixed(self._owner, self._at.plans or (), self._basis)
        return modes.run_fixed(function, args, kwargs, mode)

    def _warn_if_stuck(self, function: Any, args: Any) -> None:
        """Warns of a gradient that `jax.jit` compiles where nothing was given to `jit`.

        A controller with a step of its own may serve other functions, too; they follow its plan.
        """
        if self._schedule.steps is not None or self._at.plans is not None:
            return
        if function.is_gradient(args) and compat.any_staged(args):
            warnings.warn(
                f"{function!r} is compiled by jax.jit with a jact.Controller as its policy, which "
                "measures and adapts only in a step that controller.jit compiles: here the policy "
                "never changes. Above the training step, write @controller.jit in the place of "
                "@jax.jit.",
                NeverAdapts,
                skip_file_prefixes=compat.LIBRARY_FOLDERS,
            )

    # State.

    @property
    def state(self) -> dict[str, Any]:
        """All that a resumed run needs: a pytree of NumPy arrays, as Orbax saves it.

        Where an adaptation is being decided in the background, this waits for it.
        """
        data = {"budget": str(self.budget), **self._at.to_json()}
        text = json.dumps(data).encode()
        return {"step": np.int64(self._at.step), "json": np.frombuffer(text, np.uint8).copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where the controller that `state` is from was.

        Raises:
            ValueError: when `state` is not one, or is from a controller of another budget.
        """
        try:
            data = json.loads(np.asarray(state["json"], np.uint8).tobytes())
            budget = data["budget"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state must be that of a controller: {error}") from error
        if budget != str(self.budget):
            raise ValueError(f"the state is that of a controller with {budget}, not {self.budget}")
        self._schedule.at = Progress.from_json(data)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the state to a file."""
        pathlib.Path(path).write_bytes(self.state["json"].tobytes())

    def load(self, path: str | pathlib.Path) -> None:
        """Restores the state from a file that `save` wrote.

        Raises:
            ValueError: as `restore`.
        """
        self.restore({"json": np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)})


def _nothing() -> None:
    """Stands for a function that is known only when a step is traced."""
