"""What makes the native tokenizer code panic, looked for in `tokenizer.json` before that code sees it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlx_jax.errors import TokenizerError, listing, quote


def refuse_panics(document: Mapping[str, Any], where: str) -> None:
    """Refuse what is known to make the native loader, or the first encoding, panic.

    Raises:
        TokenizerError: with the place in the file.
    """
    for node in _objects(document.get("normalizer")):
        if node.get("type") == "Precompiled":
            _check_charsmap(node.get("precompiled_charsmap"), where)
    for node in _objects(document.get("post_processor")):
        if "special_tokens" in node:
            _check_template(node, where)
    _check_merges(document["model"], where)


def _check_merges(model: Mapping[str, Any], where: str) -> None:
    """Each merge must join two tokens to a third. The native loader copies the third into a buffer that is as long
    as the longest token of the vocabulary."""
    merges, vocab, prefix = (model.get(key) for key in ("merges", "vocab", "continuing_subword_prefix"))
    if not isinstance(merges, list) or not isinstance(vocab, dict):
        return  # not the kind of model that merges, or refused later
    prefix = prefix if isinstance(prefix, str) else ""
    for i, merge in enumerate(merges):
        try:
            first, second = merge.split(" ") if isinstance(merge, str) else merge
            good = second.startswith(prefix) and first + second[len(prefix) :] in vocab
        except (AttributeError, TypeError, ValueError):
            good = False
        if not good and not (isinstance(merge, str) and merge.startswith("#version")):
            between = f" with {quote(prefix)} between them" if prefix else ""
            raise TokenizerError(
                f"{where}: model.merges[{i}]: expected two tokens that join to a third of the vocabulary{between},"
                f" found {quote(merge)}"
            )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value, itself included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack += item.values()
        elif isinstance(item, list):
            stack += item


def _check_charsmap(value: Any, where: str) -> None:
    """A charsmap is base64 of: the trie's size in bytes (u32), the trie, texts that end in NUL (UTF-8).

    The trie is a double array of u32: a unit with bit 31 holds the place of a text; from any other at index i,
    byte c leads to the unit at i ^ offset ^ c. The native code checks none of these.
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
        leaf = units >= 2**31
        if np.any((np.arange(len(units)) ^ (units >> 10 << ((units & 512) >> 6)))[~leaf] >= len(units)):
            raise ValueError("a unit of the trie leads out of it")
        places = units[leaf] - 2**31
        if np.any(places >= len(texts)) or np.any(np.frombuffer(texts, np.uint8)[places] & 0xC0 == 0x80):
            raise ValueError("a unit of the trie names no text")
    except ValueError as cause:
        raise TokenizerError(
            f"{where}: normalizer: precompiled_charsmap: {quote(cause)}, found {quote(value)}"
        ) from None


def _check_template(node: Mapping[str, Any], where: str) -> None:
    special = node.get("special_tokens")
    known = special if isinstance(special, dict) else {}
    for name in ("single", "pair"):
        listed = node.get(name)
        pieces = [piece for piece in listed if isinstance(piece, dict)] if isinstance(listed, list) else []
        for piece in pieces:
            token = piece.get("SpecialToken")
            used = token.get("id") if isinstance(token, dict) else None
            if used is not None and (not isinstance(used, str) or used not in known):
                raise TokenizerError(
                    f"{where}: post_processor.{name} uses {quote(used)}, which is not in its special_tokens:"
                    f" {listing(known)}"
                )
        texts = [piece["Sequence"] for piece in pieces if "Sequence" in piece]
        if name == "single" and [t.get("id") for t in texts if isinstance(t, dict)] != ["A"]:
            raise TokenizerError(f"{where}: post_processor.single: expected one Sequence 'A', found {quote(texts)}")
