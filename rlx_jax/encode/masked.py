"""Define `MaskedLM`, which predicts the tokens of masks in texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx_jax.encode.embedding import chunks
from rlx_jax.encode.head_model import TokenLogits
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.token_selection import TokenSelection
from rlx_jax.errors import RequestError, quote, shown, suggest_keywords
from rlx_jax.models.heads import MASKED
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import Ids, classify_prompts
from rlx_jax.text.spans import TokenSpans, encode_spans, id_of_role
from rlx_jax.text.tokenizer import Tokenizer

# Maximum number of logits that are on the host at once, if each text has one mask.
MAX_LOGITS = 2**26


@dataclass(frozen=True)
class Filling:
    """A token for a mask.

    Attributes:
        token: the token as text.
        id: the token's id.
        score: its probability.
        text: the text with the token in place of the mask; other masks remain.
    """

    token: str
    id: int
    score: float
    text: str


class MaskedLM(TokenLogits):
    """Predict masked tokens; arguments as of `HeadModel`."""

    _methods = "fill(texts) returns tokens for masks, logits(texts) the numbers before them"
    task = MASKED

    @functools.cached_property
    def mask_id(self) -> int | None:
        """The id of the tokenizer's mask; None if it has none."""
        return None if self.tokenizer is None else id_of_role(self.tokenizer, "mask")

    @property
    def selection(self) -> TokenSelection:
        return TokenSelection(self.mask_id)

    @suggest_keywords()
    def fill(
        self, texts: Any, *, top_k: int = 5, targets: Sequence[str] | None = None, max_tokens: int | None = None
    ) -> Any:
        """Return the most probable tokens for each mask of each text.

        The masks of a text are predicted at once, each as if the others stayed masked.

        Args:
            texts: a string, or a list of strings, with the tokenizer's mask such as `[MASK]` in each.
            top_k: the number of tokens for each mask.
            targets: choose among these tokens only; their probabilities are those among all tokens.
            max_tokens: as in `Encoder.embed`.

        Returns:
            For each text a list with, for each mask, a list of `Filling`, the most probable one first. For a single
            string the list of its masks.

        Raises:
            RequestError: not strings; a text without a mask, or with a mask after the tokens that the model reads; one
                of `targets` is no single token. Others as `Encoder.embed`.
        """
        request, reader = classify_prompts(texts, "texts", allow_flat=False), self.encoder.reader
        if request.texts is None and request.ids:
            raise RequestError(f"texts[0] is {shown(request.ids[0])}; fill takes strings, in which it replaces masks")
        tokenizer, mask_id = reader.require_tokenizer(), self.mask_id
        if mask_id is None:
            raise RequestError("fill: the tokenizer has no mask_token")
        count, among = check_integer("top_k", top_k, 1), self._target_ids(targets, tokenizer)

        def encode(chunk: Sequence[str], first: int) -> list[TokenSpans]:
            rows = [rows[0] for rows in encode_spans(tokenizer, chunk, reader.max_text_tokens, first=first)]
            for i, (text, row) in enumerate(zip(chunk, rows, strict=True), first):
                _check_masks(text, row, mask_id, tokenizer.special_tokens["mask_token"], f"texts[{i}]")
            return rows

        results = []
        for _, group in chunks(request.texts or [], max(1, MAX_LOGITS // self.encoder.width)):
            requests, spans = reader.read_spans(group, encode)
            logits = self._run(requests, max_tokens, self.selection)
            for row, values in zip(spans, logits, strict=True):
                results.append(_fillings(np.array(row.ids, np.int32), values, mask_id, count, among, tokenizer))
        return results[0] if request.is_single else results

    def _target_ids(self, targets: Sequence[str] | None, tokenizer: Tokenizer) -> Ids | None:
        """Return the ids of `targets`, without repeated ones."""
        if targets is None:
            return None
        if isinstance(targets, str) or not isinstance(targets, Sequence) or not targets:
            raise RequestError(f"targets is {shown(targets)}; expected a list of tokens")
        ids = []
        for i, target in enumerate(targets):
            found = tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else []
            if len(found) != 1:
                raise RequestError(f"targets[{i}] is {shown(target)}, which is {len(found)} tokens; expected one")
            ids += found
        return np.array(sorted({*ids}), np.int32)


def _check_masks(text: str, row: TokenSpans, mask_id: int, mask: str, name: str) -> None:
    """Check that a text has masks, and that all of them are among its tokens.

    Raises:
        RequestError: it has none, or some are after the maximum number of tokens.
    """
    count = row.ids.count(mask_id)
    if not count:
        raise RequestError(f"{name} has no {mask} among its {len(row.ids)} tokens: {quote(text)}")
    if count < text.count(mask):
        raise RequestError(
            f"{name} has {text.count(mask)} {mask}, and {count} of them among the {len(row.ids)} tokens that are read"
        )


def _largest(values: Vectors, count: int) -> np.ndarray[Any, Any]:
    """Return the indices of the largest values, largest first; of equal ones the first.

    To sort all values of a vocabulary takes 40 x as long.
    """
    least = np.partition(values, -count)[-count] if count < len(values) else -np.inf
    indices = np.flatnonzero(values >= least)
    return indices[np.argsort(-values[indices], kind="stable")][:count]


def _fillings(
    ids: Ids, logits: Vectors, mask_id: int, top_k: int, among: Ids | None, tokenizer: Tokenizer
) -> list[list[Filling]]:
    """Return the most probable tokens for each mask among `ids`, from the logits `[masks, vocabulary]`."""
    masks = np.flatnonzero(ids == mask_id)
    results = []
    for position, row in zip(masks, logits, strict=True):
        candidates = np.arange(len(row)) if among is None else among
        values = row[candidates]
        best = _largest(values, top_k)
        shift = row.max()
        total = np.exp(row - shift).sum()
        fillings = []
        for index in best:
            filled = ids.copy()
            filled[position] = candidates[index]
            text = tokenizer.decode(filled.tolist(), skip_special_tokens=len(masks) == 1)
            fillings.append(
                Filling(
                    tokenizer.decode([int(candidates[index])], skip_special_tokens=False),
                    int(candidates[index]),
                    float(np.exp(values[index] - shift) / total),
                    text,
                )  # fmt: skip
            )
        results.append(fillings)
    return results
