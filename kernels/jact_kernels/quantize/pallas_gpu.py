"""The quantiser as one Mosaic GPU kernel: the input is read once, the codes are written once.

A thread owns one byte of every row of its groups, that is `8 / bits` neighbouring columns. It
copies them to shared memory, finds their ranges on the way, and makes the codes from the copy; as
no thread reads what another wrote, there is nothing to wait for.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jact_kernels import compat, noise
from jact_kernels.quantize import limits, reference
from jact_kernels.quantize.packed import as_bytes, as_codes
from jact_kernels.quantize.ranges import Range, Scheme, key_bits, measure, restore

THREADS = 128
"""The threads that Mosaic GPU programs as one (a warpgroup)."""

MAX_SHARED_BYTES = 200 * 2**10
"""Of the 227 KiB that a block of threads may have since Hopper."""

UNROLL = 8
"""Rows whose loads are on their way at the same time, since few threads fit beside large tiles."""

MAX_BYTES_PER_THREAD = 4
"""More bytes of a row per thread take more registers than there are."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How threads cover an array that is seen as (rows, elements of a group, columns).

    Attributes:
      rows: how many times a group's elements repeat before the axes of the groups.
      group: the elements of a group, one below the other.
      columns: the elements of the axes behind the groups.
      per_byte: how many neighbouring columns share a byte of codes.
      tile_rows: rows per tile.
      tile_bytes: bytes of codes per row of a tile; `tile_rows * tile_bytes` fills the threads.
    """

    rows: int
    group: int
    columns: int
    per_byte: int
    tile_rows: int
    tile_bytes: int

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of what the threads hold of one row: one entry per byte of codes."""
        return self.tile_rows, self.tile_bytes

    @property
    def grid(self) -> tuple[int, int]:
        """How many tiles there are along rows and columns."""
        return self.rows // self.tile_rows, self.columns // (self.tile_bytes * self.per_byte)

    def staged_bytes(self, dtype: DTypeLike) -> int:
        """The bytes of a tile of the array."""
        return math.prod(self.tile) * self.per_byte * self.group * jnp.dtype(dtype).itemsize

    @property
    def values(self) -> tuple[int, ...]:
        """The shape of the array, with the tiles and the columns of a byte as axes."""
        down, across = self.grid
        return down, self.tile_rows, self.group, across, self.tile_bytes, self.per_byte

    @property
    def codes(self) -> tuple[int, ...]:
        """The shape of the bytes."""
        return self.values[:-1]

    @property
    def ends(self) -> tuple[int, ...]:
        """The shape of an array with one entry per group."""
        return self.values[:2] + self.values[3:]


def plan_tiling(scheme: Scheme) -> Tiling | None:
    """Divides an array into tiles, or returns None where threads cannot be filled evenly."""
    groups = scheme.groups
    columns = math.prod(groups.shape[groups.last + 1 :])
    rows = groups.count // columns
    per_byte = 8 // scheme.bits
    if columns % per_byte:
        return None
    width = columns // per_byte
    for size in (THREADS * n for n in range(1, MAX_BYTES_PER_THREAD + 1)):
        for tile_bytes in range(min(size, width), 0, -1):
            if width % tile_bytes == 0 and size % tile_bytes == 0:
                tile_rows = size // tile_bytes
                if rows % tile_rows == 0:
                    return Tiling(
                        rows=rows,
                        group=groups.size,
                        columns=columns,
                        per_byte=per_byte,
                        tile_rows=tile_rows,
                        tile_bytes=tile_bytes,
                    )
    return None


def unsupported(scheme: Scheme, dtype: DTypeLike) -> str | None:
    """Why this kernel cannot take these arrays, or None if it can."""
    if why := limits.unsupported_on_gpus(scheme, dtype):
        return why
    if why := limits.unsupported_packing(scheme):
        return why
    tiling = plan_tiling(scheme)
    if tiling is None:
        return f"{THREADS} threads cannot be filled evenly"
    if tiling.staged_bytes(dtype) > MAX_SHARED_BYTES:
        return f"a tile of {tiling.staged_bytes(dtype) // 1024} KiB exceeds the shared memory"
    return None


