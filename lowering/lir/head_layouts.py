"""Where the entries of heads, and of blocks of keys, are in the registers of a warpgroup (Mosaic GPU)."""

from __future__ import annotations

from typing import Any

from rlx_jax.dataclasses import dataclass
from rlx_jax.lowering.lir.mosaic import LANES, WARPS, copies, tiled

# Neighbouring entries of a lane, where it reads 16 bytes of bf16.
READ_VECTOR = 8

# Widths of a head that the kernel divides among its threads.
HEAD_WIDTHS = (32, 64, 128, 256)

# Sizes of half a rotation that the kernel divides.
HALVES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class HeadLayouts:
    """Where the entries of arrays are in the registers of a warpgroup.

    Attributes:
        tile: of a block of keys `[WARPS, keys, width]`: a lane has some neighbouring entries of a row.
        columns: of one row, in every warp.
        rows: of one entry for each key of a block.
    """

    tile: Any
    columns: Any
    rows: Any

    @staticmethod
    def of(width: int, vector: int = READ_VECTOR) -> HeadLayouts:
        """Return the layouts of heads of this width, with `vector` neighbouring entries in a lane."""
        columns = min(width, LANES * vector)
        row_lanes = LANES * vector // columns
        warp, *lanes = (-4, -2) if row_lanes == 1 else (-5, -2, -3)
        tile = tiled(((WARPS, row_lanes, columns), (row_lanes, vector)[row_lanes == 1 :]), (warp,), lanes)
        return HeadLayouts(tile, tile.reduce((0, 1)), tile.reduce(2))


def sum_layout(width: int) -> Any:
    """Return the layout of a row of f32 in every warp, of which a lane has 16 neighbouring bytes at most."""
    vector = min(4, width // LANES)
    return tiled(((LANES * vector,), (vector,)), copies(WARPS), (-2,))


def half_layout(size: int) -> Any:
    """Return the layout of a row of `size` entries, a power of 2, in every warp."""
    vector = max(1, size // LANES)
    return tiled(((size,), (vector,)), copies(WARPS), (-2, *copies(LANES * vector // size)))
