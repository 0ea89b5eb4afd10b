"""Text to token ids and back, as a checkpoint's `tokenizer.json` says.

The work is done by the `tokenizers` library, which is native code: on a bad file it can panic, and a
panic is no `Exception`. Here a file is checked first for what makes it panic, every native call is
guarded, and nothing of the native object changes once it is loaded, so that threads can share it.

`encode` reads the names of special tokens in a text as these tokens, as transformers and
sentence-transformers do; `encode_plain` does not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeVar

from rlx_jax.errors import (
    ConfigError,
    LimitError,
    RequestError,
    TokenIdError,
    TokenizerError,
    UnsupportedError,
    listing,
    quote,
)
from rlx_jax.io.folder import Folder, json_bound
from rlx_jax.io.hub import SizeBound
from rlx_jax.io.strict_json import parse
from rlx_jax.models.config import Fields
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.text.chat_template import MAX_TEMPLATE_BYTES, load_templates, template_files
from rlx_jax.text.request_checks import id_list
from rlx_jax.text.tokenizer_checks import refuse_panics

T = TypeVar("T")

# The file of a tokenizer, with its vocabulary.
TOKENIZER = "tokenizer.json"
# `tokenizer.json`.
MAX_TOKENIZER_BYTES = 64 * 2**20
# Values in `tokenizer.json`. The largest known (a vocabulary of 2^18 with its merges) have 2^21.
MAX_TOKENIZER_VALUES = 2**23
# Largest token id, plus one.
MAX_VOCABULARY = 2**24
# A model_max_length this large is transformers' way to write "none" (it writes 10^30).
_NO_MAX_LENGTH = 2**31

# Letters, a digit, a combining accent, an emoji, and a sign that hardly any vocabulary has.
_PROBE = "Hello, world 12 e\u0301 \U0001f600 \U00013000"
# The classes of transformers that take a tokenizer.json as it is.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Settings of those that have a BertNormalizer, and what it calls them.
_BERT_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_ROLES_WITH_IDS = ("bos", "eos", "pad")
_ROLES = (*_ROLES_WITH_IDS, "unk", "sep", "cls", "mask")
_SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class AddedToken(NamedTuple):
    """A token that is looked for in a text before anything else; `special` ones are left out of decoded text."""

    id: int
    special: bool


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A loaded tokenizer. Safe to share between threads.

    Attributes:
        vocab_size: the largest token id plus one. A model may have more rows, as padding.
        eos_ids: tokens that end a generated row; empty if the checkpoint names none.
        bos_id: the token that starts a text, if there is one.
        pad_id: the token that fills rows, if there is one.
        model_max_length: tokens that the checkpoint says its model takes, special ones included, if it does.
        truncation_side: which end of a text that is too long is cut off.
        special_count: how many special tokens `encode` adds to a text.
        special_tokens: the checkpoint's tokens by role, `{"bos_token": "<s>"}`, which chat templates read.
        added_tokens: by their text.
        chat_templates: by name; see `rlx_jax.text.chat_template`.
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

    def same_ids(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in both."""
        return self is other or bool(self._native.get_vocab() == other._native.get_vocab())

    def is_special(self, token: int) -> bool:
        """Whether a token has a role, such as the one that ends a text, or is left out of decoded text."""
        roles = map(self._native.token_to_id, self.special_tokens.values())
        return token in (*roles, *(added.id for added in self.added_tokens.values() if added.special))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        """The token ids of `text`.

        Args:
            text: any Unicode text; `""` gives the special tokens alone.
            add_special_tokens: put the checkpoint's own (`[CLS]` and `[SEP]`, a begin token) around it.
            max_length: cut the text so that at most this many ids remain, special tokens included.

        Raises:
            RequestError: not a str, a lone surrogate, or `max_length` has no room for the special tokens.
            TokenizerError: the tokenizer fails on this text.
        """
        _check_text(text, "the text")
        return self._encode([text], add_special_tokens, max_length)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, max_length: int | None = None, first: int = 0
    ) -> list[list[int]]:
        """The token ids of each text, unpadded; else as `encode`. `first`: the number that messages give the first one.

        Raises:
            RequestError: as `encode`, with the position of the text; or `texts` is itself a str.
            TokenizerError: the tokenizer fails on one of the texts.
        """
        if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
            raise RequestError(f"texts: expected a list of str, found {type(texts).__name__}")
        batch = list(texts)
        for i, text in enumerate(batch, first):
            _check_text(text, f"texts[{i}]")
        return self._encode(batch, add_special_tokens, max_length)

    def encode_plain(self, text: str) -> list[int]:
        """The token ids of `text` with the names of added tokens in it spelt as any text is; none stand around it.

        Raises:
            RequestError, TokenizerError: as `encode`.
        """
        _check_text(text, "the text")
        native = self._native

        def spell() -> list[int]:  # the steps of an encoding without the first, which looks for added tokens
            plain = native.normalizer.normalize_str(text) if native.normalizer else text
            words = native.pre_tokenizer.pre_tokenize_str(plain) if native.pre_tokenizer else [(plain, None)]
            return [token.id for word, _ in words for token in native.model.tokenize(word)]

        return _guard(spell, "encoding failed")

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. An id without a token (a padding row of the model) stands for no text.

        Args:
            ids: one sequence of ints, an integer array of rank 1 included.
            skip_special_tokens: leave special tokens out.

        Raises:
            TokenIdError: not an int, negative, or 2^32 and over.
            TokenizerError: the tokenizer fails on these ids.
        """
        try:
            numbers = id_list([*ids] if isinstance(ids, Iterator) else ids, 2**32, "ids")
        except RequestError as cause:
            raise TokenIdError(str(cause)) from None
        text: str = _guard(
            lambda: self._native.decode(numbers, skip_special_tokens=bool(skip_special_tokens)), "decoding failed"
        )
        return text

    def _encode(self, texts: list[str], special: bool, max_length: int | None) -> list[list[int]]:
        encode = self._native.encode_batch_fast
        if max_length is None:
            return _guard(lambda: [row.ids for row in encode(texts, add_special_tokens=special)], "encoding failed")
        around = self.special_count if special else 0
        whole_number("max_length", max_length, max(1, around))

        def within() -> list[list[int]]:
            rows = [row.ids for row in encode(texts, add_special_tokens=special)]
            long = [i for i, ids in enumerate(rows) if len(ids) > max_length]
            for i, row in zip(long, encode([texts[i] for i in long], add_special_tokens=False), strict=True):
                rows[i] = self._cut(row, max_length - around, special)
            return rows

        return _guard(within, "encoding failed")

    # Truncation is a setting of the native object, which concurrent calls would take from each other;
    # so the text's own tokens are cut here, and the special ones come after.
    def _cut(self, encoding: Any, room: int, special: bool) -> list[int]:
        if len(encoding) > room:
            encoding.truncate(room, direction=self.truncation_side)
        if special:
            encoding = self._native.post_process(encoding, None, True)
        ids: list[int] = encoding.ids
        return ids


def load_tokenizer(directory: str | os.PathLike[str] | Folder, *, lowercase: bool = False) -> Tokenizer | None:
    """The tokenizer of a model directory, or None if it has no `tokenizer.json`.

    Which special tokens stand around a text is up to `tokenizer.json`; lower case and accents are up to
    `tokenizer_config.json` where it names them (both as in transformers 5). Truncation and padding baked into the
    file are ignored. Ids of special tokens come from `generation_config.json`, else `config.json`, else the
    tokenizer's own files.

    Args:
        directory: the model directory, with its files or, in a Hugging Face cache, links to them.
        lowercase: lower the text first (`do_lower_case` of sentence-transformers).

    Raises:
        TokenizerError: `tokenizer.json` is malformed, or disagrees with the files beside it.
        ConfigError: a file beside it is malformed.
        PathEscapeError: a file is a link that leads out of the directory.
        LimitError: more than `MAX_TOKENIZER_BYTES`, `MAX_TOKENIZER_VALUES` or `MAX_VOCABULARY`.
        UnsupportedError: the file asks for random tokenisation.
    """
    folder = Folder.at(directory)
    _bring(folder)
    where = folder.where(TOKENIZER)
    found = _read_document(folder, where)
    if found is None:
        return None
    raw, document = found
    # The native object parses the file again; until then, its large part need not stay.
    by_place = isinstance(document.pop("model").get("vocab"), list)
    native = _guard(lambda: _native_tokenizer(raw), where)
    words, vocab_size = _vocabulary(native, by_place, document, where)

    tokenizer_config, special_tokens_map = (Fields(folder.json(name), folder.where(name)) for name in _SIDE_FILES)
    settings = tokenizer_config.values
    _check_declared(words, tokenizer_config)
    names = {role: _token_name((tokenizer_config, special_tokens_map), role, words) for role in _ROLES}
    _guard(lambda: _apply_normalizer(native, settings, lowercase), where)
    if settings.get("split_special_tokens") is True:
        native.encode_special_tokens = True
    special_count = _check_works(native, words, where)

    own = {role: () if (name := names[role]) is None else (words[name],) for role in _ROLES_WITH_IDS}
    bos, eos, pad = (configured_ids(folder, role) or own[role] for role in _ROLES_WITH_IDS)
    return Tokenizer(
        vocab_size=vocab_size,
        eos_ids=eos,
        bos_id=bos[0] if bos else None,
        pad_id=pad[0] if pad else None,
        model_max_length=model_max_length(tokenizer_config),
        truncation_side=_truncation_side(tokenizer_config, document),
        special_count=special_count,
        special_tokens={f"{role}_token": name for role, name in names.items() if name is not None},
        added_tokens={
            entry["content"]: AddedToken(entry["id"], entry.get("special") is True)
            for entry in document.get("added_tokens") or []
        },
        chat_templates=load_templates(folder, settings, tokenizer_config.where),
        _native=native,
    )


def _read_document(folder: Folder, where: str) -> tuple[bytes, dict[str, Any]] | None:
    """The bytes of `tokenizer.json` and what they say, after it was checked; None if there is no such file."""
    raw = folder.read(TOKENIZER, MAX_TOKENIZER_BYTES, "MAX_TOKENIZER_BYTES", TokenizerError)
    if raw is None:
        return None
    document = parse(raw, where, TokenizerError, MAX_TOKENIZER_VALUES, "MAX_TOKENIZER_VALUES")
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise TokenizerError(f"{where}: expected an object with an object 'model'")
    if document["model"].get("dropout"):
        raise UnsupportedError(f"{where}: model.dropout makes a text's tokens random; set it to null")
    refuse_panics(document, where)
    return raw, document


def _bring(folder: Folder) -> None:
    """Fetch what is read of a model of the Hub, together."""
    if folder.listed(TOKENIZER) is not None:
        beside = (*_SIDE_FILES, "generation_config.json")
        bounds: dict[str, SizeBound] = {TOKENIZER: (MAX_TOKENIZER_BYTES, "MAX_TOKENIZER_BYTES")}
        bounds |= dict.fromkeys(beside, json_bound())
        bounds |= dict.fromkeys(template_files(folder).values(), (MAX_TEMPLATE_BYTES, "MAX_TEMPLATE_BYTES"))
        folder.bring(*bounds, bounds=bounds)


# -- native code -------------------------------------------------------------------------------


def _guard(call: Callable[[], T], doing: str) -> T:
    """`call()`; whatever native code raises, a panic included, becomes a TokenizerError."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError, TokenizerError):
        raise
    except BaseException as cause:  # pyo3's PanicException is no Exception
        raise TokenizerError(f"{doing}: {type(cause).__name__}: {quote(cause)}") from cause


