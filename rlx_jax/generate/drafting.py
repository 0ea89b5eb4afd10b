"""`speculative=` and `draft_tokens=` of a request, checked."""

from __future__ import annotations

from typing import Any

from rlx_jax.errors import RequestError, UnsupportedError, did_you_mean, listing, shown
from rlx_jax.generate.draft_model import DraftModel
from rlx_jax.generate.look_up import PromptLookUp
from rlx_jax.generate.mtp import mtp_plan
from rlx_jax.generate.plan import DraftPlan
from rlx_jax.generate.request_inputs import declared
from rlx_jax.generate.speaker import Speaker
from rlx_jax.text.requests import whole_number

DRAFT_TOKENS = 4
"""Drafts a step where a request does not say."""
MAX_DRAFTS = 64
SOURCES = ("prompt", "mtp")


def draft_plan(speculative: Any, draft_tokens: int, speaker: Speaker) -> DraftPlan | None:
    """Where the drafts of a request to `speaker` come from; None for plain decoding. A `Speaker` is another model.

    Raises:
        RequestError: neither a source nor None; `draft_tokens` out of range or without a source; a model with another
            vocabulary, or that reads more than tokens. UnsupportedError: another model over another mesh; as
            `mtp_plan`.
    """
    count = whole_number("draft_tokens", draft_tokens, 1)
    if count > MAX_DRAFTS:
        raise RequestError(f"draft_tokens is {count}; expected at most {MAX_DRAFTS}")
    if speculative is None:
        if count != DRAFT_TOKENS:
            raise RequestError(f"draft_tokens={count} without speculative=: say where drafts come from, as 'prompt'")
        return None
    if isinstance(speculative, Speaker):
        check_draft_model(speculative, speaker)
        return DraftModel(speculative.model, count, speculative.max_positions)
    if isinstance(speculative, str) and speculative == "prompt":
        return PromptLookUp(count)
    if isinstance(speculative, str) and speculative == "mtp":
        return mtp_plan(speaker, count)
    hint = did_you_mean(speculative, SOURCES) if isinstance(speculative, str) else ""
    raise RequestError(f"speculative is {shown(speculative)}; expected 'prompt', 'mtp', another CausalLM or None{hint}")


def check_draft_model(draft: Speaker, speaker: Speaker) -> None:
    """Another model may draft: its ids mean the same, and tokens are all that it reads.

    Raises:
        RequestError, UnsupportedError: as `draft_plan`.
    """
    names = f"speculative: {draft.model.name} cannot draft for {speaker.model.name}"
    if draft.vocab_size != speaker.vocab_size:
        raise RequestError(f"{names}: it has {draft.vocab_size} tokens, and expected are {speaker.vocab_size}")
    if draft.tokenizer and speaker.tokenizer and not draft.tokenizer.same_ids(speaker.tokenizer):
        raise RequestError(f"{names}: their tokenizers give other ids to the same tokens; use a model of one tokenizer")
    if required := [name for name, d in declared(draft.model).items() if not d.optional]:
        raise RequestError(f"{names}: beside tokens it reads {listing(required)}")
    largest = max((*speaker.buckets.prompt, *speaker.buckets.context), default=0)
    if draft.max_positions is not None and draft.max_positions < largest:
        raise RequestError(
            f"{names}: it knows {draft.max_positions} positions, and the buckets of {speaker.model.name} go up to "
            f"{largest}"
        )
    ours, other = (model.programs.division for model in (speaker.model, draft.model))
    if (ours and ours.mesh) != (other and other.mesh):
        over = " and ".join("one device" if d is None else f"a mesh of {d.text()}" for d in (other, ours))
        raise UnsupportedError(f"{names}: they are over {over}; make both with the same mesh=")
