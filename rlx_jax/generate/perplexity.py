"""What `CausalLM.perplexity` reads and returns: a text of any length, by windows that overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx_jax.errors import RequestError
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.scored_texts import ScoredTokens, text_ids
from rlx_jax.generate.scoring import Score
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.text.opening import check_positions


def strides(ids: Sequence[int], stride: int, context: int) -> list[ScoredTokens]:
    """Windows of `context` tokens, each `stride` behind the one before, of which the tokens are scored that no window
    before them has. The first token of a window has nothing before it, and a window of no more than that is left out.
    """
    windows, end = [], 0
    for begin in range(0, len(ids), stride):
        seen, end = end, min(begin + context, len(ids))
        start = max(1, seen - begin)
        if start < end - begin:
            windows.append(ScoredTokens(tuple(ids[begin:end]), start, "the text", begin, end - seen))
        if end == len(ids):
            break
    return windows


def perplexity_windows(lm: LanguageModel, text: Any, stride: Any, context: Any) -> list[ScoredTokens]:
    """The windows that `CausalLM.perplexity` reads; arguments as there.

    Raises:
        RequestError, TokenIdError, SequenceLengthError: as there; a stride of 1 would count the first window alone.
    """
    if context is None and lm.max_positions is None:
        raise RequestError("perplexity: the model has no longest text; pass context=, the tokens of a window")
    size = lm.max_positions if context is None else whole_number("context", context, 2)
    assert size is not None
    check_positions(size, lm.max_positions, "perplexity: context")
    step = max(1, size // 2) if stride is None else whole_number("stride", stride, 1)
    if step > size:
        raise RequestError(f"stride is {step}, over the {size} tokens of a window: those between would be left out")
    ids = text_ids(lm, text, "text")
    if len(ids) < 2:
        raise RequestError(f"perplexity: a text of {len(ids)} tokens has none to predict; pass 2 at least")
    windows = strides(ids, step, size)
    if step == 1 and len(windows) > 1:
        raise RequestError(
            f"perplexity: the stride is 1: a window counts with its new tokens less one, so that of {len(windows)} "
            "only the first would; pass stride=2 at least"
        )
    return windows


def perplexity_of(windows: Sequence[ScoredTokens], scores: Sequence[Score]) -> float:
    """exp of the mean negative log-likelihood, as Hugging Face's page on perplexity takes it: of the means of the
    windows, each counted with its new tokens less one."""
    total = math.fsum(s.logprob / len(s.tokens) * (w.new - 1) for w, s in zip(windows, scores, strict=True))
    return exp_of(-total / sum(window.new - 1 for window in windows))


def exp_of(nats: float) -> float:
    """exp, which is infinite where a float cannot hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
