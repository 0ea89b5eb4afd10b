"""Define `TokenClassifier`, which labels the words of texts, such as the names in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np

from rlx_jax.encode.head_model import TokenLogits
from rlx_jax.encode.pooled import Vectors, softmax
from rlx_jax.errors import RequestError, check_names, shown, suggest_keywords
from rlx_jax.models.encoder import TOKEN
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import classify_strings
from rlx_jax.text.spans import TokenSpans, encode_spans, id_of_role
from rlx_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaggedSpan:
    """A part of a text with a label.

    Attributes:
        label: the label; of several tokens without the `B-` or `I-` in front.
        score: its probability, the mean over the words that are joined.
        start, end: the first character of the part, and the one after its last.
        text: the part.
    """

    label: str
    score: float
    start: int
    end: int
    text: str


class TokenClassifier(TokenLogits):
    """Label the tokens of texts; arguments as of `HeadModel`."""

    _methods = "tag(texts) returns labelled parts of texts, logits(texts) the numbers before them"
    task = TOKEN

    @suggest_keywords()
    def tag(
        self, texts: Any, *, aggregation: str = "simple", ignore_labels: Sequence[str] = ("O",),
        overlap: int | None = None, max_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the labelled parts of each text, a list of `TaggedSpan`; for a single string, one list.

        Args:
            texts: a string, or a list of strings.
            aggregation: a name in `AGGREGATIONS`. With `none` the parts are tokens. Otherwise adjacent parts with one
                label are joined, except before a `B-`. With `simple` the parts that are joined are tokens, else words,
                and a word has the label of its `first` token, of the token with the highest probability (`max`), or
                the one with the highest mean probability (`average`).
            ignore_labels: the labels of parts that are left out; joined parts have them without `B-` or `I-`.
            overlap: divide a text that is too long into windows that share this number of tokens; None: truncate it.
            max_tokens: as in `Encoder.embed`.

        Raises:
            RequestError: not strings; no such aggregation or label; `overlap` with `none`, or larger than a window.
                Others as `Encoder.embed`.
        """
        check_names([aggregation], AGGREGATIONS, "aggregation", "; there are", RequestError)
        if isinstance(ignore_labels, str) or not isinstance(ignore_labels, Sequence):
            raise RequestError(f"ignore_labels is {shown(ignore_labels)}; expected a list of labels")
        part_labels = self.labels if aggregation == "none" else [_joined_label(label) for label in self.labels]
        choices = dict.fromkeys(["O", *part_labels])
        check_names(ignore_labels, choices, "ignore_labels", "; labels of parts are", RequestError)
        if overlap is not None and aggregation == "none":
            raise RequestError("overlap joins parts of windows, so it needs another aggregation than 'none'")
        overlap = None if overlap is None else check_integer("overlap", overlap, 0)
        (items, is_single), reader = classify_strings(texts, "tag"), self.encoder.reader
        tokenizer, results = reader.require_tokenizer(), []
        requests, spans = reader.read_spans(
            items, lambda chunk, first: encode_spans(tokenizer, chunk, reader.max_text_tokens, overlap, first)
        )
        logits = self._run(requests, max_tokens)
        windows = [(text, window) for text, rows in zip(items, spans, strict=True) for window in rows]
        words = [_words(text, window, tokenizer, aggregation) for text, window in windows]
        # One array of all texts: calls of numpy for each text take longer than a GPU computes it.
        starts = accumulate(map(len, logits), initial=0)
        indices = [[start + i for i in word] for start, row in zip(starts, words, strict=False) for word in row]
        scores = AGGREGATIONS[aggregation](softmax(np.concatenate(logits)), indices) if indices else np.zeros((0, 1))
        labels, values = iter(scores.argmax(axis=1).tolist()), iter(scores.max(axis=1).tolist())
        parts = iter([
            self._parts(
                text, [(window.offsets[word[0]][0], window.offsets[word[-1]][1]) for word in row],
                [*islice(labels, len(row))], [*islice(values, len(row))], ignore_labels, aggregation != "none",
            )
            for (text, window), row in zip(windows, words, strict=True)
        ])  # fmt: skip
        for rows in spans:
            chosen = [part for _ in rows for part in next(parts)]
            results.append(_without_overlaps(chosen) if len(rows) > 1 else chosen)
        return results[0] if is_single else results

    def _parts(
        self, text: str, places: Sequence[tuple[int, int]], labels: Sequence[int], scores: Sequence[float],
        ignore_labels: Sequence[str], is_joined: bool,
    ) -> list[TaggedSpan]:  # fmt: skip
        """Return the labelled parts of a window, given the place, the label and the score of each word.

        With `is_joined` adjacent words of one label are one part, except before a `B-`.
        """
        parts, names, end = list[TaggedSpan](), [_name(label) for label in self.labels], 0
        while end < len(places):
            start, label = end, self.labels[labels[end]]
            end += 1
            while (
                is_joined and end < len(places) and names[labels[end]] == names[labels[start]]
                and not self.labels[labels[end]].startswith("B-")
            ):  # fmt: skip
                end += 1
            label = _joined_label(label) if is_joined else label
            if label not in ignore_labels:
                first, last = places[start][0], places[end - 1][1]
                parts.append(TaggedSpan(label, sum(scores[start:end]) / (end - start), first, last, text[first:last]))
        return parts


