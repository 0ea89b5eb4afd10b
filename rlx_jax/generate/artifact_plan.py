"""The programs and settings of a language model's artifact."""

from __future__ import annotations

from typing import Any

from rlx_jax.errors import UnsupportedError, listing
from rlx_jax.runtime.export_model import ArtifactPlan
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.text.tokenizer import tokenizer_files


def language_model_plan(lm: Any) -> ArtifactPlan:
    """Return the programs that `logits`, `prefill`, `extend`, `generate`, `stream` and `chat` run.

    Raises:
        UnsupportedError: requests need other inputs than tokens; or the flow has no key/value cache.
    """
    model, programs = lm.model, lm.model.programs
    if required := [name for name, d in model.request_inputs.items() if not d.optional]:
        raise UnsupportedError(f"{model.name}: export: requests pass {listing(required)}; export lm.model")
    if reason := programs.derivation_error(model.name, "prefill"):
        raise UnsupportedError(f"{model.name}: export: {reason}: export lm.model, the forward program")
    outputs = model.output_names[:1]
    keys = [ProgramKey(model.name, "forward")]
    for program in ("prefill", "extend"):
        keys += [model.as_program(program).key(outputs=outputs, last_only=last_only) for last_only in (True, False)]
    settings = {"eos_ids": list(lm.eos_ids), "bos_id": lm.bos_id}
    return ArtifactPlan("CausalLM", tuple(keys), (), settings, tokenizer_files(lm.tokenizer))
