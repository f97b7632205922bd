"""What the compression of each residual costs in bytes and in the gradient's error, as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jact import codecs, policy
from jact.adapt import table_render
from jact.codecs import Codec
from jact.plan import Plan
from jact.policy import Policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        operations: those of the function, as in `Plan`.
        known: names of residuals that the function may have at some size.
    """

    names: tuple[str, ...]
    codecs: tuple[Codec, ...]
    nbytes: np.ndarray
    raw_bytes: np.ndarray
    supported: np.ndarray
    basis: Policy
    operations: tuple[str, ...] | None = None
    known: frozenset[str] = frozenset()


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
        operations: those of the function, as in `Plan`.
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
    operations: tuple[str, ...] | None = None

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
            operations=layout.operations,
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

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each residual and codec that can store it; pandas takes the list.

        "error" and "bias" are relative to the squared norm of the gradient.
        """
        gradient = self.gradient or 1.0
        return [
            {
                "residual": name,
                "codec": codec.name,
                "error": float(self.error[i, j] / gradient),
                "bias": float(self.bias[i, j] / gradient),
                "cosine": float(self.cosine[i, j]),
                "bytes": int(self.nbytes[i, j]),
                "raw_bytes": int(self.raw_bytes[i]),
            }
            for i, name in enumerate(self.names)
            for j, codec in enumerate(self.codecs)
            if np.isfinite(self.error[i, j])
        ]

    def to_json(self) -> str:
        """The table as a JSON document; infinite errors are written as null."""
        arrays = {f: getattr(self, f) for f in ("error", "bias", "nbytes", "raw_bytes")}
        cosine = self.measured_cosine
        data = {name: _finite(array.tolist()) for name, array in arrays.items()} | {
            "names": list(self.names),
            "codecs": [codecs.to_json(codec) for codec in self.codecs],
            "gradient": _finite(self.gradient),
            "basis": policy.to_json(self.basis),
            "measured_cosine": None if cosine is None else cosine.tolist(),
            "operations": None if self.operations is None else list(self.operations),
        }
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Sensitivities:
        """The table that `to_json` wrote.

        Raises:
            ValueError: when the text is something else.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            shape = (len(data["names"]), len(data["codecs"]))
            cosine, operations = data["measured_cosine"], data.get("operations")
            return cls(
                tuple(data["names"]),
                tuple(codecs.from_json(codec) for codec in data["codecs"]),
                _array(data["error"], np.float64).reshape(shape),
                _array(data["bias"], np.float64).reshape(shape),
                _array(data["nbytes"], np.int64).reshape(shape),
                _array(data["raw_bytes"], np.int64),
                float(_array(data["gradient"], np.float64)),
                policy.from_json(data["basis"]),
                None if cosine is None else np.array(cosine, np.float64).reshape(shape),
                None if operations is None else tuple(operations),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"the text is not that of sensitivities: {error}") from error

    def plot(self) -> Figure:
        """Draws the relative error of each residual, one line per codec, and the bytes beside it.

        Needs matplotlib. The figure is the caller's to show or save.
        """
        return table_render.plot(self)

    def __str__(self) -> str:
        return table_render.text(self)

    def __rich__(self) -> Any:
        return table_render.table(self)

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
        return Plan(tuple(zip(self.names, chosen, strict=True)), self.basis, self.operations)

    def _codec(self, residual: int, entry: Any) -> Codec:
        if isinstance(entry, str | Codec):
            return codecs.resolve(entry)
        if not 0 <= entry < len(self.codecs):
            raise ValueError(f"choice must hold positions below {len(self.codecs)}, got {entry}")
        if not np.isfinite(self.error[residual, entry]):
            name = self.names[residual]
            raise ValueError(f"{self.codecs[entry].name} cannot store {name}")
        return self.codecs[entry]


def _finite(value: Any) -> Any:
    """Numbers, or lists of lists of them, with None in the place of what JSON has no word for."""
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value if np.isfinite(value) else None


def _array(value: Any, dtype: Any) -> np.ndarray:
    return np.array(_infinite(value), dtype)


def _infinite(value: Any) -> Any:
    if isinstance(value, list):
        return [_infinite(entry) for entry in value]
    return np.inf if value is None else value
