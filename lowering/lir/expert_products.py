"""The Pallas kernel (Mosaic GPU) of `grouped`: products of blocks of rows with their experts' weights, on `wgmma`.

A program has a warpgroup that copies and one or two that multiply, each 64 of a block's rows, and computes a tile of
the result after another: one program runs on each multiprocessor. Weights are copied by TMA, and so are rows that are
neighbours. Rows that are gathered are copied by `cp.async`, straight into the layout that `wgmma` reads, so that no
array of them exists. A warpgroup without rows in the last block of an expert computes nothing. Small blocks are bound
by reading weights: `wgmma` multiplies 64 rows, of which as many are copied and written as the block has.

Measured on one H200, bf16, 128 experts of width 768 over 2048, 8 for each token, µs a layer: 64 tokens 300, 256 tokens
317, 1,024 tokens 389; the kernels in Triton's dialect before these 290, 335 and 420. 16,384 tokens: gate, up and the
activation 1,270, of which 1,024 if nothing is copied, down 616 and 507; two dense products of as many operations by
cuBLAS 1,009 and 520. Blocks of a column of tiles one after another, 3 slots, warpgroups that begin one after the other,
approximate exponentials, barriers that copies complete, blocks of 192 rows by three warpgroups, and reading the next
tile's weights into the cache ahead gain nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.lowering.lir.emit import announce_rows, arith, emit_asm, ir, llvm, mgpu, vector
from rlx_jax.lowering.lir.experts import blocked, combine, compare_into_blocks, count_into_blocks
from rlx_jax.lowering.lir.implementations import with_reference
from rlx_jax.lowering.lir.kernel_trace import KernelTrace, trace
from rlx_jax.lowering.lir.mosaic import await_slot, copies, load, pl, plgpu, run_kernel, tiled, transforms

AnyArray = Any

# Rows of the largest block and of a warpgroup, columns of a tile of all weights, and of a piece of the result, and the
# contracted entries of a step.
ROWS, OWN_ROWS, COLUMNS, PIECE, DEPTH = 128, 64, 256, 64, 64

# Steps that shared memory has room for; the steps last begun, for whose gathered rows a program does not wait yet; and
# programs. With as many of the second as of the first, copies and products would wait for each other.
SLOTS, LAG, PROGRAMS = 4, 2, 132

# Registers of a thread that copies, and of one that multiplies.
COPYING, MULTIPLYING = 40, 232

# Threads that copy a row together, 16 bytes each, and bytes of a row of a step.
ROW_THREADS, ROW_BYTES = 8, 128

# Rows of blocks, by the number of choices of an expert, on average, up to which they are used; `ROWS` beyond.
BLOCKS = {8: 16, 16: 32, 64: 64}

# Number of choices up to which all pairs are compared instead of counting choices by expert.
MAX_COMPARED_CHOICES = 2048


def multiply_choices(op: ExpertFfn, *arrays: AnyArray, interpret: Any = None) -> AnyArray:
    """Compute the op by two kernels over blocks of choices of one expert each.

    Args:
        op: the mixture.
        arrays: operands as in `ExpertFfn`.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    x, gate, up, down, weights, ids, *biases = arrays
    rows = next((rows for most, rows in BLOCKS.items() if ids.size <= most * len(gate)), ROWS)
    build_blocks = compare_into_blocks if ids.size <= MAX_COMPARED_CHOICES else count_into_blocks
    choices = build_blocks(ids, len(gate), rows)
    tokens, token = x.reshape(-1, x.shape[-1]), choices.row_choice.reshape(-1).astype(jnp.int32) // ids.shape[-1]
    has_rows = choices.row_mask[:, ::OWN_ROWS].astype(jnp.int32)
    out = run_products(
        op, tokens, (gate, up, down), biases, choices.block_expert.astype(jnp.int32), has_rows, token, interpret
    )
    return combine(choices.unsort(out).astype(jnp.float32), x, weights)


grouped = with_reference(blocked)(multiply_choices)


