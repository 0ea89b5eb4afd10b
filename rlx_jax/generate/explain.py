"""`lm.explain`: what one step of decoding, or the prefill of a prompt, consists of, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import NumericsError, RequestError, check_names, suggest_keywords
from rlx_jax.generate.generation import GeneratesText, start_generation
from rlx_jax.generate.request import check_request
from rlx_jax.generate.request_plan import RequestPlan, plan_request, prompt_blocks
from rlx_jax.generate.row_options import RowOptions
from rlx_jax.generate.sampler import Sampler
from rlx_jax.inspection.page import Page
from rlx_jax.inspection.records import Inspection
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.explain import PaddedSizes, explain_program, model_page
from rlx_jax.runtime.inputs import check_flag, check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.text.request_checks import classify_prompts
from rlx_jax.text.token_model import check_positions

# The tokens of a row, prompt and answer, where the caller gives no number.
DEFAULT_CONTEXT = 512
# The programs that can be explained.
PROGRAMS = ("decode", "prefill")


@suggest_keywords()
def explain(
    self: GeneratesText, program: str = "decode", *, batch: int = 1, context: int | None = None,
    runs: int = 3, measure: bool = True,
) -> Inspection:  # fmt: skip
    """Explain one step of decoding, or prefill: per block its time, work and share of the roofline; the largest losses
    with what would reduce them; and findings, such as copies and padding. Print the result, or use its fields.

    It runs `batch` prompts of random tokens, greedily, in the programs that `generate` runs. A model without parameters
    is not run: its times are estimates, which the text says.

    Args:
        program: "decode" is one step of the generation loop, at the end of `context` tokens; "prefill" the first chunk
            of prompts of `context` tokens.
        batch: number of rows.
        context: number of tokens of each row; by default 512, or as many as the model has positions.
        runs: number of traced runs, of which the mean counts; a run of decoding is one dispatch of the loop.
        measure: compile and run the program; False estimates its times from the plan alone.

    Raises:
        RequestError: an unknown program, or too short a context. SequenceLengthError: more tokens than positions.
        UnsupportedError: traces of this device name no kernels.
    """
    check_names([program], PROGRAMS, "explain: there is no program", "; there are", RequestError)
    lm = replace(self._lm, eos_ids=())  # no row may end early
    batch, runs = check_integer("batch", batch, 1), check_integer("runs", runs, 1)
    positions = lm.max_positions or DEFAULT_CONTEXT + 1
    context = min(DEFAULT_CONTEXT, positions - 1) if context is None else check_integer("context", context, 1)
    decodes, steps = program == "decode", lm.model.settings.loop.steps
    check_flag("measure", measure)
    new = "" if decodes else " and a new token"
    check_positions(context + bool(new), lm.max_positions, f"explain: context {context}{new}")
    # The first new token comes from prefill. Two runs of the loop do not count: see `profile_run`.
    num_new = 1 + steps * (runs + 2) if decodes else 1
    if decodes and context <= num_new:
        raise RequestError(
            f"explain: context is {context}, and {runs + 2} runs of the loop decode {num_new} tokens: pass at least "
            f"{num_new + 1}, or fewer runs"
        )
    shape = batch, context - num_new if decodes else context
    prompts = np.random.default_rng(0).integers(0, lm.vocab_size, shape).tolist()
    options = RowOptions(num_new, Sampler(), (), (), 0, 0)
    plan = plan_request(lm, check_request(lm, classify_prompts(prompts), (options,)))
    programs, is_measured = lm.model.programs, measure and lm.model.params is not None
    if decodes:
        times = time_decode(plan, runs) if is_measured else None
        sizes = {"batch": (batch, plan.sizes.batch), "context": (context, plan.sizes.cache_len)}
        padding = PaddedSizes(sizes, "the cache")
        return explain_program(programs, plan.loop.key, times, steps, padding)
    times = time_prefill(plan, runs) if is_measured else None
    width = plan.sizes.prefill_widths[0]
    padding = PaddedSizes({"batch": (batch, plan.prefill_batch), "seq": (min(context, width), width)})
    return explain_program(programs, plan.prefill_programs[0].key, times, 1, padding)


def show(self: GeneratesText, *programs: str, compare: Sequence[Inspection] = (), **options: Any) -> Page:
    """Return the page of what `explain` returns of decoding and prefill. A notebook displays it, and `save` writes it.

    Args:
        programs: only these of the two.
        compare: what `explain` returned for other models or profiles, to compare with.
        options: for `explain`.

    Raises:
        RequestError: `compare` is something else. Others as `explain`.
    """
    return model_page(self._lm.model, lambda: [explain(self, p, **options) for p in programs or PROGRAMS], compare)


def time_decode(plan: RequestPlan, runs: int) -> BlockTimes:
    """Return the time by block of a dispatch of the generation loop.

    Raises:
        NumericsError: the logits of a row are not finite, so that it ended before the loop did.
    """
    generation = start_generation(plan)
    num_rows = len(plan.request.rows)

    def advance() -> Any:
        generation.block = generation.loop.advance()
        return generation.block[0]

    # `generate` too dispatches a block of tokens before it waits for the one in front of it.
    times = profile_run([plan.loop.model.programs], advance, runs, queued=True)
    tokens = jax.device_get(generation.block[0])[:num_rows]
    if (tokens < 0).any():
        raise NumericsError("explain: the logits are not finite, so that decoding ends early and cannot be timed")
    return times


def time_prefill(plan: RequestPlan, runs: int) -> BlockTimes:
    """Return the time by block of prefill of the first chunk of the prompts."""

    def prefill() -> Any:
        blocks = prompt_blocks(plan.prefill_programs, plan.lm.ids_input, plan.request.rows, plan.prefill_batch)
        return next(blocks).logits

    return profile_run([plan.loop.model.programs], prefill, runs)


def profile(self: GeneratesText, prompts: Any, max_new_tokens: int = 64, **options: Any) -> BlockTimes:
    """Measure the time by block of `generate(prompts, max_new_tokens, **options)`.

    It runs three times, the last two under `jax.profiler`, of which the last counts. Prefill and the loop have separate
    rows.
    """
    models = [self._lm.model, getattr(options.get("speculative"), "model", None)]
    programs = [model.programs for model in models if isinstance(model, CompiledModel)]
    return profile_run(programs, lambda: self.generate(prompts, max_new_tokens, **options))
