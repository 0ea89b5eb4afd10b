"""Captured blocks of prompts: what `CausalLM.capture` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.errors import RequestError, quote
from rlx_jax.generate.request import LanguageModel, RequestInputs, request_inputs
from rlx_jax.ir.types import TensorType, is_static
from rlx_jax.runtime.inputs import bind_sizes
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Variant
from rlx_jax.text.opening import check_positions
from rlx_jax.text.padding import pad_block
from rlx_jax.text.requests import Ids, pad_rows, split_prompts


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
