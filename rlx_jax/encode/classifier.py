"""Define `Classifier`, which gives texts and pairs of texts labels, and `Reranker`, which ranks documents.

The module also makes batches of texts with labels, to train a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.artifact_plan import reranker_plan
from rlx_jax.encode.cross_encoder import PairTemplate
from rlx_jax.encode.head_model import HeadModel
from rlx_jax.encode.pooled import Vectors, softmax
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.encode.text_rows import Requests, check_list, check_pairs, without_padding
from rlx_jax.errors import RequestError, did_you_mean, quote, shown, suggest_keywords
from rlx_jax.models.encoder import MULTI_LABEL, REGRESSION, SEQUENCE, TaskHead
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import TYPES, TokenRows, block_width, pad_rows
from rlx_jax.text.token_model import EncoderModel


@dataclass(frozen=True)
class Classification:
    """The result for one text or image.

    Attributes:
        scores: the probability of each label, highest first; of a regression, its values.
    """

    scores: Mapping[str, float]

    @property
    def label(self) -> str:
        """Return the label with the highest score."""
        return next(iter(self.scores))

    @property
    def score(self) -> float:
        """Return the highest score."""
        return next(iter(self.scores.values()))

    def labels_above(self, threshold: float = 0.5) -> tuple[str, ...]:
        """Return the labels with a score above a threshold, as the result of a model with several labels."""
        return tuple(label for label, score in self.scores.items() if score > threshold)


class Classifier(HeadModel):
    """Classify texts, or pairs of texts; arguments as of `HeadModel`."""

    _methods = "classify(texts) returns labels with probabilities, logits(texts) the numbers before them"
    task = SEQUENCE
    of_pairs = (False, True)

    @suggest_keywords()
    def logits(
        self, texts: Any, second_texts: Sequence[str] | None = None, *, max_tokens: int | None = None
    ) -> Vectors:
        """Return the logits of texts, `[n, labels]` float32; of a single string `[labels]`.

        Args:
            texts: as in `Encoder.embed`.
            second_texts: a text for each of `texts`, which are classified as pairs.
            max_tokens: as in `Encoder.embed`.

        Raises:
            RequestError: `second_texts` is not a text for each of `texts`. Others as `Encoder.embed`.
        """
        return self._run_requests(self._read(texts, second_texts), max_tokens)

    def pair_logits(self, pairs: Any, *, max_tokens: int | None = None) -> Vectors:
        """Return the logits of pairs of texts, `[n, labels]` float32."""
        requests = self.encoder.reader.read_pairs(check_pairs(pairs, "pairs"))
        return self._run_requests(self._without_padding(requests), max_tokens)

    def run_texts(self, texts: Any, max_tokens: int | None = None) -> Vectors:
        return self.logits(texts, max_tokens=max_tokens)

    @property
    def selection(self) -> None:
        return None

    def _read(self, texts: Any, second_texts: Any) -> Requests:
        """Return the rows of texts, or with second texts of pairs."""
        if second_texts is None:
            _refuse_tuples(texts)
            return self._without_padding(self.encoder.reader.read_texts(texts))
        is_single = isinstance(texts, str) and isinstance(second_texts, str)
        pairs = _pairs([texts], [second_texts]) if is_single else _pairs(texts, second_texts)
        return replace(self._without_padding(self.encoder.reader.read_pairs(pairs)), is_single=is_single)

    def _without_padding(self, requests: Requests) -> Requests:
        """Return a request without the padding ids at the ends of rows, which transformers leaves out."""
        padding_id = self.head.padding_id
        if padding_id is None:
            return requests
        return replace(requests, chunks=((without_padding(rows, padding_id), more) for rows, more in requests.chunks))

    def _run_requests(self, requests: Requests, max_tokens: int | None) -> Vectors:
        """Return the logits of a request; of a single text, one row."""
        self.check_runnable()
        out = self.encoder.run(requests, max_tokens)
        return out[0] if requests.is_single else out

    @suggest_keywords()
    def classify(
        self, texts: Any, second_texts: Sequence[str] | None = None, *, top_k: int | None = None,
        max_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Return a `Classification` for each text; for a single string, one.

        The scores are the softmax of the logits. For a model with several labels per text (`problem_type` is
        `multi_label_classification`) or with one label they are the sigmoid, and for a regression the logits.

        Args:
            texts, second_texts, max_tokens: as in `logits`.
            top_k: the number of labels of a result, those with the highest scores; None: all.

        Raises:
            RequestError: `top_k` is not positive. Others as `logits`.
        """
        count = check_top_k(top_k)
        return classifications(self.head, self.logits(texts, second_texts, max_tokens=max_tokens), count)

    @suggest_keywords()
    def batches(
        self, texts: Any, labels: Any, second_texts: Sequence[str] | None = None, *, batch_size: int = 16,
        seed: int | None = None,
    ) -> Iterator[dict[str, np.ndarray[Any, Any]]]:  # fmt: skip
        """Return an iterator over the batches of one epoch, for a step of `rlx_jax.train` with
        `rlx_jax.losses.classification`.

        Rows are tokenised and truncated as for `classify`, and padded to few sizes. The last batch is filled with rows
        of weight 0.

        Args:
            texts, second_texts: as in `logits`; also lists of token ids.
            labels: one for each text: its name or number; numbers `[n, labels]` for several labels or a regression.
            batch_size: rows of a batch.
            seed: shuffles the rows; None: in order.

        Raises:
            RequestError: labels that are not of the head, or another number of them than of texts. Others as `logits`.
        """
        rows = [rows for rows, _ in self._read(texts, second_texts).chunks]
        values = read_label_rows(labels, sum(len(part.ids) for part in rows), self.head)
        size = check_integer("batch_size", batch_size, 1)
        return make_batches(rows, values, size, seed, self.encoder.buckets, self.encoder.max_positions)


