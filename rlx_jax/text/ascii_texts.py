"""`AsciiTexts`: encode ASCII texts without the normalizer, if it only converts these to lower case.

The native library takes longer to normalize a text than for all other steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

# Normalizers that change no ASCII character but capitals, and control characters.
_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
# Pre-tokenizers that split a text at white space, to which BertNormalizer converts a tab and the end of a line.
_PRE_TOKENIZERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
_OTHER_CHARACTERS = re.compile(r"[^\t\n\r -~]")
# Added tokens that the normalizer changes in nothing but capitals, and that it makes of no other text.
_PLAIN_TOKEN = re.compile("[!-~]*")
# With more added tokens, the search for them takes as long as the normalizer.
_MAX_ADDED_TOKENS = 16


@dataclass(frozen=True, eq=False)
class AsciiTexts:
    """A native tokenizer without its normalizer.

    Attributes:
        native: the tokenizer.
        lowercase: whether texts are converted to lower case.
        added_tokens: in lower case; texts that contain one are not encoded here.
    """

    native: Any
    lowercase: bool
    added_tokens: tuple[str, ...]

    @staticmethod
    def of(native: Any, added_tokens: Collection[str]) -> AsciiTexts | None:
        """Return the form of a native tokenizer without its normalizer; None if it would encode texts differently."""
        from tokenizers import Tokenizer as Native

        normalizer, pre_tokenizer = native.normalizer, native.pre_tokenizer
        if normalizer is None or pre_tokenizer is None or len(added_tokens) > _MAX_ADDED_TOKENS:
            return None
        state = json.loads(normalizer.__getstate__())
        steps = state.get("normalizers", [state])
        is_known = all(step["type"] in _NORMALIZERS for step in steps) and all(
            map(_PLAIN_TOKEN.fullmatch, added_tokens)
        )
        if not is_known or json.loads(pre_tokenizer.__getstate__())["type"] not in _PRE_TOKENIZERS:
            return None
        bare = Native(native.model)  # the vocabulary is shared
        bare.pre_tokenizer, bare.post_processor = pre_tokenizer, native.post_processor
        lowercase = any(step["type"] == "Lowercase" or step.get("lowercase") is True for step in steps)
        return AsciiTexts(bare, lowercase, tuple(token.lower() for token in added_tokens))

    def normalized(self, text: str) -> str | None:
        """Return the text as the normalizer would; None for a text that is not encoded here."""
        lower = text.lower()
        if _OTHER_CHARACTERS.search(text) or any(token in lower for token in self.added_tokens):
            return None
        return lower if self.lowercase else text


def encode_batch(
    native: Any, ascii_texts: AsciiTexts | None, items: Sequence[Any], add_special_tokens: bool = True
) -> list[Any]:
    """Return the encodings of texts or pairs of texts, unpadded; all cores encode them.

    Args:
        native: the tokenizer.
        ascii_texts: its form without the normalizer, if it has one.
        items: strings, or tuples of two strings.
        add_special_tokens: add special tokens around them.
    """
    plain: dict[int, Any] = {}
    if ascii_texts is not None:
        normalized = ascii_texts.normalized
        for i, item in enumerate(items):
            is_text = isinstance(item, str)
            texts = [normalized(item)] if is_text else [*map(normalized, item)]
            if None not in texts:
                plain[i] = texts[0] if is_text else tuple(texts)
    others = {i: item for i, item in enumerate(items) if i not in plain}
    results: list[Any] = [None] * len(items)
    for encoder, part in ((native if ascii_texts is None else ascii_texts.native, plain), (native, others)):
        if part:
            rows = encoder.encode_batch_fast([*part.values()], add_special_tokens=add_special_tokens)
            for i, row in zip(part, rows, strict=True):
                results[i] = row
    return results
