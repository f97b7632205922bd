"""What is known of biases from one measurement to the next.

Measuring them takes longer than the rest of a probe. How large they are relative to the errors that
a codec would make without them changes slowly, as it depends on how curved the functions are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

#: Figures of one probe, or sums of several, by place and name.
type Sums = Mapping[str, Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Biases:
    """Errors and biases, relative to those of errors that are independent of each other.

    Attributes:
        shapes: `Arguments.shapes` of the batches that they were measured with.
        error: lists `[residual][codec]`, by place: the error, over the independent one.
        bias: likewise, the part of the error that is the square of a bias.
        uses: how many adaptations went by them since.
    """

    shapes: str
    error: dict[str, list[list[float]]]
    bias: dict[str, list[list[float]]]
    uses: int = 0

    @classmethod
    def measured(cls, shapes: str, sums: Sums) -> Biases | None:
        """What a probe that measured biases says; None where its method always measures them."""
        if any("independent" not in found for found in sums.values()):
            return None
        return cls(
            shapes,
            {p: _ratio(f["error"], f["independent"], 1.0) for p, f in sums.items()},
            {p: _ratio(f["bias"], f["independent"], 0.0) for p, f in sums.items()},
        )

    def complete(self, sums: Sums) -> dict[str, dict[str, np.ndarray]]:
        """The figures of a probe that left out biases, with errors and biases as they are here.

        Where a function changed since, as it may before a run is resumed, errors are taken for
        independent.
        """
        result = {}
        for place, found in sums.items():
            independent = found["independent"]
            error, bias = (np.array(known.get(place, ())) for known in (self.error, self.bias))
            if error.shape != independent.shape:
                error, bias = np.ones_like(independent), np.zeros_like(independent)
            result[place] = dict(found) | {"error": independent * error, "bias": independent * bias}
        return result

    def used(self) -> Biases:
        """These, after one adaptation more."""
        return dataclasses.replace(self, uses=self.uses + 1)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON objects."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Biases | None:
        """What `to_json` wrote."""
        return None if data is None else cls(**data)


def _ratio(a: np.ndarray, b: np.ndarray, otherwise: float) -> list[list[float]]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(b > 0, a / b, otherwise).tolist()