@dataclass(frozen=True)
class RankedDocument:
    """A document of a ranking: its index in the request, its score and its text."""

    index: int
    score: float
    text: str


class Reranker(EncoderModel):
    """Score how well documents answer a query, with a cross-encoder: a classifier of pairs with one label.

    Args:
        classifier: the classifier.
        activation: the function from its logit to the score, a name in `ACTIVATIONS`.
        prompts: a pipeline, of which the prompts count.
        template: how a prompt and a pair become one text; None: the tokenizer makes rows of two texts, with the prompt
            in front of the first.
    """

    _methods = "rank(query, documents) returns documents sorted by score, score(pairs) the scores"

    def __init__(
        self, classifier: Classifier, activation: str = "sigmoid", *, prompts: SentencePipeline | None = None,
        template: PairTemplate | None = None,
    ) -> None:  # fmt: skip
        if activation not in ACTIVATIONS:
            raise RequestError(f"Reranker: activation is {shown(activation)}; expected one of {', '.join(ACTIVATIONS)}")
        if len(classifier.labels) != 1:
            raise RequestError(f"Reranker: expected a classifier with one label, got {len(classifier.labels)}")
        self.classifier, self.activation = classifier, activation
        self.prompts, self.template = prompts or SentencePipeline(), template
        self.encoder, self.tokenizer = classifier.encoder, classifier.tokenizer

    artifact_plan = reranker_plan

    @suggest_keywords()
    def warmup(self) -> None:
        """Run every program once that `score` and `rank` can need, as `Encoder.warmup` does."""
        self.encoder.run_all_programs(None, (self.template is None,))

    @suggest_keywords()
    def score(
        self, pairs: Any, *, prompt_name: str | None = None, prompt: str | None = None, max_tokens: int | None = None
    ) -> Vectors:
        """Return the scores of pairs of a query and a document, `[n]` float32.

        Args:
            pairs: a list of pairs of strings.
            prompt_name, prompt: the instruction, by its name or as text, as in `Encoder.embed`.
            max_tokens: as in `Encoder.embed`.

        Raises:
            RequestError: not a list of pairs of strings, or no such prompt. Others as `Encoder.embed`.
        """
        text, checked = self.prompts.choose_prompt(prompt_name, prompt), check_pairs(pairs, "pairs")
        if self.template is None:
            prompted = [(text + query, document) for query, document in checked]
            logits = self.classifier.pair_logits(prompted, max_tokens=max_tokens)
        else:
            self.classifier.check_runnable()
            logits = self.classifier.logits(self.template.token_ids(checked, text), max_tokens=max_tokens)
        return ACTIVATIONS[self.activation](logits[:, 0])

    @suggest_keywords()
    def rank(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, prompt_name: str | None = None,
        prompt: str | None = None, max_tokens: int | None = None,
    ) -> list[RankedDocument]:  # fmt: skip
        """Return the documents with the highest scores for a query, highest first.

        Args:
            query: the query.
            documents: the texts to sort.
            top_k: how many to return; None: all.
            prompt_name, prompt, max_tokens: as in `score`.

        Raises:
            RequestError: `documents` is not a list of strings, or `top_k` is not positive. Others as `score`.
        """
        check_list("documents", documents, "strings")
        for name, text in (("query", query), *((f"documents[{i}]", text) for i, text in enumerate(documents))):
            if not isinstance(text, str):
                raise RequestError(f"{name} is {shown(text)}; expected a string")
        count = len(documents) if top_k is None else check_integer("top_k", top_k, 1)
        if not documents:
            return []
        pairs = [(query, text) for text in documents]
        scores = self.score(pairs, prompt_name=prompt_name, prompt=prompt, max_tokens=max_tokens)
        order = np.argsort(-scores, kind="stable")[:count]
        return [RankedDocument(int(i), float(scores[i]), documents[i]) for i in order]