def _native_tokenizer(raw: bytes) -> Any:
    from tokenizers import Tokenizer as Native

    native = Native.from_buffer(raw)
    native.no_truncation()
    native.no_padding()
    return native


def _apply_normalizer(native: Any, settings: Mapping[str, Any], lowercase: bool) -> None:
    """Lower case and accents as `tokenizer_config.json` says, where it and `tokenizer.json` differ."""
    from tokenizers import normalizers

    current = native.normalizer
    if isinstance(current, normalizers.BertNormalizer) and settings.get("tokenizer_class") not in _GENERIC_CLASSES:
        present = {name: getattr(current, name) for name in ("clean_text", *_BERT_SETTINGS.values())}
        wanted = present | {_BERT_SETTINGS[key]: settings[key] for key in _BERT_SETTINGS if key in settings}
        if wanted != present:
            native.normalizer = normalizers.BertNormalizer(**wanted)
    if lowercase:
        parts = [] if native.normalizer is None else [native.normalizer]
        native.normalizer = normalizers.Sequence([normalizers.Lowercase(), *parts])


# -- checks ------------------------------------------------------------------------------------


def _vocabulary(native: Any, by_place: bool, document: Mapping[str, Any], where: str) -> tuple[dict[str, int], int]:
    """All tokens with their ids, and the largest id plus one.

    Ids must differ, and none may be missing below the largest of a token that is no added one. (Above, added tokens
    may leave gaps: those of tiktoken do.) Unigram numbers its pieces `by_place`: there, a piece given twice has its
    last place for an id, and the first is no gap.
    """
    words, model = _guard(lambda: (native.get_vocab(True), native.get_vocab(False)), where)
    if not words:
        raise TokenizerError(f"{where}: the vocabulary is empty")
    largest = max(words.values())
    if largest >= MAX_VOCABULARY:
        raise LimitError(f"{where}: token id {largest} is over the limit MAX_VOCABULARY = {MAX_VOCABULARY}")
    shared = sorted(i for i, uses in Counter(words.values()).items() if uses > 1)
    if shared:
        raise TokenizerError(f"{where}: token ids used twice: {listing(shared)}")
    added = {entry["content"]: entry["id"] for entry in document.get("added_tokens") or []}
    for content, stated in added.items():
        if words.get(content) != stated:
            raise TokenizerError(
                f"{where}: added token {quote(content)} has id {stated}, but would be read as {words.get(content)}"
            )
    last = max((i for content, i in model.items() if content not in added), default=0)
    missing = sorted(set(range(last)).difference(words.values()))
    if missing and not by_place:
        raise TokenizerError(f"{where}: token ids without a token: {listing(missing)}")
    return words, largest + 1


