"""Two Pallas kernels (Mosaic GPU) for the gated delta rule of a prompt in chunks, with the formulas of `delta_chunk`.

The first one computes what needs no state, T and `tril(Q Kᵀ ⊙ e^{Gᵢ−Gⱼ})`, of all chunks in parallel. A program of the
second one computes a head of a row, chunk after chunk: a warpgroup copies the next chunks, and the others have 64
columns of the state each, transposed, in registers, as are the left factors of all their products. Where there are few
states, a program has one such warpgroup.

Measured on one H200, bf16, 16 heads of width 128, µs, the first and the second kernel, and in Triton's dialect before:
8 x 4096 tokens 123 + 173 (196 + 254), 4096 tokens 20 + 77 (27 + 89), 2 x 512 tokens 6 + 13 (16 + 15). With two such
warpgroups, 4096 tokens take 20 + 116. One kernel that prepares a chunk in another warpgroup while the state changes
takes 430 and 400, as a chunk takes 6 µs to prepare.

NaN or infinity in k, v, g or β reaches earlier tokens of the same chunk, as 0 · NaN is NaN; XLA's forms prevent it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.kernel_group import DeltaGroup
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.emit import arith, ir, llvm, mgpu, vector
from rlx_jax.lowering.lir.implementations import with_reference
from rlx_jax.lowering.lir.matvec import MULTIPROCESSORS
from rlx_jax.lowering.lir.mosaic import await_slot, load, pl, plgpu, run_kernel, transforms
from rlx_jax.lowering.lir.recurrent import LEAST_LOG, chunks_at_once
from rlx_jax.lowering.lir.row_kernels import convolve

AnyArray = Any

# Tokens of a chunk, columns of a warpgroup, and rows of the blocks on the diagonal of T that are inverted row by row.
TOKENS, COLUMNS, BLOCK = 64, 64, 16

# Chunks that shared memory has room for.
SLOTS = 3

# What the first kernel computes of a chunk.
PREPARED = ("totals", "solved", "within")

# Registers of a thread that copies, and of one that has columns of the state: at most 504 of three warpgroups.
COPYING, RUNNING = 40, 232


class ChunkSizes(NamedTuple):
    """Sizes of the rule.

    Attributes:
        chunks: chunks of a row.
        rows, heads, keys, values: the shape of the state.
        scale: the factor of queries.
        dtype: the dtype of queries, keys and values.
        groups: warpgroups of a program that have columns of the state: one if there are few states.
        interpret: parameters of Mosaic's interpreter, which has no instructions of the device; None to compile.
    """

    chunks: int
    rows: int
    heads: int
    keys: int
    values: int
    scale: float
    dtype: Any
    groups: int
    interpret: Any

    def columns(self, refs: Any, group: AnyArray) -> Any:
        """Return the columns of a head that a warpgroup of a program has."""
        return pl.ds((refs.part * self.groups + group) * COLUMNS, COLUMNS)

    def value_columns(self, refs: Any, group: AnyArray) -> Any:
        """Return the same columns of all heads' values."""
        return pl.ds(refs.head * self.values + (refs.part * self.groups + group) * COLUMNS, COLUMNS)

    def first_key(self, ref: Any, head: AnyArray) -> Any:
        """Return the first column of a head's query or key."""
        return head // (self.heads * self.keys // ref.shape[2]) * self.keys

    def run(
        self, body: Callable[[Any], None], inputs: Any, outputs: Any, scratch: Any, grid: Any, groups: int = 0
    ) -> Any:
        """Run a kernel, with arguments as in `run_kernel`."""
        lane = cast(Any, plgpu).LoweringSemantics.Lane
        params: dict[str, Any] = {"lowering_semantics": lane, "approx_math": True, "unsafe_no_auto_barriers": True}
        return run_kernel(body, inputs, outputs, scratch, grid, groups, self.interpret, **params)