def check_top_k(top_k: int | None) -> int | None:
    """Return the number of labels of a result, checked; None: all."""
    return None if top_k is None else check_integer("top_k", top_k, 1)


def classifications(head: TaskHead, logits: Vectors, top_k: int | None) -> Any:
    """Return a `Classification` for each row of logits `[n, labels]`; for `[labels]`, one. It has `top_k` labels."""
    results = []
    for scores in np.atleast_2d(_scores(head, logits)):
        order = np.argsort(-scores, kind="stable")[:top_k]
        results.append(Classification({head.labels[i]: float(scores[i]) for i in order}))
    return results[0] if logits.ndim == 1 else results


def _scores(head: TaskHead, logits: Vectors) -> Vectors:
    """Return the scores for logits `[…, labels]`."""
    if head.problem == REGRESSION:
        return logits
    if head.problem == MULTI_LABEL or len(head.labels) == 1:
        return sigmoid(logits)
    return softmax(logits)


def _pairs(texts: Any, second_texts: Any) -> list[tuple[str, str]]:
    """Return the pairs of two lists of strings of one length."""
    for name, values in (("texts", texts), ("second_texts", second_texts)):
        check_list(name, values, "strings")
    if len(texts) != len(second_texts):
        raise RequestError(f"second_texts has {len(second_texts)} strings; expected one for each of {len(texts)} texts")
    return check_pairs([*zip(texts, second_texts, strict=True)], "pairs")


def _refuse_tuples(texts: Any) -> None:
    """Refuse pairs in one list, which is another library's form of pairs.

    Raises:
        RequestError: the message has the form of this package.
    """
    first = texts[0] if isinstance(texts, Sequence) and texts else None
    if isinstance(first, tuple | list) and any(isinstance(part, str) for part in first):
        raise RequestError(f"texts[0] is {shown(first)}; expected a string; pairs are two lists: (firsts, seconds)")


