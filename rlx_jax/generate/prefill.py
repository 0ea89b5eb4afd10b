"""The implementation of `CausalLM.logits`, `prefill`, `extend` and `capture`, which take blocks of tokens.

Each function checks and pads its tokens, runs one program, and removes the padding from the outputs. Captures are the
side outputs that `recipe.at(pattern).capture()` adds, by prompt and without padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.buckets import Buckets, bucket_size, fit_bucket
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import RequestError, SequenceLengthError, UnsupportedError, quote, shown
from rlx_jax.generate.decode import RowTokens
from rlx_jax.generate.decode_state import DecodeState, check_is_state, last_tokens, run_padded, shift_rows
from rlx_jax.generate.request import LanguageModel, Request
from rlx_jax.generate.request_inputs import RequestInputs, check_inputs
from rlx_jax.generate.request_plan import CONTEXT_BUCKET
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.ops.cache import is_code_dtype
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.runtime.inputs import bind_sizes, check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.program_key import ProgramKey, Variant
from rlx_jax.runtime.sequence_state import as_state
from rlx_jax.text.request_checks import (
    Ids,
    block_width,
    classify_prompts,
    crop_to,
    pad_block,
    pad_rows,
    pad_to,
    token_block,
)
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
    is_last, optional, runner = last_only(logits), other_inputs.optional_inputs, model.as_program("prefill")

    def make_key() -> ProgramKey:
        # Captures have every token, and a program has the last token either of all its outputs or of none.
        variant = Variant(is_last and not names, (*model.output_names[:1], *names), optional)
        return runner.key_for_sizes({**sizes, "seq": width}, variant)

    request = ("prefill", model.name, width, is_last, names, optional, *sizes.items())
    program = runner.bind(model.programs.request_keys(request, make_key))
    axes = capture_axes(model, model.programs.template(program.key.symbolic).mir, names) if names else {}
    if merged := [name for name, a in axes.items() if not a.is_plain]:
        raise RequestError(
            f"prefill: return_captures: the tokens of {quote(merged[0])} are on no axis of their own, so that padding "
            "cannot be cut off: lm.capture returns it"
        )
    arrays = other_inputs.padded(rows)
    values, new_state, captured = run_padded(program, {}, padded, valid, block.shape[1], arrays, names)
    if is_last and names:
        values = model.programs.run_helper(last_tokens, values, valid.astype(np.int32))
    captures = trim_captures(model, axes, captured, valid.astype(np.int32), block.shape[1])
    state = DecodeState(as_state(new_state), valid, max_len or cache_len, sizes, lm.owner, optional, text=block)
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


def capture_names(model: CompiledModel, method: str) -> tuple[str, ...]:
    """Return the names of the captures and other side outputs of a model.

    Raises:
        RequestError: it has none.
    """
    if not (names := model.output_names[1:]):
        raise RequestError(f"{method}: {model.name} has no captures: load it with recipe.at('layers.*').capture()")
    return names


def capture_axes(model: CompiledModel, graph: Graph, names: Sequence[str]) -> dict[str, CaptureAxes]:
    """Return the axes of the outputs `names` of a program."""
    ids, types = _ids_type(model), dict(zip(graph.output_names, map(graph.type, graph.outputs), strict=True))
    return {name: CaptureAxes.of(types[name], ids) for name in names}


def _ids_type(model: CompiledModel) -> TensorType:
    """Return the type of the tokens, `[batch, seq]`."""
    return next(decl.type for decl in model.flow._inputs if decl.name == model.first_input)


def trim_captures(
    model: CompiledModel, axes: Mapping[str, CaptureAxes], values: Mapping[str, jax.Array], lengths: Ids, width: int
) -> dict[str, jax.Array]:
    """Return captures of padded rows without the padding, with `fill_value` after the end of each row.

    Args:
        lengths: number of tokens of each row.
        width: number of tokens of the longest row.
    """
    call, rows = model.programs.run_helper, len(lengths)
    return {name: call(trim_padding, values[name], lengths, static=(a, rows, width)) for name, a in axes.items()}


def capture(lm: LanguageModel, prompts: Any, inputs: Any) -> dict[str, jax.Array]:
    """Return the captures of prompts; see `CausalLM.capture`."""
    capture_names(lm.model, "capture")
    rows = read_prompts(lm, prompts, "capture")
    return capture_rows(lm, rows, check_inputs(lm.model, inputs, len(rows), lm.inputs))


def read_prompts(lm: LanguageModel, prompts: Any, where: str, name: str = "prompts") -> list[list[int]]:
    """Return the prompts of a forward pass as ids.

    Raises:
        RequestError: there are none; the message begins with `where`. SequenceLengthError: one is too long.
    """
    rows = lm.encode_prompts(classify_prompts(prompts))
    if not rows:
        raise RequestError(f"{where}: there are no prompts")
    for i, row in enumerate(rows):
        check_positions(len(row), lm.max_positions, f"{name}[{i}]")
    return rows


def check_request_captures(lm: LanguageModel, request: Request) -> None:
    """Check, before anything runs, that `capture_request` can return the captures of a request.

    Raises:
        RequestError: there are none, or they depend on inputs that a state has read.
        UnsupportedError: generation reads keys and values that are stored as codes, which captures would not.
    """
    model = lm.model
    capture_names(model, "generate: return_captures")
    if request.prefixes and (lm.required_inputs or request.inputs.optional_inputs):
        raise RequestError("generate: return_captures: the state has read other inputs of the flow: pass the full text")
    dtype = model.settings.kv_dtype
    if dtype is not None and is_code_dtype(dtype):
        raise UnsupportedError(
            f"generate: return_captures: the cache holds {dtype.name} codes (precision.kv), and captures are of a "
            "forward pass without them: use precision.kv = 'auto', or lm.capture of the text"
        )


def capture_request(lm: LanguageModel, request: Request, new_rows: Sequence[RowTokens]) -> dict[str, jax.Array]:
    """Return the captures of the prompts of a request and their new tokens, a row for each answer.

    One forward pass computes them: in a causal flow it has the values that prefill and decoding had.
    """
    n = request.n or 1
    rows = [[*request.rows[i // n], *new.ids] for i, new in enumerate(new_rows)]
    return capture_rows(lm, rows, request.inputs.repeated(n))


def capture_rows(lm: LanguageModel, rows: Sequence[Sequence[int]], other_inputs: RequestInputs) -> dict[str, jax.Array]:
    """Return the captures of rows of tokens.

    Raises:
        RequestError: an output of several rows has no axis of rows.
    """
    model, names = lm.model, lm.model.output_names[1:]
    graph = model.programs.template(model.key(other_inputs.optional_inputs, names)).mir
    axes = capture_axes(model, graph, names)
    lengths = np.array([len(row) for row in rows], np.int32)
    width = int(lengths.max())
    block = pad_rows(rows, width)
    # Where prefill can be derived, no capture depends on later tokens or other rows, so that rows may be padded.
    error = model.programs.derivation_error(model.name, "prefill", other_inputs.optional_inputs)
    if all(a.is_plain for a in axes.values()) and not error:
        padded = pad_block(lm.buckets, block, lm.max_positions)
        values = run_forward(model, names, padded, other_inputs, other_inputs.padded(len(padded)))
        return trim_captures(model, axes, values, lengths, width)
    if len(rows) > 1 and (mixed := [name for name, a in axes.items() if not a.is_plain or a.rows is None]):
        types = dict(zip(graph.output_names, map(graph.type, graph.outputs), strict=True))
        raise RequestError(f"capture: {quote(mixed[0])} is {types[mixed[0]]}, with no axis of prompts: pass one prompt")
    # Otherwise each prompt runs by itself, without padding.
    blocks = enumerate(np.array([row], np.int32) for row in rows)
    captures = [run_forward(model, names, ids, other_inputs, other_inputs.select_row(i)) for i, ids in blocks]
    if len(rows) == 1:
        return captures[0]
    call = model.programs.run_helper
    return {name: call(join_rows, *(row[name] for row in captures), static=(a, width)) for name, a in axes.items()}


def run_forward(
    model: CompiledModel, names: tuple[str, ...], block: Ids, other_inputs: RequestInputs, arrays: Mapping[str, Any],
    lengths: Ids | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Run the program `forward` and return its outputs `names`.

    Args:
        block: tokens `[B, S]`.
        other_inputs: the other inputs of the request, for their sizes.
        arrays: the other inputs, padded to the rows of `block`.
        lengths: number of tokens of each row, to compute the logits of the last ones alone, `[B, 1, V]`; the only
            output is then the logits.
    """
    ids_input = model.first_input
    sizes = {**other_inputs.sizes, **bind_sizes({ids_input: _ids_type(model)}, {ids_input: block}, model.name)}
    is_last = lengths is not None
    variant = Variant(is_last, names, other_inputs.optional_inputs, hidden=is_last)
    program = model.bind_to_sizes(sizes, variant=variant)
    used_inputs = {i.input for i in model.programs.template(program.key.symbolic).mir.inputs}
    used = {name: value for name, value in {ids_input: block, **arrays}.items() if name in used_inputs}
    values, _ = program(used if lengths is None else {**used, "lengths": lengths}, {})
    return dict(zip(names, values, strict=not is_last))
