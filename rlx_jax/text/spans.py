"""The tokens of texts together with where each is in its text, for tasks that label tokens or find answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlx_jax.errors import RequestError
from rlx_jax.text.request_checks import check_text
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.text.tokenizer_checks import guard


class TokenSpans(NamedTuple):
    """The tokens of a text or of a pair of texts, or of a window of one that is too long.

    Attributes:
        ids, types: the token ids, and for each its type: 0 in the first text of a pair, 1 in the second if they differ.
        tokens: the token of each id, as the vocabulary spells it.
        offsets: the first character of each token in its text, and the one after its last.
        words: the number of each token's word in its text; None for special tokens.
        texts: which text of a pair each token is from, 0 or 1; None for special tokens.
        is_special: whether each token was added around the texts.
    """

    ids: list[int]
    types: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]
    words: list[int | None]
    texts: list[int | None]
    is_special: list[bool]

    @staticmethod
    def of(tokenizer: Tokenizer, *parts: Any) -> TokenSpans:
        """Return the tokens of native encodings of one or two texts, with special tokens around them."""
        # This may count the spaces in front of tokens as outside of them, which `parts` have already done.
        row = tokenizer._native.post_process(parts[0], parts[1] if len(parts) > 1 else None, True)
        is_special = [mask == 1 for mask in row.special_tokens_mask]
        offsets = iter([span for part in parts for span in part.offsets])
        types = row.type_ids if tokenizer.gives_types else [0] * len(row)
        places = [(0, 0) if special else next(offsets) for special in is_special]
        return TokenSpans(row.ids, types, row.tokens, places, row.word_ids, row.sequence_ids, is_special)


def id_of_role(tokenizer: Tokenizer, role: str) -> int | None:
    """Return the id of the tokenizer's token with a role, such as `mask`; None if it has none."""
    token = tokenizer.special_tokens.get(f"{role}_token")
    return None if token is None else tokenizer._native.token_to_id(token)


def encode_spans(
    tokenizer: Tokenizer, texts: Sequence[str], max_length: int | None, overlap: int | None = None, first: int = 0
) -> list[list[TokenSpans]]:
    """Return the tokens of each text, in one window or, of a text that is too long, in several.

    Args:
        tokenizer, texts, max_length, first: as in `Tokenizer.encode_batch`.
        overlap: the number of tokens that two windows share; None: the text is truncated to the first window.

    Raises:
        RequestError: a window has no more than `overlap` tokens. Others as `Tokenizer.encode_batch`.
    """
    for i, text in enumerate(texts, first):
        check_text(text, f"texts[{i}]")
    native, size = tokenizer._native, None if max_length is None else max_length - tokenizer.special_count

    def encode() -> list[list[TokenSpans]]:
        rows = []
        for i, encoding in enumerate(native.encode_batch([*texts], add_special_tokens=False), first):
            windows = _windows(encoding, size, overlap, tokenizer.truncation_side, f"texts[{i}]")
            rows.append([TokenSpans.of(tokenizer, window) for window in windows])
        return rows

    return guard(encode, "encoding failed")


def encode_windows(
    tokenizer: Tokenizer, question: str, context: str, max_length: int | None, overlap: int, where: str = ""
) -> list[TokenSpans]:
    """Return the tokens of a question with a context; of a long context, of the question with each window of it.

    The question comes first, or last if the tokenizer's padding side is left.

    Args:
        tokenizer: the tokenizer.
        question, context: the texts.
        max_length: maximum number of tokens of a window with the question.
        overlap: number of tokens of the context that two windows share.
        where: the index of the pair in a list, such as "[3]", for messages.

    Raises:
        RequestError: the question leaves no more than `overlap` tokens to the context. Others as `Tokenizer.encode`.
    """
    check_text(question, f"question{where}")
    check_text(context, f"context{where}")
    native = tokenizer._native

    def encode() -> list[TokenSpans]:
        first, second = native.encode_batch([question, context], add_special_tokens=False)
        size = None if max_length is None else max_length - len(first) - native.num_special_tokens_to_add(True)
        windows = _windows(second, size, overlap, tokenizer.truncation_side, f"context{where}")
        pairs = [(first, w) if tokenizer.padding_side == "right" else (w, first) for w in windows]
        return [TokenSpans.of(tokenizer, *pair) for pair in pairs]

    return guard(encode, "encoding failed")


def _windows(encoding: Any, size: int | None, overlap: int | None, side: str, name: str) -> list[Any]:
    """Return an encoding in windows of `size` tokens, which share `overlap`; without it, the first window alone."""
    if size is None or len(encoding) <= size:
        return [encoding]
    if size <= (overlap or 0):
        raise RequestError(
            f"{name}: a window has {max(size, 0)} tokens of a text of {len(encoding)}, without special tokens and the "
            f"question, and overlaps by {overlap or 0}: allow more tokens, or a smaller overlap"
        )
    encoding.truncate(size, stride=overlap or 0, direction=side)
    return [encoding, *(encoding.overflowing if overlap is not None else [])]
