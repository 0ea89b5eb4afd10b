"""`Tokenizer`: text to token ids and back, as defined by a checkpoint's `tokenizer.json`.

The native `tokenizers` library does the work. On a malformed file it can panic, and a panic is not an `Exception`.
So this module first checks the file for known causes of panics, guards every native call, and never changes the native
object after loading, so that threads can share it.

`encode` parses the text of a special token (`</s>`) as that token, as transformers and sentence-transformers do;
`encode_plain` encodes it as plain text.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, SupportsIndex

import numpy as np

from rlx_jax.errors import ConfigError, RequestError, TokenIdError, TokenizerError, UnsupportedError, quote
from rlx_jax.io import limits
from rlx_jax.io.files import parse
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import Fields
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.text.ascii_texts import AsciiTexts, SpecialTokens, fitting_lengths, gives_types
from rlx_jax.text.chat_template import MAX_TEMPLATE_BYTES, load_templates, template_files
from rlx_jax.text.read_only import freeze_tables
from rlx_jax.text.request_checks import Ids, check_text, id_list
from rlx_jax.text.tokenizer_checks import check_added_tokens, check_probe, guard, read_vocabulary, refuse_panics

TOKENIZER = "tokenizer.json"  # the file that defines a tokenizer, vocabulary included
MAX_TOKENIZER_BYTES = 64 * 2**20  # of `tokenizer.json`
# JSON values in `tokenizer.json`. The largest known files (a vocabulary of 2^18 with its merges) have 2^21.
MAX_TOKENIZER_VALUES = 2**23
# transformers writes 10^30 for "no maximum"; every model_max_length from here on means that.
_NO_MAX_LENGTH = 2**31

_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # of transformers; tokenizer.json is unchanged
# Keys of tokenizer_config.json that override a BertNormalizer, with the names of its arguments.
_BERT_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_ROLES_WITH_IDS = ("bos", "eos", "pad")
_ROLES = (*_ROLES_WITH_IDS, "unk", "sep", "cls", "mask")
_COMPANION_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")  # with the ids of special tokens, the first file first
# Fewer texts are encoded natively, each word again: looking up words of a single text takes as long.
MIN_TABLE_TEXTS = 32


class AddedToken(NamedTuple):
    """A token that is matched in a text before pre-tokenization; `special` ones are left out of decoded text."""

    id: int
    special: bool


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A loaded tokenizer. Safe to share between threads; its mappings are read-only.

    Attributes:
        vocab_size: the largest token id plus one. A model may have more rows, as padding.
        eos_ids: tokens that end a generated row; empty if the checkpoint names none.
        bos_id: the token that starts a text, if there is one.
        pad_id: the token that fills rows, if there is one.
        model_max_length: the longest input that the checkpoint declares, in tokens with special ones; None if it
            declares none.
        truncation_side: the end at which a text that is too long is cut.
        special_count: how many special tokens `encode` adds to a text.
        special_tokens: the checkpoint's tokens by role, `{"bos_token": "<s>"}`, which chat templates read.
        added_tokens: by their text.
        chat_templates: by name; see `rlx_jax.text.chat_template`.
        gives_types: whether the model gets the token types of pairs.
        padding_side: the end at which a training script padded texts; with `left` questions came after contexts.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    model_max_length: int | None
    truncation_side: Literal["left", "right"]
    special_count: int
    special_tokens: Mapping[str, str]
    added_tokens: Mapping[str, AddedToken] = field(repr=False)
    chat_templates: Mapping[str, str] = field(repr=False)
    _native: Any = field(repr=False)
    gives_types: bool = True
    padding_side: Literal["left", "right"] = "right"
    _ascii: AsciiTexts | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        freeze_tables(self, "lm.tokenizer", "special_tokens", "added_tokens", "chat_templates")

    def has_same_ids(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in both tokenizers."""
        return self is other or bool(self._native.get_vocab() == other._native.get_vocab())

    def has_role(self, token: int) -> bool:
        """Whether a token id has a role, such as `eos`."""
        return token in map(self._native.token_to_id, self.special_tokens.values())

    def is_special(self, token: int) -> bool:
        """Whether a token id has a role or is left out of decoded text."""
        return self.has_role(token) or any(added.id == token for added in self.added_tokens.values() if added.special)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text; None if the vocabulary does not have it."""
        token_id: int | None = self._native.token_to_id(token)
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: any Unicode text; `""` gives the special tokens alone.
            add_special_tokens: add the checkpoint's special tokens (`[CLS]` and `[SEP]`, a begin token) around it.
            max_length: truncate the text so that at most this many ids remain, special tokens included.

        Raises:
            RequestError: not a str, a lone surrogate, or `max_length` is below the number of special tokens.
            TokenizerError: the tokenizer fails on this text.
        """
        check_text(text, "the text")
        ids: list[int] = self._encode([text], add_special_tokens, max_length)[0][0].tolist()
        return ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_length: int | None = None, first: int = 0
    ) -> list[list[int]]:
        """Return the token ids of each text, unpadded; arguments as for `encode`.

        Args:
            first: the index of the first text in error messages, where a caller passes several batches.

        Raises:
            RequestError: as `encode`, with the index of the text; or `texts` is itself a str.
            TokenizerError: the tokenizer fails on one of the texts.
        """
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise RequestError(f"texts: expected a list of str, found {type(texts).__name__}")
        rows = self.encode_rows([*texts], add_special_tokens=add_special_tokens, max_length=max_length, first=first)[0]
        return [row.tolist() for row in rows]

    def encode_rows(
        self, items: Sequence[str] | Sequence[tuple[str, str]], *, add_special_tokens: bool = True,
        max_length: int | None = None, first: int = 0,
    ) -> tuple[list[Ids], list[Ids]]:  # fmt: skip
        """Return the token ids and types of each text, or of each pair of texts, unpadded, as arrays int32.

        A pair with more than `max_length` ids loses tokens of its longer text first, until both are equally long.
        Arguments and errors: as for `encode_batch`.
        """
        for i, item in enumerate(items, first):
            for text in item if isinstance(item, tuple | list) else (item,):
                check_text(text, f"texts[{i}]" if text is item else f"pairs[{i}]")
        return self._encode(items, add_special_tokens, max_length)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens; added tokens in it are encoded as plain text.

        Raises:
            RequestError, TokenizerError: as `encode`.
        """
        check_text(text, "the text")
        native = self._native

        def spell() -> list[int]:  # the steps of `encode` without the first, which matches added tokens
            plain = native.normalizer.normalize_str(text) if native.normalizer else text
            words = native.pre_tokenizer.pre_tokenize_str(plain) if native.pre_tokenizer else [(plain, None)]
            return [token.id for word, _ in words for token in native.model.tokenize(word)]

        return guard(spell, "encoding failed")

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. An id without a token (a padding row of the embedding) decodes to nothing.

        Args:
            ids: one sequence of ints, or an integer array of rank 1.
            skip_special_tokens: leave special tokens out.

        Raises:
            TokenIdError: not an int, negative, or at least 2^32.
            TokenizerError: the tokenizer fails on these ids.
        """
        try:
            numbers = id_list([*ids] if isinstance(ids, Iterator) else ids, 2**32, "ids")
        except RequestError as cause:
            raise TokenIdError(str(cause)) from None
        text: str = guard(
            lambda: self._native.decode(numbers, skip_special_tokens=bool(skip_special_tokens)), "decoding failed"
        )
        return text

    def decode_batch(self, rows: Sequence[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of rows of a tokenizer's own ids, as `decode` does, on all cores.

        Raises:
            TokenizerError: the tokenizer fails on these ids.
        """
        return guard(lambda: self._native.decode_batch([*rows], skip_special_tokens), "decoding failed")

    def _encode(
        self, items: Sequence[str | tuple[str, str]], special: bool, max_length: int | None
    ) -> tuple[list[Ids], list[Ids]]:
        """Return the ids and types of checked texts or pairs, truncated, with special tokens if `special`."""
        is_pair = bool(items) and not isinstance(items[0], str)
        parts: list[tuple[str, ...]] = [(item,) if isinstance(item, str) else tuple(item) for item in items]
        num_special: int = self._native.num_special_tokens_to_add(is_pair) if special else 0
        limit = (
            None if max_length is None else check_integer("max_length", max_length, max(1, num_special)) - num_special
        )

        def encode() -> tuple[list[Ids], list[Ids]]:
            around = SpecialTokens.of(self._native, is_pair, special) if len(parts) >= MIN_TABLE_TEXTS else None
            in_table = self._in_table(parts) if around is not None else [False] * len(parts)
            ids, types = self._encode_native(
                [x for x, here in zip(parts, in_table, strict=True) if not here], special, limit
            )
            if around is not None and self._ascii is not None and any(in_table):
                table_parts = [x for x, here in zip(parts, in_table, strict=True) if here]
                table_rows = map(iter, self._encode_ascii(self._ascii, table_parts, around, limit))
                sources = zip(table_rows, (iter(ids), iter(types)), strict=True)
                ids, types = ([next(a if here else b) for here in in_table] for a, b in sources)
            return ids, types if self.gives_types else [np.zeros_like(row) for row in ids]

        return guard(encode, "encoding failed")

    def _in_table(self, items: list[tuple[str, ...]]) -> list[bool]:
        """Return which texts or pairs are encoded by the table of words."""
        if self._ascii is None:
            return [False] * len(items)
        joined = [*map(" ".join, items)]
        # Most requests have no other text, and one check of all is several times faster.
        all_accepted = self._ascii.accepts(" ".join(joined))
        return [True] * len(items) if all_accepted else [*map(self._ascii.accepts, joined)]

    def _encode_ascii(
        self, ascii_texts: AsciiTexts, items: list[tuple[str, ...]], around: SpecialTokens, limit: int | None
    ) -> tuple[list[Ids], list[Ids]]:
        """Return the ids and types of texts or pairs that `ascii_texts` accepts; `limit` without special tokens."""
        flat, counts = ascii_texts.token_ids([text for parts in items for text in parts])
        begins, counts = (np.cumsum(counts) - counts).reshape(len(items), -1), counts.reshape(len(items), -1)
        lengths = counts.copy()
        if limit is not None:
            for i in np.flatnonzero(counts.sum(axis=1) > limit).tolist():
                lengths[i] = fitting_lengths(counts[i].tolist(), limit)
        if self.truncation_side == "left":
            begins = begins + counts - lengths
        return around.rows(flat, begins, lengths)

    # Native truncation is a setting of the shared object, so concurrent calls would overwrite each other's; hence the
    # text's tokens are truncated here, and special tokens are added afterwards.
    def _encode_native(
        self, items: list[tuple[str, ...]], special: bool, limit: int | None
    ) -> tuple[list[Ids], list[Ids]]:
        """Return the ids and types of texts or pairs, encoded natively; `limit` is without special tokens."""
        native = self._native
        rows = native.encode_batch_fast([x if len(x) > 1 else x[0] for x in items], add_special_tokens=special)
        num_special = native.num_special_tokens_to_add(len(items[0]) > 1) if items and special else 0
        # Few are too long, so only those are encoded again, without special tokens.
        for i, (row, texts) in enumerate(zip(rows, items, strict=True)):
            if limit is not None and len(row) - num_special > limit:
                parts = native.encode_batch_fast([*texts], add_special_tokens=False)
                for encoding, size in zip(parts, fitting_lengths([*map(len, parts)], limit), strict=True):
                    encoding.truncate(size, direction=self.truncation_side)
                rows[i] = native.post_process(*parts, *[None] * (2 - len(parts)), special)
        return [np.array(row.ids, np.int32) for row in rows], [np.array(row.type_ids, np.int32) for row in rows]


# Tokenizers in use, by the content of their files: models with equal files share one.
_tokenizers: weakref.WeakValueDictionary[Any, Tokenizer] = weakref.WeakValueDictionary()


def load_tokenizer(directory: str | os.PathLike[str] | Folder, *, lowercase: bool = False) -> Tokenizer | None:
    """Return the tokenizer of a model directory, or None if it has no `tokenizer.json`.

    `tokenizer.json` decides which special tokens are added to a text; `tokenizer_config.json` decides about lower case
    and accents where it has these settings, and texts of SigLIP 2 are in lower case (all as in transformers 5).
    Truncation and padding settings in `tokenizer.json` are ignored. Ids of special tokens come from
    `generation_config.json`, else `config.json`, else the tokenizer's own files.

    Args:
        directory: the model directory, with its files or, in a Hugging Face cache, links to them.
        lowercase: convert the text to lower case first (`do_lower_case` of sentence-transformers).

    Raises:
        TokenizerError: `tokenizer.json` is malformed, or disagrees with its companion files.
        ConfigError: a companion file is malformed.
        PathEscapeError: a file is a link that leads out of the directory.
        LimitError: more than `MAX_TOKENIZER_BYTES`, `MAX_TOKENIZER_VALUES` or `MAX_VOCABULARY`.
        UnsupportedError: the file enables random tokenization (BPE dropout).
    """
    folder = Folder.from_path(directory)
    _fetch_files(folder)
    raw = read_tokenizer(folder)
    if raw is None:
        return None
    settings = folder.json(_COMPANION_FILES[0])
    templates = load_templates(folder, settings, folder.where(_COMPANION_FILES[0]))
    contents = [folder.json(name) for name in (*_COMPANION_FILES, *_ID_FILES)]
    key = hashlib.sha256(raw).digest(), repr(contents), repr(templates), lowercase
    tokenizer = _tokenizers.get(key)
    if tokenizer is None:
        tokenizer = _tokenizers[key] = _make_tokenizer(folder, raw, templates, lowercase)
    return tokenizer


def _make_tokenizer(folder: Folder, raw: bytes, chat_templates: Mapping[str, str], lowercase: bool) -> Tokenizer:
    """Return the tokenizer of a directory from the bytes of `tokenizer.json`; see `load_tokenizer`."""
    where = folder.where(TOKENIZER)
    document = parse_document(raw, where)
    # The native library parses the file again, so the vocabulary, its largest part, is freed before that. Only Unigram
    # models have a list here.
    is_unigram = isinstance(document.pop("model").get("vocab"), list)
    native = guard(lambda: _native_tokenizer(raw), where)
    words, vocab_size = read_vocabulary(native, is_unigram, document, where)

    tokenizer_config, special_tokens_map = (Fields(folder.json(name), folder.where(name)) for name in _COMPANION_FILES)
    settings = tokenizer_config.values
    check_added_tokens(words, tokenizer_config)
    names = {role: _token_name((tokenizer_config, special_tokens_map), role, words) for role in _ROLES}
    # transformers 5 reads every SigLIP 2 checkpoint with a class that converts to lower case; few files have the step.
    has_siglip2 = "Siglip2Tokenizer" in str(settings.get("tokenizer_class"))
    lowercase = lowercase or has_siglip2 or folder.json("config.json").get("model_type") == "siglip2"
    guard(lambda: _apply_normalizer(native, settings, lowercase), where)
    if settings.get("split_special_tokens") is True:
        native.encode_special_tokens = True
    special_count = check_probe(native, words, where)

    tokenizer_ids = {role: () if (name := names[role]) is None else (words[name],) for role in _ROLES_WITH_IDS}
    added_tokens = {
        entry["content"]: AddedToken(entry["id"], entry.get("special") is True)
        for entry in document.get("added_tokens") or []
    }
    bos, eos, pad = (config_token_ids(folder, role) or tokenizer_ids[role] for role in _ROLES_WITH_IDS)
    return Tokenizer(
        vocab_size=vocab_size,
        eos_ids=eos,
        bos_id=bos[0] if bos else None,
        pad_id=pad[0] if pad else None,
        model_max_length=model_max_length(tokenizer_config),
        truncation_side=_side("truncation", tokenizer_config, document),
        padding_side=_side("padding", tokenizer_config, document),
        special_count=special_count,
        special_tokens={f"{role}_token": name for role, name in names.items() if name is not None},
        added_tokens=added_tokens,
        chat_templates=chat_templates,
        _native=native,
        gives_types=gives_types(tokenizer_config),
        _ascii=guard(lambda: AsciiTexts.of(native, added_tokens), where),
    )


def read_tokenizer(folder: Folder) -> bytes | None:
    """Return the bytes of `tokenizer.json`; None if there is no such file."""
    return folder.read(TOKENIZER, (MAX_TOKENIZER_BYTES, "MAX_TOKENIZER_BYTES"), TokenizerError)


def parse_document(raw: bytes, where: str) -> dict[str, Any]:
    """Return the parsed document in the bytes of `tokenizer.json`, checked."""
    document = parse(raw, where, TokenizerError, (MAX_TOKENIZER_VALUES, "MAX_TOKENIZER_VALUES"))
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise TokenizerError(f"{where}: expected an object with an object 'model'")
    if document["model"].get("dropout"):
        raise UnsupportedError(f"{where}: model.dropout makes a text's tokens random; set it to null")
    refuse_panics(document, where)
    return document


def _fetch_files(folder: Folder) -> None:
    """Fetch the tokenizer files of a Hub model in one parallel call; do nothing without a `tokenizer.json`."""
    if folder.hub_file(TOKENIZER) is not None:
        companions = (*_COMPANION_FILES, "generation_config.json")
        bounds = {TOKENIZER: (MAX_TOKENIZER_BYTES, "MAX_TOKENIZER_BYTES")}
        bounds |= dict.fromkeys(companions, limits.bound("MAX_CONFIG_BYTES"))
        bounds |= dict.fromkeys(template_files(folder).values(), (MAX_TEMPLATE_BYTES, "MAX_TEMPLATE_BYTES"))
        folder.fetch(*bounds, bounds=bounds)


# -- native code -------------------------------------------------------------------------------


def _native_tokenizer(raw: bytes) -> Any:
    """Return the native tokenizer of a `tokenizer.json`, with truncation and padding disabled."""
    from tokenizers import Tokenizer as Native
    from tokenizers import processors

    native = Native.from_buffer(raw)
    native.no_truncation()
    native.no_padding()
    if native.post_processor is None:  # without one, `encode_batch_fast` gives both texts of a pair the type 0
        native.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return native


def _apply_normalizer(native: Any, settings: Mapping[str, Any], lowercase: bool) -> None:
    """Apply lower case and accent settings of `tokenizer_config.json` where they differ from `tokenizer.json`."""
    from tokenizers import normalizers

    current = native.normalizer
    # Model-specific classes of transformers rebuild the normalizer from tokenizer_config.json; the generic ones do not.
    if isinstance(current, normalizers.BertNormalizer) and settings.get("tokenizer_class") not in _GENERIC_CLASSES:
        old = {name: getattr(current, name) for name in ("clean_text", *_BERT_SETTINGS.values())}
        new = old | {_BERT_SETTINGS[key]: settings[key] for key in _BERT_SETTINGS if key in settings}
        if new != old:
            native.normalizer = normalizers.BertNormalizer(**new)
    if lowercase:
        normalizer_steps = [] if native.normalizer is None else [native.normalizer]
        native.normalizer = normalizers.Sequence([normalizers.Lowercase(), *normalizer_steps])


# -- special tokens ----------------------------------------------------------------------------


def _token_name(sources: Sequence[Fields], role: str, words: Mapping[str, int]) -> str | None:
    """Return the token of a role (`eos`) from the first file that names one; an entry is a text or an object."""
    for source in sources:
        value = source.values.get(f"{role}_token")
        content = value.get("content", value) if isinstance(value, dict) else value
        if content is None or content == "":
            continue
        if not isinstance(content, str):
            raise ConfigError(f"{source.where}: {role}_token: expected a str or 'content', found {quote(value)}")
        # Only bos, eos and pad need an id here. Other roles are passed to chat templates as text.
        if content not in words and role in _ROLES_WITH_IDS:
            raise TokenizerError(f"{source.where}: {role}_token is {quote(content)}, which is not in tokenizer.json")
        return content
    return None


def config_token_ids(folder: Folder, role: str) -> tuple[int, ...]:
    """Return the ids of a role (`eos`) from `generation_config.json`, else from `config.json`; `()` without either.

    Raises:
        ConfigError: the value is not a token id or a list of them.
    """
    for name in _ID_FILES:
        value = folder.json(name).get(f"{role}_token_id")
        if value is None or (role == "pad" and value == -1):  # -1: "none" in the first Llama configs
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            raise ConfigError(f"{folder.where(name)}: {role}_token_id: expected token ids, found {quote(value)}")
        return tuple(dict.fromkeys(ids))
    return ()


def _side(kind: str, source: Fields, document: Mapping[str, Any]) -> Literal["left", "right"]:
    """Return the side of truncation or padding: `tokenizer_config.json`, else `tokenizer.json`, else right."""
    settings = document.get(kind) or {}
    side = source.raw(f"{kind}_side") or str(settings.get("direction", "right")).lower()
    if side not in ("left", "right"):
        raise source.invalid(f"{kind}_side", "left or right", side)
    return "left" if side == "left" else "right"


def model_max_length(config: Fields) -> int | None:
    """Return `model_max_length` of a `tokenizer_config.json` in tokens, or None if it sets no actual limit.

    Raises:
        ConfigError: not a positive whole number.
    """
    value = config.raw("model_max_length")
    is_unlimited = value is None or (isinstance(value, int | float) and value >= _NO_MAX_LENGTH)
    return None if is_unlimited else config.integer("model_max_length", high=_NO_MAX_LENGTH)


# -- files ------------------------------------------------------------------------------------


def tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files of a tokenizer by name, as it is in use: with the normalizer and ids that other files of its
    checkpoint gave it. None has no files."""
    if tokenizer is None:
        return {}
    native = tokenizer._native
    config: dict[str, Any] = {
        **tokenizer.special_tokens,
        "truncation_side": tokenizer.truncation_side,
        "split_special_tokens": bool(native.encode_special_tokens),
        "model_input_names": ["input_ids", *(["token_type_ids"] if tokenizer.gives_types else []), "attention_mask"],
    }
    if tokenizer.model_max_length is not None:
        config["model_max_length"] = tokenizer.model_max_length
    if tokenizer.chat_templates:
        config["chat_template"] = [{"name": name, "template": t} for name, t in tokenizer.chat_templates.items()]
    ids = {"eos": [*tokenizer.eos_ids], "bos": tokenizer.bos_id, "pad": tokenizer.pad_id}
    generation = {f"{role}_token_id": value for role, value in ids.items() if value not in (None, [])}
    documents = {"tokenizer_config.json": config, "generation_config.json": generation}
    return {TOKENIZER: native.to_str().encode()} | {
        name: json.dumps(document, ensure_ascii=False).encode() for name, document in documents.items()
    }
