"""Define `MaskedLM`, which predicts the tokens of masks in texts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import bucket_size
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.embedding import chunks
from rlx_jax.encode.head_model import ALL_TOKENS, TokenLogits
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.text_rows import Requests, without_padding
from rlx_jax.encode.token_selection import BEST_STEP, TokenSelection
from rlx_jax.errors import RequestError, quote, shown, suggest_keywords
from rlx_jax.models.encoder import MASKED
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import Ids, TokenRows, classify_strings
from rlx_jax.text.spans import id_of_role
from rlx_jax.text.tokenizer import Tokenizer

# Maximum number of probabilities that are on the host at once, if each text has one mask.
MAX_PROBABILITIES = 2**22


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
        return ALL_TOKENS if self.mask_id is None else TokenSelection(self.mask_id, min(BEST_STEP, self.vocab_size))

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
        (items, is_single), reader = classify_strings(texts, "fill"), self.encoder.reader
        tokenizer, mask_id = reader.require_tokenizer(), self.mask_id
        if mask_id is None:
            raise RequestError("fill: the tokenizer has no mask_token")
        count, among = check_integer("top_k", top_k, 1), self._target_ids(targets, tokenizer)

        size = bucket_size(len(among) or count, BEST_STEP, None)
        size = size if among else min(size, self.vocab_size)
        selection = TokenSelection(mask_id, size, (*among, *among[-1:] * (size - len(among))))
        results: list[list[list[Filling]]] = []
        for start, group in chunks(items, max(1, MAX_PROBABILITIES // size)):
            requests, rows = reader.read_texts(group, start=start), list[Ids]()
            chunks_read = _checked(requests, group, rows, tokenizer, mask_id, reader.padding)
            values = self._run(replace(requests, chunks=chunks_read), max_tokens, selection)
            best = zip(*_best(np.concatenate(values), size, len(among) or count, count), strict=True)
            results += _fillings([row.tolist() for row in rows], [*best], mask_id, tokenizer)
        return results[0] if is_single else results

    def _target_ids(self, targets: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of `targets`, without repeated ones; none without targets."""
        if targets is None:
            return ()
        if isinstance(targets, str) or not isinstance(targets, Sequence) or not targets:
            raise RequestError(f"targets is {shown(targets)}; expected a list of tokens")
        ids = []
        for i, target in enumerate(targets):
            tokens = tokenizer.encode(target, add_special_tokens=False) if isinstance(target, str) else []
            if len(tokens) != 1:
                raise RequestError(f"targets[{i}] is {shown(target)}, which is {len(tokens)} tokens; expected one")
            ids += tokens
        return tuple(sorted({*ids}))


def _checked(
    requests: Requests, texts: Sequence[str], rows: list[Ids], tokenizer: Tokenizer, mask_id: int,
    padding: tuple[int, int] | None,
) -> Iterator[tuple[TokenRows, bool]]:  # fmt: skip
    """Yield the chunks of a request, after their rows without padding were added to `rows`.

    Raises:
        RequestError: a text has no mask, or some are after the maximum number of tokens.
    """
    mask = tokenizer.special_tokens["mask_token"]
    for chunk, has_more in requests.chunks:
        first = len(rows)
        rows += chunk.ids if padding is None else without_padding(chunk, padding[1]).ids
        for i, (text, ids) in enumerate(zip(texts[first : len(rows)], rows[first:], strict=True), first):
            name, count, expected = f"texts[{requests.first + i}]", np.count_nonzero(ids == mask_id), text.count(mask)
            if not count:
                raise RequestError(f"{name} has no {mask} among its {len(ids)} tokens: {quote(text)}")
            if count < expected:
                raise RequestError(f"{name} has {expected} {mask}, {count} of them in the {len(ids)} tokens read")
        yield chunk, has_more


def _best(values: Vectors, size: int, number: int, top_k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Return the `top_k` largest probabilities for each mask and their ids, largest first.

    Args:
        values: for each mask `size` probabilities, then their ids, `[masks, 2·size]`.
        size: as in `values`.
        number: only the first ones count.
        top_k: how many to return.
    """
    scores, ids = values[:, :size][:, :number], values[:, size:][:, :number].astype(np.int32)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return np.take_along_axis(scores, order, 1).tolist(), np.take_along_axis(ids, order, 1).tolist()


def _fillings(
    rows: Sequence[list[int]], best: Sequence[tuple[list[float], list[int]]], mask_id: int, tokenizer: Tokenizer
) -> list[list[list[Filling]]]:
    """Return the fillings for the masks among the ids of each text, from the probabilities and ids for each mask.

    All are decoded in two calls of the tokenizer, which uses all cores.
    """
    masks = [[i for i, token in enumerate(ids) if token == mask_id] for ids in rows]
    filled: dict[bool, list[list[int]]] = {True: [], False: []}
    waiting = iter(best)
    for ids, places in zip(rows, masks, strict=True):
        filled[len(places) == 1] += [
            [*ids[:mask], token, *ids[mask + 1 :]] for mask in places for token in next(waiting)[1]
        ]
    texts = {skip: iter(tokenizer.decode_batch(lists, skip_special_tokens=skip)) for skip, lists in filled.items()}
    used = sorted({token for _, candidates in best for token in candidates})
    names = dict(zip(used, tokenizer.decode_batch([[token] for token in used], skip_special_tokens=False), strict=True))
    waiting = iter(best)
    return [
        [
            [
                Filling(names[token], token, score, next(texts[len(places) == 1]))
                for score, token in zip(*next(waiting), strict=True)
            ]
            for _ in places
        ]
        for places in masks
    ]