@functools.partial(jax.jit, static_argnums=(0, 7))  # equal layers of a program are lowered once
def run_products(
    op: ExpertFfn, tokens: AnyArray, weights: Sequence[AnyArray], biases: Sequence[AnyArray], block_expert: AnyArray,
    has_rows: AnyArray, token: AnyArray, interpret: Any,
) -> AnyArray:  # fmt: skip
    """Return the results of each row of some blocks, with operands as in `multiply_blocks`."""
    multiply = functools.partial(multiply_blocks, op.contract, block_expert, has_rows, interpret)
    gated, unchanged = trace(op.gated, 2, jnp.float32), trace(lambda y: y, 1, jnp.float32)
    rows = multiply(gated, tokens, weights[:2], biases[:2], token)
    return multiply(unchanged, rows, weights[2:], biases[2:], None)


class ProductSizes(NamedTuple):
    """Sizes of products of blocks.

    Attributes:
        weights: one or two weights are multiplied with.
        contract: 1 for weights `[experts, columns, depth]`, 0 for `[experts, depth, columns]`.
        rows: rows of a block.
        columns: columns of the result.
        depth: contracted entries.
        is_gathered: the rows of the blocks are numbers of rows.
        programs: programs, each of which computes a tile after another.
    """

    weights: int
    contract: int
    rows: int
    columns: int
    depth: int
    is_gathered: bool
    programs: int

    @property
    def groups(self) -> int:
        """Return the warpgroups that multiply, each as many as `OWN_ROWS` rows: a small block has fewer."""
        return -(-self.rows // OWN_ROWS)

    @property
    def tile_columns(self) -> int:
        """Return the columns of a tile of the result."""
        return min(COLUMNS // self.weights, self.columns)

    @property
    def tiles_in_row(self) -> int:
        """Return the number of tiles of a block; copies of the last one leave out what is past the last column."""
        return -(-self.columns // self.tile_columns)

    @property
    def steps(self) -> int:
        """Return the steps of a tile."""
        return self.depth // DEPTH

    @property
    def products(self) -> int:
        """Return the products of a step: of all weights at once, if their columns follow each other in memory."""
        return 1 if self.contract else self.weights

    @property
    def product_columns(self) -> int:
        """Return the columns of a product."""
        return self.tile_columns * self.weights // self.products

    def oriented(self, columns: Any, entries: Any) -> tuple[Any, Any]:
        """Return columns and contracted entries in the order of a weight's axes."""
        return (columns, entries) if self.contract else (entries, columns)

    def place(self, program: AnyArray, tile: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the block and the column of a tile with the number `tile` of a program."""
        number = program + tile * self.programs
        return lax.div(number, self.tiles_in_row), lax.rem(number, self.tiles_in_row)


def await_step(refs: Any, step: AnyArray) -> AnyArray:
    """Wait until a step is in shared memory, and return its slot."""
    slot = lax.rem(step, SLOTS)
    plgpu.barrier_wait(refs.x_copied.at[slot])
    plgpu.barrier_wait(refs.w_copied.at[slot])
    return slot


def multiply_blocks(
    contract: int, block_expert: AnyArray, has_rows: AnyArray, interpret: Any, finish: KernelTrace, x: AnyArray,
    weights: Sequence[AnyArray], biases: Sequence[AnyArray], number: AnyArray | None,
) -> AnyArray:  # fmt: skip
    """Compute `finish(x W₀ + b₀, …)` of every block with rows; rows after the last one of a block have any values.

    Args:
        contract: as in `ExpertFfn`.
        block_expert: the expert of each block `[n]`.
        has_rows: whether each `OWN_ROWS` of its rows, or all, have any `[n, ceil(rows / OWN_ROWS)]`, 0 or 1; blocks
            without rows come last.
        interpret: parameters of Mosaic's interpreter; None to compile.
        finish: an elementwise function of the products.
        x: the rows.
        weights: one or two weights of all experts.
        biases: their biases `[experts, columns]`, or none.
        number: which row of x each row of the blocks is; None if they are the rows of x.
    """
    used, parts = has_rows[:, 0].sum(dtype=jnp.int32)[None], list(has_rows.T[1:])
    block_rows = len(x if number is None else number) // len(block_expert)
    if interpret is not None and number is not None:  # the interpreter has no instructions of the device
        x, number = x[number], None
    numbers = [] if number is None else [number]
    depth, columns = x.shape[1], weights[0].shape[1 if contract else 2]
    programs = PROGRAMS if interpret is None else 3
    sizes = ProductSizes(len(weights), contract, block_rows, columns, depth, number is not None, programs)

    padding = sizes.tiles_in_row * sizes.tile_columns - columns
    biases = [jnp.pad(bias, ((0, 0), (0, padding))) for bias in biases]
    groups, weight_shape = sizes.groups, sizes.oriented(sizes.product_columns, DEPTH)
    inputs = {
        "experts": block_expert, "used": used, "x": x, "parts": parts, "numbers": numbers, "weights": [*weights],
        "biases": biases,
    }  # fmt: skip
    scratch = {
        # Steps of rows and of weights, and pieces of the result.
        "x_tiles": plgpu.SMEM((SLOTS, groups * OWN_ROWS, DEPTH), x.dtype, transforms=transforms()),
        "w_tiles": plgpu.SMEM((SLOTS, sizes.products, *weight_shape), x.dtype, transforms=transforms()),
        "out_tiles": plgpu.SMEM((groups, 2, OWN_ROWS, PIECE), x.dtype, transforms=transforms()),
        # For each slot of a step, barriers of copies of rows, of weights, and of products.
        "x_copied": plgpu.Barrier(num_barriers=SLOTS),
        "w_copied": plgpu.Barrier(num_arrivals=len(weights), num_barriers=SLOTS),
        "consumed": plgpu.Barrier(num_arrivals=groups, num_barriers=SLOTS),
    }
    out = jax.ShapeDtypeStruct((len(block_expert) * block_rows, columns), x.dtype)
    run = functools.partial(run_group, sizes, finish)
    return run_kernel(run, inputs, {"out": out}, scratch, {"program": sizes.programs}, groups + 1, interpret)[0]


def run_group(sizes: ProductSizes, finish: KernelTrace, refs: Any) -> None:
    """Run a warpgroup of a program: the last one copies, the others multiply."""
    tiles = refs.used[0] * sizes.tiles_in_row
    num_tiles = lax.div(tiles - refs.program + sizes.programs - 1, sizes.programs)
    end = num_tiles * sizes.steps

    @pl.when(refs.group == sizes.groups)
    def _() -> None:
        if sizes.groups > 1:  # otherwise all threads have enough
            plgpu.set_max_registers(COPYING, action="decrease")
        pl.loop(0, num_tiles)(functools.partial(copy_tile, sizes, refs))
        await_end(sizes, refs, end)

    @pl.when(refs.group < sizes.groups)
    def _() -> None:
        if sizes.groups > 1:
            plgpu.set_max_registers(MULTIPLYING, action="increase")
        pl.loop(0, num_tiles)(functools.partial(multiply_tile, sizes, finish, refs))
        plgpu.wait_smem_to_gmem(0)


def multiply_tile(sizes: ProductSizes, finish: KernelTrace, refs: Any, tile: AnyArray) -> None:
    """Compute the part of a tile that a warpgroup has, and write it; without rows, free the steps alone."""
    block, column = sizes.place(refs.program, tile)
    first, width = tile * sizes.steps, sizes.tile_columns
    is_filled = functools.reduce(jnp.logical_or, [part[block] > 0 for part in refs.parts], refs.group == 0)

    @pl.when(jnp.logical_not(is_filled))
    def _() -> None:
        @pl.loop(0, sizes.steps)
        def _(k: AnyArray) -> None:
            plgpu.barrier_arrive(refs.consumed.at[await_step(refs, first + k)])

    def accumulate(*sums: Any) -> tuple[AnyArray, ...]:
        @pl.loop(0, sizes.steps)
        def _(k: AnyArray) -> None:
            slot = await_step(refs, first + k)
            rows = refs.x_tiles.at[slot, pl.ds(refs.group * OWN_ROWS, OWN_ROWS)]
            for p, total in enumerate(sums):
                weights = refs.w_tiles.at[slot, p]
                plgpu.wgmma(total, rows, weights.transpose((1, 0)) if sizes.contract else weights)
            plgpu.wgmma_wait(0)  # the other warpgroup multiplies meanwhile
            plgpu.barrier_arrive(refs.consumed.at[slot])

        return tuple(total[...] for total in sums)

    @pl.when(is_filled)
    def _() -> None:
        shape = OWN_ROWS, sizes.product_columns
        sums = pl.run_scoped(accumulate, *[cast(Any, plgpu).ACC(shape, jnp.float32)] * sizes.products)
        products = [y[:, i : i + width] if shape[1] > width else y for y in sums for i in range(0, shape[1], width)]
        for p, bias in enumerate(refs.biases):
            own = bias.at[refs.experts[block], pl.ds(column * width, width)]
            row = load(own, plgpu.Layout.WGMMA.reduce(0)).astype(jnp.float32)
            products[p] += lax.broadcast_in_dim(row, products[p].shape, (1,))
        write_tile(sizes, refs, tile, finish(*products)[0].astype(refs.out.dtype))


def write_tile(sizes: ProductSizes, refs: Any, tile: AnyArray, y: AnyArray) -> None:
    """Write the part of a tile that a warpgroup has, piece by piece through shared memory."""
    block, column = sizes.place(refs.program, tile)
    size = min(sizes.rows, OWN_ROWS)
    rows, first = pl.ds(block * sizes.rows + refs.group * OWN_ROWS, size), column * sizes.tile_columns
    for piece in range(sizes.tile_columns // PIECE):
        buffer = refs.out_tiles.at[refs.group, piece % 2]
        plgpu.wait_smem_to_gmem(min(piece, 1), wait_read_only=True)
        buffer[...] = y[:, piece * PIECE : (piece + 1) * PIECE] if y.shape[1] > PIECE else y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, size)], refs.out.at[rows, pl.ds(first + piece * PIECE, PIECE)])


def copy_tile(sizes: ProductSizes, refs: Any, tile: AnyArray) -> None:
    """Copy the steps of a tile to shared memory, each once its slot is free."""
    block, column = sizes.place(refs.program, tile)
    expert, rows = refs.experts[block], pl.ds(block * sizes.rows, sizes.rows)
    own, width = [load(ref.at[rows], row_layout()) for ref in refs.numbers], sizes.tile_columns

    @pl.loop(0, sizes.steps)
    def _(k: AnyArray) -> None:
        step = tile * sizes.steps + k
        slot, entries = lax.rem(step, SLOTS), pl.ds(k * DEPTH, DEPTH)
        await_slot(refs.consumed, SLOTS, step)
        for p, ref in enumerate(refs.weights):
            source = ref.at[expert, *sizes.oriented(pl.ds(column * width, width), entries)]
            part = (0, pl.ds(p * width, width)) if sizes.contract else (p,)
            plgpu.copy_gmem_to_smem(source, refs.w_tiles.at[slot, *part], refs.w_copied.at[slot])
        x_tile = refs.x_tiles.at[slot, pl.ds(0, sizes.rows)]
        if not own:
            plgpu.copy_gmem_to_smem(refs.x.at[rows, entries], x_tile, refs.x_copied.at[slot])
        else:
            copy_rows(x_tile, refs.x, own[0], k, sizes.depth)
            pl.when(step >= LAG)(lambda: announce_rows(refs.x_copied, SLOTS, step - LAG, LAG))


def await_end(sizes: ProductSizes, refs: Any, end: AnyArray) -> None:
    """Announce the rows of the last steps, and wait until all steps have been multiplied."""
    for left in range(LAG, 0, -1) if sizes.is_gathered else ():
        pl.when(end >= left)(functools.partial(announce_rows, refs.x_copied, SLOTS, end - left, left - 1))
    for left in range(1, SLOTS + 1):
        slot = refs.consumed.at[lax.rem(end - left, SLOTS)]
        pl.when(end >= left)(functools.partial(plgpu.barrier_wait, slot))


def row_layout() -> Any:
    """Return the layout of the numbers of rows: `ROW_THREADS` threads have every 16th number."""
    return tiled(((16,), (4,), (1,)), (-3,), (-2, *copies(ROW_THREADS)))


def copy_rows(target: Any, x: Any, numbers: AnyArray, step: AnyArray, depth: int) -> None:
    """Begin to copy the entries of a step of some rows of x to shared memory, in the layout of `transforms()`.

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
