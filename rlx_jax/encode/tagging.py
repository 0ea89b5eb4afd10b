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
from rlx_jax.text.request_checks import Ids, classify_strings
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
        parts = iter(self._parts(windows, logits, tokenizer, aggregation, {*ignore_labels}))
        for rows in spans:
            chosen = [part for _ in rows for part in next(parts)]
            results.append(_without_overlaps(chosen) if len(rows) > 1 else chosen)
        return results[0] if is_single else results

    def _parts(
        self, windows: Sequence[tuple[str, TokenSpans]], logits: Sequence[Vectors], tokenizer: Tokenizer,
        aggregation: str, ignored: set[str],
    ) -> list[list[TaggedSpan]]:  # fmt: skip
        """Return the labelled parts of each window.

        It computes all windows at once, as a loop over the tokens takes longer than a GPU takes for their logits.
        """
        parts: list[list[TaggedSpan]] = [[] for _ in windows]
        words = [_words(*window, tokenizer, aggregation) for window in windows]
        bases = accumulate(map(len, logits), initial=0)
        # Of each word of all windows: its window, its first token and the one after its last.
        counts = [len(first) for first, _ in words]
        if not any(counts):
            return parts
        owners = np.repeat(np.arange(len(windows)), counts)
        firsts, ends = (np.concatenate(arrays) for arrays in zip(*words, strict=True))
        base = np.repeat([*islice(bases, len(windows))], counts)
        scores = AGGREGATIONS[aggregation](softmax(np.concatenate(logits)), firsts + base, ends + base)
        best, values = scores.argmax(axis=1), scores.max(axis=1).astype(np.float64)
        is_first = np.diff(owners, prepend=-1) > 0
        part_labels = self.labels
        if aggregation == "none":
            is_first[:] = True
        else:
            part_labels = tuple(map(_joined_label, self.labels))
            names = np.unique([_name(label) for label in self.labels], return_inverse=True)[1][best]
            is_first |= (np.diff(names, prepend=-1) != 0) | np.char.startswith(self.labels, "B-")[best]
        groups = np.flatnonzero(is_first)
        stops = np.append(groups[1:], len(owners))
        means = np.add.reduceat(values, groups) / (stops - groups)
        is_kept = np.array([label not in ignored for label in part_labels])[best[groups]]
        columns = (owners[groups], best[groups], means, firsts[groups], ends[stops - 1] - 1)
        for owner, label, score, first, last in zip(*(column[is_kept].tolist() for column in columns), strict=True):
            text, window = windows[owner]
            start, end = window.offsets[first][0], window.offsets[last][1]
            parts[owner].append(TaggedSpan(part_labels[label], score, start, end, text[start:end]))
        return parts


# -- words -------------------------------------------------------------------------------------

# From the probabilities of tokens `[tokens, labels]`, and of each word the first token and the one after its last, to
# the probabilities of words `[words, labels]`.
WordScores = Callable[[Vectors, Ids, Ids], Vectors]


def _first(scores: Vectors, firsts: Ids, ends: Ids) -> Vectors:
    return scores[firsts]


def _max(scores: Vectors, firsts: Ids, ends: Ids) -> Vectors:
    best = scores.max(axis=1)
    return scores[[first + best[first:end].argmax() for first, end in zip(firsts, ends, strict=True)]]


def _average(scores: Vectors, firsts: Ids, ends: Ids) -> Vectors:
    return np.stack([scores[first:end].mean(axis=0) for first, end in zip(firsts, ends, strict=True)])


AGGREGATIONS: dict[str, WordScores] = {
    "none": _first, "simple": _first, "first": _first, "average": _average, "max": _max
}  # fmt: skip


def _words(text: str, spans: TokenSpans, tokenizer: Tokenizer, aggregation: str) -> tuple[Ids, Ids]:
    """Return the first token of each word of a window, and the one after its last; by some aggregations each token is
    a word."""
    # Special tokens are around the text's, never between them.
    tokens = np.flatnonzero(~np.array(spans.is_special, bool)).astype(np.int32)
    if aggregation in ("none", "simple") or not len(tokens):
        return tokens, tokens + 1
    is_first = [True, *(not _continues_word(text, spans, i, tokenizer) for i in tokens[1:].tolist())]
    firsts = tokens[is_first]
    return firsts, np.append(firsts[1:], tokens[-1:] + 1)


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
