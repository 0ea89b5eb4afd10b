"""One Pallas kernel (Mosaic GPU) for a product of 2 to 8 rows with a weight, bf16 or packed, and the ops around it.

A warp multiplies a tile of 16 rows of the weight with a quarter of the columns (`row_instructions.py`), each lane as
many neighbouring columns as one load reads; sums of the warps are added in shared memory. Reading the weight takes most
of the time, hence a tile is read ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.lowering.lir.kernel_trace import KernelTrace
from rlx_jax.lowering.lir.matvec import Matvec, run_tiles, sum_chunks
from rlx_jax.lowering.lir.mosaic import WARPS, copies, load, pl, plgpu, store, tiled
from rlx_jax.lowering.lir.packed_matvec import read_ahead
from rlx_jax.lowering.lir.row_instructions import COLUMNS, GROUP, TILE_ROWS, factor_layout, product

AnyArray = Any

# Rows of x, at most.
MAX_ROWS = COLUMNS

# Groups of a tile of all parts, at most, twice as many for codes of 4 bits, and warpgroups and programs: the fastest on
# one H200, which has 132 multiprocessors and registers for 512 threads in each. Two programs of two warpgroups are
# faster for bf16 of up to `NARROW` columns: three layers and the head of Qwen3-0.6B took 153 µs in place of 163.
MAX_GROUPS, WARPGROUPS, PROGRAMS, NARROW = 16, (4, 2, 1), 132, 1024

# Bytes that a lane multiplies together; 4 for codes of 4 bits with upper halves 16 values further on.
VECTORS: dict[str, int] = {
    "": 8, "int8/32": 8, "gguf_q8_0": 8, "int8/128": 8, "int4/32": 4, "gguf_q4_0": 4, "int4/128": 8, "gguf_q4k": 8,
}  # fmt: skip


@dataclass(frozen=True)
class RowsTiling:
    """How a weight `[parts · rows, K]` is divided; names as in `Tiling`.

    Attributes:
        scheme: the name of the scheme, "" for bf16.
        count: rows of x in the kernel: 2, 4 or 8.
        parts, rows, programs: as there.
        groups: groups of `GROUP` columns.
        tile_groups: groups of a tile, of which each warp has a quarter.
        warpgroups: warpgroups of a program, each with a part of the columns.
    """

    scheme: str
    count: int
    parts: int
    rows: int
    programs: int
    groups: int
    tile_groups: int
    warpgroups: int

    @property
    def chunks(self) -> int:
        """Return the number of tiles in a row for each warpgroup."""
        return self.groups // self.tile_groups // self.warpgroups

    @property
    def tile_rows(self) -> int:
        """Return the rows of a tile."""
        return TILE_ROWS

    @property
    def bits(self) -> int:
        """Return the bits of a value."""
        return SCHEMES[self.scheme].codes[0].bits if self.scheme else 16

    @property
    def vector(self) -> int:
        """Return how many neighbouring elements of the weight a lane reads at once."""
        return VECTORS[self.scheme]

    @property
    def halves(self) -> int:
        """Return in how many parts a lane reads its entries of a group of x: one for each half of a byte, or one."""
        return 8 // self.vector

    @property
    def code_layout(self) -> Any:
        """Return where elements `[TILE_ROWS, runs, 4 · vector]` of a tile are in registers."""
        elements = self.tile_groups * GROUP * self.bits // max(8, self.bits)
        return quad_layout(8, elements // (4 * self.vector), self.vector)

    @property
    def x_layout(self) -> Any:
        """Return where the entries of x for a tile are in registers."""
        return quad_layout(self.count, self.tile_groups, self.vector, self.halves)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Return the shape of the rows of x: by groups, and by their parts for each half of a byte."""
        inner = (self.halves, GROUP // self.halves) if self.halves > 1 else (GROUP,)
        return self.count, self.groups, *inner

    def views(self, weight: AnyArray) -> list[AnyArray]:
        """Return the arrays of a weight, with an axis for runs of what four lanes read."""
        arrays = [weight[name] for name in ("codes", "scales")] if self.scheme else [weight]
        return [arrays[0].reshape(self.parts * self.rows, -1, 4 * self.vector), *arrays[1:]]


def quad_layout(rows: int, runs: int, vector: int, halves: int = 1) -> Any:
    """Return the layout of elements `[rows, runs, 4 · vector]`: a lane has a quarter of a run, a warp of the runs.

    Args:
        rows: rows that have lanes of their own; if fewer than 8, more lanes have the same.
        runs: runs of a tile.
        vector: elements of a lane.
        halves: whether there is an axis of 2 before the last one.
    """
    inner = (halves, 4 * vector) if halves > 1 else (4 * vector,)
    warp, row = (-5, -6) if halves == 1 else (-7, -8)
    return tiled(((rows, runs, *inner), (runs // WARPS, *inner), (vector,)), (warp,), (*copies(8 // rows), row, -2))


def row_layout(rows: int, inner: Sequence[int]) -> Any:
    """Return the layout of whole rows `[rows, groups, *inner]` before the product: each warp has one row."""
    lanes = tuple(range(-2 - len(inner), -1))
    return tiled(((rows, 8, *inner), (8,)), (*copies(WARPS // rows), lanes[0] - 1), lanes)


def result_layout(count: int) -> Any:
    """Return the layout of results `[count, TILE_ROWS]`: one for each lane, or for several."""
    tiles: tuple[tuple[int, ...], ...] = ((count, TILE_ROWS), (2, TILE_ROWS), (1,))
    tiles, warps = (tiles, (-5,)) if count > 2 else (tiles[1:], ())
    return tiled(tiles, (*copies(MAX_ROWS // count), *warps), (-3, -2))


def least_groups(scheme: str) -> int:
    """Return the least groups of a tile: each warp has whole blocks of the weight, and two groups or more."""
    block = SCHEMES[scheme].block if scheme else None
    return WARPS * max((block or GROUP) // GROUP, 2)


def find_rows_tiling(rows: int, columns: int, parts: int, scheme: str, count: int) -> RowsTiling | None:
    """Return the tiling of a weight, or None if its sizes do not divide, or the kernel does not have its scheme.

    Args:
        rows, columns, parts: as in `find_tiling`.
        scheme: the name of the scheme, "" for bf16.
        count: rows of x.
    """
    if scheme not in VECTORS or rows % (parts * TILE_ROWS) or columns % GROUP:
        return None
    bits = SCHEMES[scheme].codes[0].bits if scheme else 16
    groups, least = columns // GROUP, least_groups(scheme)
    most = max(least, MAX_GROUPS * (2 if bits == 4 else 1) // parts)
    part_rows = rows // parts
    padded = next(n for n in (2, 4, 8) if n >= count)
    is_narrow = not scheme and columns <= NARROW
    used = min(PROGRAMS * (1 + is_narrow), part_rows // TILE_ROWS)
    for warpgroups in WARPGROUPS[is_narrow:]:
        counts = [n for n in range(least, most + 1, least) if groups % (n * warpgroups) == 0]
        if counts:
            return RowsTiling(scheme, padded, parts, part_rows, used, groups, max(counts), warpgroups)
    return None


@dataclass(frozen=True)
class RowTiles:
    """The tiles of a weight that a warpgroup of a program reads.

    Attributes:
        tiling: how the weight is divided.
        refs: the rows of `x`, in shared memory if ops before the product compute them, the arrays of the weight as
            `RowsTiling.views` returns them, the first tile of rows of the program and the end, and its warpgroup.
        interpret: whether the kernel runs in Mosaic's interpreter.
    """

    tiling: RowsTiling
    refs: Any
    interpret: bool

    def fetch(self, tile: AnyArray, chunk: Any) -> list[list[AnyArray]]:
        """Return the arrays of a tile for each part."""
        t = self.tiling

        def read(ref: Any, part: int) -> AnyArray:
            rows = pl.ds(part * t.rows + (self.refs.first + tile) * TILE_ROWS, TILE_ROWS)
            size = ref.shape[1] // t.chunks // t.warpgroups
            layout = t.code_layout if len(ref.shape) == 3 else factor_layout(size, ref.dtype.itemsize)
            return load(ref.at[rows, pl.ds((self.refs.group * t.chunks + chunk) * size, size)], layout)

        return [[read(ref, part) for ref in self.refs.weight] for part in range(t.parts)]

    def load_x(self, chunk: Any) -> AnyArray:
        """Return the rows of x for the columns of a tile."""
        t = self.tiling
        part = self.refs.x.at[:, pl.ds((self.refs.group * t.chunks + chunk) * t.tile_groups, t.tile_groups)]
        return load(part, t.x_layout)

    def step(self, tile: AnyArray, chunk: Any, x: AnyArray, arrays: Any, _: Any) -> tuple[list[AnyArray], Any]:
        """Return the sums of each warp for each part, and the next tile's arrays."""
        following = read_ahead(self, tile, chunk, arrays)
        return [product(self.tiling, part, x, self.interpret) for part in arrays], following


def prepare_rows(spec: Matvec, refs: Any) -> None:
    """Compute the ops before the product, each warpgroup for up to `WARPS` rows at once, into shared memory `x`.

    Operands without an axis for rows are the same for all.
    """
    t = spec.tiling
    shape = (min(WARPS, t.count), *t.x_shape[1:])
    layout = row_layout(shape[0], shape[2:])

    def read(ref: Any, rows: Any) -> AnyArray:
        if len(ref.shape) == len(shape):
            return load(ref.at[rows], layout)
        return lax.broadcast_in_dim(load(ref, layout.reduce(0)), shape, range(1, len(shape)))

    for start in range(0, t.count, shape[0] * t.warpgroups):
        first = start + refs.group * shape[0]

        @pl.when(first < t.count)
        def _(first: AnyArray = first) -> None:
            rows = pl.ds(first, shape[0])
            (refs.x[rows],) = spec.prologue(*(read(ref, rows) for ref in refs.rows), axis=1)

    plgpu.barrier_arrive(refs.written)
    plgpu.barrier_wait(refs.written)


def run_program(spec: Matvec, tiles: RowTiles, refs: Any, has_ops: bool) -> None:
    """Run one warpgroup of one program: the ops before the product, the product and the epilogue for its tiles of rows.

    Args:
        spec: the shapes and functions.
        tiles: the tiles of the weight.
        refs: operands of the prologue (`rows`) and of the epilogue (`entries`), its results, shared memory for the sums
            of two tiles, and a barrier that all warpgroups pass when they have `written` them.
        has_ops: whether the prologue has ops.
    """
    t, layout = spec.tiling, result_layout(spec.tiling.count)
    begun = tiles.fetch(jnp.int32(0), jnp.int32(0))  # before the ops, which wait
    if has_ops:
        prepare_rows(spec, refs)
    only_x = tiles.load_x(0) if t.chunks == 1 else None

    def multiply(tile: AnyArray, begun: Any) -> Any:
        tile_rows = pl.ds((refs.first + tile) * TILE_ROWS, TILE_ROWS)
        operands = [load(ref.at[:, tile_rows], layout) for ref in refs.entries]
        sums, begun = sum_chunks(tiles, tile, only_x, begun)
        slot = lax.rem(tile, 2)  # all warpgroups have read the other one when one of them writes to it again
        for part, total in enumerate(sums):
            refs.sums[slot, part, pl.ds(refs.group * WARPS, WARPS)] = total
        plgpu.barrier_arrive(refs.written)
        plgpu.barrier_wait(refs.written)

        @pl.when(refs.group == 0)
        def _() -> None:
            def add_warps(part: int) -> AnyArray:
                warps = (refs.sums.at[slot, part, warp, pl.ds(0, t.count)] for warp in range(WARPS * t.warpgroups))
                y = functools.reduce(jnp.add, [load(warp, layout) for warp in warps])
                return y.astype(spec.product_dtype)

            for ref, y in zip(refs.results, spec.epilogue(*map(add_warps, range(t.parts)), *operands), strict=True):
                store(ref.at[:, tile_rows], y)

        return begun

    lax.fori_loop(0, refs.last - refs.first, multiply, begun)


@functools.partial(jax.jit, static_argnums=(0, 4))  # equal kernels of a program are lowered once
def multiply_rows(
    spec: Matvec, weight: AnyArray, rows: Sequence[AnyArray], entries: Sequence[AnyArray], interpret: Any = None
) -> list[AnyArray]:
    """Compute the product and the ops around it.

    Args:
        spec: the shapes and functions.
        weight: as in `matvec`.
        rows: the operands of the prologue, `[rows, K]`, or `[K]` for all rows; x bf16 if it has no ops.
        entries: the operands of the epilogue after the product, `[rows, rows of a part]` each.
        interpret: as in `matvec`.

    Returns:
        the results of the epilogue, of the shape of an operand.
    """
    t = spec.tiling
    assert isinstance(t, RowsTiling) and t.tile_groups % least_groups(t.scheme) == 0
    num_rows = max(len(row) for row in rows if row.ndim > 1)

    def padded(a: AnyArray) -> AnyArray:
        return jnp.pad(a, ((0, t.count - num_rows), (0, 0))) if a.ndim > 1 and num_rows < t.count else a

    has_ops = isinstance(spec.prologue, KernelTrace) and bool(spec.prologue.jaxpr.eqns)

    def program(refs: Any) -> None:
        refs.x = refs.x if has_ops else refs.rows[0]
        run_program(spec, RowTiles(t, refs, interpret is not None), refs, has_ops)

    inputs = {
        "rows": [padded(row).reshape(t.x_shape[2 - row.ndim :]) for row in rows],
        "weight": t.views(weight),
        "entries": [padded(e) for e in entries],
    }
    scratch = {
        **({"x": plgpu.SMEM(t.x_shape, jnp.bfloat16)} if has_ops else {}),
        "sums": plgpu.SMEM((2, t.parts, WARPS * t.warpgroups, MAX_ROWS, TILE_ROWS), jnp.float32),
        "written": plgpu.Barrier(num_arrivals=t.warpgroups),
    }
    outputs = {"results": [jax.ShapeDtypeStruct((t.count, t.rows), d) for d in spec.out_dtypes]}
    results = run_tiles(t, program, inputs, outputs, scratch, interpret, t.warpgroups)
    return [y[:num_rows] for y in results]