# -- words -------------------------------------------------------------------------------------

# From the probabilities of tokens `[tokens, labels]`, and the tokens of each word, to those of words `[words, labels]`.
WordScores = Callable[[Vectors, list[list[int]]], Vectors]


def _first(scores: Vectors, words: list[list[int]]) -> Vectors:
    return scores[[tokens[0] for tokens in words]]


def _max(scores: Vectors, words: list[list[int]]) -> Vectors:
    best = scores.max(axis=1).tolist()
    return scores[[max(tokens, key=best.__getitem__) for tokens in words]]


def _average(scores: Vectors, words: list[list[int]]) -> Vectors:
    return np.stack([scores[tokens].mean(axis=0) for tokens in words])


AGGREGATIONS: dict[str, WordScores] = {
    "none": _first, "simple": _first, "first": _first, "average": _average, "max": _max
}  # fmt: skip


def _words(text: str, spans: TokenSpans, tokenizer: Tokenizer, aggregation: str) -> list[list[int]]:
    """Return the indices of the tokens of each word of a window; by some aggregations each token is a word."""
    tokens = [i for i, is_special in enumerate(spans.is_special) if not is_special]
    if aggregation in ("none", "simple"):
        return [[i] for i in tokens]
    words = list[list[int]]()
    for i in tokens:
        if words and _continues_word(text, spans, i, tokenizer):
            words[-1].append(i)
        else:
            words.append([i])
    return words


def _continues_word(text: str, spans: TokenSpans, index: int, tokenizer: Tokenizer) -> bool:
    """Return whether a token continues the word of the token before it, as transformers decides.

    With WordPiece that is a token with a prefix such as `##`, and no unknown token. For other tokenizers words are
    separated by spaces.
    """
    start, end = spans.offsets[index]
    if spans.ids[index] == id_of_role(tokenizer, "unk"):
        return False
    if getattr(tokenizer._native.model, "continuing_subword_prefix", None):
        return len(spans.tokens[index]) != end - start
    return start > 0 and " " not in text[start - 1 : start + 1]


# -- labels ------------------------------------------------------------------------------------


def _joined_label(label: str) -> str:
    """Return the label of joined parts, from that of the first one."""
    return label.split("-", 1)[-1]


def _name(label: str) -> str:
    """Return a label without `B-` or `I-` in front."""
    return label[2:] if label.startswith(("B-", "I-")) else label


def _without_overlaps(parts: Sequence[TaggedSpan]) -> list[TaggedSpan]:
    """Return the parts of all windows, of overlapping ones the longer, or else the more probable."""
    chosen: list[TaggedSpan] = []
    for part in sorted(parts, key=lambda part: part.start):
        if chosen and chosen[-1].start <= part.start < chosen[-1].end:
            if (part.end - part.start, part.score) > (chosen[-1].end - chosen[-1].start, chosen[-1].score):
                chosen[-1] = part
        else:
            chosen.append(part)
    return chosen
