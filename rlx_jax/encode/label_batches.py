"""Make batches of texts with labels, to train a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.errors import RequestError, did_you_mean, quote, shown
from rlx_jax.models.encoder import MULTI_LABEL, REGRESSION, TaskHead
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import TYPES, TokenRows, block_width, pad_rows

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