def sigmoid(x: Vectors) -> Vectors:
    """Return the logistic function; its argument cannot overflow."""
    return np.exp(-np.logaddexp(np.float32(0), -x))


ACTIVATIONS: Mapping[str, Callable[[Vectors], Vectors]] = {"sigmoid": sigmoid, "identity": lambda x: x}


# -- batches of texts with labels --------------------------------------------------------------


LabelArray = np.ndarray[Any, Any]


def read_label_rows(labels: Any, count: int, head: TaskHead) -> LabelArray:
    """Return the labels of `count` texts: ids `[n]` int32, or numbers `[n, labels]` float32.

    Raises:
        RequestError: an unknown name or number, another shape, or no numbers.
    """
    num_labels = len(head.labels)
    items = labels if isinstance(labels, np.ndarray) else [*labels] if isinstance(labels, Sequence) else labels
    if isinstance(items, list) and any(isinstance(item, str) for item in items):
        unknown = next((item for item in items if item not in head.labels), None)
        if unknown is not None:
            raise RequestError(
                f"labels: {shown(unknown)} is no label; the head has {', '.join(map(quote, head.labels))}"
                f"{did_you_mean(str(unknown), head.labels)}"
            )
        items = [head.labels.index(item) for item in items]
    try:
        values = np.asarray(items)
    except ValueError as error:  # rows of different lengths
        raise RequestError(f"labels is {shown(labels)}; expected a label for each text") from error
    has_values = head.problem in (REGRESSION, MULTI_LABEL) or values.dtype.kind == "f" or num_labels == 1
    shapes = [(count, num_labels), *([(count,)] if num_labels == 1 else [])] if has_values else [(count,)]
    if values.dtype.kind not in ("biuf" if has_values else "iu") or values.shape not in shapes:
        expected = f"numbers {list(shapes[-1])}" if has_values else f"{count} names or numbers of labels"
        raise RequestError(f"labels is {shown(labels)}, of shape {list(values.shape)}; expected {expected}")
    if has_values:
        return values.reshape(count, num_labels).astype(np.float32)
    for i in np.flatnonzero(values >= num_labels)[:1]:
        raise RequestError(f"labels[{i}] is {values[i]}; the head has {num_labels} labels, and a negative one is none")
    return values.astype(np.int32)


def make_batches(
    parts: Sequence[TokenRows], labels: LabelArray, batch_size: int, seed: int | None, buckets: Buckets,
    max_positions: int | None,
) -> Iterator[dict[str, LabelArray]]:  # fmt: skip
    """Return an iterator over batches with `tokens`, `lengths`, `labels`, `weights` and, if rows have them,
    `token_type_ids`.

    Args:
        parts: the rows of the texts.
        labels: a label for each row.
        batch_size: rows of a batch; the last one is filled with rows of weight 0.
        seed: shuffles the rows; None: in order.
        buckets, max_positions: the sizes that rows are padded to.
    """
    ids = [row for part in parts for row in part.ids]
    types = [row for part in parts for row in part.types]
    order = np.arange(len(ids))
    if seed is not None:
        order = np.random.default_rng(check_integer("seed", seed, 0)).permutation(order)

    def batch(rows: LabelArray) -> dict[str, LabelArray]:
        weights = (np.arange(batch_size) < len(rows)).astype(np.float32)
        rows = np.resize(rows, batch_size)  # repeats rows at the end
        width = block_width(buckets, max(len(ids[i]) for i in rows), max_positions)
        arrays = {
            "tokens": pad_rows([ids[i] for i in rows], width),
            "lengths": np.array([len(ids[i]) for i in rows], np.int32),
            "labels": labels[rows],
            "weights": weights,
        }
        return arrays | ({TYPES: pad_rows([types[i] for i in rows], width)} if types else {})

    return (batch(order[start : start + batch_size]) for start in range(0, len(order), batch_size))
