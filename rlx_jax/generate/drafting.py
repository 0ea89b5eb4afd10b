"""`speculative=` and `draft_tokens=` of a request, checked."""

from __future__ import annotations

from typing import Any

from rlx_jax.errors import RequestError, did_you_mean, shown
from rlx_jax.generate.generation import DraftPlan
from rlx_jax.generate.look_up import PromptLookUp
from rlx_jax.text.requests import whole_number

DRAFT_TOKENS = 4
"""Drafts a step where a request does not say."""
MOST_DRAFTS = 64
SOURCES = ("prompt",)


def draft_plan(speculative: Any, draft_tokens: int) -> DraftPlan | None:
    """Where the drafts of a request come from; None for plain decoding.

    Raises:
        RequestError: neither a source nor None, or `draft_tokens` out of range or without a source.
    """
    count = whole_number("draft_tokens", draft_tokens, 1)
    if count > MOST_DRAFTS:
        raise RequestError(f"draft_tokens is {count}; expected at most {MOST_DRAFTS}")
    if speculative is None:
        if count != DRAFT_TOKENS:
            raise RequestError(f"draft_tokens={count} without speculative=: say where drafts come from, as 'prompt'")
        return None
    if isinstance(speculative, str) and speculative == "prompt":
        return PromptLookUp(count)
    hint = did_you_mean(speculative, SOURCES) if isinstance(speculative, str) else ""
    raise RequestError(f"speculative is {shown(speculative)}; expected 'prompt' or None{hint}")
