"""One Pallas kernel (Mosaic GPU) for the products of blocks of rows with the weights of their experts, on `wgmma`.

A program has a warpgroup that copies and two that multiply, each half of a block's rows, and computes a tile of the
result after another: one program runs on each multiprocessor. Weights are copied by TMA, and so are rows that are
neighbours. Rows that are gathered are copied by `cp.async`, straight into the layout that `wgmma` reads, so that no
array of them exists. A warpgroup without rows in the last block of an expert computes nothing.

Measured on one H200, bf16, a layer of 16,384 tokens, 8 of 128 experts of width 768 over 2048, µs: gate, up and the
activation 1,270, of which 1,024 if nothing is copied, down 616 and 507; the kernels of `kernels.py` 1,448 and 784, two
dense products of as many operations by cuBLAS 1,009 and 520. Blocks of a column of tiles one after another, 3 slots,
warpgroups that begin one after the other, approximate exponentials, barriers that copies complete, blocks of 192 rows
by three warpgroups, and reading the next tile's weights into the cache ahead gain nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.lir.experts import SortedChoices
from rlx_jax.lowering.lir.mosaic import arith, ir, llvm, load, mgpu, pl, plgpu, vector

AnyArray = Any

# Rows of a block and of a warpgroup, columns of a tile of all weights, and the contracted entries of a step.
ROWS, OWN_ROWS, COLUMNS, DEPTH = 128, 64, 256, 64

# Steps that shared memory has room for; the steps last begun, for whose gathered rows a program does not wait yet; and
# programs. With as many of the second as of the first, copies and products would wait for each other.
SLOTS, LAG, PROGRAMS = 4, 2, 132

# Registers of a thread that copies, and of one that multiplies.
COPYING, MULTIPLYING = 40, 232

# Threads that copy a row together, 16 bytes each, and bytes of a row of a step.
ROW_THREADS, ROW_BYTES = 8, 128


def fits_products(op: ExpertFfn, x: AnyArray, gate: AnyArray) -> bool:
    """Return whether the kernel computes the products of a mixture: 16-bit floats, sizes that tiles divide."""
    _, inner, hidden = gate.shape
    is_divided = inner % (COLUMNS // 2) == 0 and hidden % COLUMNS == 0
    return bool(op.contract) and not op.biased and is_divided and short_name(x.dtype) in ("bf16", "f16")


def multiply_choices(
    op: ExpertFfn, tokens: AnyArray, weights: Sequence[AnyArray], choices: SortedChoices, top: int,
    interpret: Any = None,
) -> AnyArray:  # fmt: skip
    """Return the results of each row of the blocks of choices, by two kernels.

    Args:
        op: the mixture.
        tokens: the tokens.
        weights: gate, up and down of all experts.
        choices: blocks of `ROWS` choices of one expert each.
        top: choices of a token.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    blocks = choices.block_expert.astype(jnp.int32), choices.row_mask.sum(-1, dtype=jnp.int32)
    token = choices.row_choice.reshape(-1).astype(jnp.int32) // top
    return run_products(op, tokens, weights, *blocks, token, interpret)


@functools.partial(jax.jit, static_argnums=(0, 6))  # equal layers of a program are lowered once
def run_products(
    op: ExpertFfn, tokens: AnyArray, weights: Sequence[AnyArray], block_expert: AnyArray, count: AnyArray,
    token: AnyArray, interpret: Any,
) -> AnyArray:  # fmt: skip
    """Return the results of each row of some blocks, with operands as in `multiply_blocks`."""
    gate, up, down = weights
    rows = multiply_blocks(op.gated, tokens, (gate, up), block_expert, count, token, interpret)
    return multiply_blocks(lambda y: y, rows, (down,), block_expert, count, None, interpret)


class ProductSizes(NamedTuple):
    """Sizes of products of blocks.

    Attributes:
        weights: one or two weights are multiplied with.
        columns: columns of the result.
        depth: contracted entries.
        is_gathered: the rows of the blocks are numbers of rows.
        programs: programs, each of which computes a tile after another.
    """

    weights: int
    columns: int
    depth: int
    is_gathered: bool
    programs: int

    @property
    def tile_columns(self) -> int:
        """Return the columns of a tile of the result."""
        return COLUMNS // self.weights

    @property
    def tiles_in_row(self) -> int:
        """Return the number of tiles of a block."""
        return self.columns // self.tile_columns

    @property
    def steps(self) -> int:
        """Return the steps of a tile."""
        return self.depth // DEPTH

    @property
    def pieces(self) -> int:
        """Return in how many pieces a tile is written: shared memory has room for one, or for two of four."""
        return 1 if self.weights == 2 else 4


