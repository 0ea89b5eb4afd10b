"""Sparse vectors of texts, and vectors of their tokens: the methods of `Encoder` for SPLADE and bge-m3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from rlx_jax.encode.embedding import chunks
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.text_rows import Requests
from rlx_jax.encode.token_selection import TokenSelection
from rlx_jax.encode.vector_layers import PlacedLayers, VectorLayer
from rlx_jax.errors import RequestError, shown, suggest_keywords
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.request_checks import Ids
from rlx_jax.text.spans import id_of_role

# Maximum number of values of dense vectors that are on the host at once.
MAX_VALUES = 2**26
# Special tokens that have no weight in a sparse vector of bge-m3.
_UNWEIGHTED = ("cls", "eos", "pad", "unk")


@suggest_keywords()
def embed_sparse(
    self: Any, texts: Any, *, prompt_name: str | None = None, prompt: str | None = None,
    max_active_dims: int | None = None, max_tokens: int | None = None,
) -> Any:  # fmt: skip
    """Return the sparse vector of each text, a dictionary from dimensions to weights above zero, the largest first.

    The dimensions are token ids. For a single string it is one dictionary. The similarity of two vectors is the sum of
    the products of weights of one dimension.

    Args:
        texts, prompt_name, prompt, max_tokens: as in `Encoder.embed`, but an iterator is consumed at once.
        max_active_dims: the number of weights to keep, the largest; None: as the checkpoint says, or all.

    Raises:
        RequestError: the checkpoint has no sparse vectors, or `max_active_dims` is not positive. Others as `embed`.
    """
    pipeline = self.pipeline
    if not pipeline.is_sparse and pipeline.token_weight is None:
        raise RequestError(f"embed_sparse: {self.model.name} has no sparse vectors, as SPLADE and bge-m3 have")
    count = pipeline.max_active_dims
    if max_active_dims is not None:
        count = check_integer("max_active_dims", max_active_dims, 1)
    results, rows = [], list[tuple[Ids, Vectors]]()
    for first, chunk in chunks(_items(self, texts, "embed_sparse"), max(1, MAX_VALUES // self.output_width)):
        requests = self.reader.read_prompted(chunk, prompt_name, prompt, first)
        if pipeline.is_sparse:
            rows = [(np.arange(self.output_width), vector) for vector in self.run(requests, max_tokens)]
        else:
            ids, vectors = _token_vectors(self, requests, (pipeline.token_weight,), max_tokens)
            roles = [] if self.tokenizer is None else [id_of_role(self.tokenizer, role) for role in _UNWEIGHTED]
            special = [i for i in roles if i is not None]
            rows = [(row, vector[:, 0] * ~np.isin(row, special)) for row, vector in zip(ids, vectors, strict=True)]
        for row, vector in rows:
            order = np.argsort(-vector, kind="stable")[: int((vector > 0).sum())]
            weights = dict[int, float]()
            for i, weight in zip(row[order].tolist(), vector[order].tolist(), strict=True):
                weights.setdefault(i, weight)  # of several tokens with one id the largest weight
            results.append(dict(islice(weights.items(), count)))
    return results[0] if isinstance(texts, str) else results


@suggest_keywords()
def embed_tokens(
    self: Any, texts: Any, *, prompt_name: str | None = None, prompt: str | None = None, max_tokens: int | None = None
) -> Any:
    """Return the vectors of each text's tokens except for the first, a list of `[tokens, width]` float32.

    For a string it is one array. `maxsim(queries, documents, mean=True)` scores them.

    Args:
        texts, prompt_name, prompt, max_tokens: as in `Encoder.embed`, but an iterator is consumed at once.

    Raises:
        RequestError: the checkpoint has no layer for the vectors of tokens. Others as `embed`.
    """
    if not self.pipeline.token_layers:
        raise RequestError(f"embed_tokens: {self.model.name} has no vectors of tokens, as bge-m3 and ColBERT have")
    requests = self.reader.read_prompted([*_items(self, texts, "embed_tokens")], prompt_name, prompt)
    _, vectors = _token_vectors(self, requests, self.pipeline.token_layers, max_tokens)
    results = [rows[1:] for rows in vectors]
    return results[0] if isinstance(texts, str) else results


def _items(encoder: Any, texts: Any, method: str) -> Iterable[Any]:
    """Return the texts of a request, after checking that it can run.

    Raises:
        RequestError: `texts` is no text, and no iterable of them.
    """
    encoder.model.concrete_params(method)
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise RequestError(f"{method}: texts is {shown(texts)}; expected a string, or strings or id lists")
    return [texts] if isinstance(texts, str) else texts


def _token_vectors(
    encoder: Any, requests: Requests, layers: tuple[VectorLayer, ...], max_tokens: int | None
) -> tuple[list[Ids], list[Vectors]]:
    """Return the token ids of each text, and the layers of its hidden states."""
    read = [*requests.chunks]
    hidden = encoder.run_tokens(replace(requests, chunks=iter(read)), TokenSelection(), max_tokens)
    vectors = PlacedLayers.on(encoder.model.programs, layers).each(hidden)
    return [row for part, _ in read for row in part.ids], vectors


def maxsim(queries: Sequence[Vectors], documents: Sequence[Vectors], *, mean: bool = False) -> Vectors:
    """Return the scores `[queries, documents]` of what `embed_tokens` returned for lists of texts.

    A score is the sum, over the vectors of the query, of the largest product with a vector of the document; with `mean`
    it is divided by their number.

    Raises:
        RequestError: an entry has no vectors, or is not `[tokens, width]`.
    """
    for name, arrays in (("queries", queries), ("documents", documents)):
        for i, array in enumerate(arrays):
            if getattr(array, "ndim", 0) != 2 or not len(array):
                raise RequestError(f"{name}[{i}] is {shown(array)}; expected vectors [tokens, width], at least one")
    scores: Vectors = np.zeros((len(queries), len(documents)), np.float32)
    if not len(queries):
        return scores
    tokens, starts = np.concatenate(queries), np.cumsum([0, *map(len, queries)])[:-1]
    for i, document in enumerate(documents):
        scores[:, i] = np.add.reduceat((tokens @ document.T).max(axis=1), starts)
    return np.divide(scores, [[len(query)] for query in queries], dtype=np.float32) if mean else scores
