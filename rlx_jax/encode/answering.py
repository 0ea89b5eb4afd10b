"""Define `QuestionAnswerer`, which finds the answer to a question in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.head_model import HeadModel
from rlx_jax.encode.pooled import Vectors, softmax
from rlx_jax.encode.text_rows import check_pairs
from rlx_jax.errors import RequestError, shown, suggest_keywords
from rlx_jax.models.encoder import ANSWER
from rlx_jax.runtime.inputs import check_flag, check_integer
from rlx_jax.text.spans import TokenSpans, encode_windows, id_of_role

# Maximum number of tokens of a question with a window of its context, and of two windows' shared tokens.
MAX_WINDOW, MAX_OVERLAP = 384, 128
# Maximum number of tokens of an answer.
MAX_ANSWER = 15
# The logit of a token outside the context, finite as in transformers, so that a row of them has probabilities.
EXCLUDED = np.float32(-10000)


@dataclass(frozen=True)
class Answer:
    """A part of a context.

    Attributes:
        text: the part; empty for no answer.
        score: its probability, the product for its first and its last token; of equal texts, the sum.
        start, end: the first character of the part, and the one after its last.
    """

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class _Window:
    """The tokens of a question with a window of its context.

    Attributes:
        context: the full context.
        spans: the tokens.
        logits: `[tokens, 2]`, of being the first and the last token of the answer.
        is_context: which tokens belong to the context, bools `[tokens]`.
        is_cls: which tokens are the classification token, bools `[tokens]`.
    """

    context: str
    spans: TokenSpans
    logits: Vectors
    is_context: np.ndarray[Any, np.dtype[np.bool_]]
    is_cls: np.ndarray[Any, np.dtype[np.bool_]]

    def candidates(self, count: int, max_tokens: int, words: bool) -> tuple[float, list[tuple[int, int, float]]]:
        """Return the probability of no answer, and the `count` most probable (start, end, probability) in characters.

        Args:
            count: number of answers.
            max_tokens: maximum number of tokens of an answer.
            words: extend answers to words.
        """
        logits = np.where((self.is_context | self.is_cls)[:, None], self.logits, EXCLUDED)
        first, last = softmax(logits, axis=0).T
        none_score = float(first[0] * last[0])
        first[0] = last[0] = 0
        scores = np.tril(np.triu(np.outer(first, last)), max_tokens - 1)
        # Extending candidates to words joins some of them, so there are more than answers.
        count = count * 2 + 10 if words else count
        order = np.argpartition(-scores, min(count, scores.size) - 1, axis=None)[:count]
        order = order[np.lexsort((order, -scores.flat[order]))]
        pairs = [divmod(int(i), len(first)) for i in order]
        offsets = self.spans.offsets
        return none_score, [
            (*self._characters(offsets, start, end, words), float(scores[start, end]))
            for start, end in pairs if self.is_context[start] and self.is_context[end]
        ]  # fmt: skip

    def _characters(
        self, offsets: Sequence[tuple[int, int]], first: int, last: int, whole_words: bool
    ) -> tuple[int, int]:
        """Return the first character of token `first`, or of its word, and the one after the last of `last`."""
        words = self.spans.words
        if whole_words and words[first] is not None and words[last] is not None:
            while first and self.is_context[first - 1] and words[first - 1] == words[first]:
                first -= 1
            while last + 1 < len(words) and self.is_context[last + 1] and words[last + 1] == words[last]:
                last += 1
        return offsets[first][0], offsets[last][1]


class QuestionAnswerer(HeadModel):
    """Find answers to questions in texts; arguments as of `HeadModel`."""

    _methods = "answer(question, context) returns a part of the context, logits(…) the logits of its ends"
    task = ANSWER
    of_pairs = (True,)

    @suggest_keywords()
    def answer(
        self, question: str | Sequence[str], context: str | Sequence[str], *, top_k: int | None = None,
        max_answer_tokens: int = MAX_ANSWER, allow_none: bool = False, whole_words: bool = True,
        max_length: int | None = None, overlap: int | None = None, max_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the most probable `Answer` to a question; for lists of questions and contexts, a list.

        Args:
            question: the question, or a list of them.
            context: the text that contains the answer; one for all questions, or a list with one for each.
            top_k: return a list of up to this number of answers for each question, best first; None: the best one.
            max_answer_tokens: maximum number of tokens of an answer.
            allow_none: whether there may be no answer; then an empty one has the probability of the first token, where
                such models are trained to put it.
            whole_words: extend answers to words.
            max_length: maximum number of tokens of the question with a window of the context; a longer context is
                divided. None: 384, or the model's limit.
            overlap: number of tokens that two windows share; None: 128, or half of `max_length`.
            max_tokens: as in `Encoder.embed`.

        Raises:
            RequestError: not strings, or not as many contexts as questions; a number is out of range; a question
                leaves no room for windows. Others as `Encoder.embed`.
        """
        for name, value in (("allow_none", allow_none), ("whole_words", whole_words)):
            check_flag(name, value)
        count = 1 if top_k is None else check_integer("top_k", top_k, 1)
        check_integer("max_answer_tokens", max_answer_tokens, 1)
        windows = self._windows(question, context, max_length, overlap, max_tokens)
        answers = [_find(rows, count, max_answer_tokens, whole_words, allow_none) for rows in windows]
        results = answers if top_k is not None else [best[0] if best else Answer("", 0.0, 0, 0) for best in answers]
        return results[0] if isinstance(question, str) else results

    @suggest_keywords()
    def logits(
        self, question: str | Sequence[str], context: str | Sequence[str], *, max_length: int | None = None,
        overlap: int | None = None, max_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the logits of being the first and the last token of the answer: `[tokens, 2]` float32 of each window.

        Args:
            question, context, max_length, overlap, max_tokens: as in `answer`.

        Returns:
            A list of the windows' logits; for a list of questions, a list of such lists.

        Raises:
            As `answer`.
        """
        windows = self._windows(question, context, max_length, overlap, max_tokens)
        results = [[window.logits for window in rows] for rows in windows]
        return results[0] if isinstance(question, str) else results

    def _windows(
        self, question: Any, context: Any, max_length: int | None, overlap: int | None, max_tokens: int | None
    ) -> list[list[_Window]]:
        """Return the windows of each pair of a question and a context, with their logits."""
        pairs, is_list = _pairs(question, context), not isinstance(question, str)
        reader = self.encoder.reader
        tokenizer, limit = reader.require_tokenizer(), reader.max_text_tokens
        if max_length is None:
            max_length = min(limit or MAX_WINDOW, MAX_WINDOW)
        elif check_integer("max_length", max_length, 1) > (limit or max_length):
            raise RequestError(f"max_length is {max_length}; the model reads up to {limit} tokens")
        shared = min(max_length // 2, MAX_OVERLAP) if overlap is None else check_integer("overlap", overlap, 0)

        def encode(chunk: Sequence[tuple[str, str]], first: int) -> list[list[TokenSpans]]:
            places = [f"[{i}]" if is_list else "" for i in range(first, first + len(chunk))]
            return [encode_windows(tokenizer, *p, max_length, shared, at) for p, at in zip(chunk, places, strict=True)]

        requests, spans = reader.read_spans(pairs, encode, "context")
        logits = iter(self._run(requests, max_tokens))
        index, cls = int(tokenizer.padding_side == "right"), id_of_role(tokenizer, "cls")

        def window(context: str, tokens: TokenSpans) -> _Window:
            is_context = np.array([text == index for text in tokens.texts])
            is_cls = np.array([token == cls for token in tokens.ids])
            return _Window(context, tokens, next(logits), is_context, is_cls)

        return [[window(context, row) for row in rows] for (_, context), rows in zip(pairs, spans, strict=True)]


def _pairs(question: Any, context: Any) -> list[tuple[str, str]]:
    """Return pairs of a question and a context.

    Raises:
        RequestError: see `QuestionAnswerer.answer`.
    """
    questions = [question] if isinstance(question, str) else question
    if isinstance(questions, str | bytes) or not isinstance(questions, Sequence):
        raise RequestError(f"question is {shown(question)}; expected a string or a list of strings")
    contexts = [context] * len(questions) if isinstance(context, str) else context
    if isinstance(question, str) != isinstance(context, str) and isinstance(question, str):
        raise RequestError(f"context is {shown(context)}; expected a string for one question")
    if not isinstance(contexts, Sequence) or len(contexts) != len(questions):
        raise RequestError(f"context is {shown(context)}; expected a string, or one for each of the questions")
    return check_pairs([*zip(questions, contexts, strict=True)], "questions and contexts")


# -- search ------------------------------------------------------------------------------------


def _find(windows: Sequence[_Window], count: int, max_tokens: int, words: bool, allow_none: bool) -> list[Answer]:
    """Return the most probable answers in all windows of a context, best first; arguments as of `candidates`."""
    answers: dict[str, Answer] = {}
    none_score = 1.0
    for window in windows:
        first_score, candidates = window.candidates(count, max_tokens, words)
        none_score = min(none_score, first_score)
        for start, end, score in candidates:
            text = window.context[start:end]
            # Several candidates may be one text, such as those that are extended to the same words.
            earlier = answers.get(text.lower())
            answer = Answer(text, score, start, end)
            answers[text.lower()] = answer if earlier is None else replace(earlier, score=earlier.score + score)
    results = [*answers.values(), *([Answer("", none_score, 0, 0)] if allow_none else [])]
    return sorted(results, key=lambda answer: -answer.score)[:count]
