"""`speculative=` and `draft_tokens=` of a request, checked."""

from __future__ import annotations

from typing import Any

from rlx_jax.errors import RequestError, UnsupportedError, did_you_mean, listing, shown
from rlx_jax.generate.draft_model import DraftModel
from rlx_jax.generate.mtp import mtp_module
from rlx_jax.generate.prompt_lookup import PromptLookup
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.speculative import Drafter
from rlx_jax.runtime.inputs import whole_number

# Drafts a step where a request does not say.
DRAFT_TOKENS = 4
MAX_DRAFTS = 64
SOURCES = ("prompt", "mtp")


def drafter_of(speculative: Any, draft_tokens: int, lm: LanguageModel) -> Drafter | None:
    """Where the drafts of a request to `lm` come from; None for plain decoding. A `LanguageModel` is another model.

    Raises:
        RequestError: neither a source nor None; `draft_tokens` out of range or without a source; a model with another
            vocabulary, or that reads more than tokens. UnsupportedError: another model over another mesh; as
            `mtp_module`.
    """
    count = whole_number("draft_tokens", draft_tokens, 1)
    if count > MAX_DRAFTS:
        raise RequestError(f"draft_tokens is {count}; expected at most {MAX_DRAFTS}")
    if speculative is None:
        if count != DRAFT_TOKENS:
            raise RequestError(f"draft_tokens={count} without speculative=: say where drafts come from, as 'prompt'")
        return None
    if isinstance(speculative, LanguageModel):
        check_draft_model(speculative, lm)
        other = speculative.model
        return DraftModel(count, other.programs, other.first_input, other, speculative.max_positions)
    if isinstance(speculative, str) and speculative == "prompt":
        return PromptLookup(count)
    if isinstance(speculative, str) and speculative == "mtp":
        return mtp_module(lm.model, count)
    hint = did_you_mean(speculative, SOURCES) if isinstance(speculative, str) else ""
    raise RequestError(f"speculative is {shown(speculative)}; expected 'prompt', 'mtp', another CausalLM or None{hint}")


def check_draft_model(draft: LanguageModel, lm: LanguageModel) -> None:
    """Another model may draft: its ids mean the same, and tokens are all that it reads.

    Raises:
        RequestError, UnsupportedError: as `drafter_of`.
    """
    names = f"speculative: {draft.model.name} cannot draft for {lm.model.name}"
    if draft.vocab_size != lm.vocab_size:
        raise RequestError(f"{names}: it has {draft.vocab_size} tokens, and expected are {lm.vocab_size}")
    if draft.tokenizer and lm.tokenizer and not draft.tokenizer.same_ids(lm.tokenizer):
        raise RequestError(f"{names}: their tokenizers give other ids to the same tokens; use a model of one tokenizer")
    if draft.required:
        raise RequestError(f"{names}: beside tokens it reads {listing(draft.required)}")
    largest = max((*lm.buckets.prompt, *lm.buckets.context), default=0)
    if draft.max_positions is not None and draft.max_positions < largest:
        raise RequestError(
            f"{names}: it knows {draft.max_positions} positions, and the buckets of {lm.model.name} go up to {largest}"
        )
    ours, other = (model.programs.division for model in (lm.model, draft.model))
    if (ours and ours.mesh) != (other and other.mesh):
        over = " and ".join("one device" if d is None else f"a mesh of {d.text()}" for d in (other, ours))
        raise UnsupportedError(f"{names}: they are over {over}; make both with the same mesh=")
