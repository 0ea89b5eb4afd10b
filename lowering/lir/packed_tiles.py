"""One Pallas kernel (Mosaic GPU) for products of some rows with a packed weight, on `wgmma`.

The features of the weight are the rows of the result, 64 for each warpgroup, and the rows of x are its columns. One
warpgroup of a program copies codes and x to shared memory; the others decode codes in registers, which `wgmma` reads
there. A lane reads 16 codes that are neighbours, where the instruction expects pairs that are 8 apart, so the columns
of x are put in the same order while they are copied. Few features are divided further: several programs, and two
warpgroups of each, sum parts of a row.

Measured on one H200, bf16, 64 rows, Q8_0: a step of Llama 1B 1.33 ms, of floats 1.32, decoded by XLA 2.83; the product
with 128256 x 2048 136 µs, of floats 158, by a kernel of Triton 226. The codes alone can be read in 73.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import SCHEMES, Scheme
from rlx_jax.lowering.lir.emit import announce_rows, emit_asm, ir, llvm, mgpu, vector
from rlx_jax.lowering.lir.implementations import few_rows, with_reference
from rlx_jax.lowering.lir.mosaic import await_slot, load, pl, plgpu, run_kernel, transforms
from rlx_jax.lowering.lir.packed import PackedWeight, dequant_matmul, has_tiles
from rlx_jax.lowering.lir.tile_decoder import STEP, TILE, Decoder, code_layout

AnyArray = Any

# Warpgroups that decode, multiprocessors, and bytes of shared memory for steps and sums.
GROUPS, PROGRAMS, SHARED = 4, 132, 220 * 1024

# Registers of a program, and of a thread that copies; the others have the rest.
REGISTERS, COPYING = 65536, 32


class Division(NamedTuple):
    """How a product is divided.

    Attributes:
        rows: rows of x, a multiple of 8.
        width: columns of x.
        tiles: tiles of features.
        wide: warpgroups for the features of a tile.
        deep: warpgroups that sum different columns of the same features.
        parts: parts of a row that programs sum.
        programs: programs, each of which computes one part of a tile after another.
        bits: bits of a code.
        slots: steps that shared memory has room for.
    """

    rows: int
    width: int
    tiles: int
    wide: int
    deep: int
    parts: int
    programs: int
    bits: int
    slots: int

    @property
    def steps(self) -> int:
        """Return the steps of a part."""
        return self.width // STEP // self.parts

    @property
    def features(self) -> int:
        """Return the features of a tile."""
        return TILE * self.wide

    @property
    def registers(self) -> int:
        """Return the registers of a thread that decodes; more than all have at the start together would never come."""
        groups = self.wide * self.deep
        at_start = REGISTERS // (128 * (groups + 1)) // 8 * 8
        return min(232, (at_start * (groups + 1) - COPYING) // groups // 8 * 8)

    @property
    def lag(self) -> int:
        """Return the steps last begun, for whose rows of x a program does not wait yet."""
        return min(2, self.slots // 2)

    @property
    def code_tiles(self) -> int:
        """Return the tiles of `TILE` bytes of codes of a step."""
        return STEP * self.bits // 8 // TILE

    def place(self, program: AnyArray, number: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the tile and the part that a program computes as its `number`-th."""
        unit = program + number * self.programs
        return lax.div(unit, self.parts), lax.rem(unit, self.parts)


