"""Packed weights in the kernel of `matvec.py`: how their codes are divided, and the product of a tile.

x becomes integers of 16 bits, in shared memory, in steps of which the largest entry has 127 · 256. If the others are so
small that this rounds them more than bf16 does, a second integer of each has what the first one leaves: an entry 2²³
times smaller than the largest one still has the precision of bf16. Each lane reads neighbouring codes of one group into
registers, one tile ahead, and multiplies them with the bytes of these integers by the instruction `dp4a`, four at once;
the sums of each integer are exact.
A group's scale then multiplies its sum, so that no decoded weight exists; a zero point or a minimum multiplies the sum
of x. So values are not rounded to the dtype of the weight as `PackedWeight.decode` rounds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import six_bit_words
from rlx_jax.lowering.lir.emit import arith, array_of, ir, llvm, number, vector, words
from rlx_jax.lowering.lir.mosaic import LANES, WARPS, load, pl, plgpu, tiled

AnyArray = Any

# Bytes that a lane reads at once.
VECTOR = 16

# The largest integer: its bytes are two signed ones. A step of the second integer is this part of one of the first.
MAX_X = 127 * 256
FINE = 1 / (2 * MAX_X)

# Entries count as this many steps at most, where their errors are compared with them: a few large ones hide no others.
SMALL_X = MAX_X / 64

# The largest finite number.
MAX_F32 = float(np.finfo(np.float32).max)

# Values of x in the registers of a lane, and values of a tile of all parts, at most.
MAX_X_VALUES, PACKED_TILE = 72, 32768


@dataclass(frozen=True)
class CodeForm:
    """How the values of a block are stored as bytes `[groups, size]`.

    Attributes:
        groups: runs of bytes of a block that scales of their own or the block's multiply.
        size: bytes of a run.
        halves: values of a byte; 2 for codes of 4 bits, of which the upper half belongs to values further on.
        by_block: whether the values further on are in the block's other half; else they follow each run.
    """

    groups: int
    size: int
    halves: int = 1
    by_block: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the values of a block."""
        return (self.halves, self.groups, self.size) if self.by_block else (self.groups, self.halves, self.size)

    @property
    def values(self) -> int:
        """Return the number of values of a block."""
        return math.prod(self.shape)


# The forms of the schemes that the kernel has.
FORMS: dict[str, CodeForm] = {
    "int8/32": CodeForm(8, 32), "gguf_q8_0": CodeForm(8, 32), "int8/128": CodeForm(4, 32),
    "int4/32": CodeForm(8, 16, 2), "gguf_q4_0": CodeForm(8, 16, 2), "int4/128": CodeForm(4, 16, 2, by_block=True),
    "gguf_q4k": CodeForm(4, 32, 2),
}  # fmt: skip


@dataclass(frozen=True)
class PackedTiling:
    """How a packed weight `[parts · rows, K]` is divided; names as in `Tiling`.

    Attributes:
        scheme: the name of the scheme.
        parts, rows, tile_rows, programs: as there.
        blocks: blocks of a row.
        tile_blocks: blocks of a tile.
        lane_rows, lane_blocks: rows and blocks of a tile that the lanes of a warp read at once.
    """

    scheme: str
    parts: int
    rows: int
    tile_rows: int
    programs: int
    blocks: int
    tile_blocks: int
    lane_rows: int
    lane_blocks: int

    @property
    def form(self) -> CodeForm:
        """Return the form of the codes."""
        return FORMS[self.scheme]

    @property
    def chunks(self) -> int:
        """Return the number of tiles in a row."""
        return self.blocks // self.tile_blocks

    @property
    def x_shape(self) -> tuple[int, ...]:
        """Return the shape of a row of x."""
        return (self.blocks, *self.form.shape)

    @property
    def layout(self) -> Any:
        """Return where the bytes `[rows, blocks, groups, size]` of a tile are in registers."""
        form = self.form
        tile = (WARPS * self.lane_rows, self.lane_blocks, form.groups, form.size)
        lanes = (self.lane_rows, self.lane_blocks, form.groups, VECTOR)
        first = next(i for i, n in enumerate(lanes) if n > 1)  # a layout has no leading ones
        inner = lanes[first:]
        tiles = (tile,) if tile[first:] == inner else (tile, inner)
        warp = -4 if len(tiles) == 1 else -4 - len(inner)
        lane_dims = tuple(i - 4 for i in range(3) if lanes[i] > 1)
        return tiled(tiles, (warp,), lane_dims)

    @property
    def y_layout(self) -> Any:
        """Return where one entry for each row of a tile is."""
        return self.layout.reduce((1, 2, 3))

    def views(self, arrays: dict[str, AnyArray]) -> list[AnyArray]:
        """Return the arrays of a weight, in the order of `fetch`, with axes for blocks and groups."""
        form, n = self.form, self.parts * self.rows
        codes, scales = arrays["codes"].reshape(n, self.blocks, form.groups, form.size), arrays["scales"]
        if scales.shape[1] == self.blocks:
            return [codes, scales]
        return [codes, scales.reshape(n, self.blocks, 4 if SCHEMES[self.scheme].six_bits else form.groups)]


