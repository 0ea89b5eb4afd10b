"""The implementation of `CausalLM.logits`, `prefill`, `extend` and `capture`, which take blocks of tokens.

Each function checks and pads its tokens, runs one program, and removes the padding from the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.settings import Buckets, bucket_size, fit_bucket
from rlx_jax.errors import RequestError, SequenceLengthError, quote, shown
from rlx_jax.generate.decode_state import DecodeState, check_is_state, run_padded, shift_rows
from rlx_jax.generate.request import LanguageModel, RequestInputs, check_inputs
from rlx_jax.generate.request_plan import CONTEXT_BUCKET
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.runtime.inputs import bind_sizes, check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.program_key import Variant
from rlx_jax.runtime.sequence_state import as_state
from rlx_jax.text.padding import block_width, crop_to, pad_block, pad_to
from rlx_jax.text.request_checks import Ids, classify_prompts, pad_rows, token_block
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
    lm: LanguageModel, tokens: Any, lengths: Any, max_len: int | None, logits: str, mask: Any, inputs: Any
) -> tuple[jax.Array, DecodeState]:
    """Prefill a new state; see `CausalLM.prefill`."""
    model, limit = lm.model, lm.max_positions
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
    variant = Variant(last_only(logits), model.output_names[:1], other_inputs.optional_inputs)
    program = model.as_program("prefill").bind_to_sizes({**sizes, "seq": width}, variant=variant)
    values, new_state = run_padded(program, {}, padded, valid, block.shape[1], other_inputs.padded(rows))
    state = DecodeState(
        as_state(new_state), valid, max_len or cache_len, sizes, lm.owner, other_inputs.optional_inputs, text=block
    )
    return (values if logits == "last" else restore_left_padding(model, values, starts)), state


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
        values, new_state = run_padded(program, arrays.arrays(), padded, valid, block.shape[1])
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


@dataclass(frozen=True)
class CaptureAxes:
    """The axes of a capture that enumerate rows and tokens.

    Attributes:
        rows: the axis of the batch, if there is one.
        tokens: the axes of the tokens of a row.
        is_plain: whether all other axes have static sizes, so that padding can be sliced off. An axis that merges rows
            and tokens, for example, is not plain.
    """

    rows: int | None
    tokens: tuple[int, ...]
    is_plain: bool

    @staticmethod
    def of(value: TensorType, ids: TensorType) -> CaptureAxes:
        """Return the axes of a capture of type `value`, in a flow with ids of type `ids`, `[batch, seq]`."""
        symbols = [None if is_static(size) else str(size) for size in value.shape]
        batch, seq = (tuple(axis for axis, symbol in enumerate(symbols) if symbol == str(dim)) for dim in ids.shape)
        other_symbols = (symbol for axis, symbol in enumerate(symbols) if axis not in (*batch, *seq))
        return CaptureAxes(batch[0] if batch else None, seq, len(batch) < 2 and not any(other_symbols))


def trim_padding(axes: CaptureAxes, rows: int, tokens: int, array: jax.Array, lengths: jax.Array) -> jax.Array:
    """Slice a capture of padded rows to `rows` × `tokens`, with `fill_value` after the end of each row."""
    sizes = {axes.rows: rows} | dict.fromkeys(axes.tokens, tokens)
    array = array[tuple(slice(sizes.get(axis)) for axis in range(array.ndim))]
    if axes.rows is None:  # a table common to all rows, such as positions
        return array
    ends = lengths.reshape([-1 if axis == axes.rows else 1 for axis in range(array.ndim)])
    for axis in axes.tokens:
        is_token = lax.broadcasted_iota(jnp.int32, array.shape, axis) < ends
        array = jnp.where(is_token, array, fill_value(array.dtype))
    return array


def join_rows(axes: CaptureAxes, tokens: int, *arrays: jax.Array) -> jax.Array:
    """Concatenate captures of one row each, padded with `fill_value` to `tokens` tokens."""
    assert axes.rows is not None
    padded = []
    for array in arrays:
        pad_widths = [(0, (tokens - n) * (axis in axes.tokens)) for axis, n in enumerate(array.shape)]
        padded.append(jnp.pad(array, pad_widths, constant_values=fill_value(array.dtype)))
    return jnp.concatenate(padded, axes.rows)


def fill_value(dtype: Any) -> Any:
    """Return the padding value of captures: NaN, -1 in signed integers, else 0.

    NaN, as a mean over padding by mistake should be noticed.
    """
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan, dtype)
    return np.array(-1 if jnp.issubdtype(dtype, jnp.signedinteger) else 0, dtype)


def capture(lm: LanguageModel, prompts: Any, inputs: Any) -> dict[str, jax.Array]:
    """Return the captures of prompts; see `CausalLM.capture`."""
    model, limit = lm.model, lm.max_positions
    names = model.output_names[1:]
    if not names:
        raise RequestError(f"capture: {model.name} has no captures: load it with recipe.at('layers.*').capture()")
    rows = lm.encode_prompts(classify_prompts(prompts))
    if not rows:
        raise RequestError("capture: there are no prompts")
    for i, row in enumerate(rows):
        check_positions(len(row), limit, f"prompts[{i}]")
    other_inputs = check_inputs(model, inputs, len(rows), lm.inputs)
    graph = model.programs.template(model.key(other_inputs.optional_inputs, names)).mir
    ids = next(decl.type for decl in model.flow._inputs if decl.name == model.first_input)
    types = dict(zip(graph.output_names, map(graph.type, graph.outputs), strict=True))
    axes = {name: CaptureAxes.of(value, ids) for name, value in types.items()}
    lengths = np.array([len(row) for row in rows], np.int32)
    width = int(lengths.max())
    block = pad_rows(rows, width)
    call = model.programs.run_helper
    # Where prefill can be derived, no capture depends on later tokens or other rows, so that rows may be padded.
    error = model.programs.derivation_error(model.name, "prefill", other_inputs.optional_inputs)
    if all(a.is_plain for a in axes.values()) and not error:
        padded = pad_block(lm.buckets, block, limit)
        values = run_forward(model, tuple(axes), padded, ids, other_inputs, other_inputs.padded(len(padded)))
        static = {name: (a, *block.shape) for name, a in axes.items()}
        return {name: call(trim_padding, value, lengths, static=static[name]) for name, value in values.items()}
    if len(rows) > 1 and (mixed := [name for name, a in axes.items() if not a.is_plain or a.rows is None]):
        raise RequestError(
            f"capture: {quote(mixed[0])} is {types[mixed[0]]}, which has no axis of prompts: capture each prompt alone"
        )
    # Otherwise each prompt runs by itself, without padding.
    blocks = (np.array([row], np.int32) for row in rows)
    captures = [
        run_forward(model, tuple(axes), block, ids, other_inputs, other_inputs.select_row(i))
        for i, block in enumerate(blocks)
    ]
    if len(rows) == 1:
        return captures[0]
    return {name: call(join_rows, *(row[name] for row in captures), static=(a, width)) for name, a in axes.items()}


def run_forward(
    model: CompiledModel, names: tuple[str, ...], block: Ids, ids: TensorType, other_inputs: RequestInputs,
    arrays: Mapping[str, Any],
) -> dict[str, jax.Array]:  # fmt: skip
    """Run the program `forward` and return its outputs `names`.

    Args:
        block: tokens `[B, S]`.
        ids: type of the token input.
        other_inputs: the other inputs of the request, for their sizes.
        arrays: the other inputs, padded to the rows of `block`.
    """
    ids_input = model.first_input
    sizes = {**other_inputs.sizes, **bind_sizes({ids_input: ids}, {ids_input: block}, model.name)}
    program = model.bind_to_sizes(
        sizes, variant=Variant(last_only=False, outputs=names, optional_inputs=other_inputs.optional_inputs)
    )
    used_inputs = {i.input for i in model.programs.template(program.key.symbolic).mir.inputs}
    values, _ = program(
        {name: value for name, value in {ids_input: block, **arrays}.items() if name in used_inputs}, {}
    )
    return dict(zip(names, values, strict=True))