def divide(rows: int, height: int, width: int, bits: int, programs: int = PROGRAMS) -> Division:
    """Return the division of a product by which the busiest multiprocessor reads and writes the fewest bytes."""
    best, size = None, -(-rows // 8) * 8
    for wide in (n for n in range(GROUPS, 0, -1) if height // TILE % n == 0):
        deep, tiles = (2 if 2 * wide <= GROUPS else 1), height // TILE // wide
        step, sums = STEP * (TILE * wide * bits // 8 + 2 * size), (deep - 1) * TILE * wide * size * 4
        for parts in (n for n in range(1, width // STEP + 1) if width // STEP % n == 0):
            most = -(-tiles * parts // programs)
            cost = most * (width // STEP // parts) * step + parts * size * height * 8 // programs
            used, slots = min(programs, tiles * parts), min(8, (SHARED - sums) // step)
            if best is None or cost < best[0]:
                best = cost, Division(size, width, tiles, wide, deep, parts, used, bits, slots)
    assert best is not None
    return best[1]


def multiply_tiles(x: AnyArray, w: PackedWeight, interpret: Any = None) -> AnyArray:
    """Compute the product of x `[M, K]` with a packed weight `[N, K]`, in float32."""
    arrays = w.arrays["codes"], w.arrays["scales"]
    return run_tiles(SCHEMES[w.scheme], w.logical_dtype, x.astype(w.dtype), *arrays, interpret)


@functools.partial(jax.jit, static_argnums=(0, 1, 5))  # equal products of a program are lowered once
def run_tiles(
    scheme: Scheme, logical: np.dtype[Any], x: AnyArray, codes: AnyArray, scales: AnyArray, interpret: Any
) -> AnyArray:
    """Compute `multiply_tiles` of a weight with these arrays, whose values are rounded to `logical` before."""
    rows, decoder = len(x), Decoder(scheme, logical, interpret is not None)
    d = divide(rows, len(codes), x.shape[1], decoder.bits, PROGRAMS if interpret is None else 2)
    if decoder.interprets:  # the interpreter has no instructions of the device
        sizes, order = {"u": 2, "v": 2, "h": 2, "q": 8, "e": 2}, {16: "uvhqe", 32: "uhvqe", 64: "huvqe"}[decoder.stride]
        x = jnp.pad(x, ((0, d.rows - rows), (0, 0))).reshape(d.rows, -1, *(sizes[axis] for axis in order))
        x = x.transpose(0, 1, *(2 + order.index(axis) for axis in "hquve")).reshape(d.rows, -1)

    groups, barrier = d.wide * d.deep, plgpu.Barrier
    scratch = {
        # Steps of x and of codes, of `TILE` columns each, sums that another warpgroup adds, and decoded values of each
        # warpgroup, in the interpreter alone.
        "x_tiles": plgpu.SMEM((d.slots, 2, d.rows, TILE), x.dtype, transforms=transforms()),
        "code_tiles": plgpu.SMEM((d.slots, d.code_tiles, d.features, TILE), codes.dtype),
        "sums": plgpu.SMEM((d.features, d.rows if d.deep > 1 else 1), jnp.float32),
        "decoded": plgpu.SMEM((groups, TILE, TILE) if decoder.interprets else (1, 1, 8), x.dtype),
        # For each slot of a step, barriers of its copies and of products; barriers of sums that are written, and read.
        "x_copied": barrier(num_arrivals=2 if decoder.interprets else 1, num_barriers=d.slots),
        "codes_copied": barrier(num_arrivals=d.code_tiles, num_barriers=d.slots),
        "consumed": barrier(num_arrivals=groups, num_barriers=d.slots),
        "summed": barrier(num_arrivals=d.wide), "added": barrier(num_arrivals=d.wide),
    }  # fmt: skip
    out = jax.ShapeDtypeStruct((d.parts, d.rows, d.tiles * d.features), jnp.float32)
    (sums,) = run_kernel(
        functools.partial(run_group, d, decoder, rows), {"x": x, "codes": codes, "scales": scales}, {"out": out},
        scratch, {"program": d.programs}, groups + 1, interpret,
    )  # fmt: skip
    return sums.sum(axis=0)[:rows]


def run_group(d: Division, decoder: Decoder, rows: int, refs: Any) -> None:
    """Run a warpgroup of a program: the last one copies, the others decode and multiply."""
    units = d.tiles * d.parts
    count = lax.div(units - refs.program + d.programs - 1, d.programs)
    end = count * d.steps

    @pl.when(refs.group == d.wide * d.deep)
    def _() -> None:
        plgpu.set_max_registers(COPYING, action="decrease")
        pl.loop(0, end)(functools.partial(copy_step, d, decoder, rows, refs))
        for left in range(d.lag, 0, -1) if not decoder.interprets else ():
            pl.when(end >= left)(functools.partial(announce_rows, refs.x_copied, d.slots, end - left, left - 1))
        for left in range(d.slots, 0, -1):
            slot = refs.consumed.at[lax.rem(end + d.slots - left, d.slots)]
            pl.when(end >= left)(functools.partial(plgpu.barrier_wait, slot))

    @pl.when(refs.group < d.wide * d.deep)
    def _() -> None:
        plgpu.set_max_registers(d.registers, action="increase")
        pl.loop(0, count)(functools.partial(multiply_unit, d, decoder, refs, count))


def multiply_unit(d: Division, decoder: Decoder, refs: Any, count: AnyArray, unit: AnyArray) -> None:
    """Compute the features and the columns that a warpgroup has of a part of a tile, and write their sums."""
    (tile, part), feature, half = d.place(refs.program, unit), lax.rem(refs.group, d.wide), lax.div(refs.group, d.wide)
    first, own = tile * d.features + feature * TILE, pl.ds(feature * TILE, TILE)
    pieces = [0, 1] if d.deep == 1 else [half]

    def accumulate(sums: Any) -> AnyArray:
        def fetch(k: Any) -> list[AnyArray]:
            column = (part * d.steps + k) * STEP
            starts = [column + piece * TILE for piece in pieces] if decoder.bits == 8 else [column]
            return [decoder.fetch(refs.scales, first, start) for start in starts]

        def step(k: AnyArray, scales: list[AnyArray]) -> list[AnyArray]:
            slot, following = lax.rem(unit * d.steps + k, d.slots), fetch(jnp.minimum(k + 1, d.steps - 1))
            plgpu.barrier_wait(refs.codes_copied.at[slot])
            plgpu.barrier_wait(refs.x_copied.at[slot])
            for piece, scale in zip(pieces, scales if len(scales) == len(pieces) else scales * 2, strict=True):
                tile_of_codes = piece if decoder.bits == 8 else 0
                codes = load(refs.code_tiles.at[slot, tile_of_codes, own], code_layout())
                values = decoder.decode(codes, scale, jnp.int32(piece), (part * d.steps + k) * STEP)
                if decoder.interprets:
                    refs.decoded[refs.group] = values
                    values = refs.decoded.at[refs.group]
                plgpu.wgmma(sums, values, refs.x_tiles.at[slot, piece].transpose((1, 0)))
                if d.rows > TILE or piece is pieces[-1]:  # many sums leave too few registers
                    plgpu.wgmma_wait(0)  # other warpgroups decode meanwhile
            plgpu.commit_smem()  # before copies overwrite what was read
            plgpu.barrier_arrive(refs.consumed.at[slot])
            return following

        lax.fori_loop(0, d.steps, step, fetch(0))
        return sums[...]

    total = pl.run_scoped(accumulate, cast(Any, plgpu).ACC((TILE, d.rows), jnp.float32))
    if d.deep == 1:
        store(decoder, refs.out.at[part], d.tiles * d.features, first, total)
        return

    @pl.when(half == 1)
    def _() -> None:
        pl.when(unit > 0)(lambda: plgpu.barrier_wait(refs.added))
        refs.sums[own] = total
        plgpu.barrier_arrive(refs.summed)

    @pl.when(half == 0)
    def _() -> None:
        plgpu.barrier_wait(refs.summed)
        others = load(refs.sums.at[own], plgpu.Layout.WGMMA)
        pl.when(unit + 1 < count)(lambda: plgpu.barrier_arrive(refs.added))
        store(decoder, refs.out.at[part], d.tiles * d.features, first, total + others)


def store(decoder: Decoder, out: Any, height: int, first: AnyArray, sums: AnyArray) -> None:
    """Write sums `[features, rows]` to columns of the result `[rows, features]`."""
    if decoder.interprets:
        out[:, pl.ds(first, TILE)] = sums.T
        return

    def emit(_: Any, out: Any, first: Any, sums: Any) -> None:
        i64, row = ir.IntegerType.get_signless(64), 4 * height
        asm = f"""{{
            .reg .u32 tid, warp, lane;
            mov.u32 tid, %tid.x; and.b32 lane, tid, 3; mad.wide.u32 $0, lane, {2 * row}, $1;
            shr.u32 warp, tid, 1; and.b32 warp, warp, 48; shr.u32 lane, tid, 2; and.b32 lane, lane, 7;
            add.u32 lane, lane, warp; add.u32 lane, lane, $2; mad.wide.u32 $0, lane, 4, $0;
        }}"""
        operands = [llvm.ptrtoint(i64, mgpu.utils.memref_ptr(out)), first.registers.flat[0]]
        base = llvm.inline_asm(i64, operands, asm, "=&l,l,r", has_side_effects=True)
        for i, pair in enumerate(sums.registers.flat):
            at = i // 2 * 8 * row + i % 2 * 32
            asm = f"st.global.f32 [$0 + {at}], $1; st.global.f32 [$0 + {at + row}], $2;"
            emit_asm(asm, [base, *(vector.extract(pair, [], [j]) for j in range(2))], "l,f,f")

    arg_types = plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WGMMA
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(out, first, sums)


def copy_step(d: Division, decoder: Decoder, rows: int, refs: Any, step: AnyArray) -> None:
    """Copy a step to shared memory, once its slot is free."""
    slot, unit = lax.rem(step, d.slots), lax.div(step, d.steps)
    tile, part = d.place(refs.program, unit)
    features, column = pl.ds(tile * d.features, d.features), (part * d.steps + lax.rem(step, d.steps)) * STEP
    await_slot(refs.consumed, d.slots, step)
    for i in range(d.code_tiles):
        source = refs.codes.at[features, pl.ds(column // 8 * d.bits + i * TILE, TILE)]
        plgpu.copy_gmem_to_smem(source, refs.code_tiles.at[slot, i], refs.codes_copied.at[slot])
    if not decoder.interprets:
        copy_x(d, decoder.stride, rows, refs.x_tiles.at[slot], refs.x, column)
        pl.when(step >= d.lag)(lambda: announce_rows(refs.x_copied, d.slots, step - d.lag, d.lag))
    for i in range(2) if decoder.interprets else ():
        source = refs.x.at[:, pl.ds(column + i * TILE, TILE)]
        plgpu.copy_gmem_to_smem(source, refs.x_tiles.at[slot, i], refs.x_copied.at[slot])


def copy_x(d: Division, stride: int, rows: int, target: Any, x: Any, column: AnyArray) -> None:
    """Begin to copy the columns of a step to shared memory, in the layout of `transforms`.

    Lanes copy a pair of each half: lane 16 u + 8 v + q the columns a u + b v + 2 q, with a and b by the stride, to the
    place 4 q + 2 u + v. Rows after the last one repeat it.
    """
    arg_types = plgpu.RefType(transforms()), plgpu.RefType(), plgpu.Layout.WG_SPLAT
    apart = {16: (64, 32), 32: (64, 16), 64: (32, 16)}[stride]

    def emit(_: Any, target: Any, x: Any, column: Any) -> None:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        asm = f"""{{
            .reg .u32 lane, row, q, t, to<2>; .reg .u64 from, first;
            mov.u32 lane, %tid.x; shr.u32 row, lane, 5; and.b32 row, row, 3; and.b32 q, lane, 7;
            shr.u32 t, lane, 1; and.b32 t, t, 12; xor.b32 to0, q, row; shl.b32 to0, to0, 4; add.u32 to0, to0, t;
            shl.b32 t, row, 7; add.u32 to0, to0, t; add.u32 to0, to0, $0; xor.b32 to1, to0, 64;
            bfe.u32 t, lane, 4, 1; shl.b32 q, q, 1; mad.lo.u32 q, t, {apart[0]}, q;
            bfe.u32 t, lane, 3, 1; mad.lo.u32 q, t, {apart[1]}, q; add.u32 q, q, $2; mad.wide.u32 first, q, 2, $1;"""
        for i in range(d.rows // 4):
            asm += f"add.u32 q, row, {4 * i}; min.u32 q, q, {rows - 1}; mad.wide.u32 from, q, {2 * d.width}, first;"
            for half in range(2):
                to, source = (half * d.rows + 4 * i) * 2 * TILE, half * 2 * stride
                asm += f"cp.async.ca.shared.global [to{i % 2} + {to}], [from + {source}], 4;"
        operands = [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target)), llvm.ptrtoint(i64, mgpu.utils.memref_ptr(x))]
        emit_asm(asm + "cp.async.commit_group; }", [*operands, column.registers.flat[0]], "r,l,r")

    plgpu.inline_mgpu(arg_types=arg_types)(emit)(target, x, column)


@with_reference(functools.partial(dequant_matmul, "cuda"))
def multiply(op: MatMul | FusedMatMulBiasAct, *operands: AnyArray) -> AnyArray:
    """Compute a product by the kernel."""
    return few_rows(multiply_tiles, op, *operands)


def packed_tiles(op: MatMul | FusedMatMulBiasAct, x: AnyArray, w: AnyArray, *bias: AnyArray) -> AnyArray:
    """Compute a product by the kernel; as without it, if this weight is a float, or packed by another scheme.

    Layers of one type may have weights of several schemes.
    """
    if not isinstance(w, PackedWeight):
        return op.eval(x, w, *bias)
    has_kernel = has_tiles(w.scheme, w.shape, math.prod(x.shape[:-1]))
    return (multiply if has_kernel else functools.partial(dequant_matmul, "cuda"))(op, x, w, *bias)
