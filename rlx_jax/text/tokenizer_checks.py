"""Check a `tokenizer.json`: for content that makes the native tokenizers library panic, and against its companion."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from rlx_jax.errors import ConfigError, LimitError, RlxError, TokenizerError, listing, quote
from rlx_jax.models.config import MAX_VOCABULARY, Fields

T = TypeVar("T")
# Letters, a digit, a combining accent, an emoji, and a hieroglyph that hardly any vocabulary has.
_PROBE = "Hello, world 12 e\u0301 \U0001f600 \U00013000"


def guard(call: Callable[[], T], action: str) -> T:
    """Return `call()`; anything that native code raises, panics included, becomes a TokenizerError."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError, RlxError):
        raise
    except BaseException as cause:  # pyo3's PanicException does not derive from Exception
        raise TokenizerError(f"{action}: {type(cause).__name__}: {quote(cause)}") from cause


def refuse_panics(document: Mapping[str, Any], where: str) -> None:
    """Refuse content that is known to make the native loader, or the first encoding, panic.

    Raises:
        TokenizerError: there is some; the message has its position in the file.
    """
    for node in _iter_objects(document.get("normalizer")):
        if node.get("type") == "Precompiled":
            _check_charsmap(node.get("precompiled_charsmap"), where)
    for node in _iter_objects(document.get("post_processor")):
        if "special_tokens" in node:
            _check_template(node, where)
    _check_merges(document["model"], where)


def check_added_tokens(words: Mapping[str, int], source: Fields) -> None:
    """Check that the tokens and ids in `tokenizer_config.json` agree with `tokenizer.json`."""
    decoder, mismatches = source.group("added_tokens_decoder"), []
    for id_text, entry in ({} if decoder is None else decoder.values).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str):
            raise ConfigError(f"{source.where}: added_tokens_decoder: {quote(id_text)} has no 'content' that is a str")
        if str(words.get(content)) != id_text:
            mismatches.append(f"{content} = {id_text}")
    if mismatches:
        raise TokenizerError(
            f"{source.where}: added_tokens_decoder: differs from tokenizer.json: {listing(mismatches)}"
        )


def _check_merges(model: Mapping[str, Any], where: str) -> None:
    """Check that each merge joins two tokens to a third.

    The native loader copies the third into a buffer of the length of the longest token in the vocabulary.
    """
    merges, vocab, prefix = (model.get(key) for key in ("merges", "vocab", "continuing_subword_prefix"))
    if not isinstance(merges, list) or not isinstance(vocab, dict):
        return  # a model without merges, or one that is refused later
    prefix = prefix if isinstance(prefix, str) else ""
    for i, merge in enumerate(merges):
        try:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            is_valid = right.startswith(prefix) and left + right[len(prefix) :] in vocab
        except (AttributeError, TypeError, ValueError):
            is_valid = False
        if not is_valid and not (isinstance(merge, str) and merge.startswith("#version")):
            between = f" with {quote(prefix)} between them" if prefix else ""
            raise TokenizerError(
                f"{where}: model.merges[{i}]: expected two tokens that join to a third of the vocabulary{between},"
                f" found {quote(merge)}"
            )