def quantize(
    x: jax.Array, seed: noise.Seed, *, scheme: Scheme, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Quantises `x`; see `jact_kernels.quantize`."""
    plgpu = compat.mosaic_gpu()
    tiling = plan_tiling(scheme)
    assert tiling is not None
    layout = plgpu.Layout.WG_STRIDED(tiling.tile, vec_size=1)
    phases = range(tiling.per_byte)

    def body(x_ref: Any, seed_ref: Any, codes_ref: Any, *refs: Any) -> None:
        *stored_refs, tile_ref = refs
        down, across = lax.axis_index("down"), lax.axis_index("across")

        def stage(row: Any) -> list[jax.Array]:
            source = x_ref.at[down, :, row, across]
            values = [plgpu.load(source.at[:, :, phase], layout=layout) for phase in phases]
            for phase, value in zip(phases, values, strict=True):
                plgpu.store(tile_ref.at[phase, row], value)
            return [value.astype(jnp.float32) for value in values]

        def widen(row: Any, ends: Any) -> Any:
            values, (low, high) = stage(row), ends
            return (
                [jnp.minimum(*pair) for pair in zip(low, values, strict=True)],
                [jnp.maximum(*pair) for pair in zip(high, values, strict=True)],
            )

        first = stage(0)
        ends = _for_each_row(1, tiling.group, widen, (first, first))
        measured = [measure(low, high, scheme) for low, high in zip(*ends, strict=True)]
        for phase, (entries, _) in zip(phases, measured, strict=True):
            for ref, entry in zip(stored_refs, entries, strict=True):
                plgpu.store(ref.at[down, :, across, :, phase], entry)
        each = [_per_group(group, scheme, seed_ref[0]) for _, group in measured]
        start = _start(plgpu, layout, tiling, down, across)

        def encode(row: Any, _: None) -> None:
            packed = jnp.zeros(tiling.tile, jnp.int32)
            for phase, (half_low, inverse, key) in zip(phases, each, strict=True):
                value = plgpu.load(tile_ref.at[phase, row], layout=layout).astype(jnp.float32)
                place = reference.position(value, half_low, inverse)
                shift = reference.TO_NEAREST
                if scheme.stochastic:
                    index = start + noise.spread_index(row * jnp.int32(tiling.columns) + phase)
                    shift = reference.random_shift(noise.finalise(index ^ key))
                code = (place.astype(jnp.int32) + shift) >> jnp.int32(reference.FRACTION_BITS)
                code = reference.clamp(code, place, scheme.levels, None)
                packed = packed | (code << jnp.int32(phase * scheme.bits))
            plgpu.store(codes_ref.at[down, :, row, across, :], packed.astype(jnp.uint8))

        _for_each_row(0, tiling.group, encode, None)

    end = jax.ShapeDtypeStruct(tiling.ends, jnp.float32)
    stored_types = jax.eval_shape(lambda low, high: measure(low, high, scheme)[0], end, end)
    codes, *stored = compat.mosaic_gpu_kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(tiling.codes, jnp.uint8), *stored_types),
        scratch_types=(plgpu.SMEM((tiling.per_byte, tiling.group, *tiling.tile), x.dtype),),
        grid=tiling.grid,
        grid_names=("down", "across"),
        interpret=interpret,
        name="quantize",
    )(x.reshape(tiling.values), _seed_array(seed))
    grid_shape = scheme.groups.grid_shape
    return as_codes(codes, scheme), *(entry.reshape(grid_shape) for entry in stored)


def dequantize(
    codes: jax.Array,
    *stored: jax.Array,
    scheme: Scheme,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """Decodes codes; see `jact_kernels.dequantize`."""
    plgpu = compat.mosaic_gpu()
    tiling = plan_tiling(scheme)
    assert tiling is not None
    layout = plgpu.Layout.WG_STRIDED(tiling.tile, vec_size=1)
    whole = (*tiling.tile, tiling.per_byte)
    together = plgpu.Layout.WG_STRIDED(whole, vec_size=tiling.per_byte)
    phases = range(tiling.per_byte)

    def body(codes_ref: Any, *refs: Any) -> None:
        *stored_refs, out_ref, row_ref = refs
        down, across = lax.axis_index("down"), lax.axis_index("across")
        each = []
        for phase in phases:
            entries = tuple(
                plgpu.load(ref.at[down, :, across, :, phase], layout=layout) for ref in stored_refs
            )
            low, step, _ = restore(entries, scheme)
            each.append((low * jnp.float32(0.5), step * jnp.float32(0.5)))

        def decode(row: Any, _: None) -> None:
            byte = plgpu.load(codes_ref.at[down, :, row, across, :], layout=layout)
            byte = byte.astype(jnp.int32)
            for phase, (half_low, half_step) in zip(phases, each, strict=True):
                code = (byte >> jnp.int32(phase * scheme.bits)) & jnp.int32(scheme.levels)
                value = reference.value(code.astype(jnp.float32), half_low, half_step, dtype)
                plgpu.store(row_ref.at[:, :, phase], value)
            # What a thread wrote column by column it now reads as one vector.
            plgpu.store(out_ref.at[down, :, row, across], plgpu.load(row_ref, layout=together))

        _for_each_row(0, tiling.group, decode, None)

    out = compat.mosaic_gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct(tiling.values, dtype),
        scratch_types=(plgpu.SMEM(whole, dtype),),
        grid=tiling.grid,
        grid_names=("down", "across"),
        interpret=interpret,
        name="dequantize",
    )(
        as_bytes(codes, scheme).reshape(tiling.codes),
        *(entry.reshape(tiling.ends) for entry in stored),
    )
    return out.reshape(scheme.groups.shape)


def _for_each_row(start: int, stop: int, body: Any, carry: Any) -> Any:
    """A loop over rows, `UNROLL` of them at a time, and the rest one by one."""
    aligned = start + (stop - start) // UNROLL * UNROLL

    def several(step: Any, carry: Any) -> Any:
        for row in range(UNROLL):
            carry = body(step * jnp.int32(UNROLL) + jnp.int32(start + row), carry)
        return carry

    carry = lax.fori_loop(0, (aligned - start) // UNROLL, several, carry)
    for row in range(aligned, stop):
        carry = body(jnp.int32(row), carry)
    return carry


def _per_group(
    group: Range, scheme: Scheme, seed: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return *reference.scale(group), noise.group_key(seed, key_bits(group, scheme))


def _start(plgpu: Any, layout: Any, tiling: Tiling, down: Any, across: Any) -> jax.Array:
    """The spread index of the first element of each thread."""
    row, byte = (
        plgpu.broadcasted_iota(jnp.int32, tiling.tile, axis, layout=layout) for axis in (0, 1)
    )
    row = row + down * jnp.int32(tiling.tile_rows)
    byte = byte + across * jnp.int32(tiling.tile_bytes)
    index = row * jnp.int32(tiling.group * tiling.columns) + byte * jnp.int32(tiling.per_byte)
    return noise.spread_index(index)


def _seed_array(seed: noise.Seed) -> jax.Array:
    return lax.convert_element_type(jnp.asarray(seed), jnp.uint32).reshape(1)
