"""Define `TokenClassifier`, which labels the words of texts, such as the names in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from rlx_jax.encode.head_model import TokenLogits
from rlx_jax.encode.pooled import Vectors, softmax
from rlx_jax.encode.text_rows import check_list
from rlx_jax.errors import RequestError, check_names, suggest_keywords
from rlx_jax.models.encoder import TOKEN
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import Ids, classify_strings
from rlx_jax.text.spans import TokenSpans, encode_spans, id_of_role
from rlx_jax.text.tokenizer import Tokenizer


class TaggedSpan(NamedTuple):
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
        check_list("ignore_labels", ignore_labels, "labels")
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
        logits = [row[: len(window.ids)] for row, (_, window) in zip(logits, windows, strict=True)]  # without padding
        is_token = ~np.array([*chain.from_iterable(window.is_special for _, window in windows)], bool)
        is_first = is_token.copy()
        if aggregation not in ("none", "simple"):
            is_first &= [*chain.from_iterable(_word_starts(*window, tokenizer) for window in windows)]
        if not is_first.any():
            return [[] for _ in windows]
        # The first token of each word of all windows, the one after its last, and its window.
        firsts = np.flatnonzero(is_first).astype(np.int32)
        ends = firsts + np.add.reduceat(is_token, firsts, dtype=np.int32)
        owners = np.repeat(np.arange(len(windows)), [*map(len, logits)])[firsts]
        scores = AGGREGATIONS[aggregation](softmax(np.concatenate(logits)), firsts, ends)
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
        groups, stops, means = groups[is_kept], stops[is_kept], means[is_kept]
        # Arrays, since objects of every token are what takes the most time.
        pairs = chain.from_iterable(window.offsets for _, window in windows)
        offsets = np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(is_token)).reshape(-1, 2)
        starts, last = offsets[firsts[groups], 0].tolist(), offsets[ends[stops - 1] - 1, 1].tolist()
        owners = owners[groups]
        texts = [windows[i][0][start:end] for i, start, end in zip(owners.tolist(), starts, last, strict=True)]
        labels = np.array(part_labels, object)[best[groups]].tolist()
        columns = zip(labels, means.tolist(), starts, last, texts, strict=True)
        parts = [*map(partial(tuple.__new__, TaggedSpan), columns)]
        bounds = np.searchsorted(owners, np.arange(len(windows) + 1)).tolist()
        return [parts[start:end] for start, end in pairwise(bounds)]


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


def _word_starts(text: str, spans: TokenSpans, tokenizer: Tokenizer) -> list[bool]:
    """Return whether each token of a window is the first of a word, as transformers decides.

    With WordPiece that is a token without a prefix such as `##`, or an unknown one. For other tokenizers words are
    separated by spaces. Special tokens, which are around the text's, never between them, may be any.
    """
    unknown, offsets, special = id_of_role(tokenizer, "unk"), spans.offsets, spans.is_special
    if getattr(tokenizer._native.model, "continuing_subword_prefix", None):
        starts = [len(token) == end - start for token, (start, end) in zip(spans.row.tokens, offsets, strict=True)]
    else:
        starts = [start == 0 or " " in text[start - 1 : start + 1] for start, _ in offsets]
    starts = [is_start or token == unknown for is_start, token in zip(starts, spans.ids, strict=True)]
    if False in special:
        starts[special.index(False)] = True
    return starts


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