def find_packed_tiling(rows: int, columns: int, parts: int, scheme: str, programs: int = 264) -> PackedTiling | None:
    """Return the tiling of a packed weight, or None if its sizes do not divide, or the kernel does not have its scheme.

    Args:
        rows, columns, parts: as in `find_tiling`.
        scheme: the name of the scheme.
        programs: the most programs.
    """
    form = FORMS.get(scheme)
    if form is None or columns % form.values or rows % parts:
        return None
    blocks, part_rows = columns // form.values, rows // parts
    lane_blocks = math.gcd(blocks, LANES // form.groups)
    lane_rows = LANES // form.groups // lane_blocks
    per_lane = form.values * lane_rows // LANES  # values of x for each block
    most = min(blocks, MAX_X_VALUES // per_lane)
    counts = [n for n in range(lane_blocks, most + 1, lane_blocks) if blocks % n == 0]
    tile_rows = WARPS * lane_rows
    if not counts or part_rows % tile_rows or lane_blocks == 1:  # Mosaic finds no layouts for single blocks
        return None
    row_values = max(counts) * form.values * parts
    while part_rows % (2 * tile_rows) == 0 and 2 * tile_rows * row_values <= PACKED_TILE:
        tile_rows *= 2
    used = min(programs, part_rows // tile_rows)
    return PackedTiling(scheme, parts, part_rows, tile_rows, used, blocks, max(counts), lane_rows, lane_blocks)


@dataclass(frozen=True)
class PackedTiles:
    """The tiles of a packed weight that a program reads.

    Attributes:
        tiling: how the weight is divided.
        refs: its arrays as `PackedTiling.views` returns them (`weight`), shared memory for the upper and the lower
            bytes of x, and of what they leave (`x_bytes`), and the first tile of rows of the program and the end.
        interpret: whether the kernel runs in Mosaic's interpreter, which has no instructions of the device.
    """

    tiling: PackedTiling
    refs: Any
    interpret: bool

    def fetch(self, tile: AnyArray, chunk: Any) -> list[list[AnyArray]]:
        """Return the arrays of a tile for each part: codes and scales, the words of a block each alone."""
        t, layout = self.tiling, self.tiling.layout
        start = (self.refs.first + tile) * t.tile_rows
        blocks, parts = pl.ds(chunk * t.tile_blocks, t.tile_blocks), []
        for part in range(t.parts):
            rows = pl.ds(part * t.rows + start, t.tile_rows)
            codes, scales = (array.at[rows, blocks] for array in self.refs.weight)
            if SCHEMES[t.scheme].six_bits:
                reads = [(scales.at[:, :, i], layout.reduce((2, 3))) for i in range(4)]
            else:
                reads = [(scales, layout.reduce(3 if len(scales.shape) == 3 else (2, 3)))]
            reads.insert(0, (codes, layout))
            parts.append([load(ref, part_layout) for ref, part_layout in reads])
        return parts

    def store_x(self, x: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Write a row x to shared memory as integers.

        Returns:
            the number that 1 of the first integers stands for, and whether there are second ones.
        """

        x = x.astype(jnp.float32)
        largest = jnp.maximum(jnp.max(jnp.abs(x)), jnp.float32(1e-30))
        # An infinite entry becomes the largest integer, so that its results are infinite.
        finite = jnp.where(x > MAX_F32, MAX_F32, jnp.where(x < -MAX_F32, -MAX_F32, x))
        steps = finite * jnp.broadcast_to(MAX_X / jnp.minimum(largest, MAX_F32), x.shape)
        coarse = rounded(steps)
        rest = steps - coarse.astype(jnp.float32)
        excess = jnp.sum(jnp.abs(rest) * 256 - jnp.minimum(jnp.abs(steps), SMALL_X))
        has_fine = excess > 0

        def store(integers: AnyArray, refs: Sequence[Any]) -> None:
            upper = (integers + 128) >> 8
            refs[0][...] = upper.astype(jnp.int8)
            refs[1][...] = (integers - (upper << 8)).astype(jnp.int8)

        store(coarse, self.refs.x_bytes[:2])
        pl.when(has_fine)(lambda: store(rounded(rest * jnp.float32(1 / FINE)), self.refs.x_bytes[2:]))
        return largest / MAX_X + 0 * excess, has_fine  # NaN if an entry is: not every maximum is NaN then

    def load_x(self, chunk: Any, first: int = 0) -> list[list[AnyArray]]:
        """Return integers of x for each half of a byte of codes, in the order of `product`.

        Args:
            chunk: number of a tile in a row.
            first: 0 for the first integers, 2 for the second ones.
        """
        t, packing = self.tiling, SCHEMES[self.tiling.scheme]
        blocks, layout = pl.ds(chunk * t.tile_blocks, t.tile_blocks), t.layout.reduce(0)
        halves = [(blocks, h) if t.form.by_block else (blocks, slice(None), h) for h in range(t.form.halves)]
        refs = self.refs.x_bytes[first : first + 2]
        parts = [[load(ref.at[half], layout) for ref in refs] for half in halves]
        return [[*part, self.dot(None, part)] if packing.zero or packing.minimum else part for part in parts]

    def begin(self) -> list[list[AnyArray]]:
        """Start to read: return the arrays of the first tile."""
        return self.fetch(jnp.int32(0), 0)

    def step(
        self, tile: AnyArray, chunk: Any, x: Sequence[Sequence[AnyArray]], arrays: Sequence[Sequence[AnyArray]],
        stored: tuple[AnyArray, AnyArray],
    ) -> tuple[list[AnyArray], list[list[AnyArray]]]:  # fmt: skip
        """Return the product of a tile with the integers for each part `[tile rows]`, and the next tile's arrays.

        Args:
            tile: the number of the rows of the tile.
            chunk: its number in these rows.
            x: the first integers of x, as `load_x` returns them.
            arrays: its arrays, as `fetch` returned them.
            stored: what `store_x` returned.
        """
        following = read_ahead(self, tile, chunk, arrays)
        results = [self.product(part, x) for part in arrays]

        def add_fine() -> list[AnyArray]:
            x = self.load_x(chunk, 2)
            return [y + self.product(part, x) * FINE for y, part in zip(results, arrays, strict=True)]

        return lax.cond(stored[1], add_fine, lambda: list(results)), following

    def product(self, arrays: Sequence[AnyArray], x: Sequence[Sequence[AnyArray]]) -> AnyArray:
        """Return the product of one part of a tile with integers of x.

        Args:
            arrays: as `fetch` returns them.
            x: for each half of a byte of codes, the upper and the lower bytes `[blocks, groups, size]`, and the sums
                over each group for a scheme that needs them.
        """
        codes, *factors = arrays
        shape, packing = codes.shape[:3], SCHEMES[self.tiling.scheme]

        def spread(values: AnyArray, *axes: int) -> AnyArray:
            return lax.broadcast_in_dim(values, shape, axes)

        # The codes of the upper half are not shifted: sums are 16 times as large.
        masks = (255,) if len(x) == 1 else (15, 240)
        sums = [self.dot(codes, part[:2], mask) for part, mask in zip(x, masks, strict=True)]
        x_sums = [part[2] for part in x if len(part) > 2]
        if packing.group is None:
            total = sums[0] if len(x) == 1 else sums[0] * 16 + sums[1]
            if packing.zero:
                total = total - spread(functools.reduce(jnp.add, x_sums) * (16 * packing.zero), 1, 2)
            scales = floats(factors[0]) * (1 if len(x) == 1 else 1 / 16)
            result = total.astype(jnp.float32) * (scales if scales.ndim == 3 else spread(scales, 0, 1))
        else:
            # Sums of products are below 2³¹: of 64 integers of x, codes of 4 bits, and multiples of 6.
            values = [sums[0], sums[1] >> 4], [spread(part, 1, 2) for part in x_sums]
            pairs = zip(self.multiples(factors[1:], shape), values, strict=True)
            totals = [(lower * v + upper * u).astype(jnp.float32) for (lower, upper), (v, u) in pairs]
            scale, minimum = (spread(floats((factors[0] >> 16 * i).astype(jnp.uint16)), 0, 1) for i in (0, 1))
            result = scale * totals[0] - minimum * totals[1]
        return result.sum(axis=2).sum(axis=1)

    def multiples(self, words: Sequence[AnyArray], shape: Sequence[int]) -> list[tuple[AnyArray, AnyArray]]:
        """Return the multiples of scales, and of minimums, of the lower and of the upper halves, int32 of this shape.

        Args:
            words: the second to the last word of each block, `[rows, blocks]`.
            shape: rows, blocks, groups.
        """
        group = plgpu.layout_cast(lax.broadcasted_iota(jnp.uint32, shape, 2), self.tiling.layout.reduce(3))
        pairs = []
        for i in range(2):
            early, late = (lax.broadcast_in_dim(w, shape, (0, 1)) for w in six_bit_words(words[i], words[2], i))
            pair = jnp.where(group < 2, early, late) >> (group & 1) * 16
            pairs.append(((pair & 255).astype(jnp.int32), (pair >> 8 & 255).astype(jnp.int32)))
        return pairs

    def dot(self, codes: AnyArray | None, x: Sequence[AnyArray], mask: int = 255) -> AnyArray:
        """Return the sums over each group of codes times the integers of x, int32; without codes, of the integers.

        Args:
            codes: bytes `[rows, blocks, groups, size]`.
            x: the upper and the lower bytes of integers `[blocks, groups, size]`.
            mask: the bits of each byte of codes that count.
        """
        if codes is not None:
            x = [lax.broadcast_in_dim(part, codes.shape, (1, 2, 3)) for part in x]
        operands = [*x] if codes is None else [*x, codes]
        if self.interpret:
            upper, lower, *rest = (operand.astype(jnp.int32) for operand in operands)
            values = upper * 256 + lower
            if rest:
                values = values * (rest[0] if mask == 255 else rest[0] & mask)
            return values.sum(axis=-1)
        layout = self.tiling.layout if codes is not None else self.tiling.layout.reduce(0)
        return dot_bytes(operands, layout, mask, is_signed=codes is not None and codes.dtype == jnp.int8)


def read_ahead(tiles: Any, tile: AnyArray, chunk: Any, arrays: Sequence[Sequence[AnyArray]]) -> list[list[AnyArray]]:
    """Return the arrays of the tile after this one; of this one, if it is the last of its program.

    Args:
        tiles: a `PackedTiles` or `RowTiles`.
        tile, chunk, arrays: as in `PackedTiles.step`.
    """
    chunks = tiles.tiling.chunks
    wraps = (chunk + 1) // chunks
    fetch = functools.partial(tiles.fetch, tile + wraps, chunk + 1 - wraps * chunks)
    parts: list[list[AnyArray]] = lax.cond(
        tiles.refs.first + tile + wraps < tiles.refs.last, fetch, lambda: [list(part) for part in arrays]
    )
    return parts


def dot_bytes(operands: Sequence[AnyArray], layout: Any, mask: int, is_signed: bool) -> AnyArray:
    """Return the sums over the last axis of codes times integers, int32, by the instruction `dp4a`.

    Args:
        operands: the upper and the lower bytes of the integers, and the codes; 1 if there are none.
        layout: the layout of the operands, in which a lane has all of the last axis.
        mask: the bits of each byte of codes that count.
        is_signed: whether the codes are signed.
    """
    *shape, size = operands[0].shape
    reduced = layout.reduce(len(shape))

    def body(_: Any, *arrays: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        one = ir.VectorType.get((1,), i32)
        asm = f"dp4a.{'s32' if is_signed else 'u32'}.s32 $0, $1, $2, $3;"

        def words_of(registers: Any) -> list[Any]:
            return [word for register in registers for word in words(register)]

        def sum_of(upper: list[Any], lower: list[Any], *codes: list[Any]) -> Any:
            factors = codes[0] if codes else [number(0x01010101)] * len(upper)
            if mask != 255:
                factors = [arith.andi(factor, number(mask * 0x01010101)) for factor in factors]
            sums = [number(0), number(0)]
            for i, part in enumerate((upper, lower)):
                for factor, x in zip(factors, part, strict=True):
                    sums[i] = llvm.inline_asm(i32, [factor, x, sums[i]], asm, "=r,r,r,r")
            return vector.broadcast(one, arith.addi(arith.shli(sums[0], number(8)), sums[1]))

        rows = zip(*(array.registers.reshape(-1, size // VECTOR) for array in arrays), strict=True)
        registers = [sum_of(*map(words_of, row)) for row in rows]
        return array_of(registers, reduced, tuple(shape), is_signed=True)

    result = plgpu.ShapeDtypeStruct(tuple(shape), jnp.int32, layout=reduced)
    return plgpu.inline_mgpu(arg_types=(layout,) * len(operands), return_type=result)(body)(*operands)


def rounded(x: AnyArray) -> AnyArray:
    """Return the nearest integers, int32, of numbers below 2²²."""
    # Adding 1.5 · 2²³ leaves the integer in the low bits of the sum.
    return lax.bitcast_convert_type(x + jnp.float32(1.5 * 2**23), jnp.int32) - jnp.int32(0x4B400000)


def floats(bits: AnyArray) -> AnyArray:
    """Return the float32 values of the bits of float16."""
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
