"""`Encoder`: hidden states and sentence embeddings of a bidirectional flow."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rlx_jax.built import Weights
from rlx_jax.errors import GraphError, MaskShapeError, RequestError, shown
from rlx_jax.executable import Progress
from rlx_jax.generate.opening import check_positions, check_tokenizer, known_positions, open_token_model, primary
from rlx_jax.generate.requests import bucket, id_list, pad_rows, row_lengths, split_prompts, token_block
from rlx_jax.generate.sentence import SentencePipeline, pool
from rlx_jax.generate.tokenizer import Tokenizer
from rlx_jax.inputs import as_host_array
from rlx_jax.profiles import CompileProfile
from rlx_jax.report import Report

BATCH = 32
SEQ_BUCKET = 16
MASK = "attention_mask"


class Encoder:
    """`flow` maps ids `[batch, seq]` and an optional `attention_mask` to hidden states `[batch, seq, hidden]`.

    Args:
        flow: a `ModelFlow` whose first input is the ids, or a recipe.
        tokenizer, pipeline: for `embed`; `rlx_jax.load` brings the checkpoint's own. Without a pipeline: mean pooling.
        max_positions: the longest sequence the model knows, in tokens.
        progress: told how far loading and compiling are; see `rlx_jax.executable.Progress`.
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
        self.model, self.vocab_size = open_token_model(flow, weights, profile, mesh, strict, progress)
        self.tokenizer, self.max_positions = check_tokenizer(tokenizer), known_positions(self.model, max_positions)
        if not isinstance(pipeline, SentencePipeline | None):
            raise RequestError(f"pipeline is {shown(pipeline)}; expected a SentencePipeline")
        self.pipeline = pipeline or SentencePipeline()
        flow = self.model.compiler.flow
        if MASK not in [i.name for i in flow.inputs]:
            raise GraphError(f"{flow.name}: an Encoder's flow declares the input {MASK!r} (default=None)")
        template = self.model.compiler.template("forward")
        self.width = int(template.built.primary_shape[-1])
        self._pool = jax.jit(functools.partial(pool, pipeline=self.pipeline))

    def hidden_states(self, tokens: Any, lengths: Any = None, **inputs: Any) -> jax.Array:
        """The last hidden state: tokens `[B, S]` ints → `[B, S, H]` float32.

        `lengths` `[B]`: valid tokens of right-padded rows; without it every token is valid. `inputs` are the flow's
        optional ones, each `[B, S]`: `attention_mask` (instead of `lengths`), `token_type_ids`, `position_ids`.

        Raises:
            TokenIdError, SequenceLengthError, RequestError.
            MaskShapeError: one of `inputs` has another shape than the tokens.
        """
        block, _, _ = token_block(tokens, self.vocab_size)
        check_positions(block.shape[1], self.max_positions, "tokens")
        valid = row_lengths(lengths, block.shape, low=1)
        for name, value in inputs.items():
            if value is None:
                continue
            shape = (value if isinstance(value, jax.Array) else as_host_array(name, value)).shape
            if shape != block.shape:
                raise MaskShapeError(f"{name}: expected {list(block.shape)}, as the tokens, got {list(shape)}")
        if lengths is not None:
            if inputs.get(MASK) is not None:
                raise RequestError(f"lengths and {MASK} say the same; pass one of them")
            inputs[MASK] = np.arange(block.shape[1])[None] < valid[:, None]
        return primary(self.model(block, **inputs))

    def embed(self, texts: Any) -> np.ndarray[Any, Any]:
        """One vector for each text or id list: `[n, H]` float32; a single string gives `[H]`.

        Texts are tokenised, truncated, pooled and normalised as the checkpoint's own files say.

        Raises:
            RequestError: not strings or id lists. TokenIdError: an id out of range.
        """
        asked = split_prompts(texts, "texts", flat=False)
        rows = self._rows(asked.texts) if asked.texts is not None else []
        for i, ids in enumerate(asked.ids or []):
            rows.append(id_list(ids, self.vocab_size, f"texts[{i}]"))
            if not rows[-1]:
                raise RequestError(f"texts[{i}] has no token ids")
            check_positions(len(rows[-1]), self.max_positions, f"texts[{i}]")
        out = np.zeros((len(rows), self.width * len(self.pipeline.pooling)), np.float32)
        for chosen in _batches([len(r) for r in rows]):
            out[chosen] = self._embed([rows[i] for i in chosen])
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
        """Rows of similar length, padded to few different sizes; padding rows hold one token."""
        width = bucket(max(map(len, rows)), SEQ_BUCKET, self.max_positions)
        height = bucket(len(rows), 1, BATCH)
        lengths = np.array([*(len(r) for r in rows), *(1 for _ in range(height - len(rows)))])
        hidden = self.hidden_states(pad_rows([*rows, *([0] for _ in range(height - len(rows)))], width), lengths)
        keep = np.arange(width)[None] < lengths[:, None]
        return np.asarray(self._pool(hidden, keep))[: len(rows)]

    def report(self) -> Report:
        """What compiling cost, and the last program's needs."""
        return self.model.report()


def _batches(lengths: list[int]) -> Iterator[list[int]]:
    """Row numbers in batches of at most 32, shortest first."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]
