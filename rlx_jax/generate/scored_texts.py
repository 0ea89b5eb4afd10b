"""What `CausalLM.score` is given: texts, ids and pairs, as tokens of which the last ones are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import RequestError, shown
from rlx_jax.generate.request import LanguageModel
from rlx_jax.text.opening import check_positions
from rlx_jax.text.requests import as_known_arrays, id_list


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids of which those from `start` on, which is at least 1, are scored behind all that stand before them.

    `name` is what messages call them, and `first` how many tokens of the text stand before the first one. Of a window
    of a longer text, `new` are the tokens that no window before it has.
    """

    ids: tuple[int, ...]
    start: int
    name: str = "texts"
    first: int = 0
    new: int = 0

    @property
    def width(self) -> int:
        """Tokens that the model reads: the last one has nothing behind it to predict."""
        return len(self.ids) - 1


def scored_tokens(lm: LanguageModel, texts: Any) -> tuple[list[ScoredTokens], bool]:
    """The tokens of each item, and whether it is one that stands alone.

    Raises:
        RequestError: neither texts, nor ids, nor pairs of them; nothing to score; no tokenizer, or no begin token.
        TokenIdError: an id that the model does not have. SequenceLengthError: an item is over the model's positions.
    """
    texts = as_known_arrays("texts", texts)
    single = _is_one(texts)
    if not single and not isinstance(texts, list | tuple | np.ndarray | jax.Array):
        raise RequestError(
            "score: expected a string, token ids, a pair (context, continuation), or a list of them, got "
            f"{shown(texts)}"
        )
    items = [texts] if single else list(texts)
    found = [_read(lm, item, "texts" if single else f"texts[{i}]") for i, item in enumerate(items)]
    for item in found:
        # As in lm-evaluation-harness: the last token is not read, and may stand one behind the last position.
        check_positions(item.width, lm.max_positions, f"{item.name}: {len(item.ids)} tokens, the last one not read")
    return found, single


def text_ids(lm: LanguageModel, text: Any, what: str) -> list[int]:
    """The ids of a string, with the special tokens that the tokenizer puts around it, or ids as they are."""
    if isinstance(text, str):
        text = lm.needed("strings need").encode(text)
    return id_list(text, lm.vocab_size, what)


def first_id(lm: LanguageModel) -> int:
    """What stands before a text that has nothing before it: the begin token, or else the end token.

    Raises:
        RequestError: there is neither.
    """
    if lm.bos_id is not None:
        return lm.bos_id
    if lm.eos_ids:
        return lm.eos_ids[0]
    raise RequestError(
        "score: an empty context stands for the begin token, or else the end token, and the model has neither; "
        "pass bos_id= or eos_ids= to CausalLM"
    )


def pair_ids(lm: LanguageModel, context: Any, continuation: Any, what: str) -> ScoredTokens:
    """A context and its continuation.

    Of strings, spaces at the end of the context belong to the continuation, both are tokenised as one text, and the
    continuation is what goes beyond the tokens of the context alone, as in lm-evaluation-harness. Of a context of
    spaces nothing is left, and then the first token stands before it unless the tokenizer puts one there.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise RequestError(f"{what}: a context and a continuation are both strings or both ids, got {shown(context)}")
    if not isinstance(context, str):
        before, behind = (text_ids(lm, part, f"{what}[{i}]") for i, part in enumerate((context, continuation)))
        before = before or [first_id(lm)]
    elif context:
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        whole, before = (text_ids(lm, text, what) for text in (context + continuation, context))
        before, behind = whole[: len(before)] or [first_id(lm)], whole[len(before) :]
    else:
        encoded = lm.needed("strings need").encode(continuation, add_special_tokens=False)
        behind = id_list(encoded, lm.vocab_size, what)
        before = [first_id(lm)]
        if behind[:1] == before:  # the text brings its own
            del behind[0]
    if not behind:
        raise RequestError(f"{what}: the continuation has no tokens of its own, so that there is nothing to score")
    return ScoredTokens((*before, *behind), len(before), what)


def _read(lm: LanguageModel, item: Any, what: str) -> ScoredTokens:
    if _is_pair(item):
        context, continuation = item
        return pair_ids(lm, context, continuation, what)
    if not _is_one(item):
        raise RequestError(f"{what}: expected a string, token ids or a pair (context, continuation), got {shown(item)}")
    ids = text_ids(lm, item, what)
    if len(ids) < 2:
        raise RequestError(
            f"{what}: {len(ids)} tokens, and the first of a text is given, not scored; pass 2, or a pair: "
            "('', text) scores all tokens of a text behind the begin token"
        )
    return ScoredTokens(tuple(ids), 1, what)


def _is_pair(item: Any) -> bool:
    """A tuple of two texts, or of two lists of ids."""
    return isinstance(item, tuple) and len(item) == 2 and not any(isinstance(part, int | np.integer) for part in item)


def _is_one(item: Any) -> bool:
    """A string, a list of ids, or a pair."""
    if isinstance(item, str) or _is_pair(item):
        return True
    if isinstance(item, np.ndarray | jax.Array):
        return item.ndim == 1 and item.dtype.kind in "iu"
    kinds = set(map(type, item)) if isinstance(item, list | tuple) else set()
    return bool(kinds) and all(issubclass(kind, int | np.integer) for kind in kinds)
