"""Run texts with one row each.

Rows are padded to few sizes if no token reads padding; otherwise they run at their own lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.buckets import Buckets, bucket_size, fit_bucket
from rlx_jax.dataclasses import dataclass
from rlx_jax.encode.packing import Block
from rlx_jax.encode.pooled import get_pooled
from rlx_jax.encode.sentence import SentencePipeline, pool
from rlx_jax.encode.token_selection import TokenSelection, select_results
from rlx_jax.lowering.hir.row_layouts import MASK, PER_TOKEN
from rlx_jax.runtime.inputs import as_host_array
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.request_checks import TYPES, Ids, TokenRows, block_width, pad_rows, pad_to
from rlx_jax.text.token_model import primary_output

# Maximum number of rows of a call, if the profile has no buckets for it.
MAX_ROWS = 32


def read_mask_names(model: CompiledModel) -> frozenset[str]:
    """Return the attention mask as a set of input names; empty if the flow does not declare or does not read it."""
    mask = frozenset(i.name for i in model.flow._inputs if i.name == MASK and i.type.shape == PER_TOKEN.shape)
    return mask.difference(model.programs.unread_inputs(model.name, mask)) if mask else mask


def pool_rows(pipeline: SentencePipeline, hidden: jax.Array, keep: jax.Array, skip: jax.Array | int = 0) -> jax.Array:
    """Return `pool` of hidden states, with the static argument first so that it can be jitted."""
    return pool(hidden, keep, pipeline, skip)


@dataclass(frozen=True)
class RowBatcher:
    """One row for each text, shortest first; rows × width of a call is at most `tokens`, with at least one row.

    By default the program `padded` of `model` runs rows that are padded to few sizes.

    Attributes:
        exact: run the program `forward` on unpadded rows of one length instead. This is for flows that may read
            padding, and for texts that already contain the padding that the model reads.
        one_row_per_call: one row per call, because rows may influence each other.
        mask: names of the inputs that are 1 everywhere.
        pipeline: how to pool; None: the vector is the flow's output `pooled`.
        skip: number of tokens of the prompt that pooling leaves out; None: pooling reads every prompt.
        selection: the tokens to return the outputs of, in place of pooled vectors.
    """

    model: CompiledModel
    buckets: Buckets
    max_positions: int | None = None
    exact: bool = False
    one_row_per_call: bool = False
    mask: frozenset[str] = frozenset()
    pipeline: SentencePipeline | None = None
    tokens: int | None = None
    skip: int | None = None
    selection: TokenSelection | None = None

    def sizes(self, rows: int, width: int) -> tuple[int, int]:
        """Return the (rows, width) of the program that runs `rows` rows of up to `width` tokens."""
        buckets = self.buckets
        if self.one_row_per_call:
            rows = 1
        else:
            rows = fit_bucket(buckets.batch, rows) or buckets.rows(bucket_size(rows, 1, MAX_ROWS))
        return rows, width if self.exact else block_width(buckets, width, self.max_positions)

    def outputs(self, block: Ids, inputs: Mapping[str, Any], rows: int, width: int) -> Any:
        """Return the flow's outputs for a block `[B, S]`, padded to `[rows, width]` with tokens that no other token
        reads.

        `inputs` have the shape of the block. In rows that are only padding the mask has one valid token, so that
        attention has a key to read.
        """
        if (rows, width) != block.shape:
            inputs = {n: pad_to(as_host_array(n, jax.device_get(v)), rows, width) for n, v in inputs.items()}
            inputs[MASK][block.shape[0] :, 0] = 1
        if self.exact:
            inputs = {n: v for n, v in inputs.items() if n != MASK}
            inputs |= dict.fromkeys(self.mask, np.ones((rows, width), bool))
        return self.model(pad_to(block, rows, width), **inputs)

    def plan_calls(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], tuple[int, int]]]:
        """Yield (row numbers, sizes of the program) of each call, shortest rows first."""
        max_rows = 1 if self.one_row_per_call else self.buckets.batch[-1] if self.buckets.batch else MAX_ROWS
        order = sorted(range(len(lengths)), key=lambda row: lengths[row])
        while order:
            candidates = order[:max_rows]
            count = sum(lengths[row] == lengths[candidates[0]] for row in candidates) if self.exact else len(candidates)
            sizes = self.sizes(count, lengths[order[count - 1]])
            # Fewer rows until the call fits; rows are sorted, so that also narrows it.
            while count > 1 and self.tokens is not None and sizes[0] * sizes[1] > self.tokens:
                count -= 1
                sizes = self.sizes(count, lengths[order[count - 1]])
            yield order[:count], sizes
            order = order[count:]

    def plan(self, lengths: Sequence[int], has_more: bool) -> list[Block]:
        """Return calls for texts of these lengths, as `PackedBatcher.plan` does."""
        return self.plan_one_per_row(lengths)

    def plan_one_per_row(self, lengths: Sequence[int]) -> list[Block]:
        """Return calls in which every text has a row of its own, as `PackedBatcher.plan_one_per_row` does."""
        return [Block(*sizes, 1, tuple((text,) for text in texts)) for texts, sizes in self.plan_calls(lengths)]

    def num_threads(self, block: Block, rows: TokenRows) -> int:
        """Return the number of threads for this call, as `PackedBatcher.num_threads` does."""
        return 1

    def run(self, block: Block, rows: TokenRows) -> jax.Array:
        """Return the vectors of a block, or the outputs of tokens, as `PackedBatcher.run` does."""
        ids = [rows.ids[text] for (text,) in block.texts]
        longest = max(map(len, ids))
        keep = np.arange(longest)[None] < np.array([[len(row)] for row in ids])
        inputs: dict[str, Any] = {MASK: keep}
        if rows.types:
            inputs[TYPES] = pad_rows([rows.types[text] for (text,) in block.texts], longest)
        outputs = self.outputs(pad_rows(ids, longest), inputs, block.rows, block.width)
        if self.selection is not None:
            tokens = primary_output(outputs)
            if self.selection.token_id is None:
                return tokens
            valid = pad_to(keep, block.rows, block.width)
            number = self.selection.number([[row] for row in ids], 1, block.width)
            selected = self.selection.inputs(pad_to(pad_rows(ids, longest), *valid.shape), valid, number)
            num_best = self.selection.num_best
            result: jax.Array = self.model.programs.run_helper(
                select_results, tokens, *selected.values(), static=(num_best,)
            )
            return result
        if self.pipeline is None:
            return get_pooled(outputs)  # type: ignore[no-any-return]
        valid, skip = pad_to(keep, block.rows, block.width), [] if self.skip is None else [np.int32(self.skip)]
        vectors: jax.Array = self.model.programs.run_helper(
            pool_rows, primary_output(outputs), valid, *skip, static=(self.pipeline,)
        )
        return vectors


def restore_order(width: int, order: tuple[int, ...], *hidden: jax.Array) -> jax.Array:
    """Return hidden states of blocks of rows, `[rows, width, H]` each, as one `[B, S, H]` in the original order.

    Row i of the result is row `order[i]` of the concatenated blocks. Positions that no block covers are 0.
    """
    padded_blocks = [jnp.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0))) for x in hidden]
    return jnp.concatenate(padded_blocks)[np.array(order)]


def run_exact_rows(batcher: RowBatcher, block: Ids, inputs: Mapping[str, Any], lengths: Sequence[int]) -> jax.Array:
    """Return hidden states `[B, S, H]` of a block; row i runs at its own `lengths[i]` tokens and is 0 after them."""
    host = {name: as_host_array(name, jax.device_get(value)) for name, value in inputs.items()}
    blocks, positions, offset = [], dict[int, int](), 0
    for row_ids, (rows, width) in batcher.plan_calls(lengths):
        row_inputs = {name: value[row_ids, :width] for name, value in host.items()}
        blocks.append(primary_output(batcher.outputs(block[row_ids, :width], row_inputs, rows, width)))
        positions |= {row: offset + i for i, row in enumerate(row_ids)}
        offset += rows
    static = block.shape[1], tuple(positions[row] for row in range(len(block)))
    return batcher.model.programs.run_helper(restore_order, *blocks, static=static)
