"""Instructions of the products of 2 to 8 rows with a tile of a weight (`row_products.py`), bf16 or packed.

Rows of the weight are rows of the instruction `mma.m16n8k16`, and rows of x are its columns. Codes are converted to
bf16 in registers, exactly. The scale of a group multiplies the sum of its products in float32, so that no value is
rounded to the dtype of the weight, unlike in `PackedWeight.decode`.

In all functions `t` is a `RowsTiling`, the tiling of the weight. A run is a register of consecutive bytes of codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import decode_slice, group_scales
from rlx_jax.lowering.lir.emit import arith, array_of, ir, llvm, mgpu, mma, number, vector, words
from rlx_jax.lowering.lir.mosaic import WARPS, copies, plgpu, tiled

AnyArray = Any

# Number of values that share a scale; number of rows of the weight and of x in an instruction.
GROUP, TILE_ROWS, COLUMNS = 32, 16, 8


def factor_layout(count: int, itemsize: int) -> Any:
    """Return the layout of scales `[8, count]`: a quarter of them per warp, replicated over the lanes of a row."""
    per_warp = count // WARPS
    vector = math.gcd(per_warp, 16 // itemsize)
    tiles = ((8, count), (vector,)) if vector == per_warp else ((8, count), (per_warp,), (vector,))
    row = -1 - len(tiles)
    return tiled(tiles, (row + 1,), (row, *copies(4)))


def sum_layout() -> Any:
    """Return the layout of the results of the instruction, `[WARPS, 8, rows]`."""
    return tiled(((WARPS, 8, 8), (2, 8), (1,)), (-6,), (-2, -5))


def product(t: Any, arrays: Sequence[AnyArray], x: AnyArray, interpret: bool) -> AnyArray:
    """Return the sums of each warp, float32 `[WARPS, 8, TILE_ROWS]`; the rows of x are repeated to 8.

    Args:
        t: the tiling.
        arrays: the codes and the scales of a tile.
        x: the rows of x, at the columns of the tile.
        interpret: whether the kernel runs in Mosaic's interpreter, which has no instructions of the device.
    """
    if interpret:
        w = decoded(t, [a.reshape(TILE_ROWS, -1) for a in arrays]) if t.scheme else arrays[0].astype(jnp.float32)
        quarters = (a.reshape(len(a), WARPS, -1) for a in (x.astype(jnp.float32), w))
        y = jnp.einsum("mqk,nqk->qmn", *quarters, precision="highest")
        return jnp.tile(y, (1, COLUMNS // t.count, 1))
    layouts = [t.code_layout, *(factor_layout(a.shape[1], a.dtype.itemsize) for a in arrays[1:]), t.x_layout]
    out = plgpu.ShapeDtypeStruct((WARPS, COLUMNS, TILE_ROWS), jnp.float32, layout=sum_layout())
    return plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=out)(functools.partial(emit_product, t))(*arrays, x)


def decoded(t: Any, arrays: Sequence[AnyArray]) -> AnyArray:
    """Return the values of a tile, computed without constant arrays, which a kernel cannot capture."""
    named = dict(zip(("codes", "scales"), arrays, strict=True))
    scales, columns = group_scales(named, t.scheme), t.tile_groups * GROUP
    size = GROUP // t.halves

    def part(start: int) -> AnyArray:
        here = {name: a[:, start * a.shape[1] // columns, None] for name, a in scales.items()}
        return decode_slice(named, t.scheme, here, start, size, lambda a: a)

    return jnp.concatenate([part(start) for start in range(0, columns, size)], axis=1)


def emit_product(t: Any, _: Any, *arrays: Any) -> Any:
    """Emit the instructions of `product` on the registers of its operands."""
    *weights, x = arrays
    groups, f32 = t.tile_groups // WARPS, ir.F32Type.get()
    # The words of x for each group: four, or two for each half of a group.
    x_words = [[w for register in row for w in words(register)] for row in x.registers.reshape(groups, -1)]
    total = [mgpu.c(0.0, f32)] * 4
    codes = weights[0].registers.reshape(2, -1)
    for run in range(codes.shape[1]):
        upper, lower = (values_of_run(t, register) for register in codes[:, run])
        for group, *rows in zip(groups_of_run(t, run), upper, lower, strict=True):
            total = add_group(t, weights[-1], total, group, rows, x_words[group])
    one = ir.VectorType.get((1,), f32)
    registers = [vector.broadcast(one, value) for value in total]
    return array_of(registers, sum_layout(), (WARPS, COLUMNS, TILE_ROWS))


def values_of_run(t: Any, register: Any) -> list[list[Any]]:
    """Return the codes of a run as words of two bf16, for each group in the run."""
    parts = words(register)
    if not t.scheme:
        return [parts]
    if t.bits == 8:  # 128 + the lower seven bits, minus 128 or, if the code is negative, 256
        return [[pair for w in parts for pair in pairs(w, 0xFF7FFF7F, None)]]
    offset = number(0x43004300 + SCHEMES[t.scheme].zero * 0x00010001)
    sides = [[pair for w in side for pair in pairs(w, 0xFF0FFF0F, offset)] for side in (parts, map(upper_half, parts))]
    return [sides[0] + sides[1]] if t.vector == 4 else sides  # 4: both halves of a byte are in one group


def upper_half(word: Any) -> Any:
    """Return a word with the upper four bits of each byte moved to the lower four."""
    return arith.shrui(word, number(4))


def pairs(word: Any, mask: int, less: Any) -> list[Any]:
    """Convert the bytes of a word to bf16, as two words: the bits of 128 + byte that `mask` selects, minus `less`.

    If `less` is None, subtract 128, or 256 if the highest bit of the byte is set.
    """
    i32, differences = ir.IntegerType.get_signless(32), list[Any]()
    for selected in (0x7170, 0x7372):
        asm = "prmt.b32 $0, $1, $2, $3;"
        bits: Any = llvm.inline_asm(i32, [word, number(0x43434343), number(selected)], asm, "=r,r,r,r")
        operands = [arith.andi(bits, number(mask)), arith.andi(bits, number(0xFF80FF80)) if less is None else less]
        differences.append(llvm.inline_asm(i32, operands, "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r"))
    return differences


def factor(array: Any, row: int, index: int) -> Any:
    """Return one scale of one of the two rows of a lane."""
    registers = array.registers.reshape(2, -1)
    size = registers[0, 0].type.shape[0]
    return vector.extract(registers[row, index // size], [], [index % size])


def float_of(bits: Any) -> Any:
    """Convert the bits of a float16 to float32."""
    return arith.extf(ir.F32Type.get(), arith.bitcast(ir.F16Type.get(), bits))


def six_bit_scale(array: Any, row: int, group: int, is_minimum: int) -> Any:
    """Return the scale or the minimum of a group in float32; see `six_bit_words`."""
    block, place = divmod(group, 8)
    floats, first, last = (factor(array, row, 4 * block + i) for i in (0, 1 + is_minimum, 3))
    if place < 4:
        multiples = arith.andi(first, number(0x3F3F3F3F))
    else:
        lower = arith.andi(arith.shrui(last, number(4 * is_minimum)), number(0x0F0F0F0F))
        multiples = arith.ori(lower, arith.andi(arith.shrui(first, number(2)), number(0x30303030)))
    multiple = arith.andi(arith.shrui(multiples, number(place % 4 * 8)), number(255))
    bits = arith.trunci(ir.IntegerType.get_signless(16), arith.shrui(floats, number(16 * is_minimum)))
    return arith.mulf(float_of(bits), arith.uitofp(ir.F32Type.get(), multiple))


def add_group(
    t: Any, factors: Any, total: list[Any], group: int, rows: Sequence[list[Any]], x: Sequence[Any]
) -> list[Any]:
    """Add the products of a group to the sums of a lane, and return the sums.

    Args:
        t: the tiling.
        factors: the scales of the tile.
        total: the four sums of a lane: two rows of the weight times two rows of x.
        group: the index of the group.
        rows: the words of its values, for both rows of the lane.
        x: the words of x.
    """
    zero, packing = [mgpu.c(0.0, ir.F32Type.get())] * 4, SCHEMES[t.scheme] if t.scheme else None

    def products(rows: Sequence[Sequence[Any]], sums: Sequence[Any]) -> list[Any]:
        upper, lower = rows
        for i in (0, 2):
            sums = mma(sums, (upper[i], lower[i], upper[i + 1], lower[i + 1]), x[i : i + 2])
        return list(sums)

    if packing is None:
        return products(rows, total)
    sums, index = products(rows, zero), group // ((packing.block or GROUP) // GROUP)
    if not packing.minimum:
        scales = [float_of(factor(factors, row, index)) for row in range(2)]
        return [llvm.intr_fma(sums[i], scales[i // 2], total[i]) for i in range(4)]
    x_sums = products([[number(0x3F803F80)] * 4] * 2, zero)
    scales, minimums = ([six_bit_scale(factors, row, group, i) for row in range(2)] for i in range(2))
    total = [llvm.intr_fma(arith.negf(minimums[i // 2]), x_sums[i], total[i]) for i in range(4)]
    return [llvm.intr_fma(sums[i], scales[i // 2], total[i]) for i in range(4)]


def groups_of_run(t: Any, run: int) -> list[int]:
    """Return the groups of a warp that are in a run: one, or two if each byte contains codes of two groups."""
    if t.bits >= 8 or t.vector == 4:
        return [run]
    runs = SCHEMES[t.scheme].codes[0].stride // GROUP  # runs whose upper halves follow
    first = run // runs * 2 * runs + run % runs
    return [first, first + runs]
