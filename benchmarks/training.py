"""One training of an experiment under one policy."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jact
from benchmarks import options
from benchmarks.experiments import Experiment


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A controller's arguments: one object serves all seeds, each of which has its own controller.

    Attributes:
        bits: The average.
        policy: Chooses which values are saved; None is the controller's own choice.
    """

    bits: float
    policy: jact.Policy | None = None

    def controller(self, steps: int) -> jact.Controller:
        """A controller that measures at the first step and half way."""
        half = max(2, steps // 2)
        # With the least number of bits of all candidates, there would be nothing to choose.
        codecs = ("int8", "int4", "int2", "int1")[: 3 if self.bits > 2 else 4]
        return jact.Controller(
            bits=self.bits,
            every=half,
            switch_after=half // 5 or 1,
            codecs=codecs,
            policy=self.policy,
        )


class Trainer:
    """Trains an experiment under one policy, from as many seeds as asked for.

    Data and parameters are arguments of the compiled step, so that all seeds share it. Only a
    controller, which finds its plan by itself, begins anew for each.

    Args:
        experiment: What to train.
        policy: What `jact.value_and_grad` takes; "off" is plain JAX. Or `Adaptive`.
    """

    def __init__(self, experiment: Experiment, policy: Any):
        self.experiment = experiment
        self.policy = policy
        self._score = jax.jit(experiment.score)
        self._step = None if isinstance(policy, Adaptive) else jax.jit(self._make_step(policy))

    def run(self, seed: int, advance: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Trains from one seed.

        Args:
            seed: Of the parameters, of the order of examples, and of which nodes of a graph are
                for training.
            advance: Is called after each step.

        Returns:
            "accuracy" on the test examples in percent, the mean "loss" of the last tenth of the
            steps, and "seconds" of processor time, compilation included.
        """
        start = time.process_time()
        experiment, step = self.experiment, self._step
        if step is None:
            controller = self.policy.controller(experiment.steps)
            step = controller.jit(self._make_step(controller))
        arrays = experiment.load(seed)
        params, state = experiment.init(seed, arrays)
        optimizer_state = experiment.optimizer(experiment.steps).init(params)
        losses = []
        for picked in experiment.batches(seed):
            params, state, optimizer_state, loss = step(
                params, state, optimizer_state, arrays, jnp.asarray(picked)
            )
            losses.append(loss)
            advance()
        shares = [
            self._score(params, state, arrays, jnp.asarray(picked))
            for picked in experiment.test_batches()
        ]
        return {
            "accuracy": 100 * float(np.mean([float(share) for share in shares])),
            "loss": float(np.mean([float(loss) for loss in losses[-max(1, len(losses) // 10) :]])),
            "seconds": time.process_time() - start,
        }

    def _make_step(self, policy: Any) -> Callable[..., Any]:
        experiment = self.experiment
        optimizer = experiment.optimizer(experiment.steps)
        gradient = options.differentiated(experiment.loss, policy)

        def step(params: Any, state: Any, optimizer_state: Any, *examples: Any) -> Any:
            (loss, state), grads = gradient(params, state, *examples)
            updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
            params = jax.tree.map(jnp.add, params, updates)
            return params, state, optimizer_state, loss

        return step
