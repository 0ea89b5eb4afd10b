"""One Pallas kernel (Mosaic GPU) for a product of one row with a weight, bf16 or packed, and the ops around it.

`matvec` computes `y = W · prologue(x, …)` and `epilogue(y, …)`. The prologue runs in every program of the kernel, over
a whole row: a norm, a residual sum. The epilogue runs over the few entries of y that a program has just computed: a
bias, an activation of gate and up, a residual. Both are JAX functions of the arrays `[1, …, K]` of a model. They are
traced once, and their equations run in the kernel (`kernel_trace.py`); so a new elementwise op needs no new kernel.

A program reads its rows of W in order, as tiles of some rows and at most `CHUNK` columns, several tiles ahead, and each
warp multiplies some rows of a tile. Reading W takes most of the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.lowering.lir.kernel_trace import KernelTrace
from rlx_jax.lowering.lir.mosaic import LANES, WARPS, load, pl, plgpu, run_kernel, store, tiled
from rlx_jax.lowering.lir.packed_matvec import PackedTiles, PackedTiling

AnyArray = Any

# Columns of a tile, at most: as many values of x are in the registers of a warp, in float32.
CHUNK = 2304

# Tiles of a row whose code the kernel repeats, at most; more are a loop, and those after the first of a packed weight.
MAX_UNROLLED = 8

# Multiprocessors of a Hopper GPU, the bytes of shared memory for programs in each, and its programs at once, at most.
MULTIPROCESSORS, SHARED, MAX_PROGRAMS = 132, 226 * 1024, 3

# Entries of a tile of one part, about: 16 KB of bf16, the copy that read fastest on one H200.
TILE = 8192

# Tiles read ahead; and at most, where a program reads many and shared memory is free: with 6 of 8 tiles, a product of
# 2048 x 8192 took 12.2 µs on an H200, with 3 it took 10.1; heads of 128256 x 2048 and 262144 x 1152 gained 1.6 and 4.
SLOTS, MAX_SLOTS, MANY_TILES = 3, 6, 40


@dataclass(frozen=True)
class Tiling:
    """How a weight `[parts · rows, K]` is divided.

    Attributes:
        parts: equal parts of the rows whose results the epilogue combines: 2 for gate and up, else 1.
        rows: rows of a part.
        lines, width: the K columns as lines of contiguous entries: `K = lines · width`.
        tile_rows: rows of a tile.
        tile_lines: lines of a tile.
        programs: programs of the kernel.
        slots: tiles that a program reads ahead.
    """

    parts: int
    rows: int
    lines: int
    width: int
    tile_rows: int
    tile_lines: int
    programs: int
    slots: int = SLOTS

    @property
    def chunks(self) -> int:
        """Return the number of tiles in a row."""
        return -(-self.lines // self.tile_lines)

    def first_line(self, chunk: Any) -> Any:
        """Return the first line of a tile in a row. The last tile may overlap the one before."""
        line = chunk * self.tile_lines
        return line if self.is_even else jnp.minimum(line, self.lines - self.tile_lines)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Return the shape of a row of x."""
        return self.lines, self.width

    @property
    def layout(self) -> Any:
        """Return where a tile is: each warp has whole rows, each lane some neighbouring entries of a line."""
        return tiled(((WARPS, 1, self.width), (self.width // LANES,)), (-4,), (-2,))

    @property
    def y_layout(self) -> Any:
        """Return where one entry for each row of a tile is."""
        return self.layout.reduce((1, 2))

    @property
    def is_even(self) -> bool:
        """Return whether the tiles of a row share no lines."""
        return self.lines % self.tile_lines == 0

    @property
    def at_once(self) -> int:
        """Return the most programs that run at once."""
        tile = self.tile_rows * self.tile_lines * self.width
        shared = 2 * (SLOTS * self.parts * tile + self.lines * self.width)
        return MULTIPROCESSORS * max(1, min(MAX_PROGRAMS, SHARED // shared))


def find_tiling(rows: int, columns: int, parts: int) -> Tiling | None:
    """Return the tiling of a weight, or None if its sizes do not divide.

    Args:
        rows: rows of the weight, of all parts.
        columns: columns of the weight, the size K of the contracted axis.
        parts: as in `Tiling`.
    """
    if rows % (parts * WARPS):
        return None
    widths = (w for w in (256, 128, 64) if columns % w == 0)
    tiles = [(n, w) for w in widths for n in range(2, columns // w + 1) if n * w <= CHUNK]
    if not tiles:
        return None
    # Mosaic searches for minutes for the layouts of tiles of one line, hence two lines or more. Large tiles that divide
    # the row; else those that read the fewest entries twice.
    even = [tile for tile in tiles if columns % math.prod(tile) == 0 and math.prod(tile) >= min(columns, CHUNK // 2)]
    even = even or [tile for tile in tiles if tile[1] == tiles[0][1]]
    tile_lines, width = min(even, key=lambda tile: (-columns % math.prod(tile), -math.prod(tile)))
    lines, part_rows = columns // width, rows // parts
    tile_rows = WARPS
    while part_rows % (2 * tile_rows) == 0 and 2 * tile_rows * tile_lines * width * parts <= TILE:
        tile_rows *= 2
    # No program waits for a place on a multiprocessor, and each but some has as many tiles.
    t, part_tiles = Tiling(parts, part_rows, lines, width, tile_rows, tile_lines, 1), part_rows // tile_rows
    program_tiles = -(-part_tiles // t.at_once)
    programs = -(-part_tiles // program_tiles)
    if program_tiles * t.chunks < MANY_TILES:
        return replace(t, programs=programs)
    free = SHARED // -(-programs // MULTIPROCESSORS) - 2 * columns
    slots = free // (2 * parts * tile_rows * tile_lines * width)
    return replace(t, programs=programs, slots=max(SLOTS, min(MAX_SLOTS, slots)))


@dataclass(frozen=True)
class Matvec:
    """The shapes and functions of one kernel.

    Attributes:
        tiling: how the weight is divided: a `Tiling`, `PackedTiling` or, for several rows, a `RowsTiling`.
        prologue: `(x, …) → (row, kept rows …)` over whole rows; the first result is multiplied.
        epilogue: `(y parts …, …) → results` over entries of y.
    """

    tiling: Any
    prologue: Callable[..., list[AnyArray]]
    epilogue: KernelTrace

    @property
    def out_dtypes(self) -> list[Any]:
        """Return the dtypes of the results."""
        return [aval.dtype for aval in self.epilogue.jaxpr.out_avals]

    @property
    def product_dtype(self) -> Any:
        """Return the dtype of y."""
        return self.epilogue.jaxpr.in_avals[0].dtype


def row_layout(t: Tiling | PackedTiling) -> tuple[Any, bool]:
    """Return where the entries of a whole row are for the prologue, and whether it is repeated.

    It is divided among all lanes, or in every warp if its length does not divide.
    """
    columns = math.prod(t.x_shape)
    vector = next((n for n in (8, 4, 2, 1) if columns % (LANES * WARPS * n) == 0), None)
    return (t.layout.reduce(0), True) if vector is None else (plgpu.Layout.WG_STRIDED(t.x_shape, vector), False)


@dataclass(frozen=True)
class WeightTiles:
    """The tiles of the weight that a program reads, in order, `slots` of them ahead.

    Attributes:
        tiling: how the weight is divided.
        source: `(part, row, line) → reference` to the entries of a tile, from its first row and line on.
        refs: shared memory for x `[lines, width]` and for the `tiles` `[slots, parts, tile rows, tile lines, width]`, a
            barrier for each slot, which its copies complete (`copied`), and the first tile of rows of the program and
            the end.
        factor: `chunk → number`, which multiplies the products of a tile; None for 1.
    """

    tiling: Tiling
    source: Callable[[int, AnyArray, AnyArray], Any]
    refs: Any
    factor: Callable[[Any], AnyArray] | None = None

    def begin(self) -> tuple[()]:
        """Start to copy the first tiles."""
        for step in range(self.tiling.slots):
            self.start(jnp.int32(step))
        return ()

    def start(self, step: AnyArray) -> None:
        """Start to copy the tile of a step, of every part, if there is one."""
        t, refs = self.tiling, self.refs

        @pl.when(step < (refs.last - refs.first) * t.chunks)
        def _() -> None:
            slot = lax.rem(step, t.slots)
            row, line = (refs.first + step // t.chunks) * t.tile_rows, t.first_line(lax.rem(step, t.chunks))
            for part in range(t.parts):
                plgpu.copy_gmem_to_smem(self.source(part, row, line), refs.tiles.at[slot, part], refs.copied.at[slot])

    def store_x(self, x: AnyArray) -> None:
        """Write a row x to shared memory."""
        self.refs.x[...] = x

    def load_x(self, chunk: Any) -> AnyArray:
        """Return the values of x for a tile of a row, in float32, for each row of the tile."""
        t, start, layout = self.tiling, self.tiling.first_line(chunk), self.tiling.layout.reduce(0)
        part = load(self.refs.x.at[pl.ds(start, t.tile_lines)], layout, optimized=True).astype(jnp.float32)
        if not t.is_even:  # the first lines of the last tile are the last ones of the tile before
            lines = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, part.shape, 0), layout)
            part = jnp.where(lines + start >= chunk * t.tile_lines, part, 0)
        return lax.broadcast_in_dim(part, (t.tile_rows, t.tile_lines, t.width), (1, 2))

    def step(self, tile: AnyArray, chunk: Any, x: AnyArray, *_: Any) -> tuple[list[AnyArray], tuple[()]]:
        """Return the product of a tile with x for each part `[tile rows]`, and start a later copy."""
        t, step = self.tiling, tile * self.tiling.chunks + chunk
        slot = lax.rem(step, t.slots)
        plgpu.barrier_wait(self.refs.copied.at[slot])
        tiles = (load(self.refs.tiles.at[slot, part], t.layout, optimized=True) for part in range(t.parts))
        results = [(tile.astype(jnp.float32) * x).sum(axis=1).sum(axis=1) for tile in tiles]
        if self.factor is not None:
            results = [y * jnp.broadcast_to(self.factor(chunk), y.shape) for y in results]
        plgpu.commit_smem()  # all warps have read the tile
        self.start(step + t.slots)
        return results, ()


def sum_chunks(tiles: Any, tile: AnyArray, only_x: Any, begun: Any, stored: Any = None) -> tuple[list[AnyArray], Any]:
    """Return the product of a tile of rows with x for each part, and what has begun to be read.

    Args:
        tiles: a `WeightTiles`, `PackedTiles` or `RowTiles`.
        tile: the number of the rows of the tile.
        only_x: x if a tile has all columns, else None.
        begun: what has begun to be read.
        stored: what `tiles.store_x` returned.
    """
    chunks = tiles.tiling.chunks

    def add_chunk(chunk: Any, state: Any) -> Any:
        sums, begun = state
        products, begun = tiles.step(tile, chunk, tiles.load_x(chunk) if only_x is None else only_x, begun, stored)
        return [a + b for a, b in zip(sums, products, strict=True)] if sums else products, begun

    state = add_chunk(0, ([], begun))
    if chunks > (MAX_UNROLLED if isinstance(tiles, WeightTiles) else 1):
        sums, begun = lax.fori_loop(1, chunks, add_chunk, state)
    else:
        sums, begun = functools.reduce(lambda state, chunk: add_chunk(chunk, state), range(1, chunks), state)
    return sums, begun


def run_program(spec: Matvec, refs: Any, tiles: WeightTiles | PackedTiles) -> None:
    """Run one program of the kernel: the prologue, and the product and the epilogue for its tiles of rows.

    Args:
        spec: the shapes and functions.
        refs: operands of the prologue (`rows`) and of the epilogue (`entries`), results of the epilogue (`results`) and
            of the prologue (`kept`), and the first tile of rows and the end.
        tiles: the tiles of the weight.
    """
    t, (layout, is_repeated) = spec.tiling, row_layout(spec.tiling)
    begun: Any = tiles.begin()
    x, *kept = spec.prologue(*(load(ref, layout) for ref in refs.rows), axis=0 if is_repeated else None)
    stored: Any = tiles.store_x(x)
    for ref, row in zip(refs.kept, kept, strict=True):

        @pl.when(refs.program == 0)
        def _(ref: Any = ref, row: AnyArray = row) -> None:
            store(ref, row)

    only_x = tiles.load_x(0) if t.chunks == 1 else None

    def multiply(tile: AnyArray, begun: Any) -> Any:
        out_rows = pl.ds((refs.first + tile) * t.tile_rows, t.tile_rows)
        operands = [load(ref.at[out_rows], t.y_layout) for ref in refs.entries]

        sums, begun = sum_chunks(tiles, tile, only_x, begun, stored)
        # After the last chunk, as an infinite unit times the 0 of another chunk is NaN.
        sums = sums if stored is None else [y * jnp.broadcast_to(stored[0], y.shape) for y in sums]
        results = spec.epilogue(*(y.astype(spec.product_dtype) for y in sums), *operands)
        for ref, y in zip(refs.results, results, strict=True):
            store(ref.at[out_rows], y)
        return begun

    lax.fori_loop(0, refs.last - refs.first, multiply, begun)


@functools.partial(jax.jit, static_argnums=(0, 4))  # equal kernels of a program are lowered once
def matvec(
    spec: Matvec, weight: AnyArray, rows: Sequence[AnyArray], entries: Sequence[AnyArray], interpret: Any = None
) -> list[AnyArray]:
    """Compute the product and the ops around it.

    Args:
        spec: the shapes and functions.
        weight: `[parts · rows, K]`, or the arrays of a packed one by name.
        rows: the operands of the prologue, of K entries each.
        entries: the operands of the epilogue after the product, of one entry for each row of a part.
        interpret: parameters of Mosaic's interpreter; None to compile.

    Returns:
        the results of the epilogue `[rows]`, then the prologue's results after the first `[K]`.
    """
    t, prologue = spec.tiling, spec.prologue
    assert isinstance(prologue, KernelTrace)
    x_dtype, *kept = (aval.dtype for aval in prologue.jaxpr.out_avals)
    arrays = t.views(weight) if isinstance(t, PackedTiling) else [weight.reshape(-1, t.lines, t.width)]

    def program(refs: Any) -> None:
        tiles: WeightTiles | PackedTiles
        if isinstance(t, PackedTiling):
            tiles = PackedTiles(t, refs, interpret is not None)
        else:

            def source(part: int, row: AnyArray, line: AnyArray) -> Any:
                return refs.weight[0].at[pl.ds(part * t.rows + row, t.tile_rows), pl.ds(line, t.tile_lines)]

            tiles = WeightTiles(t, source, refs)
        run_program(spec, refs, tiles)

    bytes_of_x = {"x_bytes": [plgpu.SMEM(t.x_shape, jnp.int8)] * 4}
    scratch = bytes_of_x if isinstance(t, PackedTiling) else scratch_of(t, x_dtype, weight.dtype)
    outputs = {
        "results": [jax.ShapeDtypeStruct((t.rows,), dtype) for dtype in spec.out_dtypes],
        "kept": [jax.ShapeDtypeStruct(t.x_shape, dtype) for dtype in kept],
    }
    entry_rows = [e.reshape(-1) for e in entries]
    inputs = {"rows": [row.reshape(t.x_shape) for row in rows], "weight": arrays, "entries": entry_rows}
    return [r.reshape(-1) for r in run_tiles(t, program, inputs, outputs, scratch, interpret)]


def scratch_of(t: Tiling, x_dtype: Any, dtype: Any) -> dict[str, Any]:
    """Return the shared memory of a program for x and tiles, and for each slot of one a barrier of its copies."""
    tiles = plgpu.SMEM((t.slots, t.parts, t.tile_rows, t.tile_lines, t.width), dtype)
    copied = plgpu.Barrier(num_arrivals=t.parts, num_barriers=t.slots)
    return {"x": plgpu.SMEM(t.x_shape, x_dtype), "tiles": tiles, "copied": copied}


def run_tiles(
    t: Any, program: Callable[[Any], None], inputs: Mapping[str, Any], outputs: Mapping[str, Any],
    scratch: Mapping[str, Any], interpret: Any, groups: int = 0,
) -> Any:  # fmt: skip
    """Run a kernel whose programs have an equal number of tiles of rows, or one more, and return its results.

    Args:
        t: how the weight is divided.
        program: a program; `first` and `last` of its argument are its first tile of rows and the one after its last.
        inputs, outputs, scratch, interpret, groups: as in `run_kernel`.
    """

    def body(refs: Any) -> None:
        index, num_tiles = refs.program, t.rows // t.tile_rows
        refs.first, refs.last = index * num_tiles // t.programs, (index + 1) * num_tiles // t.programs
        program(refs)

    return run_kernel(body, inputs, outputs, scratch, {"program": t.programs}, groups, interpret)