def _iter_objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, including the value itself."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _check_charsmap(value: Any, where: str) -> None:
    """Check the charsmap of a normalizer, in which the native code checks nothing.

    It is the base64 of: the size of a trie in bytes (u32), the trie, and UTF-8 texts that end in NUL. The trie is a
    double array of u32: a unit with bit 31 set holds the offset of a text; from any other unit at index i, byte c leads
    to the unit at i ^ offset ^ c.
    """
    try:
        if not isinstance(value, str):
            raise ValueError("expected base64 text")
        data = base64.b64decode(value, validate=True)
        size = int.from_bytes(data[:4], "little")
        texts = data[4 + size :]
        texts.decode()
        if size == 0 or size % 1024:
            raise ValueError(f"a trie of {size} bytes; expected a multiple of 1024")
        units = np.frombuffer(data, "<u4", size // 4, 4).astype(np.int64)
        is_leaf = units >= 2**31
        if np.any((np.arange(len(units)) ^ (units >> 10 << ((units & 512) >> 6)))[~is_leaf] >= len(units)):
            raise ValueError("a unit of the trie leads out of it")
        text_offsets = units[is_leaf] - 2**31
        if np.any(text_offsets >= len(texts)) or np.any(np.frombuffer(texts, np.uint8)[text_offsets] & 0xC0 == 0x80):
            raise ValueError("a unit of the trie names no text")
    except ValueError as cause:
        raise TokenizerError(
            f"{where}: normalizer: precompiled_charsmap: {quote(cause)}, found {quote(value)}"
        ) from None


def _check_template(node: Mapping[str, Any], where: str) -> None:
    """Check that a TemplateProcessing uses only its declared special tokens, and adds them around one sequence."""
    special = node.get("special_tokens")
    declared = special if isinstance(special, dict) else {}
    for name in ("single", "pair"):
        items = node.get(name)
        pieces = [piece for piece in items if isinstance(piece, dict)] if isinstance(items, list) else []
        for piece in pieces:
            token = piece.get("SpecialToken")
            token_id = token.get("id") if isinstance(token, dict) else None
            if token_id is not None and (not isinstance(token_id, str) or token_id not in declared):
                raise TokenizerError(
                    f"{where}: post_processor.{name} uses {quote(token_id)}, which is not in its special_tokens:"
                    f" {listing(declared)}"
                )
        texts = [piece["Sequence"] for piece in pieces if "Sequence" in piece]
        if name == "single" and [t.get("id") for t in texts if isinstance(t, dict)] != ["A"]:
            raise TokenizerError(f"{where}: post_processor.single: expected one Sequence 'A', found {quote(texts)}")


def read_vocabulary(
    native: Any, is_unigram: bool, document: Mapping[str, Any], where: str
) -> tuple[dict[str, int], int]:
    """Return the ids of all tokens by text, and the largest id plus one.

    Ids must be unique, and every id up to the largest one of a token that is not an added token must have a token.
    (Added tokens above that may leave gaps: tiktoken's do.) Unigram models number their pieces by position
    (`is_unigram`): a piece that occurs twice takes its last position as its id, so its first position is not an error.
    """
    words, model = guard(lambda: (native.get_vocab(True), native.get_vocab(False)), where)
    if not words:
        raise TokenizerError(f"{where}: the vocabulary is empty")
    largest_id = max(words.values())
    if largest_id >= MAX_VOCABULARY:
        raise LimitError(f"{where}: token id {largest_id} is over the limit MAX_VOCABULARY = {MAX_VOCABULARY}")
    duplicate_ids = sorted(i for i, uses in Counter(words.values()).items() if uses > 1)
    if duplicate_ids:
        raise TokenizerError(f"{where}: token ids used twice: {listing(duplicate_ids)}")
    added_ids = {entry["content"]: entry["id"] for entry in document.get("added_tokens") or []}
    for content, declared_id in added_ids.items():
        if words.get(content) != declared_id:
            raise TokenizerError(
                f"{where}: added token {quote(content)} has id {declared_id}, but would be encoded as "
                f"{words.get(content)}"
            )
    last_id = max((i for content, i in model.items() if content not in added_ids), default=0)
    missing_ids = sorted(set(range(last_id)).difference(words.values()))
    if missing_ids and not is_unigram:
        raise TokenizerError(f"{where}: token ids without a token: {listing(missing_ids)}")
    return words, largest_id + 1


def check_probe(native: Any, words: Mapping[str, int], where: str) -> int:
    """Encode a probe text, so that a broken tokenizer fails at load; return the number of added special tokens."""

    def probe() -> tuple[list[int], list[int], list[int], int]:
        bare = native.encode(_PROBE, add_special_tokens=False)
        native.decode(bare.ids)
        count: int = native.num_special_tokens_to_add(False)
        return bare.ids, native.encode(_PROBE).ids, native.post_process(bare, None, True).ids, count

    bare, with_special, post_processed, count = guard(probe, where)
    if unknown := sorted(set(with_special).difference(words.values(), bare)):
        raise TokenizerError(f"{where}: post_processor adds ids that are not in the vocabulary: {listing(unknown)}")
    if with_special != post_processed or len(with_special) != len(bare) + count:
        raise TokenizerError(f"{where}: post_processor does more than add special tokens around a text")
    return count
