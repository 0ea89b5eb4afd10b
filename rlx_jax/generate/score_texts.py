"""`ScoredTokens`: the texts, ids and pairs that `CausalLM.score` takes, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import RequestError, shown
from rlx_jax.generate.request import LanguageModel
from rlx_jax.text.request_checks import convert_foreign_arrays, id_list
from rlx_jax.text.token_model import check_positions


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids to score, given the ids before them.

    Attributes:
        ids: context and continuation.
        start: index of the first id that is scored, at least 1.
        name: the text in error messages.
        offset: number of tokens of the text before `ids`, for a window of a longer text.
        num_new: number of tokens that no earlier window of the text has.
    """

    ids: tuple[int, ...]
    start: int
    name: str = "texts"
    offset: int = 0
    num_new: int = 0

    @property
    def width(self) -> int:
        """Return the number of tokens that the model reads: all but the last one, after which nothing is predicted."""
        return len(self.ids) - 1


def scored_tokens(lm: LanguageModel, texts: Any) -> tuple[list[ScoredTokens], bool]:
    """Return the tokens of each item, and whether `texts` is a single item rather than a list.

    Raises:
        RequestError: `texts` has neither texts, nor ids, nor pairs of them; there is nothing to score; or there is no
            tokenizer, or no begin token. TokenIdError: the model does not have an id. SequenceLengthError: an item is
            over the model's positions.
    """
    texts = convert_foreign_arrays("texts", texts)
    single = _is_single(texts)
    if not single and not isinstance(texts, list | tuple | np.ndarray | jax.Array):
        raise RequestError(
            "score: expected a string, token ids, a pair (context, continuation), or a list of them, got "
            f"{shown(texts)}"
        )
    items = [texts] if single else list(texts)
    scored = [_item_tokens(lm, item, "texts" if single else f"texts[{i}]") for i, item in enumerate(items)]
    for item in scored:
        # As in lm-evaluation-harness: the last token is not read, so it may be one past the last position.
        check_positions(item.width, lm.max_positions, f"{item.name}: {len(item.ids)} tokens, the last one not read")
    return scored, single


def text_ids(lm: LanguageModel, text: Any, name: str) -> list[int]:
    """Return the ids of a string, with the special tokens that the tokenizer adds, or ids unchanged."""
    if isinstance(text, str):
        text = lm.require_tokenizer("strings need").encode(text)
    return id_list(text, lm.vocab_size, name)


def first_id(lm: LanguageModel) -> int:
    """Return the id that serves as context of a text without one: the begin token, or else the end token.

    Raises:
        RequestError: there is neither.
    """
    if lm.bos_id is not None:
        return lm.bos_id
    if lm.eos_ids:
        return lm.eos_ids[0]
    raise RequestError(
        "score: an empty context is replaced by the begin token, or else the end token, and the model has neither; "
        "pass bos_id= or eos_ids= to CausalLM"
    )


def pair_ids(lm: LanguageModel, context: Any, continuation: Any, name: str) -> ScoredTokens:
    """Return the tokens of a context and its continuation, which is scored.

    Strings are tokenized as in lm-evaluation-harness: spaces at the end of the context belong to the continuation, both
    are tokenized as one text, and the continuation starts after as many tokens as the context alone has. A context of
    spaces only becomes empty; `first_id` is then the context, unless the tokenizer adds a begin token.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise RequestError(f"{name}: a context and a continuation are both strings or both ids, got {shown(context)}")
    if not isinstance(context, str):
        context_ids, target_ids = (text_ids(lm, part, f"{name}[{i}]") for i, part in enumerate((context, continuation)))
        context_ids = context_ids or [first_id(lm)]
    elif context:
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        all_ids, context_ids = (text_ids(lm, text, name) for text in (context + continuation, context))
        context_ids, target_ids = all_ids[: len(context_ids)] or [first_id(lm)], all_ids[len(context_ids) :]
    else:
        encoded = lm.require_tokenizer("strings need").encode(continuation, add_special_tokens=False)
        target_ids = id_list(encoded, lm.vocab_size, name)
        context_ids = [first_id(lm)]
        if target_ids[:1] == context_ids:  # the text has the token already, for example as `<s>`
            del target_ids[0]
    if not target_ids:
        raise RequestError(f"{name}: the continuation has no tokens, so that there is nothing to score")
    return ScoredTokens((*context_ids, *target_ids), len(context_ids), name)


def _item_tokens(lm: LanguageModel, item: Any, name: str) -> ScoredTokens:
    """Return the tokens of one item to score: a text, ids or a pair."""
    if _is_pair(item):
        context, continuation = item
        return pair_ids(lm, context, continuation, name)
    if not _is_single(item):
        raise RequestError(f"{name}: expected a string, token ids or a pair (context, continuation), got {shown(item)}")
    ids = text_ids(lm, item, name)
    if len(ids) < 2:
        raise RequestError(
            f"{name}: {len(ids)} tokens; the first token of a text is not scored: pass at least 2, or a pair: "
            "('', text) scores all tokens of a text after the begin token"
        )
    return ScoredTokens(tuple(ids), 1, name)


def _is_pair(item: Any) -> bool:
    """Return whether an item is a tuple of two texts, or of two lists of ids."""
    return isinstance(item, tuple) and len(item) == 2 and not any(isinstance(part, int | np.integer) for part in item)


def _is_single(item: Any) -> bool:
    """Return whether an item is a single text: a string, a list of ids, or a pair."""
    if isinstance(item, str) or _is_pair(item):
        return True
    if isinstance(item, np.ndarray | jax.Array):
        return item.ndim == 1 and item.dtype.kind in "iu"
    kinds = set(map(type, item)) if isinstance(item, list | tuple) else set()
    return bool(kinds) and all(issubclass(kind, int | np.integer) for kind in kinds)
