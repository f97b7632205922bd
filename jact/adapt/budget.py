"""What a controller may spend."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jact.adapt.allocate import Allocation, allocate
from jact.adapt.modes import Plans
from jact.adapt.table import Layout, Sensitivities
from jact.codecs import Codec, Offload
from jact.codecs.quantize import BITS
from jact.memory.sizes import format_bytes, parse_bytes

#: Entries of a plan.
type Entries = tuple[tuple[str, Codec], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget of average bits, of a fraction, or of peak memory; one of them.

    Attributes:
        bits: average bits of an element, at least 1: as many bytes as the policies "int1" to
            "int8" would take of the same residuals, ranges included, and between these what
            interpolation gives.
        fraction: of the bytes of the residuals, uncompressed.
        memory: bytes of the compiled step's peak, as `jact.memory.peak` tells it.

    Raises:
        ValueError: when not exactly one is given, or it is out of range.
    """

    bits: float | None = None
    fraction: float | None = None
    memory: int | str | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        if len(given) != 1:
            raise ValueError(
                "give one of bits, fraction and memory"
                f"{', not ' + ' and '.join(given) if given else ''}"
            )
        if self.bits is not None and not self.bits >= 1:
            raise ValueError(f"bits must be at least 1, got {self.bits!r}")
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory, "memory"))

    def nbytes(self, landscape: Landscape) -> int:
        """Bytes that all residuals may take together, where that follows from them alone."""
        raw = landscape.raw_bytes
        if self.fraction is not None:
            return int(self.fraction * raw.sum())
        assert self.bits is not None
        return int(landscape.uniform_bytes(self.bits))

    def __str__(self) -> str:
        if self.memory is not None:
            return f"a peak of {format_bytes(int(self.memory))}"
        if self.bits is not None:
            return f"{self.bits:g} bits on average"
        return f"{self.fraction:g} of the uncompressed bytes"


class Landscape:
    """The residuals of all functions in a step, with what each codec costs and how it errs.

    Attributes:
        error: float64 `[residual, codec]`: the expected squared error of the gradient of its
            function, relative to the squared norm of that gradient.
        nbytes: int64 `[residual, codec]`: bytes on the device.
        raw_bytes: int64 `[residual]`: uncompressed.
    """

    def __init__(
        self,
        places: Sequence[str],
        tables: Sequence[Sensitivities],
        uniform: Sequence[np.ndarray],
        calls: Sequence[int],
        besides: Mapping[str, Entries] | None = None,
    ):
        """Joins tables.

        Args:
            places: of the functions.
            tables: one for each function.
            uniform: for each, int64 `[residual, 8]`: the bytes with 1 to 8 bits.
            calls: how many times the step calls each.
            besides: entries of plans, by place, for residuals that are none in this batch.
        """
        self.places = tuple(places)
        self.tables = tuple(tables)
        self._besides = dict(besides or {})
        self.error = np.concatenate([t.error / max(t.gradient, 1e-300) for t in tables])
        pairs = list(zip(tables, calls, strict=True))
        self.nbytes = np.concatenate([n * _device_bytes(t) for t, n in pairs])
        self.raw_bytes = np.concatenate([n * t.raw_bytes for t, n in pairs])
        self._uniform = np.concatenate([n * u for u, n in zip(uniform, calls, strict=True)])

    def uniform_bytes(self, bits: float) -> float:
        """Bytes of all residuals with as many bits each; interpolated between 1 to 8 and 32."""
        columns = np.concatenate([self._uniform, self.raw_bytes[:, None]], axis=1)
        return float(np.interp(bits, [*BITS, 32], columns.sum(0)))

    @property
    def smallest(self) -> int:
        """The fewest bytes that the residuals can take."""
        return int(np.where(np.isfinite(self.error), self.nbytes, np.iinfo(int).max).min(1).sum())

    @property
    def largest(self) -> int:
        """The most bytes that the residuals can take."""
        return int(np.where(np.isfinite(self.error), self.nbytes, 0).max(1).sum())

    def allocate(self, budget: int) -> Allocation:
        """The choice of least error within a budget of bytes."""
        return allocate(self.error, self.nbytes, budget)

    def allocate_for(self, nbytes: float) -> Allocation:
        """Likewise, within the most and the fewest bytes that there can be."""
        return self.allocate(int(min(max(nbytes, self.smallest), self.largest)))

    def plans(self, choice: Sequence[int]) -> Plans:
        """The plans that a choice amounts to."""
        plans, rest = [], list(choice)
        for place, table in zip(self.places, self.tables, strict=True):
            own, rest = rest[: len(table.names)], rest[len(table.names) :]
            plan = table.plan(own)
            entries = (*plan.entries, *self._besides.get(place, ()))
            plans.append((place, dataclasses.replace(plan, entries=entries)))
        return tuple(plans)

    def choice(self, plans: Plans) -> list[int] | None:
        """The choice that plans amount to; None where they are not about these residuals."""
        by_place, result = dict(plans), []
        for place, table in zip(self.places, self.tables, strict=True):
            codecs = by_place[place].codecs if place in by_place else {}
            if set(codecs) != {*table.names, *dict(self._besides.get(place, ()))}:
                return None
            for i, name in enumerate(table.names):
                if codecs[name] not in table.codecs:
                    return None
                column = table.codecs.index(codecs[name])
                if not np.isfinite(table.error[i, column]):
                    return None
                result.append(column)
        return result

    def error_of(self, choice: Sequence[int]) -> float:
        """The relative error `|g - g0| / |g0|` to expect of a choice."""
        rows = np.arange(len(choice))
        total = float(self.error[rows, list(choice)].sum())
        return float(np.sqrt(total / max(len(self.tables), 1)))

    def bits_of(self, choice: Sequence[int]) -> float:
        """Average bits of an element: where 4 is what the policy "int4" would take."""
        columns = np.concatenate([self._uniform, self.raw_bytes[:, None]], axis=1).sum(0)
        return float(np.interp(self.nbytes_of(choice), columns, [*BITS, 32]))

    def nbytes_of(self, choice: Sequence[int]) -> int:
        """The bytes of a choice."""
        return int(self.nbytes[np.arange(len(choice)), list(choice)].sum())


def _device_bytes(table: Sensitivities) -> np.ndarray:
    """Bytes on the device: what is offloaded takes none."""
    offloaded = np.array([isinstance(codec, Offload) for codec in table.codecs])
    return np.where(offloaded[None], 0, table.nbytes)


def guessed(layout: Layout) -> Sensitivities:
    """A table for when nothing is known yet: the error of each code as its bits would suggest."""
    raw = np.maximum(layout.raw_bytes[:, None].astype(np.float64), 1)
    error = raw * 4.0 ** (-32 * layout.nbytes / raw)
    error = np.where(layout.nbytes >= raw, 0.0, error)
    return Sensitivities(
        names=layout.names,
        codecs=layout.codecs,
        error=np.where(layout.supported, error, np.inf),
        bias=np.zeros_like(error),
        nbytes=layout.nbytes,
        raw_bytes=layout.raw_bytes,
        gradient=float(raw.sum()),
        basis=layout.basis,
        operations=layout.operations,
    )