def _check_declared(words: Mapping[str, int], source: Fields) -> None:
    """Tokens that `tokenizer_config.json` lists must be those of `tokenizer.json`."""
    declared, wrong = source.group("added_tokens_decoder"), []
    for stated, entry in ({} if declared is None else declared.values).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str):
            raise ConfigError(f"{source.where}: added_tokens_decoder: {quote(stated)} has no 'content' that is a str")
        if str(words.get(content)) != stated:
            wrong.append(f"{content} = {stated}")
    if wrong:
        raise TokenizerError(f"{source.where}: added_tokens_decoder: not so in tokenizer.json: {listing(wrong)}")


def _check_works(native: Any, words: Mapping[str, int], where: str) -> int:
    """How many special tokens an encoding gets. Encodes something, so that what is missing shows now."""

    def probe() -> tuple[list[int], list[int], list[int], int]:
        bare = native.encode(_PROBE, add_special_tokens=False)
        native.decode(bare.ids)
        count: int = native.num_special_tokens_to_add(False)
        return bare.ids, native.encode(_PROBE).ids, native.post_process(bare, None, True).ids, count

    bare, whole, steps, count = _guard(probe, where)
    unknown = sorted(set(whole).difference(words.values(), bare))
    if unknown:
        raise TokenizerError(f"{where}: post_processor adds token ids that the vocabulary lacks: {listing(unknown)}")
    if whole != steps or len(whole) != len(bare) + count:
        raise TokenizerError(f"{where}: post_processor does more than to put special tokens around a text")
    return count


