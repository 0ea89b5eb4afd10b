"""Implementations of recurrences, and the choice among them.

`eval` loops over tokens. A single token needs no loop, and many tokens are computed in chunks by matrix products.

Within a chunk of the gated delta rule, the updates form one triangular system (the WY form of Householder products and
its UT transform): Yang et al., arXiv:2406.06484, and with decay arXiv:2412.06464. The selective scan has no system to
solve: Dao and Gu, arXiv:2405.21060, section 6. A chunk consists of three functions: a preparation that needs no state,
the update of the state, and the results. On an accelerator the first and the last run for all chunks in parallel; on a
CPU chunks run one after the other, so that each stays in the processor's cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.device import Device
from rlx_jax.ir.ops.recurrent import CHUNK, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.types import is_static, short_name
from rlx_jax.lowering.lir.plan import Call, Choice

AnyArray = Any
Recurrence = GatedDeltaOp | SelectiveScanOp
# Number of tokens from which chunks are faster than single steps.
MIN_CHUNKED_TOKENS = 16
# Chunks per iteration of the loop over states (its unrolling): on one H200, 4096 tokens of 16 heads take 1.61 ms at 1,
# 1.12 at 4, 1.10 at 8, 1.16 at 16.
SCAN_UNROLL = 8
# Bytes of a state from which reading it dominates a step.
LARGE_STATE_BYTES = 4 << 20
# Widths of keys and values for the kernels of a prompt. Three chunks of queries, keys and values 256 wide have more
# bytes than the shared memory of a multiprocessor.
KERNEL_WIDTHS = (64, 128)
# Columns of a state that a program of `one_pass` has, which divide its columns, and rows, at most: a thread has half as
# many numbers.
STATE_COLUMNS, MAX_STATE_KEYS = 64, 256
# Taps of a convolution, at most, of which a kernel has the tokens before a block in shared memory.
MAX_TAPS = 9
# The largest logarithm, about, of a decay that is 0 in float32. Sums with lower ones would round those of other tokens.
LEAST_LOG = -104.0
# Rows of a triangular block that is inverted by powers. Entries of powers grow with the binomials of that number.
BLOCK = 8
# Numbers of tokens from which `chunk_size` is another one.
SIZE_BOUNDS = (MIN_CHUNKED_TOKENS, 17, 33)


# -- the choice --------------------------------------------------------------------------------


def choose(call: Call, device: Device, kernels: bool = False) -> Choice | None:
    """Choose the implementation of a recurrence.

    Args:
        call: the op and the types of its operands, with static sizes.
        device: the target.
        kernels: whether custom kernels may be chosen.

    Returns:
        The choice; None for `eval`, token by token.
    """
    op, operands = call
    assert isinstance(op, Recurrence)
    tokens, fits = int(operands[0].shape[1]), kernels and fits_kernels(call)
    if tokens == 1:
        keys, values = (int(t.shape[-1]) for t in operands[1:3])
        state_size = operands[2].size * keys  # numbers of the state, in f32
        fits = fits and keys <= MAX_STATE_KEYS and values % STATE_COLUMNS == 0
        if fits and not op.every and 4 * state_size >= LARGE_STATE_BYTES:
            return Choice("one_pass", "the state is read once")
        return Choice("one_token", "there is no loop over one token")
    # Chunks have no state after each token, and their products need one decay per head: A `[H]`, not `[H, N]`.
    if tokens < MIN_CHUNKED_TOKENS or op.every or (isinstance(op, SelectiveScanOp) and operands[2].rank == 2):
        return None
    reason = f"{tokens} tokens as products of matrices"
    if kernels and isinstance(op, GatedDeltaOp):
        if not (refusal := prompt_refusal(call)):
            return Choice("states_in_one", f"{reason}, in two kernels")
        reason += f"; no kernel: {refusal}"
    return Choice("chunk_by_chunk" if device.kind == "cpu" else "chunks_at_once", reason)


def fits_kernels(call: Call) -> bool:
    """Return whether a kernel supports a recurrence of one token: the gated delta rule, widths 16, 32, 64 and so on."""
    op, operands = call
    if not isinstance(op, GatedDeltaOp):
        return False
    return all(width >= 16 and not width & (width - 1) for width in (int(t.shape[3]) for t in operands[1:3]))


def prompt_refusal(call: Call) -> str:
    """Return why no kernel runs a gated delta rule over many tokens; "" if `delta_chunks.py` has some."""
    op, (_, k, v, *_) = call
    assert isinstance(op, GatedDeltaOp)
    if op.every or int(k.shape[1]) < MIN_CHUNKED_TOKENS:
        return "tokens run one by one"
    if short_name(v.dtype) not in ("bf16", "f16"):
        return f"values are {short_name(v.dtype)}"
    widths = {int(k.shape[3]), int(v.shape[3])} - set(KERNEL_WIDTHS)
    return f"heads are {max(widths)} wide, not {' or '.join(map(str, KERNEL_WIDTHS))}" if widths else ""


# -- implementations ---------------------------------------------------------------------------


def one_token(op: Recurrence, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """Compute the op over one token: its step, without a loop."""
    reference = operands[2 if isinstance(op, GatedDeltaOp) else 0]
    tokens = [x if x.ndim < 3 else x[:, 0] for x in operands[:5]]  # all except A have the token axis
    new_state, out = op.step(op.initial_state(*operands), *(x.astype(jnp.float32) for x in tokens))
    return (out[:, None].astype(reference.dtype), new_state, *((new_state[:, None],) if op.every else ()))


class Chunk(NamedTuple):
    """A recurrence over one chunk of C tokens. Arrays are `[B, G, R, C, …]`: R heads share each of G groups.

    Attributes:
        prepare: operands of the chunk → all that needs no state.
        update_state: (state before the chunk, result of `prepare`) → state after the chunk.
        compute_output: (state before the chunk, operands, result of `prepare`) → results of the chunk.
    """

    prepare: Callable[..., Any]
    update_state: Callable[..., AnyArray]
    compute_output: Callable[..., AnyArray]


ArrayFunction = Callable[..., tuple[AnyArray, ...]]


def sized_by_tokens(run: Callable[..., tuple[AnyArray, ...]]) -> ArrayFunction:
    """Return an implementation in chunks of `chunk_size`, also of a symbolic number of tokens.

    An exported program with symbolic sizes has to compute the numbers of a program for the same tokens, so it has all
    sizes of chunks, and `eval` for the few tokens that `choose` gives to it. XLA keeps one of them when it compiles the
    program for a size. Layers with equal operands share one function, which keeps artifacts small and fast to load.
    """

    @partial(jax.jit, static_argnums=0)
    def run_any_size(op: Recurrence, *operands: AnyArray) -> tuple[AnyArray, ...]:
        number = sum((jnp.asarray(operands[0].shape[1]) >= n).astype(jnp.int32) for n in SIZE_BOUNDS)
        in_chunks = (partial(run, op, *operands, size=chunk_size(n)) for n in SIZE_BOUNDS)
        return tuple(lax.switch(number, [partial(op.eval, *operands), *in_chunks]))

    @functools.wraps(run)
    def run_sized(op: Recurrence, *operands: AnyArray) -> tuple[AnyArray, ...]:
        return (run if is_static(operands[0].shape[1]) else run_any_size)(op, *operands)

    return run_sized


@sized_by_tokens
def chunks_at_once(op: Recurrence, *operands: AnyArray, size: int | None = None) -> tuple[AnyArray, ...]:
    """Compute the op in chunks: all in parallel except for the state, which a loop carries from chunk to chunk."""
    chunk, chunks, start, (tokens, dtype) = split_into_chunks(op, operands, size)
    terms = jax.vmap(chunk.prepare)(chunks)

    def step(state: AnyArray, part: Any) -> tuple[AnyArray, AnyArray]:
        return chunk.update_state(state, part), state.astype(dtype)

    unroll = SCAN_UNROLL if is_static(chunks[0].shape[0]) else 1
    last_state, old_states = lax.scan(step, start, terms, unroll=unroll)
    out = jax.vmap(chunk.compute_output)(old_states, chunks, terms)
    return from_chunks(out, tokens).astype(dtype), last_state.reshape(op.initial_state(*operands).shape)


@sized_by_tokens
def chunk_by_chunk(op: Recurrence, *operands: AnyArray, size: int | None = None) -> tuple[AnyArray, ...]:
    """Compute the op in chunks, one after the other."""
    chunk, chunks, start, (tokens, dtype) = split_into_chunks(op, operands, size)

    def step(state: AnyArray, part: Any) -> tuple[AnyArray, AnyArray]:
        terms = chunk.prepare(part)
        return chunk.update_state(state, terms), chunk.compute_output(state, part, terms).astype(dtype)

    last_state, out = lax.scan(step, start, chunks)
    return from_chunks(out, tokens), last_state.reshape(op.initial_state(*operands).shape)


def split_into_chunks(
    op: Recurrence, operands: tuple[AnyArray, ...], size: int | None = None
) -> tuple[Chunk, Any, AnyArray, tuple[int, Any]]:
    """Prepare an op for computation in chunks of `size` tokens, by default `chunk_size`.

    Returns:
        The chunk functions, the operands split into chunks, the initial state `[B, G, R, …]`, and the number of tokens
        and dtype of the result.
    """
    f32, state = jnp.float32, op.initial_state(*operands)
    if isinstance(op, GatedDeltaOp):
        q, k, v, g, beta = operands[:5]
        groups, result, query = k.shape[2], v, 0
        rows = (q, k, v, jnp.maximum(g.astype(f32), LEAST_LOG)[..., None], beta.astype(f32)[..., None])
        chunk = delta_chunk(op.factor(k.shape[3]), v.dtype)
    else:
        x, dt, a, b, c = operands[:5]
        groups, result, query = b.shape[2], x, 4
        dt = dt.astype(f32)
        rows = (x, dt[..., None], jnp.maximum(dt * a.astype(f32)[None, None], LEAST_LOG)[..., None], b, c)
        chunk = scan_chunk(x.dtype)
    size = size or chunk_size(result.shape[1])
    chunks = mark_non_finite(tuple(to_chunks(x, size, groups) for x in rows), query)
    start = state.reshape(state.shape[0], groups, -1, *state.shape[2:])
    return chunk, chunks, start, (result.shape[1], result.dtype)


def delta_chunk(scale: float, dtype: Any) -> Chunk:
    """Return the gated delta rule over C tokens.

    With G the running sum of g and `T = (I + tril(diag(β) K Kᵀ ⊙ e^{Gᵢ−Gⱼ}, −1))⁻¹`, `U = T diag(β) V` and
    `W = T diag(β e^G) K`, a chunk that begins with the state S has `V' = U − W S`, the results
    `scale · (diag(e^G) Q S + tril(Q Kᵀ ⊙ e^{Gᵢ−Gⱼ}) V')` and the next state `e^{G_C} S + (diag(e^{G_C−G}) K)ᵀ V'`.
    """
    dot = partial(product, dtype)

    def prepare(part: Any) -> Any:
        _, k, v, g, beta, mark = (x.astype(jnp.float32) for x in part)
        total = jnp.cumsum(g, axis=-2)
        between = decays(total)
        solved = invert_unit_lower(jnp.tril(beta * between * dot("bgrik,bgrjk->bgrij", k, k), -1))
        # U, W and diag(e^{G_C−G}) K of the formulas above.
        fresh = dot("bgrij,bgrjv->bgriv", solved, beta * v)
        erased = dot("bgrij,bgrjk->bgrik", solved, beta * jnp.exp(total) * k)
        written = jnp.exp(total[..., -1:, :] - total) * k
        return fresh, erased.astype(dtype), written.astype(dtype), total + mark, between

    def values_to_write(state: AnyArray, terms: Any) -> AnyArray:
        return terms[0] - dot("bgrik,bgrkv->bgriv", terms[1], state)

    def update_state(state: AnyArray, terms: Any) -> AnyArray:
        return jnp.exp(terms[3][..., -1:, :]) * state + dot(
            "bgrik,bgriv->bgrkv", terms[2], values_to_write(state, terms)
        )

    def compute_output(state: AnyArray, part: Any, terms: Any) -> AnyArray:
        (q, k, *_), (_, erased, _, total, between) = part, terms
        within = between * dot("bgrik,bgrjk->bgrij", q, k)
        across = jnp.exp(total) * dot("bgrik,bgrkv->bgriv", jnp.broadcast_to(q, erased.shape), state)
        return scale * (across + dot("bgrij,bgrjv->bgriv", within, values_to_write(state, terms)))

    return Chunk(prepare, update_state, compute_output)


def scan_chunk(dtype: Any) -> Chunk:
    """Return the selective scan over C tokens. Its state is decayed and added to, but not multiplied by a matrix.

    With G the running sum of Δ A, a chunk that begins with the state h has the results
    `tril(C Bᵀ ⊙ e^{Gᵢ−Gⱼ} Δⱼ) X + diag(e^G) C hᵀ` and the next state `e^{G_C} h + Xᵀ diag(Δ e^{G_C−G}) B`.
    """
    dot = partial(product, dtype)

    def prepare(part: Any) -> Any:
        x, dt, rate, b, _, mark = (t.astype(jnp.float32) for t in part)
        total = jnp.cumsum(rate, axis=-2)
        weight = dt * jnp.exp(total[..., -1:, :] - total) * x
        return dot("bgrip,bgrik->bgrpk", weight, jnp.broadcast_to(b, (*x.shape[:-1], b.shape[-1]))), total + mark

    def update_state(state: AnyArray, terms: Any) -> AnyArray:
        return jnp.exp(terms[1][..., -1:, :]) * state + terms[0]

    def compute_output(state: AnyArray, part: Any, terms: Any) -> AnyArray:
        x, dt, _, b, c, _ = part
        inside = decays(terms[1]) * jnp.swapaxes(dt, -1, -2) * dot("bgrik,bgrjk->bgrij", c, b)
        across = dot("bgrik,bgrpk->bgrip", jnp.broadcast_to(c, (*x.shape[:-1], c.shape[-1])), state)
        return jnp.exp(terms[1]) * across + dot("bgrij,bgrjp->bgrip", inside, x)

    return Chunk(prepare, update_state, compute_output)


# -- parts -------------------------------------------------------------------------------------


def chunk_size(tokens: int) -> int:
    """Return the tokens of a chunk: `CHUNK`, or the least power of two (from `BLOCK`) that all tokens fit in."""
    return min(CHUNK, max(BLOCK, 1 << (tokens - 1).bit_length()))


def to_chunks(x: AnyArray, size: int, groups: int) -> AnyArray:
    """Split `[B, S, H, W]` into chunks `[n, B, groups, H/groups, size, W]`.

    The last chunk is padded with zeros, which leave the state unchanged.
    """
    batch, tokens, heads, width = x.shape
    chunks = (tokens + size - 1) // size
    x = jnp.pad(x, ((0, 0), (0, chunks * size - tokens), (0, 0), (0, 0)))
    return x.reshape(batch, chunks, size, groups, heads // groups, width).transpose(1, 0, 3, 4, 2, 5)


def mark_non_finite(chunks: tuple[AnyArray, ...], query: int) -> tuple[AnyArray, ...]:
    """Return the chunks with NaN and infinity as zero, and NaN from the first token of each chunk on that had one.

    A product would carry them to earlier tokens too, as 0 · NaN is NaN; added to the running sum of the decays, the
    mark reaches the token, later ones and the state. Operand `query` is unchanged: only its token reads it.

    On one H200, 8 x 4096 tokens and 16 heads of width 128, the delta rule takes 4.10 ms with it and 4.09 without in
    bf16, 7.5 and 7.3 in f32; the scan 1.86 and 1.82, 2.89 and 2.69.
    """
    written = [x for i, x in enumerate(chunks) if i != query]
    bad = functools.reduce(jnp.logical_or, (~jnp.isfinite(x).all(axis=-1, keepdims=True) for x in written))
    mark = jnp.where(lax.cummax(bad.astype(jnp.int32), axis=bad.ndim - 2) > 0, jnp.nan, 0)
    return (*(x if i == query else jnp.where(jnp.isfinite(x), x, 0) for i, x in enumerate(chunks)), mark)


def from_chunks(x: AnyArray, tokens: int) -> AnyArray:
    """Join chunks, the inverse of `to_chunks`: `[n, B, G, R, size, W]` → `[B, S, G·R, W]`."""
    chunks, batch, groups, times, size, width = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, chunks * size, groups * times, width)[:, :tokens]


def decays(total: AnyArray) -> AnyArray:
    """Return `e^{Gᵢ − Gⱼ}` for i ≥ j, else 0, from the running sums G `[…, C, 1]`: `[…, C, C]`."""
    size = total.shape[-2]
    is_visible = jnp.tril(jnp.ones((size, size), bool)).reshape((1,) * (total.ndim - 2) + (size, size))
    # Masked before exp: the sums of later tokens could overflow, and give NaN gradients.
    return jnp.exp(jnp.where(is_visible, total - jnp.swapaxes(total, -1, -2), -jnp.inf))


def product(dtype: Any, subscripts: str, *arrays: AnyArray) -> AnyArray:
    """Return an einsum of operands in `dtype`, summed in float32.

    Float32 operands use the highest precision, since devices may round them to fewer bits by default.
    """
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    cast = (a.astype(dtype) for a in arrays)
    return jnp.einsum(subscripts, *cast, precision=precision, preferred_element_type=jnp.float32)


def invert_unit_lower(a: AnyArray) -> AnyArray:
    """Return `(I + a)⁻¹` for a strictly lower triangular `a` `[…, n, n]`, n a power of two, in float32.

    Diagonal blocks of `BLOCK` rows are inverted by a finite sum of powers, `(I − a)(I + a²)(I + a⁴)`. Two adjacent
    blocks with the inverses X and Y are joined by `[[X, 0], [−Y L X, Y]]`, where L is the block left of Y and below X.
    Powers of the full matrix would grow with the binomials of n and cancel.
    """
    n = a.shape[-1]
    size = min(BLOCK, n)
    identity = jnp.eye(size, dtype=a.dtype).reshape((1,) * (a.ndim - 1) + (size, size))
    dot = partial(jnp.einsum, "...ij,...jk->...ik", precision=lax.Precision.HIGHEST)
    power = diagonal_blocks(a, size, 0)
    inverse, num_powers = identity - power, 2
    while num_powers < size:
        power = dot(power, power)
        inverse, num_powers = dot(inverse, identity + power), 2 * num_powers
    while size < n:
        upper_inv, lower_inv = (lax.slice_in_dim(inverse, i, None, stride=2, axis=-3) for i in (0, 1))
        lower_left = -dot(dot(lower_inv, diagonal_blocks(a, size, 1)), upper_inv)
        upper = jnp.concatenate([upper_inv, jnp.zeros_like(upper_inv)], axis=-1)
        inverse, size = jnp.concatenate([upper, jnp.concatenate([lower_left, lower_inv], axis=-1)], axis=-2), 2 * size
    return lax.squeeze(inverse, (inverse.ndim - 3,))


def diagonal_blocks(a: AnyArray, size: int, below: int) -> AnyArray:
    """Return blocks of a matrix `[…, n, n]`.

    Args:
        a: the matrix.
        size: rows and columns of a block.
        below: 0 for the blocks on the diagonal, `[…, n/size, size, size]`. 1 for the block below the first of each pair
            of diagonal blocks, `[…, n/(2·size), size, size]`.
    """
    step = size * (1 + below)
    count = a.shape[-1] // step
    blocks = a.reshape(*a.shape[:-2], count, step, count, step)
    # A masked sum, as XLA compiles it in less time than one slice for each block.
    is_diagonal = jnp.eye(count, dtype=bool).reshape((1,) * (a.ndim - 2) + (count, 1, count, 1))
    blocks = jnp.where(is_diagonal, blocks, 0).sum(axis=-2)
    return lax.slice_in_dim(lax.slice_in_dim(blocks, below * size, step, axis=-2), 0, size, axis=-1)
