"""Define `MultiVectorEncoder`, which computes a vector for each token of a text (ColBERT), and read its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.sentence import (
    TRANSFORMER_FILES,
    SentencePipeline,
    module_fields,
    read_modules,
    read_prompts,
    transformer_settings,
)
from rlx_jax.encode.token_selection import TokenSelection
from rlx_jax.encode.vector_layers import PlacedLayers, VectorLayer, output_width, read_layer
from rlx_jax.errors import ConfigError, RequestError, UnsupportedError, listing, quote, shown, suggest_keywords
from rlx_jax.io.folder import Folder
from rlx_jax.runtime.report import Report
from rlx_jax.text.request_checks import Ids, classify_prompts
from rlx_jax.text.token_model import TaskModel, model_repr
from rlx_jax.text.tokenizer import Tokenizer

MODEL_TYPE = "MultiVectorEncoder"
TOKENS = "token_embeddings"
# The kinds of texts, and the names of their prompts in the order in which sentence-transformers looks for them.
KINDS = {"query": ("query",), "document": ("document", "passage", "corpus")}
_LAYERS = ("Dense", "Normalize")
# Number of queries of one call, where they are expanded by tokens that the others do not read.
_QUERIES = 32


@dataclass(frozen=True)
class QueryExpansion:
    """Tokens that queries are filled up with.

    Attributes:
        length: number of tokens of a query with them.
        is_fixed: whether longer queries are cut.
        is_read: whether the other tokens read them.
        token: the token; None: the mask token, or else the end token.
    """

    length: int
    is_fixed: bool
    is_read: bool
    token: str | None = None


@dataclass(frozen=True)
class TokenSettings:
    """What a checkpoint does with the tokens of texts.

    Attributes:
        pipeline: prompts and the limit of the length.
        layers: applied to each hidden state in turn.
        skipped_words: tokens without a vector.
        skipping_kinds: the kinds of texts that they are left out of.
        lengths: maximum number of tokens by kind of text, where it is not the pipeline's.
        expansion: of queries; None for none.
        divides: whether a score is divided by the number of vectors of the query.
    """

    pipeline: SentencePipeline
    layers: tuple[VectorLayer, ...] = ()
    skipped_words: tuple[str, ...] = ()
    skipping_kinds: tuple[str, ...] = ("document",)
    lengths: tuple[tuple[str, int], ...] = ()
    expansion: QueryExpansion | None = None
    divides: bool = False


class MultiVectorEncoder(TaskModel):
    """Compute a vector for each token of a text, and score documents by the best match of each token of a query.

    Args:
        encoder: the encoder of hidden states, with a tokenizer.
        settings: what is done with them.
    """

    _methods = "embed_tokens(texts, kind=) returns vectors per token, maxsim(queries, documents) scores"

    def __init__(self, encoder: Encoder, settings: TokenSettings) -> None:
        if encoder.tokenizer is None:
            raise RequestError("MultiVectorEncoder: expected an encoder with a tokenizer")
        output_width(settings.layers, encoder.width, "MultiVectorEncoder")
        self.encoder, self.settings = encoder, settings
        self.model, self.tokenizer = encoder.model, encoder.tokenizer
        self._layers = PlacedLayers.on(encoder.model.programs, settings.layers)
        ids = map(self.tokenizer.token_id, settings.skipped_words)
        self._skipped = np.array([i for i in ids if i is not None], np.int32)
        self._expansion_id = _expansion_id(self.tokenizer, settings.expansion)

    def __repr__(self) -> str:
        return model_repr("MultiVectorEncoder", self.model, self.encoder.vocab_size, self.encoder.max_positions)

    @suggest_keywords()
    def embed_tokens(
        self, texts: Any, *, kind: str, prompt_name: str | None = None, prompt: str | None = None,
        max_tokens: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the vectors of each text's tokens: a list of `[tokens, width]` float32; for a string, one.

        Args:
            texts: a string or a list of strings.
            kind: "query" or "document", which have different prompts, lengths, and tokens without a vector.
            prompt_name, prompt: in place of the prompt of the kind, as in `Encoder.embed`.
            max_tokens: as in `Encoder.embed`.

        Raises:
            RequestError: another kind, or no strings. Others as `Encoder.embed`.
        """
        if kind not in KINDS:
            raise RequestError(f"kind is {shown(kind)}; expected one of {', '.join(KINDS)}")
        self.model.refuse_traced()
        self.model.require_params("embed_tokens")
        pipeline = self.settings.pipeline
        if prompt_name is None and prompt is None:
            prompt_name = next((name for name in KINDS[kind] if name in pipeline.prompts), None)
        text = pipeline.choose_prompt(prompt_name, prompt)
        request = classify_prompts(texts, "texts", allow_flat=False)
        if request.texts is None and request.ids:
            raise RequestError("embed_tokens: texts are token ids; expected strings")
        rows = self._tokenize([text + one for one in request.texts or []], kind)
        vectors = self._vectors(rows, kind, max_tokens)
        skipped = self._skipped if kind in self.settings.skipping_kinds else self._skipped[:0]
        results = [v[~np.isin(row, skipped)] for v, row in zip(vectors, rows, strict=True)]
        return results[0] if request.is_single else results

    def _tokenize(self, texts: list[str], kind: str) -> list[Ids]:
        """Return the token ids of texts, without expansions."""
        length = dict(self.settings.lengths).get(kind)
        expansion = self.settings.expansion if kind == "query" else None
        if expansion is not None and expansion.is_fixed:
            length = expansion.length
        elif expansion is not None and length is not None:
            length = max(length, expansion.length)
        pipeline = self.settings.pipeline
        limited = pipeline if length is None else replace(pipeline, max_seq_length=length)
        reader = replace(self.encoder.reader, pipeline=limited)
        return [row for rows, _ in reader.read_texts(texts).chunks for row in rows.ids]

    def _vectors(self, rows: list[Ids], kind: str, max_tokens: int | None) -> list[Vectors]:
        """Return the vectors of all tokens of rows, which get the tokens of the expansion."""
        counts, expansion = [len(row) for row in rows], self.settings.expansion
        if kind == "query" and expansion is not None:
            for i, row in enumerate(rows):
                rows[i] = np.pad(row, (0, max(expansion.length - len(row), 0)), constant_values=self._expansion_id)
        if kind == "query" and expansion is not None and not expansion.is_read:
            hidden = self._unread_expansions(rows, counts)
        else:
            requests = self.encoder.reader.read_texts([row.tolist() for row in rows])
            hidden = self.encoder.run_tokens(requests, TokenSelection(), max_tokens) if rows else []
        ends = np.cumsum([len(row) for row in rows])
        return np.split(self._layers(np.concatenate(hidden)), ends[:-1]) if rows else []

    def _unread_expansions(self, rows: list[Ids], counts: list[int]) -> list[Vectors]:
        """Return the hidden states of rows, in which only the first `counts` tokens of each are read."""
        hidden: list[Vectors] = []
        for first in range(0, len(rows), _QUERIES):
            chunk = rows[first : first + _QUERIES]
            width = max(map(len, chunk))
            block = np.stack([np.pad(row, (0, width - len(row))) for row in chunk])
            mask = np.arange(width)[None] < np.array(counts[first : first + _QUERIES])[:, None]
            states = np.asarray(self.encoder.hidden_states(block, attention_mask=mask.astype(np.int32)), np.float32)
            hidden += [state[: len(row)] for state, row in zip(states, chunk, strict=True)]
        return hidden

    def maxsim(self, queries: Sequence[Vectors], documents: Sequence[Vectors]) -> Vectors:
        """Return the scores `[queries, documents]` of what `embed_tokens` returned for lists of texts.

        A score is the sum, over the vectors of the query, of the largest product with a vector of the document.

        Raises:
            RequestError: an entry has no vectors, or is not `[tokens, width]`.
        """
        for name, arrays in (("queries", queries), ("documents", documents)):
            for i, array in enumerate(arrays):
                if getattr(array, "ndim", 0) != 2 or not len(array):
                    raise RequestError(f"{name}[{i}] is {shown(array)}; expected vectors [tokens, width], at least one")
        scores = np.zeros((len(queries), len(documents)), np.float32)
        if not len(queries):
            return scores
        tokens, starts = np.concatenate(queries), np.cumsum([0, *map(len, queries)])[:-1]
        for i, document in enumerate(documents):
            scores[:, i] = np.add.reduceat((tokens @ document.T).max(axis=1), starts)
        lengths = np.array([len(query) for query in queries], np.float32)[:, None]
        return scores / lengths if self.settings.divides else scores

    def report(self, **sizes: int) -> Report:
        """Return the cost of compiling and of the last program, as `Encoder.report` does."""
        return self.encoder.report(**sizes)


