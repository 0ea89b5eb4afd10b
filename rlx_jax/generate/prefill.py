"""What `CausalLM.logits`, `prefill` and `extend` do with blocks of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.settings import Buckets, bucket, smallest
from rlx_jax.errors import RequestError, SequenceLengthError, shown
from rlx_jax.generate.decode_state import DecodeState, check_is_state, moved_back, run_padded
from rlx_jax.generate.plan import CONTEXT_BUCKET
from rlx_jax.generate.request import LanguageModel, request_inputs
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.runtime.state import as_state
from rlx_jax.text.opening import check_positions, primary
from rlx_jax.text.padding import block_width, cropped, pad_block, padded_to
from rlx_jax.text.requests import token_block

ROOM = 256  # free slots after a prompt when prefill is not told max_len


def logits_of(lm: LanguageModel, tokens: Any, lengths: Any, mask: Any, inputs: Any) -> jax.Array:
    """As `CausalLM.logits`."""
    model, limit = lm.model, lm.max_positions
    block, _, starts = token_block(tokens, lm.vocab_size, lengths, mask)
    check_positions(block.shape[1], limit, "tokens")
    # Where prefill can be derived, tokens after the end of a row change nothing before it, and rows nothing in others.
    padded = block if model.programs.why_not(model.name, "prefill") else pad_block(lm.buckets, block, limit)
    beside = request_inputs(model, inputs, len(block), lm.inputs).padded(len(padded))
    out = cropped(model.programs, primary(model(padded, **beside)), *block.shape)
    return as_given(model, out, starts)


def prefill(
    lm: LanguageModel, tokens: Any, lengths: Any, max_len: int | None, logits: str, mask: Any, inputs: Any
) -> tuple[jax.Array, DecodeState]:
    """As `CausalLM.prefill`."""
    model, limit = lm.model, lm.max_positions
    block, valid, starts = token_block(tokens, lm.vocab_size, lengths, mask)
    longest = int(valid.max())
    check_positions(longest, limit, "the prompt")
    if max_len is not None:
        check_positions(whole_number("max_len", max_len, 1), limit, "max_len")
        if longest > max_len:
            raise SequenceLengthError(f"a prompt of {longest} tokens does not fit max_len={max_len}")
    padded = pad_block(lm.buckets, block, max_len or limit)
    rows, width = padded.shape
    slots = prefill_slots(lm.buckets, longest, width, max_len, limit)
    beside = request_inputs(model, inputs, len(block), lm.inputs)
    sizes = {**beside.sizes, "batch": rows, "context": slots}
    variant = Variant(last_only(logits), model.output_names[:1], beside.given)
    reader = model.as_program("prefill").bound({**sizes, "seq": width}, variant=variant)
    out, after = run_padded(reader, {}, padded, valid, block.shape[1], beside.padded(rows))
    state = DecodeState(as_state(after), valid, max_len or slots, sizes, lm.owner, beside.given, text=block)
    return (out if logits == "last" else as_given(model, out, starts)), state


def extend(
    lm: LanguageModel, state: DecodeState, tokens: Any, lengths: Any, logits: str
) -> tuple[jax.Array, DecodeState]:
    """As `CausalLM.extend`."""
    model = lm.model
    check_is_state(state, "extend").take(lm.owner, peek=True)
    block, valid, _ = token_block(tokens, lm.vocab_size, lengths, low=0)
    if block.shape[0] != len(state.lengths):
        raise RequestError(f"extend: the state holds {len(state.lengths)} rows, tokens {block.shape[0]}")
    state.check_room(valid)
    seq = block.shape[1]  # one token a row, as in a step of decoding, stays one
    width = seq if seq == 1 else block_width(lm.buckets, seq, state.sizes["context"], step=1)
    padded = padded_to(block, state.sizes["batch"], width)
    variant = Variant(last_only(logits), model.output_names[:1], state.given)
    reader = model.as_program("extend").bound({**state.sizes, "seq": padded.shape[1]}, variant=variant)
    held = state.take(lm.owner)
    try:
        out, after = run_padded(reader, held.arrays(), padded, valid, block.shape[1])
    except BaseException:
        if not held.length.is_deleted():  # the program did not begin: the state is as it was
            state.state = held
        raise
    state.note(block, valid)
    return out, replace(state, state=as_state(after), lengths=state.lengths + valid)


def prefill_slots(buckets: Buckets, longest: int, width: int, max_len: int | None, max_positions: int | None) -> int:
    """Slots of the cache that `prefill` makes for a block of `width` whose rows hold at most `longest`: `max_len`, else
    `ROOM` more than the block; in a bucket, or the latter in a power of two."""
    if max_len is not None:
        return smallest(buckets.context, max(max_len, width)) or max_len
    if buckets.context and buckets.context[-1] >= longest:
        return smallest(buckets.context, width + ROOM) or buckets.context[-1]
    slots = bucket(width + ROOM, CONTEXT_BUCKET, None)
    return slots if max_positions is None else max(longest, min(slots, max_positions))


def last_only(logits: str) -> bool:
    """Whether `logits` of `prefill` and `extend` are those of the last tokens."""
    if logits not in ("all", "last"):
        raise RequestError(f"logits is {shown(logits)}; expected 'all' or 'last'")
    return logits == "last"


def as_given(model: CompiledModel, array: jax.Array, starts: np.ndarray[Any, Any]) -> jax.Array:
    """`[B, S, …]` with each row where it began."""
    return model.programs.call(moved_back, array, starts.astype(np.int32)) if starts.any() else array
