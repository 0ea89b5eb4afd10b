"""Define `MultiVectorEncoder`, which computes a vector for each token of a text (ColBERT), and read its files."""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.encoder import Encoder
from rlx_jax.encode.pooled import Vectors
from rlx_jax.encode.sentence import (
    SentencePipeline,
    module_fields,
    read_modules,
    read_prompts,
    transformer_fields,
    transformer_settings,
)
from rlx_jax.encode.sparse import maxsim
from rlx_jax.encode.token_selection import TokenSelection
from rlx_jax.encode.vector_layers import (
    SENTENCE,
    Dense,
    PlacedLayers,
    UnitLength,
    VectorLayer,
    output_width,
    read_layer,
)
from rlx_jax.errors import (
    ConfigError,
    MissingWeightError,
    RequestError,
    UnsupportedError,
    listing,
    quote,
    shown,
    suggest_keywords,
)
from rlx_jax.io.folder import CONFIG, Folder
from rlx_jax.models.config import Fields
from rlx_jax.text.request_checks import Ids, classify_strings
from rlx_jax.text.token_model import EncoderModel
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.source import WeightSource

MODEL_TYPE = "MultiVectorEncoder"
TOKENS = "token_embeddings"
# The kinds of texts, and the names of their prompts in the order in which sentence-transformers looks for them.
KINDS = {"query": ("query",), "document": ("document", "passage", "corpus")}
_LAYERS = ("Dense", "Normalize")
# The names by which directories of PyLate and of the original ColBERT code are recognized, and their defaults.
PYLATE, STANFORD = "ColBERT", "HF_ColBERT"
_QUERY_LENGTH, _PUNCTUATION = 32, [*string.punctuation]
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
        prefixes: the token after the first one, by kind of text; if it is not in the vocabulary, the text in front.
        projection: the model's weight of a linear layer in front of `layers`; empty for none.
        needs_prefixes: whether `prefixes` must be in the vocabulary.
    """

    pipeline: SentencePipeline
    layers: tuple[VectorLayer, ...] = ()
    skipped_words: tuple[str, ...] = ()
    skipping_kinds: tuple[str, ...] = ("document",)
    lengths: tuple[tuple[str, int], ...] = ()
    expansion: QueryExpansion | None = None
    divides: bool = False
    prefixes: tuple[tuple[str, str], ...] = ()
    projection: str = ""
    needs_prefixes: bool = False

    def with_projection(self, weights: WeightSource) -> TokenSettings:
        """Return the settings with the projection, if there is one, as the first of the layers."""
        if not self.projection:
            return self
        if not weights.has(self.projection):
            raise MissingWeightError(f"{self.projection} is missing, the projection of a ColBERT model")
        dense = Dense(read_numbers(self.projection, weights).astype(np.float32))
        return replace(self, layers=(dense, *self.layers), projection="")


class MultiVectorEncoder(EncoderModel):
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
        self.tokenizer = encoder.tokenizer
        self._layers = PlacedLayers.on(encoder.model.programs, settings.layers)
        ids = map(self.tokenizer.token_id, settings.skipped_words)
        self._skipped = np.array([i for i in ids if i is not None], np.int32)
        self._prefixes = {kind: (prefix, _prefix_id(self.tokenizer, prefix)) for kind, prefix in settings.prefixes}
        missing = [prefix for prefix, token in self._prefixes.values() if token is None]
        if settings.needs_prefixes and missing:
            raise ConfigError(f"the tokens {listing(missing)} before a text are not in the vocabulary of the tokenizer")
        self._expansion_id = _expansion_id(self.tokenizer, settings.expansion)

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
        self.model.concrete_params("embed_tokens")
        pipeline = self.settings.pipeline
        if prompt_name is None and prompt is None:
            prompt_name = next((name for name in KINDS[kind] if name in pipeline.prompts), None)
        text = pipeline.choose_prompt(prompt_name, prompt)
        items, is_single = classify_strings(texts, "embed_tokens")
        rows = self._tokenize([text + item for item in items], kind)
        vectors = self._vectors(rows, kind, max_tokens)
        skipped = self._skipped if kind in self.settings.skipping_kinds else self._skipped[:0]
        results = [v[~np.isin(row, skipped)] for v, row in zip(vectors, rows, strict=True)]
        return results[0] if is_single else results

    def _tokenize(self, texts: list[str], kind: str) -> list[Ids]:
        """Return the token ids of texts, without expansions."""
        length = dict(self.settings.lengths).get(kind)
        prefix, prefix_id = self._prefixes.get(kind, ("", None))
        expansion = self.settings.expansion if kind == "query" else None
        if expansion is not None and expansion.is_fixed:
            length = expansion.length
        elif expansion is not None and length is not None:
            length = max(length, expansion.length)
        reader = self.encoder.reader
        if length is not None:
            reader = replace(reader, pipeline=replace(self.settings.pipeline, max_seq_length=length))
        limit = reader.max_text_tokens
        if prefix_id is None:
            texts = [prefix + text for text in texts]
        elif limit is not None:  # leave a place for the prefix
            reader = replace(reader, pipeline=replace(self.settings.pipeline, max_seq_length=limit - 1))
        rows = [row for chunk, _ in reader.read_texts(texts).chunks for row in chunk.ids]
        return rows if prefix_id is None else [np.insert(row, 1, prefix_id) for row in rows]

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
        return self._layers.each(hidden)

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
        """Return the scores `[queries, documents]` of lists of vectors, as `maxsim` in `rlx_jax.encode.sparse` does."""
        return maxsim(queries, documents, mean=self.settings.divides)

    def warmup(self) -> None:
        """Run every program once that documents can need, as `Encoder.warmup` does."""
        self.encoder.run_all_programs(TokenSelection())
        self._layers.warm_up(self.encoder.width)


def _prefix_id(tokenizer: Tokenizer, prefix: str) -> int | None:
    """Return the id of the token that is the prefix, maybe without the space after it; None if there is none."""
    words = (prefix, *prefix.split(None, 1)[:1])
    return next((token for word in words if (token := tokenizer.token_id(word)) is not None), None)


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
    """Return the settings of a ColBERT model; None if the directory is none.

    sentence-transformers, PyLate and the original ColBERT code write such directories.

    Raises:
        ConfigError: a file is malformed. UnsupportedError: names the module or the setting.
    """
    about = module_fields(folder, "", "config_sentence_transformers.json")
    modules, where = read_modules(folder) or [], folder.where("modules.json")
    if not modules and about.raw("model_type") != MODEL_TYPE:
        architectures = folder.json(CONFIG).get("architectures")
        return _read_stanford(folder) if isinstance(architectures, list) and STANFORD in architectures else None
    is_pylate = about.raw("model_type") == PYLATE or "query_prefix" in about.values and not about.raw("model_type")
    if about.raw("model_type") != MODEL_TYPE and not is_pylate:
        return None
    kinds = [kind for kind, _ in modules]
    if kinds[:1] != ["Transformer"] or not set(kinds[1:]) <= {*_LAYERS, "MultiVectorMask"}:
        expected = f"'Transformer', then any of {listing(_LAYERS)}, 'MultiVectorMask'"
        raise UnsupportedError(f"{where}: modules {listing(kinds)} of a {MODEL_TYPE}; supported are {expected}")
    similarity = "maxsim" if is_pylate else about.raw("similarity_fn_name", "maxsim")
    if similarity not in ("maxsim", "meanmaxsim"):
        raise UnsupportedError(f"{about.where}: similarity_fn_name {quote(similarity)}; supported: maxsim, meanmaxsim")
    path = modules[0][1]
    transformer = transformer_settings(folder, path)
    prompts, default = read_prompts(folder, about.values.get("model_type"))
    read = functools.partial(read_layer, folder, feature=TOKENS, default=TOKENS if is_pylate else SENTENCE)
    settings = TokenSettings(
        SentencePipeline(
            max_seq_length=transformer.max_seq_length, do_lower_case=transformer.do_lower_case, prompts=prompts,
            default_prompt_name=default, transformer=path,
        ),
        tuple(layer for kind, at in modules[1:] if kind in _LAYERS and (layer := read(kind, at))),
        divides=similarity == "meanmaxsim",
    )  # fmt: skip
    if is_pylate:
        prefixes = tuple((kind, about.text(f"{kind}_prefix", "")) for kind in KINDS)
        attends, words = about.flag("attend_to_expansion_tokens", False), about.raw("skiplist_words", _PUNCTUATION)
        settings = _with_default_modules(settings, prefixes, words, attends, about, "query_length", "document_length")
        if about.flag("do_query_expansion", True):
            return settings
        lengths = (("query", about.integer("query_length", _QUERY_LENGTH)), *settings.lengths)
        return replace(settings, expansion=None, lengths=lengths)
    for kind, at in modules[1:]:
        if kind == "MultiVectorMask":
            c = module_fields(folder, at, "config.json")
            words = c.items("skiplist_words", [], "strings", lambda word: isinstance(word, str))
            tasks = c.items("skiplist_tasks", ["document"], "kinds of texts", lambda task: task in [*KINDS])
            c.finish()
            settings = replace(settings, skipped_words=tuple(words), skipping_kinds=tuple(tasks))
    return _with_lengths(folder, path, settings)


def _read_stanford(folder: Folder) -> TokenSettings:
    """Return the settings of a directory of the original ColBERT code."""
    c, transformer = module_fields(folder, "", "artifact.metadata"), transformer_settings(folder, "")
    if c.raw("similarity", "cosine") != "cosine":
        raise UnsupportedError(f"{c.where}: similarity {quote(c.raw('similarity'))}; supported is 'cosine'")
    prefixes = (("query", c.text("query_token_id", "[unused0]")), ("document", c.text("doc_token_id", "[unused1]")))
    words = _PUNCTUATION if c.flag("mask_punctuation", True) else []
    pipeline = SentencePipeline(max_seq_length=transformer.max_seq_length)
    settings = TokenSettings(pipeline, projection="linear.weight", needs_prefixes=True)
    attends = c.flag("attend_to_mask_tokens", False)
    return _with_default_modules(settings, prefixes, words, attends, c, "query_maxlen", "doc_maxlen")


def _with_default_modules(
    settings: TokenSettings, prefixes: tuple[tuple[str, str], ...], words: Sequence[str], attends: bool, c: Fields,
    query_field: str, document_field: str,
) -> TokenSettings:  # fmt: skip
    """Return the settings with what the first ColBERT libraries always do: fill up queries, and normalize."""
    length = c.integer_or_null(document_field, None)
    return replace(
        settings, layers=(*settings.layers, UnitLength()), prefixes=prefixes, skipped_words=tuple(words),
        lengths=() if length is None else (("document", length),),
        expansion=QueryExpansion(c.integer(query_field, _QUERY_LENGTH), True, attends),
    )  # fmt: skip


def _with_lengths(folder: Folder, path: str, settings: TokenSettings) -> TokenSettings:
    """Return the settings with the lengths and the expansion of the transformer module."""
    c = transformer_fields(folder, path)
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
    limits = tuple((kind, length) for kind, length in lengths.items() if length is not None)
    return replace(settings, lengths=limits, expansion=expansion)
