"""Implementations of attention, and the choice among them.

`AttentionOp.eval` defines the result; the implementation `xla` runs it unchanged.

Measured on one H200, bf16, 32 query heads and 8 key heads of width 64, µs, XLA and cuDNN: a causal prompt of 8 x 2048
5545 and 457, of 1 x 512 105 and 67; one new token over a cache of 2048, 1 row 74 and 44, 32 rows 102 and 70; 16 new
tokens over a cache, where cuDNN needs the full mask, 127 and 124. 8 query heads and 2 key heads of width 256: a prompt
of 1 x 4096 693 and 213; one token over a cache of 4096, 8 rows 68 and 84, of 2048, 64 rows 231 and 102. On one core of
an AMD EPYC, f32, 12 heads of width 32, ms, `xla` and `heads_first`: 16 x 32 tokens 0.81 and 0.66, 8 x 64 1.61 and 1.24,
4 x 128 3.54 and 2.05.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.device import Device
from rlx_jax.errors import UnsupportedError
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.lir.plan import Call, Choice

AnyArray = Any
# Rows times keys up to which XLA is faster for one new token and heads over 128 wide.
MAX_XLA_KEYS = 1 << 16

# Bytes of f32 scores `[B,N,S,T]` above which attention without cuDNN runs over chunks of the queries.
MAX_SCORE_BYTES = 2**29

# Bytes of the f32 scores of a chunk. One H200, f32, causal, 8 x 2048 tokens, 32 query heads on 8 of width 64, ms and
# GiB of temporaries with the gradient: all scores 33.6 and 12.0, chunks of 2**26 bytes 32.4 and 0.4, of 2**28 25.6 and
# 1.0, of 2**30 23.9 and 3.3. A chunk has few queries of all rows of a large batch; one row after another was slower:
# 16 x 2048 tokens 19.5 and 30.5 ms, 32 x 512 over 4096 keys 22.1 and 29.8.
CHUNK_SCORE_BYTES = 2**28


def choose(call: Call, device: Device, preference: str) -> Choice:
    """Choose the implementation of an attention.

    Args:
        call: the op and the types of its operands, with static sizes.
        device: the target.
        preference: `auto`, `xla` or `cudnn`.

    Raises:
        UnsupportedError: `preference` is `cudnn`, which does not support this attention; names the reason.
    """
    op, (q, k, *_) = call
    assert isinstance(op, AttentionOp)
    if op.returns != "context":  # a capture: the attention beside it keeps its own implementation
        return Choice("xla", f"fused implementations do not return {op.returns}")
    if preference == "xla":
        return Choice("xla", "asked for")
    refusal = why_not_cudnn(call, device)
    if not refusal:
        return Choice("cudnn", "asked for" if preference == "cudnn" else "faster here")
    if preference != "auto":
        raise UnsupportedError(
            f"attention.implementation = '{preference}' is not available: {refusal}; with 'auto' another "
            "implementation runs instead"
        )
    queries, keys, scores = int(q.shape[1]), int(k.shape[1]), score_bytes(call)
    if queries > 1 and scores > MAX_SCORE_BYTES:
        return Choice("query_chunks", f"{refusal}; all scores take {scores / 2**30:.1f} GiB")
    if device.kind == "cpu" and 1 < queries == keys:  # `heads_first` would copy a cache
        return Choice("heads_first", "faster on a CPU")
    return Choice("xla", refusal)


def score_bytes(call: Call) -> int:
    """Return the bytes of the f32 scores `[B,N,S,T]` of an attention."""
    op, (q, k, *_) = call
    assert isinstance(op, AttentionOp)
    return 4 * int(q.shape[0]) * op.heads * int(q.shape[1]) * int(k.shape[1])


def why_not_cudnn(call: Call, device: Device) -> str:
    """Return why cuDNN cannot compute this attention, or is slower; empty if it should be used."""
    op, (q, k, v, *_) = call
    assert isinstance(op, AttentionOp)
    queries, keys, width = int(q.shape[1]), int(k.shape[1]), int(q.shape[2]) // op.heads
    if device.kind != "cuda":
        return f"cuDNN is for cuda, the target is {device.kind}"
    if (limits := device.cudnn) is None:
        return f"cuDNN has no such attention for {device.name}"
    if short_name(q.dtype) not in limits.dtypes:
        return f"cuDNN takes {' and '.join(limits.dtypes)}, not {short_name(q.dtype)}"
    if width % limits.multiple or width > limits.width:
        return f"cuDNN takes head widths that {limits.multiple} divides, up to {limits.width}, not {width}"
    if v.shape[2] != k.shape[2]:
        return f"cuDNN takes values as wide as keys, not {v.shape[2]} and {k.shape[2]}"
    if op.softcap is not None:
        return "cuDNN has no softcap"
    if op.ahead:
        return "cuDNN takes windows that end with the query's own key"
    if op.precision != "default":
        return f"products are pinned to {op.precision}"
    if op.extra not in ((), ("positions",)):  # with a mask, cuDNN does not return zeros for a row without keys
        return f"cuDNN does not mean the same with the operands {', '.join(op.extra)}"
    if op.extra and not op.causal:
        return "cuDNN does not mean the same with positions that are not causal"
    if op.extra and (queries > 1 or op.window is not None) and score_bytes(call) <= MAX_SCORE_BYTES:
        return f"cuDNN does not gain where {queries} queries stand at positions of their own"
    if op.extra and width > 128 and int(q.shape[0]) * keys <= MAX_XLA_KEYS:
        return f"cuDNN does not gain over {keys} keys of heads {width} wide"
    if not op.extra and queries != keys and (op.causal or op.window is not None):
        return f"cuDNN aligns a causal mask top-left; there are {queries} queries and {keys} keys"
    return ""


def query_chunks(op: AttentionOp, q: AnyArray, k: AnyArray, v: AnyArray, *extras: AnyArray) -> AnyArray:
    """Compute the op for one chunk of queries after another, each over all keys.

    A gradient keeps the operands and computes the scores of a chunk again, so that memory grows with S, not with S².
    """
    batch, queries, _ = q.shape
    size = max(1, min(queries, CHUNK_SCORE_BYTES // (4 * batch * op.heads * k.shape[1])))
    count = -(-queries // size)
    # Operands that have a query axis are split along it; a keep mask [B|1,T] and sinks [N] have none.
    axes = {"keep": 2, "bias": 2, "positions": 1}
    query_axes = [axes.get(name, x.ndim) for name, x in zip(op.extra, extras, strict=True)]
    split_axes = [
        axis if axis < x.ndim and x.shape[axis] == queries else None for axis, x in zip(query_axes, extras, strict=True)
    ]

    def chunks(x: AnyArray, axis: int) -> AnyArray:
        """Split an axis of S into `[count, …, size, …]`; the last chunk repeats the last query where S is too short."""
        padded = jnp.pad(x, [(0, count * size - queries if i == axis else 0) for i in range(x.ndim)], mode="edge")
        shape = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(padded.reshape(shape), axis, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # it is the body of a loop, as a layer in `interpret`
    def chunk(start: AnyArray, q: AnyArray, parts: list[AnyArray]) -> AnyArray:
        chunk_operands = iter(parts)
        operands = [x if axis is None else next(chunk_operands) for axis, x in zip(split_axes, extras, strict=True)]
        return op.eval(q, k, v, *operands, start=start, total=queries)

    starts = jnp.arange(count, dtype=jnp.int32) * size
    parts = [chunks(x, axis) for axis, x in zip(split_axes, extras, strict=True) if axis is not None]
    out = jax.lax.map(lambda xs: chunk(*xs), (starts, chunks(q, 1), parts))
    return jnp.moveaxis(out, 0, 1).reshape(batch, count * size, -1)[:, :queries]


def cudnn(op: AttentionOp, q: AnyArray, k: AnyArray, v: AnyArray, *extras: AnyArray) -> AnyArray:
    """Compute the op by cuDNN's flash attention.

    cuDNN has a gradient for even lengths only, so an odd number of tokens is padded by one, unless there are positions.

    Args:
        op: the attention.
        q: queries, as in `AttentionOp`.
        k: keys.
        v: values.
        extras: nothing, or the positions `[B|1,S]` of the queries.
    """
    batch, queries, width = q.shape
    masked, mask = op.causal or op.window is not None, None
    # A query at position p reads keys 0 … p: the first p + 1. Positions of padding may be after the last key.
    last = jnp.minimum(extras[0].max(axis=1) + 1, k.shape[1]) if extras else None
    valid = None if last is None else jnp.broadcast_to(last, (batch,)).astype(jnp.int32)
    if extras and (queries > 1 or op.window is not None):
        distance = extras[0][:, None, :, None] - jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, None]
        mask = (distance >= 0) & (distance < (op.window or k.shape[1]))
    if valid is None and k.shape[1] % 2 and not masked:  # a causal mask already hides the padding key
        valid = jnp.full((batch,), k.shape[1], jnp.int32)

    def heads(x: AnyArray, count: int) -> AnyArray:
        even = x if extras or x.shape[1] % 2 == 0 else jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        return even.reshape(*even.shape[:2], count, width // op.heads)

    out = jax.nn.dot_product_attention(
        heads(q, op.heads),
        heads(k, op.kv_heads),
        heads(v, op.kv_heads),
        mask=mask,
        scale=op.scale,
        is_causal=not extras and masked,
        key_value_seq_lengths=valid,
        local_window_size=None if op.window is None or extras else (op.window - 1, 0),
        implementation="cudnn",
    )
    return out[:, :queries].reshape(q.shape)