def run_chunks(op: GatedDeltaOp, *operands: AnyArray, interpret: Any = None) -> tuple[AnyArray, ...]:
    """Compute the op in chunks by the kernels.

    Args:
        op: the rule.
        operands: its operands.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    q, k, v, g, beta = operands[:5]
    start, tokens = op.initial_state(*operands), v.shape[1]
    rows, heads, keys, values = start.shape
    chunks = -(-tokens // TOKENS)
    # Zeros leave the state unchanged.
    padding = ((0, 0), (0, chunks * TOKENS - tokens), (0, 0))
    q, k, v = (jnp.pad(x.astype(v.dtype).reshape(rows, tokens, -1), padding) for x in (q, k, v))
    g, beta = (jnp.pad(x.astype(jnp.float32), padding).swapaxes(1, 2) for x in (jnp.maximum(g, LEAST_LOG), beta))
    groups = values // COLUMNS if rows * heads * values // COLUMNS > MULTIPROCESSORS else 1
    t = ChunkSizes(chunks, rows, heads, keys, values, op.factor(keys), v.dtype, groups, interpret)
    out, last = call_kernels(t, q, k, v, g, beta, start)
    return out[:, :tokens].reshape(rows, tokens, heads, values), last


def run_convolved(
    op: DeltaGroup, mixed: AnyArray, window: AnyArray, g: AnyArray, beta: AnyArray, interpret: Any = None
) -> Any:
    """Compute a group by a kernel for each of q, k and v, and by those of the rule; `interpret` as in `run_chunks`."""
    heads, keys, values, own_heads = op.key_heads, op.keys, op.values, g.shape[2]
    parts = (0, heads, keys, op.unit), (heads * keys, heads, keys, op.unit), (2 * heads * keys, own_heads, values, None)
    q, k, v = (convolve(mixed, window, *part, interpret) for part in parts)
    return run_chunks(op.rule, q, k, v, g, beta, interpret=interpret)


states_in_one = with_reference(chunks_at_once)(run_chunks)
convolved_states = with_reference(DeltaGroup.eval)(run_convolved)


@functools.partial(jax.jit, static_argnums=0)  # equal layers of a program are lowered once
def call_kernels(
    t: ChunkSizes, q: AnyArray, k: AnyArray, v: AnyArray, g: AnyArray, beta: AnyArray, start: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """Return the results `[rows, tokens, heads · values]` and the last state.

    Args:
        t: the sizes.
        q, k, v: queries, keys and values `[rows, tokens, heads · width]`.
        g, beta: `[rows, heads, tokens]`.
        start: the state before.
    """
    out, last = run_states(t, q, k, v, beta, prepare(t, q, k, g, beta), start)
    return out, last


def prepare(t: ChunkSizes, q: AnyArray, k: AnyArray, g: AnyArray, beta: AnyArray) -> Sequence[AnyArray]:
    """Return G `[rows, heads, tokens]`, and T and the factors of values in a chunk `[rows, heads, tokens, TOKENS]`."""
    parts_of_keys = t.keys // 64

    def body(refs: Any) -> None:
        head, row, tokens = refs.head, refs.row, pl.ds(refs.chunk * TOKENS, TOKENS)
        for ref, tiles in ((refs.q, refs.q_tiles), (refs.k, refs.k_tiles)):
            for n in range(parts_of_keys):
                columns = pl.ds(t.first_key(ref, head) + n * 64, 64)
                plgpu.copy_gmem_to_smem(ref.at[row, tokens, columns], tiles.at[n], refs.copied)
        for ref, tile in ((refs.g, refs.g_tile), (refs.beta, refs.beta_tile)):
            plgpu.copy_gmem_to_smem(ref.at[row, head, tokens], tile, refs.copied)
        plgpu.barrier_wait(refs.copied)
        shape, layout = (TOKENS, TOKENS), plgpu.Layout.WGMMA

        def along(axis: int, ref: Any) -> AnyArray:
            values = load(ref, layout.reduce(1 - axis))
            return lax.broadcast_in_dim(values, shape, (axis,))

        token, other = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
        total = jnp.where(token >= other, along(1, refs.g_tile), 0.0).sum(1)
        refs.total_tile[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.total_tile, refs.totals.at[row, head, tokens])
        difference = lax.broadcast_in_dim(total, shape, (0,)) - along(1, refs.total_tile)
        between = jnp.exp(jnp.where(token >= other, difference, -jnp.inf))

        def product(tiles: Any) -> AnyArray:
            pairs = [(tiles.at[n], refs.k_tiles.at[n].transpose((1, 0))) for n in range(parts_of_keys)]
            return products(t, (zeros(*shape), pairs))[0]

        inside = (between * product(refs.q_tiles)).astype(t.dtype)
        lower = along(0, refs.beta_tile) * between * product(refs.k_tiles)
        inverse = inverted(t, refs.blocks, refs.parts, lower).astype(t.dtype)
        # The tiles are read no more.
        stored = ((refs.q_tiles.at[0], inside, refs.within), (refs.k_tiles.at[0], inverse, refs.solved))
        for tile, values, _ in stored:
            tile[...] = values
        plgpu.commit_smem()
        for tile, _, ref in stored:
            plgpu.copy_smem_to_gmem(tile, ref.at[row, head, tokens])
        plgpu.wait_smem_to_gmem(0)

    tokens, vector_tile = t.chunks * TOKENS, plgpu.SMEM((TOKENS,), jnp.float32)
    tiles = plgpu.SMEM((parts_of_keys, TOKENS, 64), t.dtype, transforms=transforms(64))
    scratch = {
        "q_tiles": tiles, "k_tiles": tiles, "g_tile": vector_tile, "beta_tile": vector_tile, "total_tile": vector_tile,
        "blocks": plgpu.SMEM((TOKENS, BLOCK), jnp.float32),
        "parts": plgpu.SMEM((4, TOKENS, 2 * BLOCK), jnp.bfloat16, transforms=transforms(BLOCK)),
        "copied": plgpu.Barrier(num_arrivals=2 * parts_of_keys + 2),
    }  # fmt: skip
    matrix = jax.ShapeDtypeStruct((t.rows, t.heads, tokens, TOKENS), t.dtype)
    results: Sequence[AnyArray] = t.run(
        body, {"q": q, "k": k, "g": g, "beta": beta}, dict(zip(PREPARED, (g, matrix, matrix), strict=True)), scratch,
        {"chunk": t.chunks, "head": t.heads, "row": t.rows},
    )  # fmt: skip
    return results


def run_states(
    t: ChunkSizes, q: AnyArray, k: AnyArray, v: AnyArray, beta: AnyArray, prepared: Sequence[AnyArray], start: AnyArray
) -> Sequence[AnyArray]:
    """Return the results and the last state, with operands as in `call_kernels` and results of `prepare`."""

    def tiles(count: int, columns: int) -> Any:
        return plgpu.SMEM((count, TOKENS, columns), t.dtype, transforms=transforms(64))

    inputs = {"q": q, "k": k, "v": v, "beta": beta, **dict(zip(PREPARED, prepared, strict=True)), "start": start}
    vectors = plgpu.SMEM((SLOTS, TOKENS), jnp.float32)
    scratch = {
        # Chunks in shared memory, and results.
        "q_tiles": tiles(SLOTS, t.keys), "k_tiles": tiles(SLOTS, t.keys), "v_tiles": tiles(SLOTS * t.groups, COLUMNS),
        "beta_tiles": vectors, "total_tiles": vectors, "solved_tiles": tiles(SLOTS, TOKENS),
        "within_tiles": tiles(SLOTS, TOKENS), "out_tiles": tiles(t.groups, COLUMNS),
        # For each slot of a chunk, barriers of its copies and its last use.
        "copied": plgpu.Barrier(num_arrivals=6 + t.groups, num_barriers=SLOTS),
        "used": plgpu.Barrier(num_arrivals=t.groups, num_barriers=SLOTS),
    }  # fmt: skip
    results: Sequence[AnyArray] = t.run(
        functools.partial(run_program, t), inputs, {"out": v, "last": start}, scratch,
        {"part": t.values // COLUMNS // t.groups, "head": t.heads, "row": t.rows}, groups=t.groups + 1,
    )  # fmt: skip
    return results


def run_program(t: ChunkSizes, refs: Any) -> None:
    """Run a warpgroup of a program: the last one copies, the others compute."""

    @pl.when(refs.group == t.groups)
    def _() -> None:
        if t.groups > 1:
            plgpu.set_max_registers(COPYING, action="decrease")
        pl.loop(0, t.chunks)(functools.partial(copy_chunk, t, refs))
        for i in range(max(0, t.chunks - SLOTS), t.chunks):
            plgpu.barrier_wait(refs.used.at[i % SLOTS])

    @pl.when(refs.group < t.groups)
    def _() -> None:
        if t.groups > 1:
            plgpu.set_max_registers(RUNNING, action="increase")
        place = refs.row, refs.head, slice(None), t.columns(refs, refs.group)
        start, last = (ref.at[place].transpose((1, 0)) for ref in (refs.start, refs.last))
        single = cast(Any, plgpu.Layout)._WGMMA_ACC_32BIT
        state = plgpu.layout_cast(load(start, single), plgpu.Layout.WGMMA)
        state = lax.fori_loop(0, t.chunks, functools.partial(run_chunk, t, refs), state)
        last[...] = plgpu.layout_cast(state, single)
        plgpu.wait_smem_to_gmem(0)


def copy_chunk(t: ChunkSizes, refs: Any, i: AnyArray) -> None:
    """Begin to copy the operands of a chunk, once its slot is free."""
    slot, tokens = lax.rem(i, SLOTS), pl.ds(i * TOKENS, TOKENS)
    await_slot(refs.used, SLOTS, i)
    barrier = refs.copied.at[slot]
    for ref, tiles in ((refs.q, refs.q_tiles), (refs.k, refs.k_tiles)):
        plgpu.copy_gmem_to_smem(
            ref.at[refs.row, tokens, pl.ds(t.first_key(ref, refs.head), t.keys)], tiles.at[slot], barrier
        )
    for n in range(t.groups):
        values = refs.v.at[refs.row, tokens, t.value_columns(refs, n)]
        plgpu.copy_gmem_to_smem(values, refs.v_tiles.at[slot * t.groups + n], barrier)
    for ref, tiles in (
        (refs.beta, refs.beta_tiles), (refs.totals, refs.total_tiles),
        (refs.solved, refs.solved_tiles), (refs.within, refs.within_tiles),
    ):  # fmt: skip
        plgpu.copy_gmem_to_smem(ref.at[refs.row, refs.head, tokens], tiles.at[slot], barrier)


def run_chunk(t: ChunkSizes, refs: Any, i: AnyArray, state: AnyArray) -> AnyArray:
    """Return a warpgroup's columns of the state after a chunk, and write its columns of the results.

    `U − W S` is computed as `T diag(β) (V − diag(e^G) K S)`.
    """
    slot, shape, layout, transposed = lax.rem(i, SLOTS), (COLUMNS, TOKENS), plgpu.Layout.WGMMA, (1, 0)
    plgpu.barrier_wait(refs.copied.at[slot])
    total, rate = (load(tiles.at[slot], layout.reduce(0)) for tiles in (refs.total_tiles, refs.beta_tiles))
    end = refs.total_tiles[slot, TOKENS - 1]

    def scaled(factors: AnyArray, values: AnyArray) -> AnyArray:
        return lax.broadcast_in_dim(factors, values.shape, (1,)) * values

    decay, rounded = jnp.exp(total), state.astype(t.dtype)
    v_tile = refs.v_tiles.at[slot * t.groups + refs.group].transpose(transposed)
    values = load(v_tile, layout, optimized=True).astype(jnp.float32)

    def change(erased: AnyArray) -> AnyArray:
        return scaled(rate, values - scaled(decay, erased)).astype(t.dtype)

    changed, across = two_products(
        t, change, *((rounded, tiles.at[slot].transpose(transposed)) for tiles in (refs.k_tiles, refs.q_tiles))
    )
    (new,) = products(t, (zeros(*shape), [(changed, refs.solved_tiles.at[slot].transpose(transposed))]))

    def write(inside: AnyArray) -> None:
        tile = refs.out_tiles.at[refs.group]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile.transpose(transposed)[...] = (t.scale * (scaled(decay, across) + inside)).astype(t.dtype)
        plgpu.commit_smem()
        columns = t.value_columns(refs, refs.group)
        plgpu.copy_smem_to_gmem(tile, refs.out.at[refs.row, pl.ds(i * TOKENS, TOKENS), columns])

    written = scaled(jnp.exp(end - total), new).astype(t.dtype)
    _, state = two_products(
        t, write, (new.astype(t.dtype), refs.within_tiles.at[slot].transpose(transposed)),
        (written, refs.k_tiles.at[slot]), jnp.exp(end) * state,
    )  # fmt: skip
    plgpu.barrier_arrive(refs.used.at[slot])
    return state


def products(t: ChunkSizes, *sums: tuple[AnyArray, Sequence[tuple[Any, Any]]]) -> list[AnyArray]:
    """Return some arrays in float32, each plus products; left factors are arrays or in shared memory."""
    if t.interpret is not None:
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        return [sum((dot(a[...], b[...]) for a, b in pairs), start) for start, pairs in sums]

    def accumulate(refs: Sequence[Any]) -> None:
        for ref, (_, pairs) in zip(refs, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(ref, a, b)

    results: list[AnyArray] = pl.run_state(accumulate)([cast(Any, plgpu).ACC.init(start) for start, _ in sums])
    return results


def two_products(
    t: ChunkSizes, use: Callable[[AnyArray], Any], first: tuple[AnyArray, Any], second: tuple[AnyArray, Any],
    start: AnyArray | None = None,
) -> tuple[Any, AnyArray]:  # fmt: skip
    """Return `use` of a product, computed during a second one, and the second one; all in float32.

    With `start` it is added to the second one, and `use` has no result.
    """
    if t.interpret is not None:
        one, other = (jnp.dot(a, b[...], preferred_element_type=jnp.float32) for a, b in (first, second))
        return use(one), other if start is None else start + other

    def run(one: Any, other: Any) -> Any:
        plgpu.wgmma(one, *first)
        plgpu.wgmma(other, *second)
        return use(plgpu.wgmma_accumulator_load(one, wait_n=1))

    def run_from(sums: Sequence[Any]) -> None:
        run(*sums)

    accumulator, shapes = cast(Any, plgpu).ACC, [(a.shape[0], b.shape[1]) for a, b in (first, second)]
    if start is not None:
        return None, pl.run_state(run_from)([accumulator.init(a) for a in (zeros(*shapes[0]), start)])[1]
    both = (accumulator(shape, jnp.float32) for shape in shapes)
    used, other = pl.run_scoped(lambda one, other: (run(one, other), other[...]), *both)
    return used, other


def zeros(*shape: int) -> AnyArray:
    """Return zeros where products leave their sums."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def inverted(t: ChunkSizes, blocks: Any, parts: Any, lower: AnyArray) -> AnyArray:
    """Return the inverse of a triangular matrix with ones on the diagonal and the entries of `lower` below it.

    Blocks on the diagonal are inverted row by row. With the inverses X of its own diagonal blocks, and L of what is
    below the first block of each pair, the inverse of blocks of twice the size is `X − X L X`. Arrays have only the
    columns of a row's own block.
    """
    number = plgpu.broadcasted_iota(jnp.int32, (TOKENS, BLOCK), 0, layout=plgpu.Layout.WGMMA) // BLOCK
    columns = [lower[:, n * BLOCK : (n + 1) * BLOCK] for n in range(TOKENS // BLOCK)]

    def only(n: int, values: AnyArray) -> AnyArray:
        return jnp.where(number == n, values, 0.0)

    def times(pairs: Sequence[tuple[AnyArray, int]], right: AnyArray, turn: int) -> AnyArray:
        """Return the sum of products with rows of `right`, from which on being the second of each pair.

        Numbers are two of bf16 each. `turn` says which half of shared memory they are in: the other one may be read.
        """
        width, operands = right.shape[1], list[Any]()
        for part, values in enumerate(halves(right)):
            parts.at[2 * turn + part, :, pl.ds(0, width)][...] = values
        plgpu.commit_smem()
        for left, first in pairs:
            high, low = halves(left)
            rows = [parts.at[2 * turn + n, pl.ds(first, left.shape[1]), pl.ds(0, width)] for n in range(2)]
            operands += [(high, rows[1]), (low, rows[0]), (high, rows[0])]
        (result,) = products(t, (zeros(*right.shape), operands))
        return result

    own = functools.reduce(lambda others, n: jnp.where(number == n, columns[n], others), range(3), columns[3])
    x = inverted_blocks(t, blocks, own)
    y = times([(only(1, columns[0]), 0), (only(3, columns[2]), 2 * BLOCK)], x, 0)
    z = times([(only(1, x), BLOCK), (only(3, x), 3 * BLOCK)], y, 1)
    is_odd = lax.rem(number, 2) == 1
    x = jnp.concatenate([jnp.where(is_odd, -z, x), jnp.where(is_odd, x, 0.0)], axis=1)
    token = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)

    def last(values: AnyArray, others: AnyArray = 0.0) -> AnyArray:
        return jnp.where(token >= TOKENS // 2, values, others)

    y = times([(last(lower[:, : TOKENS // 2]), 0)], x, 0)
    z = times([(last(x), TOKENS // 2)], y, 1)
    return jnp.concatenate([last(-z, x), last(x)], axis=1)


def halves(x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Return numbers as sums of two of bf16, the first of which has their upper bits."""
    upper = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -(1 << 16), jnp.float32)
    return upper.astype(jnp.bfloat16), (x - upper).astype(jnp.bfloat16)


def inverted_blocks(t: ChunkSizes, blocks: Any, lower: AnyArray) -> AnyArray:
    """Return the inverses of some triangular blocks `[blocks · BLOCK, BLOCK]` with ones on the diagonal."""
    if t.interpret is not None:
        rows = lower.reshape(-1, BLOCK, BLOCK)
        number = lax.broadcasted_iota(jnp.int32, rows[:, 0].shape, 1)
        solved = substitute(
            lambda i: [rows[:, i, k, None] for k in range(i)], lambda a, b, sums: sums - a * b,
            [jnp.where(number == i, 1.0, 0.0) for i in range(BLOCK)],
        )  # fmt: skip
        return jnp.stack(solved, axis=1).reshape(lower.shape)
    blocks[...] = lower
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit_blocks)(blocks)
    return load(blocks, plgpu.Layout.WGMMA)


def substitute(row: Callable[[int], Sequence[Any]], subtract: Callable[..., Any], unit: Sequence[Any]) -> list[Any]:
    """Return columns of the inverse of a triangular block by forward substitution.

    Args:
        row: the entries of a row before the diagonal.
        subtract: (a, b, c) → c − a b.
        unit: the same columns of the identity.
    """
    solved: list[Any] = []
    for i in range(BLOCK):
        value = unit[i]
        for a, b in zip(row(i), solved, strict=True):
            value = subtract(a, b, value)
        solved.append(value)
    return solved


def emit_blocks(_: Any, blocks: Any) -> None:
    """Emit the instructions of `inverted_blocks`: a thread has a column of a block."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    four = ir.VectorType.get((4,), f32)

    def index(value: Any) -> Any:
        return arith.index_cast(ir.IndexType.get(), value)

    thread = arith.andi(mgpu.thread_idx(), mgpu.c(TOKENS - 1, i32))
    column = arith.andi(thread, mgpu.c(BLOCK - 1, i32))
    first = arith.subi(thread, column)

    def row(i: int) -> list[Any]:
        number = index(arith.addi(first, mgpu.c(i, i32)))
        entries: list[Any] = []
        for k in range(0, i, 4):
            loaded = vector.load(four, blocks, [number, mgpu.c(k, ir.IndexType.get())])
            entries += [vector.extract(loaded, [], [j]) for j in range(4)]
        return entries[:i]

    def unit(i: int) -> Any:
        is_one = arith.cmpi(arith.CmpIPredicate.eq, column, mgpu.c(i, i32))
        return arith.select(is_one, mgpu.c(1.0, f32), mgpu.c(0.0, f32))

    mgpu.warpgroup_barrier()
    solved = substitute(row, lambda a, b, sums: llvm.intr_fma(arith.negf(a), b, sums), [unit(i) for i in range(BLOCK)])
    mgpu.warpgroup_barrier()
    for i, value in enumerate(solved):
        number = index(arith.addi(first, mgpu.c(i, i32)))
        vector.store(vector.broadcast(ir.VectorType.get((1,), f32), value), blocks, [number, index(column)])
    mgpu.warpgroup_barrier()