# -- special tokens ----------------------------------------------------------------------------


def _token_name(sources: Sequence[Fields], role: str, words: Mapping[str, int]) -> str | None:
    """The token of this role (`eos`) in the first file that has one, as text or as an object with its text."""
    for source in sources:
        value = source.values.get(f"{role}_token")
        content = value.get("content", value) if isinstance(value, dict) else value
        if content is None or content == "":
            continue
        if not isinstance(content, str):
            raise ConfigError(f"{source.where}: {role}_token: expected a str or 'content', found {quote(value)}")
        if content not in words and role in _ROLES_WITH_IDS:
            raise TokenizerError(f"{source.where}: {role}_token is {quote(content)}, which tokenizer.json lacks")
        return content
    return None


def configured_ids(folder: Folder, role: str) -> tuple[int, ...]:
    """The ids of this role (`eos`) in `generation_config.json`, else in `config.json`; none if neither names one.

    Raises:
        ConfigError: not token ids.
    """
    for name in ("generation_config.json", "config.json"):
        value = folder.json(name).get(f"{role}_token_id")
        if value is None or (role == "pad" and value == -1):  # -1: "none" in the first Llama configs
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids):
            raise ConfigError(f"{folder.where(name)}: {role}_token_id: expected token ids, found {quote(value)}")
        return tuple(dict.fromkeys(ids))
    return ()


def _truncation_side(source: Fields, document: Mapping[str, Any]) -> Literal["left", "right"]:
    baked = document.get("truncation") or {}
    side = source.raw("truncation_side") or str(baked.get("direction", "right")).lower()
    if side not in ("left", "right"):
        raise source.wrong("truncation_side", "left or right", side)
    return "left" if side == "left" else "right"


def model_max_length(config: Fields) -> int | None:
    """`model_max_length` of a `tokenizer_config.json`: tokens, or None if it names no real length.

    Raises:
        ConfigError: not a positive whole number.
    """
    value = config.raw("model_max_length")
    none = value is None or (isinstance(value, int | float) and value >= _NO_MAX_LENGTH)
    return None if none else config.whole("model_max_length", high=_NO_MAX_LENGTH)


# -- requests ----------------------------------------------------------------------------------


def _check_text(text: object, what: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{what}: expected a str, found {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(
            f"{what}: half of a surrogate pair at character {cause.start}; it is no Unicode text"
        ) from None