class ProductRefs(NamedTuple):
    """Operands of a program: references to memory of the device and shared memory, barriers, and its place.

    Attributes:
        experts, counts, used: the expert of each block and the number of its rows, and the number of blocks with rows.
        numbers: the rows of x that blocks have, if they are gathered.
        x, weights, out: the rows, the weights and the result.
        x_tiles, w_tiles, out_tiles: shared memory for steps of rows and of weights, and for pieces of the result.
        x_copied, w_copied, consumed: for each slot of a step, a barrier of copies of rows, of weights, and of products.
        group, program: the number of the warpgroup, and of the program.
    """

    experts: Any
    counts: Any
    used: Any
    numbers: Any
    x: Any
    weights: Any
    out: Any
    x_tiles: Any
    w_tiles: Any
    out_tiles: Any
    x_copied: Any
    w_copied: Any
    consumed: Any
    group: Any
    program: Any

    def place(self, sizes: ProductSizes, tile: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the block and the column of a tile with the number `tile` of this program."""
        number = self.program + tile * sizes.programs
        return lax.div(number, sizes.tiles_in_row), lax.rem(number, sizes.tiles_in_row)

    def await_step(self, step: AnyArray) -> AnyArray:
        """Wait until a step is in shared memory, and return its slot."""
        slot = lax.rem(step, SLOTS)
        plgpu.barrier_wait(self.x_copied.at[slot])
        plgpu.barrier_wait(self.w_copied.at[slot])
        return slot


def multiply_blocks(
    finish: Callable[..., AnyArray], x: AnyArray, weights: Sequence[AnyArray], block_expert: AnyArray, count: AnyArray,
    number: AnyArray | None, interpret: Any,
) -> AnyArray:  # fmt: skip
    """Compute `finish(x W₀ᵀ, …)` of every block with rows; rows after the last one of a block have any values.

    Args:
        finish: an elementwise function of the products.
        x: the rows.
        weights: one or two weights `[experts, columns, K]`.
        block_expert: the expert of each block `[n]`.
        count: the number of its rows `[n]`; blocks without rows come last.
        number: which row of x each row of the blocks is `[n · ROWS]`; None if they are the rows of x.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    used = (count > 0).sum(dtype=jnp.int32)[None]
    if interpret is not None and number is not None:  # the interpreter has no instructions of the device
        x, number = x[number], None
    numbers = [] if number is None else [number]
    _, columns, depth = weights[0].shape
    sizes = ProductSizes(len(weights), columns, depth, number is not None, PROGRAMS if interpret is None else 3)

    def body(*refs: Any) -> None:
        (experts, counts, used), (x_ref, *others) = refs[:3], refs[3 + len(numbers) :]
        given = experts, counts, used, refs[3 : 3 + len(numbers)], x_ref, others[: len(weights)]
        place = lax.axis_index("group"), lax.axis_index("program")
        run_group(sizes, finish, ProductRefs._make((*given, *others[len(weights) :], *place)))

    tiling, buffers = transforms(), min(sizes.pieces, 2)
    scratch: list[Any] = [
        plgpu.SMEM((SLOTS, ROWS, DEPTH), x.dtype, transforms=tiling),
        plgpu.SMEM((SLOTS, COLUMNS, DEPTH), x.dtype, transforms=tiling),
        plgpu.SMEM((2, buffers, OWN_ROWS, sizes.tile_columns // sizes.pieces), x.dtype, transforms=tiling),
        plgpu.Barrier(num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=len(weights), num_barriers=SLOTS),
        plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
    ]
    run = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((len(block_expert) * ROWS, columns), x.dtype), grid=(sizes.programs,),
        grid_names=("program",), num_threads=3, thread_name="group", scratch_types=scratch,
        **({} if interpret is None else {"interpret": interpret}),
    )  # fmt: skip
    return run(block_expert, count, used, *numbers, x, *weights)


def run_group(sizes: ProductSizes, finish: Callable[..., AnyArray], refs: ProductRefs) -> None:
    """Run a warpgroup of a program: the last one copies, the others multiply."""
    tiles = refs.used[0] * sizes.tiles_in_row
    num_tiles = lax.div(tiles - refs.program + sizes.programs - 1, sizes.programs)
    end = num_tiles * sizes.steps

    @pl.when(refs.group == 2)
    def _() -> None:
        plgpu.set_max_registers(COPYING, action="decrease")
        pl.loop(0, num_tiles)(functools.partial(copy_tile, sizes, refs))
        await_end(sizes, refs, end)

    @pl.when(refs.group < 2)
    def _() -> None:
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        pl.loop(0, num_tiles)(functools.partial(multiply_tile, sizes, finish, refs))
        plgpu.wait_smem_to_gmem(0)


def multiply_tile(sizes: ProductSizes, finish: Callable[..., AnyArray], refs: ProductRefs, tile: AnyArray) -> None:
    """Compute the half of a tile that a warpgroup has, and write it; without rows, free the steps alone."""
    block, column = refs.place(sizes, tile)
    first, is_filled = tile * sizes.steps, refs.counts[block] > refs.group * OWN_ROWS

    @pl.when(jnp.logical_not(is_filled))
    def _() -> None:
        @pl.loop(0, sizes.steps)
        def _(k: AnyArray) -> None:
            plgpu.barrier_arrive(refs.consumed.at[refs.await_step(first + k)])

    def accumulate(sums: Any) -> AnyArray:
        @pl.loop(0, sizes.steps)
        def _(k: AnyArray) -> None:
            slot = refs.await_step(first + k)
            rows = refs.x_tiles.at[slot, pl.ds(refs.group * OWN_ROWS, OWN_ROWS)]
            plgpu.wgmma(sums, rows, refs.w_tiles.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(0)  # the other warpgroup multiplies meanwhile
            plgpu.barrier_arrive(refs.consumed.at[slot])

        return sums[...]

    @pl.when(is_filled)
    def _() -> None:
        sums = pl.run_scoped(accumulate, cast(Any, plgpu).ACC((OWN_ROWS, COLUMNS), jnp.float32))
        width = sizes.tile_columns
        products = [sums[:, p * width : (p + 1) * width] for p in range(sizes.weights)] if sizes.weights > 1 else [sums]
        write_tile(sizes, refs, block, column, finish(*products).astype(refs.out.dtype))


def write_tile(sizes: ProductSizes, refs: ProductRefs, block: AnyArray, column: AnyArray, y: AnyArray) -> None:
    """Write the half of a tile that a warpgroup has, piece by piece through shared memory."""
    rows = pl.ds(block * ROWS + refs.group * OWN_ROWS, OWN_ROWS)
    width, buffers = sizes.tile_columns // sizes.pieces, min(sizes.pieces, 2)
    for piece in range(sizes.pieces):
        buffer = refs.out_tiles.at[refs.group, piece % buffers]
        plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
        buffer[...] = y[:, piece * width : (piece + 1) * width] if sizes.pieces > 1 else y
        plgpu.commit_smem()
        place = refs.out.at[rows, pl.ds(column * sizes.tile_columns + piece * width, width)]
        plgpu.copy_smem_to_gmem(buffer, place)


def copy_tile(sizes: ProductSizes, refs: ProductRefs, tile: AnyArray) -> None:
    """Copy the steps of a tile to shared memory, each once its slot is free."""
    block, column = refs.place(sizes, tile)
    expert, rows = refs.experts[block], pl.ds(block * ROWS, ROWS)
    own = [load(ref.at[rows], row_layout(), optimized=False) for ref in refs.numbers]

    @pl.loop(0, sizes.steps)
    def _(k: AnyArray) -> None:
        step = tile * sizes.steps + k
        slot, entries = lax.rem(step, SLOTS), pl.ds(k * DEPTH, DEPTH)

        @pl.when(step >= SLOTS)
        def _() -> None:
            plgpu.barrier_wait(refs.consumed.at[slot])

        width = sizes.tile_columns
        for p, ref in enumerate(refs.weights):
            source, target = ref.at[expert, pl.ds(column * width, width), entries], pl.ds(p * width, width)
            plgpu.copy_gmem_to_smem(source, refs.w_tiles.at[slot, target], refs.w_copied.at[slot])
        if not own:
            plgpu.copy_gmem_to_smem(refs.x.at[rows, entries], refs.x_tiles.at[slot], refs.x_copied.at[slot])
        else:
            copy_rows(refs.x_tiles.at[slot], refs.x, own[0], k, sizes.depth)

            @pl.when(step >= LAG)
            def _() -> None:
                wait_for_rows(LAG)
                plgpu.barrier_arrive(refs.x_copied.at[lax.rem(step - LAG, SLOTS)])


def await_end(sizes: ProductSizes, refs: ProductRefs, end: AnyArray) -> None:
    """Announce the rows of the last steps, and wait until all steps have been multiplied."""
    for left in range(LAG, 0, -1) if sizes.is_gathered else ():

        @pl.when(end >= left)
        def _(left: int = left) -> None:
            wait_for_rows(left - 1)
            plgpu.barrier_arrive(refs.x_copied.at[lax.rem(end - left, SLOTS)])

    for left in range(1, SLOTS + 1):

        @pl.when(end >= left)
        def _(left: int = left) -> None:
            plgpu.barrier_wait(refs.consumed.at[lax.rem(end - left, SLOTS)])


def transforms() -> tuple[Any, ...]:
    """Return the layout in shared memory that `wgmma` reads."""
    return plgpu.TilingTransform((8, DEPTH)), plgpu.SwizzleTransform(ROW_BYTES)


def row_layout() -> Any:
    """Return the layout of the numbers of rows: `ROW_THREADS` threads have every 16th number."""
    tiles, copies = plgpu.Tiling(((16,), (4,), (1,))), plgpu.Replicated(ROW_THREADS)
    return plgpu.Layout.TILED(tiles, warp_dims=(-3,), lane_dims=(-2, copies), vector_dim=-1)


def copy_rows(target: Any, x: Any, numbers: AnyArray, step: AnyArray, depth: int) -> None:
    """Begin to copy the entries of a step of some rows of x to shared memory, in the layout of `transforms`.

    Each 16 bytes of a row are at their number exclusive-or the number of the row.
    """
    arg_types = (plgpu.RefType(transforms()), plgpu.RefType(), row_layout(), plgpu.Layout.WG_SPLAT)

    def emit(_: Any, target: Any, x: Any, numbers: Any, step: Any) -> None:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        rows = [vector.extract(r, [], [0]) for r in numbers.registers.flat]
        offset = arith.extui(i64, arith.muli(step.registers.flat[0], mgpu.c(ROW_BYTES, i32)))
        source = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(x)), offset)
        asm = """{
            .reg .u32 thread, row, part, to; .reg .u64 from, first;
            mov.u32 thread, %tid.x; and.b32 thread, thread, 127; shr.u32 row, thread, 3; and.b32 part, thread, 7;
            shl.b32 to, part, 4; cvt.u64.u32 first, to; add.u64 first, first, $1;
            xor.b32 part, part, row; and.b32 part, part, 7; shl.b32 part, part, 4;
            shl.b32 to, row, 7; add.u32 to, to, part; add.u32 to, to, $0;"""
        for i in range(len(rows)):
            asm += f"mad.wide.u32 from, ${2 + i}, {2 * depth}, first;"
            asm += f"cp.async.cg.shared.global.L2::128B [to + {16 * ROW_BYTES * i}], [from], 16;"
        operands = [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(target)), source, *rows]
        emit_asm(asm + "cp.async.commit_group; }", operands, "r,l" + ",r" * len(rows))

    plgpu.inline_mgpu(arg_types=arg_types)(emit)(target, x, numbers, step)


def wait_for_rows(begun: int) -> None:
    """Wait until all copies of rows but the last `begun` have ended, and `wgmma` reads what they wrote."""
    asm = f"cp.async.wait_group {begun}; fence.proxy.async.shared::cta;"
    plgpu.inline_mgpu()(lambda _: emit_asm(asm, [], ""))()


def emit_asm(asm: str, operands: Sequence[Any], constraints: str) -> None:
    """Emit instructions of the device."""
    llvm.inline_asm(None, operands, asm, constraints, has_side_effects=True)
