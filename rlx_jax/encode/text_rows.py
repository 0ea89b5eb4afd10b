"""Turn the texts of a request into rows of token ids: prompts, truncation, pairs of texts, and checks of id lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.encode.embedding import chunks, prefetch
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.errors import RequestError, UnsupportedError, quote, shown
from rlx_jax.text.request_checks import NO_TOKENIZER, Ids, TokenRows, classify_prompts, id_list
from rlx_jax.text.spans import TokenSpans
from rlx_jax.text.token_model import check_positions
from rlx_jax.text.tokenizer import Tokenizer

T = TypeVar("T")

# Threads that tokenise chunks of texts: while the native library encodes one, Python reads the ids of the other.
NUM_THREADS = 2


@dataclass(frozen=True)
class Requests:
    """The texts of a request, tokenised lazily.

    Attributes:
        chunks: (token rows of a chunk, whether another chunk follows).
        total: the number of texts; None for an iterator of unknown length.
        is_single: whether the request is one text and no list.
        label: the name of the argument, for messages.
        first: the index of the first text, for messages.
        items: the index of the item that each row so far is a window of; empty if the rows are the items.
        prompt_tokens: see `TextReader.count_prompt_tokens`.
    """

    chunks: Iterator[tuple[TokenRows, bool]]
    total: int | None
    is_single: bool
    label: str = "texts"
    first: int = 0
    items: list[int] = field(default_factory=list)
    prompt_tokens: int = 0

    def index(self, row: int) -> int:
        """Return the index of the item that a row is of."""
        return self.items[row] if self.items else self.first + row


@dataclass(frozen=True)
class TextReader:
    """Turn texts into rows of token ids for a model.

    Attributes:
        tokenizer: for strings; None if the model has none.
        pipeline: the limit of the length, and whether pooling reads the prompt.
        vocab_size: exclusive upper bound of token ids.
        max_positions: the longest row that the model supports; None without a limit.
        padding: (tokens, id) that rows are padded to, if the model reads padding.
        buckets: the sizes that programs are compiled for.
        reads_types: whether the model distinguishes the two texts of a pair by token types.
    """

    tokenizer: Tokenizer | None
    pipeline: SentencePipeline
    vocab_size: int
    max_positions: int | None
    padding: tuple[int, int] | None
    buckets: Buckets
    reads_types: bool = False

    def count_prompt_tokens(self, prompt: str) -> int:
        """Return the number of leading tokens of each text that pooling leaves out.

        These are the tokens of the prompt encoded alone: leading special tokens count, a special token at the end does
        not, because in a prompted text it follows the text.

        Raises:
            UnsupportedError: the last token looks special and has no role: sentence-transformers counts it with some
                classes of tokenizer.
        """
        if not prompt or self.pipeline.include_prompt or self.tokenizer is None:
            return 0
        ids = self.tokenizer.encode(prompt, max_length=self.max_text_tokens)
        if not ids or self.tokenizer.has_role(ids[-1]):
            return max(len(ids) - 1, 0)
        if self.tokenizer.is_special(ids[-1]) or ids[-1] not in self.tokenizer.encode(prompt, add_special_tokens=False):
            end = self.tokenizer.decode(ids[-1:], skip_special_tokens=False)
            raise UnsupportedError(
                f"include_prompt is false, and whether pooling skips {quote(end)} at the end of the prompt "
                "is unknown, as it has no role: name it in tokenizer_config.json, for example as sep_token"
            )
        return len(ids)

    def read_prompted(
        self, texts: Any, prompt_name: str | None = None, prompt: str | None = None, start: int = 0
    ) -> Requests:
        """Return the rows of texts with a prompt of the pipeline: see `read_texts` and `choose_prompt`."""
        text = self.pipeline.choose_prompt(prompt_name, prompt)
        argument = "prompt_name" if prompt_name is not None else "prompt" if prompt is not None else ""
        return replace(self.read_texts(texts, text, argument, start), prompt_tokens=self.count_prompt_tokens(text))

    def read_texts(self, texts: Any, prompt: str = "", prompt_argument: str = "", start: int = 0) -> Requests:
        """Return the rows of texts or id lists.

        Args:
            texts: a string, or a list or an iterator of strings or of id lists.
            prompt: the text in front of each string.
            prompt_argument: name of the argument that gave the prompt, for messages; empty for the default prompt.
            start: the index of the first text, for messages.
        """

        def rows(items: Sequence[Any], is_text: bool, first: int) -> TokenRows:
            if prompt and prompt_argument and items and not is_text:
                raise RequestError(f"{prompt_argument} is for strings; token ids are read as they are")
            ids = self._tokenize(items, prompt, first) if is_text else self._check_id_lists(items, first)
            return TokenRows(self._fit(ids, "texts", range(first, first + len(ids))))

        if isinstance(texts, Iterator):

            def read(chunk: tuple[int, list[Any]]) -> TokenRows:
                first = start + chunk[0]
                request = classify_prompts(chunk[1], "texts", allow_flat=False, first=first)
                return rows(request.texts or request.ids or [], request.texts is not None, first)

            return Requests(prefetch(chunks(texts), read), None, False, first=start)
        request = classify_prompts(texts, "texts", allow_flat=False, first=start)
        is_text, entries = request.texts is not None, request.texts or request.ids or []
        read_chunks = prefetch(chunks(entries), lambda chunk: rows(chunk[1], is_text, start + chunk[0]), NUM_THREADS)
        return Requests(read_chunks, len(entries), request.is_single, first=start)

    def read_pairs(self, pairs: Sequence[tuple[str, str]]) -> Requests:
        """Return the rows of pairs of texts; a pair that is too long loses tokens of its longer text first."""

        def rows(chunk: tuple[int, list[tuple[str, str]]]) -> TokenRows:
            tokenizer = self.require_tokenizer()
            ids, types = tokenizer.encode_rows(chunk[1], max_length=self.max_text_tokens, first=chunk[0])
            return self._encoded_rows(ids, types, "pairs", range(chunk[0], chunk[0] + len(ids)), self.reads_types)

        return Requests(prefetch(chunks(pairs), rows, NUM_THREADS), len(pairs), False, "pairs")

    def read_spans(
        self, items: Sequence[T], encode: Callable[[Sequence[T], int], list[list[TokenSpans]]],
        label: str = "texts",
    ) -> tuple[Requests, list[list[TokenSpans]]]:  # fmt: skip
        """Return the rows of what `encode` makes of chunks of items, and its results, which are there after the rows.

        Args:
            items: texts, or pairs of texts.
            encode: called with items and the index of the first; it returns the rows of each item.
            label: the name of the argument, for messages.
        """
        spans: list[list[TokenSpans]] = []
        owners: list[int] = []

        def encode_chunk(chunk: tuple[int, list[T]]) -> tuple[list[list[TokenSpans]], list[int], TokenRows]:
            encoded = encode(chunk[1], chunk[0])
            windows = [(i, window) for i, windows in enumerate(encoded, chunk[0]) for window in windows]
            indices = [i for i, _ in windows]
            has_types = self.reads_types and isinstance(chunk[1][0], tuple)
            ids = [np.array(window.ids, np.int32) for _, window in windows]
            types = [np.array(window.types, np.int32) for _, window in windows if has_types]
            return encoded, indices, self._encoded_rows(ids, types, label, indices, has_types)

        def read_chunks() -> Iterator[tuple[TokenRows, bool]]:
            # Threads encode the chunks at the same time, so that their results are joined here, in order.
            for (encoded, indices, rows), has_more in prefetch(chunks(items), encode_chunk, NUM_THREADS):
                spans.extend(encoded)
                owners.extend(indices)
                yield rows, has_more

        return Requests(read_chunks(), None, False, label, items=owners), spans

    @property
    def max_text_tokens(self) -> int | None:
        """Maximum number of tokens of a text, where it is truncated; None without a limit."""
        # The checkpoint's max_seq_length replaces the tokenizer's own limit.
        length = self.pipeline.max_seq_length or (None if self.tokenizer is None else self.tokenizer.model_max_length)
        limits = (length, self.max_positions, self.padding[0] if self.padding else None)
        return min((limit for limit in limits if limit is not None), default=None)

    def _fit(self, rows: list[Ids], label: str, indices: Sequence[int]) -> list[Ids]:
        """Return rows padded if the model reads padding; else refuse rows that are longer than the largest bucket."""
        if self.padding is not None:
            tokens, fill = self.padding
            for i, row in zip(indices, rows, strict=True):
                check_positions(len(row), tokens, f"{label}[{i}]")
            return [np.pad(row, (0, tokens - len(row)), constant_values=fill) for row in rows]
        for i, row in zip(indices, rows, strict=True):
            if self.buckets.on_recompile == "error" and self.buckets.prompt and len(row) > self.buckets.prompt[-1]:
                raise RequestError(
                    f"{label}[{i}]: {len(row)} tokens, and {self.buckets.text()}; shorten it, or add to buckets.prompt "
                    "of the profile"
                )
        return rows

    def _check_id_lists(self, items: Sequence[Any], first: int) -> list[Ids]:
        """Return id lists as arrays, after checking their ids and lengths."""
        rows = []
        for i, ids in enumerate(items, first):
            rows.append(np.array(id_list(ids, self.vocab_size, f"texts[{i}]"), np.int32))
            if not len(rows[-1]):
                raise RequestError(f"texts[{i}] has no token ids")
            check_positions(len(rows[-1]), self.max_positions, f"texts[{i}]")
        return rows

    def _tokenize(self, texts: Sequence[str], prompt: str, first: int) -> list[Ids]:
        """Return the token ids of strings, truncated to `max_text_tokens`."""
        prompted_texts = [prompt + text for text in texts] if prompt else texts
        tokenizer = self.require_tokenizer()
        ids, _ = tokenizer.encode_rows(prompted_texts, max_length=self.max_text_tokens, first=first)
        return self._check_ids(ids, "texts", range(first, first + len(ids)))

    def _encoded_rows(
        self, ids: list[Ids], types: list[Ids], label: str, indices: Sequence[int], has_types: bool
    ) -> TokenRows:
        """Return the token ids, and with `has_types` the types, of encoded texts."""
        ids = self._fit(self._check_ids(ids, label, indices), label, indices)
        if has_types and self.padding is not None:
            types = [np.pad(t, (0, len(row) - len(t))) for t, row in zip(types, ids, strict=True)]
        return TokenRows(ids, types if has_types else [])

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise a RequestError if there is none."""
        if self.tokenizer is None:
            raise RequestError(f"strings need a tokenizer, and this model has none: {NO_TOKENIZER}; or pass token ids")
        return self.tokenizer

    def _check_ids(self, rows: list[Ids], label: str, indices: Sequence[int]) -> list[Ids]:
        """Return the ids of a tokenizer, after checking that each row has some and that all are in range."""
        if not all(map(len, rows)) or (rows and np.concatenate(rows).max() >= self.vocab_size):
            for i, ids in zip(indices, rows, strict=True):
                # `id_list` raises the detailed error for an id out of range; the error below is for an empty list.
                id_list(ids, self.vocab_size, f"{label}[{i}]")
                if not len(ids):
                    raise RequestError(f"{label}[{i}] has no tokens: the tokenizer puts none around a text")
        return rows


def without_padding(rows: TokenRows, padding_id: int) -> TokenRows:
    """Return rows without the padding ids at their ends; a row keeps its first token."""
    lengths = [int(np.flatnonzero(row != padding_id).max(initial=0)) + 1 for row in rows.ids]
    return TokenRows(*([row[:n] for row, n in zip(lists, lengths, strict=False)] for lists in (rows.ids, rows.types)))


def check_list(name: str, value: Any, content: str) -> None:
    """Raise a RequestError if an argument is no list, whose content the message describes."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} is {shown(value)}; expected a list of {content}")


def check_pairs(pairs: Any, name: str) -> list[tuple[str, str]]:
    """Return a list of pairs of strings, checked.

    Raises:
        RequestError: not a list of pairs of strings; the message names the entry.
    """
    check_list(name, pairs, "pairs of strings")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RequestError(f"{name}[{i}] is {shown(pair)}; expected a pair of strings")
    return [(pair[0], pair[1]) for pair in pairs]
