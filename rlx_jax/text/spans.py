"""The tokens of texts together with where each is in its text, for tasks that label tokens or find answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RequestError
from rlx_jax.text.request_checks import check_text
from rlx_jax.text.tokenizer import Tokenizer
from rlx_jax.text.tokenizer_checks import guard


@dataclass(frozen=True)
class TokenSpans:
    """The tokens of a text or of a pair of texts, or of a window of one that is too long.

    Attributes:
        row: the native encoding, with special tokens.
        parts: the native encodings of the texts, without them, if `row` was made of these; else it has their offsets.
        has_types: whether the tokenizer gives types of tokens.
    """

    row: Any
    parts: tuple[Any, ...]
    has_types: bool

    # The native encoding makes a new list for each access. Offsets are not retained: of many texts, Python's garbage
    # collector would take longer for them than the encoding.

    @cached_property
    def ids(self) -> list[int]:
        """The token ids."""
        return self.row.ids  # type: ignore[no-any-return]

    @property
    def types(self) -> list[int]:
        """The type of each token: 0 in the first text of a pair, 1 in the second if they differ."""
        return self.row.type_ids if self.has_types else [0] * len(self.row)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """The first character of each token in its text, and the one after its last."""
        if not self.parts:
            return self.row.offsets  # type: ignore[no-any-return]
        offsets = iter([span for part in self.parts for span in part.offsets])
        return [(0, 0) if special else next(offsets) for special in self.is_special]

    @cached_property
    def words(self) -> list[int | None]:
        """The number of each token's word in its text; None for special tokens."""
        return self.row.word_ids  # type: ignore[no-any-return]

    @cached_property
    def texts(self) -> list[int | None]:
        """Which text of a pair each token is from, 0 or 1; None for special tokens."""
        return self.row.sequence_ids  # type: ignore[no-any-return]

    @property
    def is_special(self) -> list[bool]:
        """Whether each token was added around the texts."""
        return [mask == 1 for mask in self.row.special_tokens_mask]

    @staticmethod
    def of(tokenizer: Tokenizer, *parts: Any) -> TokenSpans:
        """Return the tokens of native encodings of one or two texts, with special tokens around them."""
        # This may count the spaces in front of tokens as outside of them, which `parts` have already done.
        row = tokenizer._native.post_process(parts[0], parts[1] if len(parts) > 1 else None, True)
        return TokenSpans(row, parts, tokenizer.gives_types)


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
        for i, (text, row) in enumerate(zip(texts, native.encode_batch([*texts]), strict=True), first):
            if size is None or len(row) - tokenizer.special_count <= size:
                rows.append([TokenSpans(row, (), tokenizer.gives_types)])
                continue
            encoding = native.encode(text, add_special_tokens=False)
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
