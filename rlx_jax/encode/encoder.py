"""`Encoder`: hidden states and sentence embeddings of a bidirectional flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.compiler.buckets import smallest
from rlx_jax.compiler.executable import Progress
from rlx_jax.encode.sentence import SentencePipeline, pool
from rlx_jax.errors import (
    GraphError,
    MaskShapeError,
    NumericsError,
    RecompileError,
    RequestError,
    listing,
    shown,
)
from rlx_jax.profiles import CompileProfile
from rlx_jax.program import Weights
from rlx_jax.runtime.arguments import refuse_consumed
from rlx_jax.runtime.inputs import as_host_array
from rlx_jax.runtime.report import Report
from rlx_jax.text.opening import check_positions, check_tokenizer, known_positions, open_token_model, primary
from rlx_jax.text.padding import block_width, bucket, check_buckets, check_sizes, cropped, padded_to
from rlx_jax.text.requests import Ids, id_list, keep_mask, pad_rows, row_lengths, split_prompts, token_block
from rlx_jax.text.tokenizer import Tokenizer

BATCH = 32
MASK = "attention_mask"


class Encoder:
    """`flow` maps ids `[batch, seq]` and an optional `attention_mask` to hidden states `[batch, seq, hidden]`.

    Args:
        flow: a `ModelFlow` whose first input is the ids, or a recipe; or a compiled model, whose programs it shares.
        tokenizer, pipeline: for `embed`; `rlx_jax.load` brings the checkpoint's own. Without a pipeline: mean pooling.
        max_positions: the longest sequence the model knows, in tokens.
        progress: told how far loading and compiling are; see `rlx_jax.compiler.executable.Progress`.
    """

    def __init__(
        self,
        flow: Any,
        weights: Weights = None,
        *,
        tokenizer: Tokenizer | None = None,
        pipeline: SentencePipeline | None = None,
        profile: CompileProfile | None = None,
        mesh: Any = None,
        strict: bool = True,
        max_positions: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.vocab_size = open_token_model(
            flow, weights, profile, mesh, strict, progress, max_positions, programs=("forward",)
        )  # fmt: skip
        self.tokenizer, self.max_positions = check_tokenizer(tokenizer), known_positions(self.model)
        if not isinstance(pipeline, SentencePipeline | None):
            raise RequestError(f"pipeline is {shown(pipeline)}; expected a SentencePipeline")
        self.pipeline = pipeline or SentencePipeline()
        self.buckets = self.model.settings.buckets
        check_buckets(self.buckets, self.max_positions)
        flow = self.model.flow
        if MASK not in [i.name for i in flow.inputs]:
            raise GraphError(f"{flow.name}: an Encoder's flow declares the input {MASK!r} (default=None)")
        template = self.model.template()
        self.width = int(template.built.primary_shape[-1])

    def hidden_states(self, tokens: Any, lengths: Any = None, **inputs: Any) -> jax.Array:
        """The last hidden state: tokens `[B, S]` ints → `[B, S, H]` float32.

        `lengths` `[B]`: valid tokens of right-padded rows; without it every token is valid. `inputs` are the flow's
        optional ones, each `[B, S]`: `attention_mask` of 0 and 1 (instead of `lengths`), `token_type_ids`,
        `position_ids`.

        Raises:
            TokenIdError, SequenceLengthError, RequestError.
            MaskShapeError: one of `inputs` has another shape than the tokens, or the mask other values.
        """
        block, _, _ = token_block(tokens, self.vocab_size)
        check_positions(block.shape[1], self.max_positions, "tokens")
        valid = row_lengths(lengths, block.shape, low=1)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        refuse_consumed({}, inputs)
        for name, value in inputs.items():
            shape = (value if isinstance(value, jax.Array) else as_host_array(name, value)).shape
            if shape != block.shape:
                raise MaskShapeError(f"{name}: expected {list(block.shape)}, as the tokens, got {list(shape)}")
            if name == MASK and not isinstance(value, jax.Array):
                inputs[name] = keep_mask(value, block.shape)
        if lengths is not None and MASK in inputs:
            raise RequestError(f"lengths and {MASK} say the same; pass one of them")
        pads = bool(self.buckets.batch or self.buckets.prompt)
        padded = self._sizes(*block.shape) if pads else block.shape
        if MASK not in inputs and (lengths is not None or pads):  # a block that fills its bucket runs the same program
            inputs[MASK] = np.arange(block.shape[1])[None] < valid[:, None]
        return cropped(self.model.programs, self._hidden(block, inputs, *padded), *block.shape)

    def _hidden(self, block: Ids, inputs: Mapping[str, Any], rows: int, width: int) -> jax.Array:
        """Hidden states `[rows, width, H]` of a block `[B, S]` and inputs like it, padded with tokens that no other
        sees. A row that is padding holds one token."""
        if (rows, width) != block.shape:
            inputs = {n: padded_to(as_host_array(n, jax.device_get(v)), rows, width) for n, v in inputs.items()}
            inputs[MASK][block.shape[0] :, 0] = 1
        return primary(self.model(padded_to(block, rows, width), **inputs))

    def _sizes(self, rows: int, width: int) -> tuple[int, int]:
        """Rows and tokens of the program for so many."""
        batch = smallest(self.buckets.batch, rows) or self.buckets.rows(bucket(rows, 1, BATCH))
        return batch, block_width(self.buckets, width, self.max_positions)

    def embed(self, texts: Any) -> np.ndarray[Any, Any]:
        """One vector for each text or id list: `[n, H]` float32; a single string gives `[H]`.

        Texts are tokenised, truncated, pooled and normalised as the checkpoint's own files say.

        Raises:
            RequestError: not strings or id lists. TokenIdError: an id out of range.
            NumericsError: vectors that are not finite; its `rows` names them, and `outputs` has them all.
        """
        self.model.refuse_traced()
        asked = split_prompts(texts, "texts", flat=False)
        rows = self._rows(asked.texts) if asked.texts is not None else []
        for i, ids in enumerate(asked.ids or []):
            rows.append(id_list(ids, self.vocab_size, f"texts[{i}]"))
            if not rows[-1]:
                raise RequestError(f"texts[{i}] has no token ids")
            check_positions(len(rows[-1]), self.max_positions, f"texts[{i}]")
        self._check_buckets([len(r) for r in rows])
        out = np.zeros((len(rows), self.width * len(self.pipeline.pooling)), np.float32)
        for chosen in _batches([len(r) for r in rows], self.buckets.batch[-1] if self.buckets.batch else BATCH):
            out[chosen] = self._embed([rows[i] for i in chosen])
        failed = np.flatnonzero(~np.isfinite(out).all(axis=1))
        if failed.size:
            named = listing((f"texts[{i}]" for i in failed), 8)
            message = f"embed: {failed.size} of {len(rows)} vectors are not finite: {named}"
            raise NumericsError(message, dict.fromkeys(failed.tolist(), 0), [*out])
        return out[0] if asked.single else out

    def _rows(self, texts: list[str]) -> list[list[int]]:
        if self.tokenizer is None:
            raise RequestError("strings need a tokenizer: the checkpoint has no tokenizer.json; pass token ids")
        # The checkpoint's max_seq_length stands in for the tokenizer's own limit, it does not add to it.
        limits = (self.pipeline.max_seq_length or self.tokenizer.model_max_length, self.max_positions)
        longest = min((x for x in limits if x is not None), default=None)
        rows = self.tokenizer.encode_batch([self.pipeline.prompt + t for t in texts], max_length=longest)
        return [id_list(row, self.vocab_size, f"texts[{i}]") for i, row in enumerate(rows)]

    def _embed(self, rows: list[list[int]]) -> np.ndarray[Any, Any]:
        """Vectors of rows of similar length, padded to few different sizes."""
        sizes = self._sizes(len(rows), longest := max(map(len, rows)))
        keep = np.arange(longest)[None] < np.array([[len(r)] for r in rows])
        hidden = self._hidden(pad_rows(rows, longest), {MASK: keep}, *sizes)
        pooled = self.model.programs.call(Pooled(self.pipeline), hidden, padded_to(keep, *sizes))
        return np.asarray(jax.device_get(pooled))[: len(rows)]

    def _check_buckets(self, lengths: list[int]) -> None:
        """Refuse texts that no program is compiled for, before any of them runs."""
        for i, length in enumerate(lengths):
            if self.buckets.on_recompile == "error" and self.buckets.prompt and length > self.buckets.prompt[-1]:
                raise RecompileError(
                    f"texts[{i}]: {length} tokens, and {self.buckets.text()}; shorten it, or add to buckets.prompt of "
                    "the profile"
                )

    def warmup(self) -> None:
        """Run every program once that `embed` can need, whatever the lengths and the number of texts; then none of them
        compiles. `hidden_states` runs the same ones, unless it is given `token_type_ids` or `position_ids`.

        What compiles later all the same is counted in `report().recompiles`, and is as the profile's
        `buckets.on_recompile` says.

        Raises:
            RequestError: the profile has no buckets for lengths and rows.
        """
        check_sizes(self.buckets)
        with self.model.programs.warm_up():
            for rows in self.buckets.batch:
                for width in self.buckets.prompt:
                    self._embed([[0] * width] * rows)

    def report(self) -> Report:
        """What compiling cost, and the last program's needs."""
        return self.model.report()


def _batches(lengths: list[int], size: int) -> Iterator[list[int]]:
    """Row numbers in batches of at most `size`, shortest first."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]


@dataclass(frozen=True)
class Pooled:
    """`pool` by one pipeline."""

    pipeline: SentencePipeline

    def __call__(self, hidden: jax.Array, keep: jax.Array) -> jax.Array:
        return pool(hidden, keep, self.pipeline)
