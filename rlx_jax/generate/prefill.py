"""The implementation of `CausalLM.logits`, `prefill` and `extend`, which take blocks of tokens.

Each function checks and pads its tokens, runs one program, and removes the padding from the outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.settings import Buckets, bucket_size, fit_bucket
from rlx_jax.errors import RequestError, SequenceLengthError, quote, shown
from rlx_jax.generate.capturing import capture_axes, capture_names, trim_captures
from rlx_jax.generate.decode_state import DecodeState, check_is_state, last_tokens, run_padded, shift_rows
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.request_inputs import check_inputs
from rlx_jax.generate.request_plan import CONTEXT_BUCKET
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.program_key import Variant
from rlx_jax.runtime.sequence_state import as_state
from rlx_jax.text.padding import block_width, crop_to, pad_block, pad_to
from rlx_jax.text.request_checks import token_block
from rlx_jax.text.token_model import check_positions, primary_output

DEFAULT_HEADROOM = 256  # free slots of the cache after a prompt, where `prefill` is called without max_len


def compute_logits(lm: LanguageModel, tokens: Any, lengths: Any, mask: Any, inputs: Any) -> jax.Array:
    """Return the logits of every position; see `CausalLM.logits`."""
    model, limit = lm.model, lm.max_positions
    block, _, starts = token_block(tokens, lm.vocab_size, lengths, mask)
    check_positions(block.shape[1], limit, "tokens")
    # Padding is only safe where prefill can be derived: then tokens do not see later ones, and rows not each other.
    padded = block if model.programs.derivation_error(model.name, "prefill") else pad_block(lm.buckets, block, limit)
    other_inputs = check_inputs(model, inputs, len(block), lm.inputs).padded(len(padded))
    values = crop_to(model.programs, primary_output(model(padded, **other_inputs)), *block.shape)
    return restore_left_padding(model, values, starts)


def prefill(
    lm: LanguageModel, tokens: Any, lengths: Any, max_len: int | None, logits: str, mask: Any, inputs: Any,
    returns_captures: bool = False,
) -> tuple[jax.Array, DecodeState, dict[str, jax.Array]]:  # fmt: skip
    """Prefill a new state; see `CausalLM.prefill`. Without `returns_captures` there are none."""
    model, limit = lm.model, lm.max_positions
    names = capture_names(model, "prefill") if returns_captures else ()
    block, valid, starts = token_block(tokens, lm.vocab_size, lengths, mask)
    longest = int(valid.max())
    check_positions(longest, limit, "the prompt")
    if max_len is not None:
        check_positions(check_integer("max_len", max_len, 1), limit, "max_len")
        if longest > max_len:
            raise SequenceLengthError(f"a prompt of {longest} tokens does not fit max_len={max_len}")
    padded = pad_block(lm.buckets, block, max_len or limit)
    rows, width = padded.shape
    cache_len = prefill_cache_len(lm.buckets, longest, width, max_len, limit)
    other_inputs = check_inputs(model, inputs, len(block), lm.inputs)
    sizes = {**other_inputs.sizes, "batch": rows, "context": cache_len}
    # Captures have every token, and a program has the last token either of all its outputs or of none.
    is_last = last_only(logits)
    variant = Variant(is_last and not names, (*model.output_names[:1], *names), other_inputs.optional_inputs)
    program = model.as_program("prefill").bind_to_sizes({**sizes, "seq": width}, variant=variant)
    axes = capture_axes(model, model.programs.template(program.key.symbolic).mir, names)
    if merged := [name for name, a in axes.items() if not a.is_plain]:
        raise RequestError(
            f"prefill: return_captures: the tokens of {quote(merged[0])} are on no axis of their own, so that padding "
            "cannot be cut off: lm.capture returns it"
        )
    values, new_state, captured = run_padded(
        program, {}, padded, valid, block.shape[1], other_inputs.padded(rows), names
    )
    if is_last and names:
        values = model.programs.run_helper(last_tokens, values, valid.astype(np.int32))
    captures = trim_captures(model, axes, captured, valid.astype(np.int32), block.shape[1])
    state = DecodeState(
        as_state(new_state), valid, max_len or cache_len, sizes, lm.owner, other_inputs.optional_inputs, text=block
    )
    return (values if is_last else restore_left_padding(model, values, starts)), state, captures


def extend(
    lm: LanguageModel, state: DecodeState, tokens: Any, lengths: Any, logits: str
) -> tuple[jax.Array, DecodeState]:
    """Extend a state by more tokens; see `CausalLM.extend`."""
    model = lm.model
    check_is_state(state, "extend").take(lm.owner, peek=True)
    block, valid, _ = token_block(tokens, lm.vocab_size, lengths, min_length=0)
    if block.shape[0] != len(state.lengths):
        raise RequestError(f"extend: the state has {len(state.lengths)} rows, tokens {block.shape[0]}")
    state.check_capacity(valid)
    seq = block.shape[1]  # a block of width 1, a decoding step, is not padded: it has a program of its own
    width = seq if seq == 1 else block_width(lm.buckets, seq, state.sizes["context"], step=1)
    padded = pad_to(block, state.sizes["batch"], width)
    variant = Variant(last_only(logits), model.output_names[:1], state.optional_inputs)
    program = model.as_program("extend").bind_to_sizes({**state.sizes, "seq": padded.shape[1]}, variant=variant)
    arrays = state.take(lm.owner)
    try:
        values, new_state, _ = run_padded(program, arrays.arrays(), padded, valid, block.shape[1])
    except BaseException:
        if not arrays.length.is_deleted():  # the program did not start, so the state was not donated and is still valid
            state.state = arrays
        raise
    state.append_tokens(block, valid)
    return values, replace(state, state=as_state(new_state), lengths=state.lengths + valid)


def prefill_cache_len(
    buckets: Buckets, longest: int, width: int, max_len: int | None, max_positions: int | None
) -> int:
    """Return the length of the cache that `prefill` allocates.

    It is `max_len`, or else `DEFAULT_HEADROOM` more than the width of the block, rounded up to a bucket of the profile.
    Without buckets, the latter is rounded up to a power of two, but not over the model's positions.

    Args:
        longest: number of tokens of the longest row.
        width: padded width of the block.
    """
    if max_len is not None:
        return fit_bucket(buckets.context, max(max_len, width)) or max_len
    if buckets.context and buckets.context[-1] >= longest:
        return fit_bucket(buckets.context, width + DEFAULT_HEADROOM) or buckets.context[-1]
    cache_len = bucket_size(width + DEFAULT_HEADROOM, CONTEXT_BUCKET, None)
    return cache_len if max_positions is None else max(longest, min(cache_len, max_positions))


def last_only(logits: str) -> bool:
    """Return whether the argument `logits` of `prefill` and `extend` selects the last tokens.

    Raises:
        RequestError: it is neither "all" nor "last".
    """
    if logits not in ("all", "last"):
        raise RequestError(f"logits is {shown(logits)}; expected 'all' or 'last'")
    return logits == "last"


def restore_left_padding(model: CompiledModel, array: jax.Array, starts: np.ndarray[Any, Any]) -> jax.Array:
    """Move the rows of `[B, S, …]` back to the columns `starts` `[B]`, where left-padded rows began."""
    return model.programs.run_helper(shift_rows, array, starts.astype(np.int32)) if starts.any() else array
