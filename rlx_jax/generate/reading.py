"""What `CausalLM.logits`, `prefill` and `extend` do with blocks of tokens; and `state=` of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import RequestError
from rlx_jax.generate.decode_state import DecodeState, moved_back, run_padded
from rlx_jax.generate.plan import Before
from rlx_jax.generate.request_inputs import RequestInputs, request_inputs
from rlx_jax.generate.serving import asked_slots, last_only, pad_step, prefill_slots
from rlx_jax.generate.speaker import Speaker
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.runtime.state import as_state
from rlx_jax.text.opening import check_positions, primary
from rlx_jax.text.padding import cropped, pad_block
from rlx_jax.text.requests import Prompts, id_list, token_block


def logits_of(speaker: Speaker, tokens: Any, lengths: Any, mask: Any, inputs: Any, pads: bool) -> jax.Array:
    """As `CausalLM.logits`; `pads`: whether a block may be padded."""
    model, limit = speaker.model, speaker.max_positions
    block, _, starts = token_block(tokens, speaker.vocab_size, lengths, mask)
    check_positions(block.shape[1], limit, "tokens")
    padded = pad_block(speaker.buckets, block, limit) if pads else block
    beside = request_inputs(model, inputs, len(block)).padded(len(padded))
    out = cropped(model.programs, primary(model(padded, **beside)), *block.shape)
    return as_given(model, out, starts)


def prefill(
    speaker: Speaker, tokens: Any, lengths: Any, max_len: int | None, logits: str, mask: Any, inputs: Any
) -> tuple[jax.Array, DecodeState]:
    """As `CausalLM.prefill`."""
    model, limit = speaker.model, speaker.max_positions
    block, valid, starts = token_block(tokens, speaker.vocab_size, lengths, mask)
    longest = int(valid.max())
    check_positions(longest, limit, "the prompt")
    max_len = asked_slots(max_len, longest, limit)
    padded = pad_block(speaker.buckets, block, max_len or limit)
    rows, width = padded.shape
    slots = prefill_slots(speaker.buckets, longest, width, max_len, limit)
    beside = request_inputs(model, inputs, len(block))
    sizes = {**beside.sizes, "batch": rows, "context": slots}
    reader = model.as_program("prefill").reader(
        {**sizes, "seq": width}, Variant(last_only(logits), model.output_names[:1], beside.given)
    )
    out, after = run_padded(reader, {}, padded, valid, block.shape[1], beside.padded(rows))
    state = DecodeState(as_state(after), valid, max_len or slots, sizes, speaker.owner, beside.given, text=block)
    return (out if logits == "last" else as_given(model, out, starts)), state


def extend(
    speaker: Speaker, state: DecodeState, tokens: Any, lengths: Any, logits: str
) -> tuple[jax.Array, DecodeState]:
    """As `CausalLM.extend`."""
    model = speaker.model
    check_is_state(state, "extend").take(speaker.owner, peek=True)
    block, valid, _ = token_block(tokens, speaker.vocab_size, lengths, low=0)
    if block.shape[0] != len(state.lengths):
        raise RequestError(f"extend: the state holds {len(state.lengths)} rows, tokens {block.shape[0]}")
    state.check_room(valid)
    padded = pad_step(speaker.buckets, block, state.sizes)
    reader = model.as_program("extend").bound(
        {**state.sizes, "seq": padded.shape[1]},
        variant=Variant(last_only(logits), model.output_names[:1], state.given),
    )
    held = state.take(speaker.owner)
    try:
        out, after = run_padded(reader, held.arrays(), padded, valid, block.shape[1])
    except BaseException:
        if not held.length.is_deleted():  # the program did not begin: the state is as it was
            state.state = held
        raise
    state.note(block, valid)
    return out, replace(state, state=as_state(after), lengths=state.lengths + valid)


def as_given(model: CompiledModel, array: jax.Array, starts: np.ndarray[Any, Any]) -> jax.Array:
    """`[B, S, …]` with each row where it began."""
    return model.programs.call(moved_back, array, starts.astype(np.int32)) if starts.any() else array


def check_is_state(state: Any, where: str) -> DecodeState:
    """Raises:
    RequestError: it is something else.
    """
    if isinstance(state, DecodeState):
        return state
    pair = "; prefill returns logits and the state" if isinstance(state, tuple) else ""
    raise RequestError(f"{where}: expected the state that prefill returned, got {type(state).__name__}{pair}")


# -- a request behind a state ------------------------------------------------------------------


def behind(speaker: Speaker, asked: Prompts, state: Any) -> tuple[list[list[int]], Before, RequestInputs]:
    """What a state and the prompts of a request behind it are together: whole rows, those that the state holds, and
    what it has of the inputs beside tokens.

    Raises:
        RequestError: no state; an empty prompt; it has several rows, and not one for each prompt.
        SessionStateError: it was consumed.
    """
    held = check_is_state(state, "state").take(speaker.owner, peek=True)
    encode = speaker.needed().encode if asked.texts is not None else None
    texts = [encode(text, add_special_tokens=False) for text in asked.texts or []] if encode else []
    given: list[Any] = asked.ids or texts
    new = [id_list(row, speaker.vocab_size, f"prompts[{i}]") for i, row in enumerate(given)]
    for i, row in enumerate(new):
        if not row:
            raise RequestError(
                f"prompts[{i}] is empty: a state tells no logits, which are those of the last token that is read; keep "
                "that token out of the state, and pass it here"
            )
    count = len(state.lengths)
    if count not in (1, len(new)):
        raise RequestError(
            f"state: it holds {count} rows, and there are {len(new)} prompts; pass one prompt for each row, or a state "
            "of one row"
        )
    rows = tuple(range(len(new))) if count > 1 else (0,) * len(new)
    told = state.ids
    sizes = {name: size for name, size in state.sizes.items() if name not in ("batch", "context")}
    before = Before(held.arrays(), rows, tuple(len(told[row]) for row in rows), state.sizes["context"])
    whole = [told[row] + ids for row, ids in zip(rows, new, strict=True)]
    return whole, before, RequestInputs(sizes=sizes, given=state.given)


def common_prefix(rows: list[list[int]]) -> int:
    """First tokens that all rows have, fewer than the shortest row."""
    if len(rows) < 2:
        return 0
    first, last = min(rows), max(rows)  # in the order of lists these differ soonest
    limit = min(map(len, rows)) - 1
    return next((i for i in range(limit) if first[i] != last[i]), limit)