def _expansion_id(tokenizer: Tokenizer, expansion: QueryExpansion | None) -> int:
    """Return the id of the token that queries are filled up with."""
    if expansion is None:
        return 0
    roles = (tokenizer.special_tokens.get(f"{role}_token") for role in ("mask", "eos"))
    token = expansion.token or next((name for name in roles if name is not None), None)
    token_id = None if token is None else tokenizer.token_id(token)
    if token_id is None:
        raise ConfigError(f"query_expansion: the token {quote(token)} is not in the vocabulary of the tokenizer")
    return token_id


# -- files -------------------------------------------------------------------------------------


def read_multi_vector(folder: Folder) -> TokenSettings | None:
    """Return the settings of a MultiVectorEncoder of sentence-transformers; None if the directory is none.

    Raises:
        ConfigError: a file is malformed. UnsupportedError: names the module or the setting.
    """
    about = module_fields(folder, "", "config_sentence_transformers.json")
    if about.raw("model_type") != MODEL_TYPE:
        return None
    modules, where = read_modules(folder) or [], folder.where("modules.json")
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or not set(kinds[1:]) <= {*_LAYERS, "MultiVectorMask"}:
        expected = f"'Transformer', then any of {listing(_LAYERS)}, 'MultiVectorMask'"
        raise UnsupportedError(f"{where}: modules {listing(kinds)} of a {MODEL_TYPE}; supported are {expected}")
    similarity = about.raw("similarity_fn_name", "maxsim")
    if similarity not in ("maxsim", "meanmaxsim"):
        raise UnsupportedError(f"{about.where}: similarity_fn_name {quote(similarity)}; supported: maxsim, meanmaxsim")
    path = modules[0][1]
    transformer, (prompts, default) = transformer_settings(folder, path), read_prompts(folder, MODEL_TYPE)
    settings = TokenSettings(
        SentencePipeline(
            max_seq_length=transformer.max_seq_length, do_lower_case=transformer.do_lower_case, prompts=prompts,
            default_prompt_name=default, transformer=path,
        ),
        tuple(layer for kind, at in modules[1:] if kind in _LAYERS and (layer := read_layer(folder, kind, at, TOKENS))),
        divides=similarity == "meanmaxsim",
    )  # fmt: skip
    for kind, at in modules[1:]:
        if kind == "MultiVectorMask":
            c = module_fields(folder, at, "config.json")
            words = c.items("skiplist_words", [], "strings", lambda word: isinstance(word, str))
            tasks = c.items("skiplist_tasks", ["document"], "kinds of texts", lambda task: task in [*KINDS])
            c.finish()
            settings = replace(settings, skipped_words=tuple(words), skipping_kinds=tuple(tasks))
    return _with_lengths(folder, path, settings)


def _with_lengths(folder: Folder, path: str, settings: TokenSettings) -> TokenSettings:
    """Return the settings with the lengths and the expansion of the transformer module."""
    candidates = (module_fields(folder, path, file) for file in TRANSFORMER_FILES)
    c = next((c for c in candidates if c.values), module_fields(folder, path, TRANSFORMER_FILES[0]))
    lengths = {kind: c.integer_or_null(f"{kind}_length", None) for kind in KINDS}
    expansion, group = None, c.group("query_expansion")
    if group is not None:
        strategy = group.choice("strategy", "fixed", {"fixed": "fixed", "min": "min"})
        token = None if group.raw("token") is None else group.text("token")
        expansion = QueryExpansion(group.integer("length"), strategy == "fixed", group.flag("attend", False), token)
        group.finish()
        tokenizer = module_fields(folder, path, "tokenizer_config.json")
        if tokenizer.raw("padding_side", "right") != "right":
            raise UnsupportedError(f"{tokenizer.where}: padding_side with query_expansion; supported is 'right'")
    found = tuple((kind, length) for kind, length in lengths.items() if length is not None)
    return replace(settings, lengths=found, expansion=expansion)
