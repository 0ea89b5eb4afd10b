"""What `CausalLM.logits`, `prefill`, `extend` and `capture` do with blocks of tokens, and what `capture` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.settings import Buckets, bucket, smallest
from rlx_jax.errors import RequestError, SequenceLengthError, quote, shown
from rlx_jax.generate.decode_state import DecodeState, check_is_state, moved_back, run_padded
from rlx_jax.generate.request import LanguageModel, RequestInputs, request_inputs
from rlx_jax.generate.request_plan import CONTEXT_BUCKET
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.runtime.inputs import bind_sizes, whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.runtime.sequence_state import as_state
from rlx_jax.text.padding import block_width, cropped, pad_block, padded_to
from rlx_jax.text.request_checks import Ids, pad_rows, split_prompts, token_block
from rlx_jax.text.token_model import check_positions, primary

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


@dataclass(frozen=True)
class CaptureAxes:
    """The axis of a capture that has the rows of the batch, if one has, and the axes that have the tokens of a row.

    `is_plain`: every other axis has a size of its own, so that rows and tokens of padding can be cut off.
    """

    rows: int | None
    tokens: tuple[int, ...]
    is_plain: bool

    @staticmethod
    def of(value: TensorType, ids: TensorType) -> CaptureAxes:
        """The axes of a capture of the type `value`, of a flow that reads `ids` `[batch, seq]`."""
        symbols = [None if is_static(size) else str(size) for size in value.shape]
        batch, seq = (tuple(axis for axis, symbol in enumerate(symbols) if symbol == str(dim)) for dim in ids.shape)
        others = (symbol for axis, symbol in enumerate(symbols) if axis not in (*batch, *seq))
        return CaptureAxes(batch[0] if batch else None, seq, len(batch) < 2 and not any(others))


def trim_padding(axes: CaptureAxes, rows: int, tokens: int, array: jax.Array, lengths: jax.Array) -> jax.Array:
    """A capture of padded rows, cut to `rows` of `tokens`; `fill_value` at the tokens after the end of a row."""
    sizes = {axes.rows: rows} | dict.fromkeys(axes.tokens, tokens)
    array = array[tuple(slice(sizes.get(axis)) for axis in range(array.ndim))]
    if axes.rows is None:  # a table that all rows share
        return array
    ends = lengths.reshape([-1 if axis == axes.rows else 1 for axis in range(array.ndim)])
    for axis in axes.tokens:
        real = lax.broadcasted_iota(jnp.int32, array.shape, axis) < ends
        array = jnp.where(real, array, fill_value(array.dtype))
    return array


def join_rows(axes: CaptureAxes, tokens: int, *arrays: jax.Array) -> jax.Array:
    """Captures of one row each as one array, with `fill_value` up to `tokens`."""
    assert axes.rows is not None
    wide = []
    for array in arrays:
        more = [(0, (tokens - n) * (axis in axes.tokens)) for axis, n in enumerate(array.shape)]
        wide.append(jnp.pad(array, more, constant_values=fill_value(array.dtype)))
    return jnp.concatenate(wide, axes.rows)


def fill_value(dtype: Any) -> Any:
    """What stands for no token: NaN, -1 in signed integers, else 0. A mean over padding should not pass for a mean."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan, dtype)
    return np.array(-1 if jnp.issubdtype(dtype, jnp.signedinteger) else 0, dtype)


def capture(lm: LanguageModel, prompts: Any, inputs: Any) -> dict[str, jax.Array]:
    """As `CausalLM.capture`."""
    model, limit = lm.model, lm.max_positions
    names = model.output_names[1:]
    if not names:
        raise RequestError(f"capture: {model.name} has no captures: load it with recipe.at('layers.*').capture()")
    rows = lm.rows(split_prompts(prompts))
    if not rows:
        raise RequestError("capture: there are no prompts")
    for i, row in enumerate(rows):
        check_positions(len(row), limit, f"prompts[{i}]")
    beside = request_inputs(model, inputs, len(rows), lm.inputs)
    graph = model.programs.template(model.key(beside.given, names)).mir
    ids = next(decl.type for decl in model.flow._inputs if decl.name == model.first_input)
    types = dict(zip(graph.output_names, map(graph.type, graph.outputs), strict=True))
    axes = {name: CaptureAxes.of(value, ids) for name, value in types.items()}
    lengths = np.array([len(row) for row in rows], np.int32)
    width = int(lengths.max())
    block = pad_rows(rows, width)
    call = model.programs.call
    # Where prefill can be derived, no capture reads tokens after its own or other rows: rows may be padded.
    if all(a.is_plain for a in axes.values()) and not model.programs.why_not(model.name, "prefill", beside.given):
        padded = pad_block(lm.buckets, block, limit)
        values = run(model, tuple(axes), padded, ids, beside, beside.padded(len(padded)))
        static = {name: (a, *block.shape) for name, a in axes.items()}
        return {name: call(trim_padding, value, lengths, static=static[name]) for name, value in values.items()}
    if len(rows) > 1 and (mixed := [name for name, a in axes.items() if not a.is_plain or a.rows is None]):
        raise RequestError(
            f"capture: {quote(mixed[0])} is {types[mixed[0]]}, which has no axis of prompts: capture each prompt alone"
        )
    blocks = (np.array([row], np.int32) for row in rows)
    alone = [run(model, tuple(axes), block, ids, beside, beside.of_row(i)) for i, block in enumerate(blocks)]
    if len(rows) == 1:
        return alone[0]
    return {name: call(join_rows, *(row[name] for row in alone), static=(a, width)) for name, a in axes.items()}


def run(
    model: CompiledModel, names: tuple[str, ...], block: Ids, ids: TensorType, beside: RequestInputs,
    arrays: Mapping[str, Any],
) -> dict[str, jax.Array]:  # fmt: skip
    """The outputs `names` of the program `forward` for a block of tokens and other inputs."""
    first = model.first_input
    sizes = {**beside.sizes, **bind_sizes({first: ids}, {first: block}, model.name)}
    program = model.bound(sizes, variant=Variant(last_only=False, outputs=names, given=beside.given))
    read = {i.input for i in model.programs.template(program.key.symbolic).mir.inputs}
    values, _ = program({name: value for name, value in {first: block, **arrays}.items() if name in read}, {})
    return dict(zip(names, values, strict=True))
