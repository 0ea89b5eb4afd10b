"""Texts with a row each: padded to few sizes where no token reads padding, or else at their own lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.settings import Buckets, bucket, smallest
from rlx_jax.encode.packing import Block
from rlx_jax.encode.pooled import pooled_of
from rlx_jax.encode.sentence import SentencePipeline, pool
from rlx_jax.lowering.hir.row_layouts import EACH, MASK
from rlx_jax.runtime.inputs import as_host_array
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.padding import block_width, padded_to
from rlx_jax.text.request_checks import Ids, pad_rows
from rlx_jax.text.token_model import primary

# Rows of a call, where the profile does not say.
BATCH = 32


def masks_of(model: CompiledModel) -> frozenset[str]:
    """The mask over tokens among the inputs of a flow, if it declares one and reads it."""
    mask = frozenset(i.name for i in model.flow._inputs if i.name == MASK and i.type.shape == EACH.shape)
    return mask.difference(model.programs.unread(model.name, mask)) if mask else mask


def pooled(pipeline: SentencePipeline, hidden: jax.Array, keep: jax.Array, skip: jax.Array | int = 0) -> jax.Array:
    """`pool` by one pipeline."""
    return pool(hidden, keep, pipeline, skip)


@dataclass(frozen=True)
class RowForm:
    """A row for each text, shortest first, `tokens` of a call at most, and one row at least.

    The program `padded` of `model` takes rows that are padded to few sizes. Where rows are `exact`, its program
    `forward` takes those of one length, as they are: for a flow that may read padding, so that there is none, or whose
    texts have it in them. With `single` a call has one row, as rows may see each other. The inputs in `mask` are 1
    everywhere.

    Without a pipeline the flow's output `pooled` is the vector. `skip`: tokens of the prompt that pooling leaves out;
    None: pooling reads every prompt.
    """

    model: CompiledModel
    buckets: Buckets
    max_positions: int | None = None
    exact: bool = False
    single: bool = False
    mask: frozenset[str] = frozenset()
    pipeline: SentencePipeline | None = None
    tokens: int | None = None
    skip: int | None = None

    def sizes(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and tokens of the program for so many."""
        buckets = self.buckets
        rows = 1 if self.single else smallest(buckets.batch, rows) or buckets.rows(bucket(rows, 1, BATCH))
        return rows, width if self.exact else block_width(buckets, width, self.max_positions)

    def outputs(self, block: Ids, inputs: Mapping[str, Any], rows: int, width: int) -> Any:
        """What the flow gives for a block `[B, S]` and inputs like it, padded to `[rows, width]` with tokens that no
        other sees. A row that is padding holds one token."""
        if (rows, width) != block.shape:
            inputs = {n: padded_to(as_host_array(n, jax.device_get(v)), rows, width) for n, v in inputs.items()}
            inputs[MASK][block.shape[0] :, 0] = 1
        if self.exact:
            inputs = {n: v for n, v in inputs.items() if n != MASK}
            inputs |= dict.fromkeys(self.mask, np.ones((rows, width), bool))
        return self.model(padded_to(block, rows, width), **inputs)

    def calls(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """The rows of each call, the shortest first, and its sizes."""
        most = 1 if self.single else self.buckets.batch[-1] if self.buckets.batch else BATCH
        order = sorted(range(len(lengths)), key=lambda row: lengths[row])
        while order:
            first = order[:most]
            count = sum(lengths[row] == lengths[first[0]] for row in first) if self.exact else len(first)
            sizes = self.sizes(count, lengths[order[count - 1]])
            while count > 1 and self.tokens is not None and sizes[0] * sizes[1] > self.tokens:
                count -= 1
                sizes = self.sizes(count, lengths[order[count - 1]])
            yield order[:count], sizes
            order = order[count:]

    def plan(self, lengths: Sequence[int], more: bool) -> list[Block]:
        """As that of `PackedForm`."""
        return self.apart(lengths)

    def apart(self, lengths: Sequence[int]) -> list[Block]:
        """As that of `PackedForm`."""
        return [Block(*sizes, 1, tuple((text,) for text in texts)) for texts, sizes in self.calls(lengths)]

    def lanes(self, block: Block) -> int:
        """As that of `PackedForm`."""
        return 1

    def run(self, block: Block, ids: Sequence[Ids]) -> jax.Array:
        """As that of `PackedForm`."""
        rows = [ids[text] for (text,) in block.texts]
        longest = max(map(len, rows))
        keep = np.arange(longest)[None] < np.array([[len(row)] for row in rows])
        outputs = self.outputs(pad_rows(rows, longest), {MASK: keep}, block.rows, block.width)
        if self.pipeline is None:
            return pooled_of(outputs)  # type: ignore[no-any-return]
        kept, skip = padded_to(keep, block.rows, block.width), [] if self.skip is None else [np.int32(self.skip)]
        vectors: jax.Array = self.model.programs.call(pooled, primary(outputs), kept, *skip, static=(self.pipeline,))
        return vectors


def restored(width: int, order: tuple[int, ...], *hidden: jax.Array) -> jax.Array:
    """Hidden states of blocks of rows, `[rows, width, H]` each, as one `[B, S, H]` in the order of the rows: row i
    stands at `order[i]` of them all. What no block has is 0."""
    wide = [jnp.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0))) for x in hidden]
    return jnp.concatenate(wide)[np.array(order)]


def exact_rows(form: RowForm, block: Ids, inputs: Mapping[str, Any], lengths: Sequence[int]) -> jax.Array:
    """Hidden states `[B, S, H]` of a block whose rows have `lengths` tokens, each run at its own; 0 behind them."""
    host = {name: as_host_array(name, jax.device_get(value)) for name, value in inputs.items()}
    made, place, at = [], dict[int, int](), 0
    for chosen, (rows, width) in form.calls(lengths):
        cut = {name: value[chosen, :width] for name, value in host.items()}
        made.append(primary(form.outputs(block[chosen, :width], cut, rows, width)))
        place |= {row: at + i for i, row in enumerate(chosen)}
        at += rows
    static = block.shape[1], tuple(place[row] for row in range(len(block)))
    return form.model.programs.call(restored, *made, static=static)  # type: ignore[no-any-return]
