"""What the compression of each residual costs in bytes and in the gradient's error, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jact import codecs
from jact.codecs import Codec
from jact.plan import Plan
from jact.policy import Policy

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The residuals of a function and the codecs that may store them: what is known before it runs.

    Attributes:
        names: the residuals, as in `Plan.entries` and in that order.
        codecs: the candidates; `codecs.Keep()` is the first.
        nbytes: int64 `[residual, codec]`: bytes of the code, of all iterations together where a
            loop stacks it up.
        raw_bytes: int64 `[residual]`: bytes of the residual itself.
        supported: bool `[residual, codec]`: whether the codec can store the residual.
        basis: the policy that chose the residuals.
    """

    names: tuple[str, ...]
    codecs: tuple[Codec, ...]
    nbytes: np.ndarray
    raw_bytes: np.ndarray
    supported: np.ndarray
    basis: Policy


@dataclasses.dataclass(frozen=True, eq=False)
class Sensitivities:
    """How far the gradient errs for each residual and each codec that may store it.

    "The gradient" is that with respect to all differentiated arguments together, and its error is
    what storing this one residual with this codec adds, everything else exact. The rounding of
    different residuals is independent, so the errors of a plan add up, biases aside.

    Attributes:
        names: the residuals, as in `Plan.entries` and in that order.
        codecs: the candidates; `codecs.Keep()` is one of them, whose error is 0.
        error: float64 `[residual, codec]`: the expected squared error, bias included; infinite
            where the codec cannot store the residual.
        bias: float64 `[residual, codec]`: the part of `error` that is the square of a bias, which
            comes back in every step; 0 where there is none.
        nbytes: int64 `[residual, codec]`: bytes of the code, of all iterations together where a
            loop stacks it up.
        raw_bytes: int64 `[residual]`: bytes of the residual itself.
        gradient: the squared norm of the gradient.
        basis: the policy that chose the residuals.
        measured_cosine: float64 `[residual, codec]`: the cosine of the angle between the gradient
            and the exact one, where the method measures it; None where it does not.
    """

    names: tuple[str, ...]
    codecs: tuple[Codec, ...]
    error: np.ndarray
    bias: np.ndarray
    nbytes: np.ndarray
    raw_bytes: np.ndarray
    gradient: float
    basis: Policy
    measured_cosine: np.ndarray | None = None

    @classmethod
    def from_statistics(cls, layout: Layout, statistics: Mapping[str, Any]) -> Sensitivities:
        """The table that the statistics of a `Probe` amount to.

        Args:
            layout: what `Probe.layout` says of the same function.
            statistics: what the probe returned, or the mean of several: arrays of any library.
        """
        found = {name: np.asarray(value, np.float64) for name, value in statistics.items()}
        error = np.where(layout.supported, found["error"], np.inf)
        bias = np.where(layout.supported, np.minimum(found["bias"], error), 0.0)
        return cls(
            layout.names,
            layout.codecs,
            error,
            bias,
            layout.nbytes,
            layout.raw_bytes,
            float(found["gradient"]),
            layout.basis,
        )

    @property
    def cosine(self) -> np.ndarray:
        """float64 `[residual, codec]`: the cosine between the gradient and the exact one.

        Measured where the method measures it. Otherwise what the error implies when it is
        orthogonal to the gradient, as that of independent rounding nearly is: `1 / sqrt(1 +
        error / gradient)`.
        """
        if self.measured_cosine is not None:
            return self.measured_cosine
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(self.error == 0, 0.0, self.error / self.gradient)
        return 1 / np.sqrt(1 + relative)

    def plan(self, choice: Sequence[int] | Mapping[str, int | Codec | str]) -> Plan:
        """The plan that stores each residual with one of the candidates.

        Args:
            choice: for each residual the position of its codec in `codecs`; or, by name, that
                position, a codec or a preset's name. Names that are left out are kept exactly.

        Raises:
            ValueError: for a name that is not a residual's, a choice of the wrong length, a
                position out of range, or a codec that cannot store the residual.
        """
        keep = next(i for i, codec in enumerate(self.codecs) if isinstance(codec, codecs.Keep))
        if isinstance(choice, Mapping):
            unknown = sorted(set(choice) - set(self.names))
            if unknown:
                raise ValueError(f"choice names {', '.join(unknown)}, which are no residuals")
            picked = [choice.get(name, keep) for name in self.names]
        elif len(choice) != len(self.names):
            raise ValueError(
                f"choice must have one entry for each of {len(self.names)} residuals, "
                f"got {len(choice)}"
            )
        else:
            picked = list(choice)
        chosen = [self._codec(i, entry) for i, entry in enumerate(picked)]
        return Plan(tuple(zip(self.names, chosen, strict=True)), self.basis)

    def _codec(self, residual: int, entry: Any) -> Codec:
        if isinstance(entry, str) or isinstance(entry, Codec):
            return codecs.resolve(entry)
        if not 0 <= entry < len(self.codecs):
            raise ValueError(f"choice must hold positions below {len(self.codecs)}, got {entry}")
        if not np.isfinite(self.error[residual, entry]):
            name = self.names[residual]
            raise ValueError(f"{self.codecs[entry].name} cannot store {name}")
        return self.codecs[entry]
