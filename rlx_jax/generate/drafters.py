"""The drafters for speculative decoding: a draft model, a multi-token prediction module, or n-grams of the text.

`DraftModel`: Leviathan et al. 2023. A smaller model of the same vocabulary reads the same text and samples drafts from
its own distribution. `VerifyLoop` accepts them such that the tokens follow the distribution of the larger model.

`MtpModule`: DeepSeek-V3, arXiv:2412.19437, section 2.2. At position i the module reads a pair: the model's hidden state
(the input of its head) at token i, and token i + 1. It returns logits of token i + 2 and a hidden state, which replaces
the model's hidden state for the next draft. Its state retains pairs of accepted tokens only. Pairs of drafts are read
again once `verify` has computed the model's hidden states.

`PromptLookup`: Saxena 2023, "Prompt Lookup Decoding". It finds an earlier occurrence of the last tokens of a row, and
proposes the tokens that followed it. It costs almost nothing and needs no second model. It helps where a text repeats
its prompt, as in edits, summaries and code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Shardings, StateArrays
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import GraphError, RequestError, UnsupportedError, did_you_mean, listing, shown
from rlx_jax.generate.decode import Array, Sizes
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.request_plan import bind_prefill, prompt_blocks
from rlx_jax.generate.speculative import (
    Drafter,
    DrafterState,
    Drafts,
    DraftStep,
    VerifiedTokens,
    choose_draft,
    state_after_tokens,
)
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.program import Buildable, Built, MtpFactory
from rlx_jax.runtime.compile_flow import companion_model
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.program_key import ProgramKey, Variant
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.sequence_state import LENGTH
from rlx_jax.text.request_checks import pad_rows


@dataclass(frozen=True)
class ProgramDrafter(Drafter):
    """Base class of drafters that run programs of another model in the loop.

    Attributes:
        programs: the programs of the other model.
        ids_input: name of its token input.
        model: the other model; None in a bound drafter, so that a compiled loop keeps no parameters alive.
        keys: in a bound drafter, the programs that it runs.
    """

    programs: Programs = field(kw_only=True)
    ids_input: str = field(kw_only=True)
    model: CompiledModel | None = None
    keys: tuple[ProgramKey, ...] = ()

    @property
    def unbound_model(self) -> CompiledModel:
        """Return the model of a drafter that is not bound."""
        assert self.model is not None
        return self.model

    def params(self) -> Any:
        """Return the parameters of the other model."""
        return self.unbound_model.require_params("drafting")

    def lir(self) -> Lir | None:
        """Return the largest of its programs; all of them share one state."""
        return self.programs.function(self.keys[0]).lir

    def shardings(self) -> Shardings | None:
        """Return the shardings of that program, the same as where the model runs by itself."""
        return self.programs.shardings(self.keys[0], {})


@dataclass(frozen=True)
class DraftModel(ProgramDrafter):
    """Drafter that runs `extend` of another model, one token at a time.

    Attributes:
        rollback_arrays: arrays of its state that every token changes and that have no position axis, with the axis of
            their rows. They are recorded after each draft, as rejecting a draft must undo it.
    """

    source_name: ClassVar[str] = "another model"

    rollback_arrays: tuple[tuple[str, int], ...] = ()

    def bind(self, sizes: Mapping[str, int]) -> DraftModel:
        """Return the drafter with the program `extend` for one token, and without parameters; see `Drafter`."""
        model, logits = self.unbound_model, self.unbound_model.output_names[:1]
        key = model.as_program("extend").key_for_sizes({**sizes, "seq": 1}, Variant(outputs=logits, spare=self.tokens))
        back = self.programs.template(model.as_program("verify").key(outputs=logits)).rollback_arrays
        return replace(self, model=None, max_positions=None, keys=(key,), rollback_arrays=back)

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Prefill the prompts; ring buffers of windowed layers get `self.tokens` spare slots. See `Drafter`."""
        variant = Variant(outputs=self.unbound_model.output_names[:1], spare=self.tokens)
        prefill_programs = bind_prefill(self.unbound_model, sizes.prefill_widths, sizes.state, variant)
        *_, last_block = prompt_blocks(prefill_programs, self.ids_input, prompts, sizes.batch)
        return None, last_block.state

    def propose(self, drafter_state: DrafterState, draft_step: DraftStep) -> tuple[Drafts, DrafterState]:
        """Propose drafts one by one.

        The model also reads the last draft, so that its state has it in case the draft is accepted.
        """
        extend = self.programs.function(self.keys[0]).run
        rows, draft_limit, count = draft_step.rows, draft_step.draft_limit, self.tokens

        def step(carry: Any, number: Array) -> Any:
            """Choose draft `number` (from 0 on) after the token before it; the body of the scan.

            The last step reads the last draft and chooses none, hence `<=`.
            """
            state, ids, history, is_valid = carry
            reads = rows.running & (number <= draft_limit)
            extend_inputs = {self.ids_input: ids[:, None], "lengths": reads.astype(jnp.int32)}
            outputs, state = extend(drafter_state.params, state, extend_inputs)
            ids, finite, draft_logits, history = choose_draft(draft_step, history, outputs[0])
            is_valid = is_valid & finite
            rollback_arrays = {name: state[name] for name, _ in self.rollback_arrays}
            return (state, ids, history, is_valid), (ids, is_valid, draft_logits, rollback_arrays)

        start = (dict(drafter_state.state), rows.ids, rows.history, rows.running)
        (state, *_), (*steps, rollback_arrays) = lax.scan(step, start, jnp.arange(count + 1, dtype=jnp.int32))
        before = {name: drafter_state.state[name] for name, _ in self.rollback_arrays}
        return Drafts.from_steps(count, *steps), replace(drafter_state, carry=(before, rollback_arrays), state=state)

    def accept(self, drafter_state: DrafterState, draft_step: DraftStep, verified: VerifiedTokens) -> DrafterState:
        """Reset the state to the accepted tokens."""
        before, after = drafter_state.carry
        # The length truncates arrays with a position axis.
        state = drafter_state.state | {LENGTH: draft_step.state_lengths + verified.num_emitted}
        for name, axis in self.rollback_arrays:
            states = jnp.moveaxis(after[name], 0, axis + 1)
            state[name] = state_after_tokens(before[name], states, verified.num_emitted, axis)
        return replace(drafter_state, carry=None, state=state)


# Name of the input and of the output of a module that are hidden states.
HIDDEN = "hidden"


@dataclass(frozen=True)
class MtpModule(ProgramDrafter):
    """Drafter that runs `extend` of a module for multi-token prediction (MTP).

    The first of its keys is the program for the pairs of the tokens accepted in a step, the second one for a single
    draft. `DrafterState.carry` are these pairs: tokens `[B, k + 1]`, hidden states `[B, k + 1, H]`, and their number
    `[B]`, at least 1 in a running row.
    """

    source_name: ClassVar[str] = "'mtp'"
    needs_hidden: ClassVar[bool] = True

    def bind(self, sizes: Mapping[str, int]) -> MtpModule:
        """Return the drafter with its two programs, and without parameters; see `Drafter`."""
        extend = self.unbound_model.as_program("extend")
        keys = tuple(extend.key_for_sizes({**sizes, "seq": seq}) for seq in (self.tokens + 1, 1))
        return replace(self, model=None, keys=keys)

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Prefill the pairs of the prompts, except the last pair, which the first `propose` reads; see `Drafter`."""
        padded = [*prompts, *([0] for _ in range(sizes.batch - len(prompts)))]
        lengths = np.array([len(p) for p in padded], np.int32)
        variant = Variant(outputs=(HIDDEN,))
        prefill_programs = bind_prefill(self.unbound_model, sizes.prefill_widths, sizes.state, variant)
        state: StateArrays = {}
        offset = 0
        for program, width, block in zip(prefill_programs, sizes.prefill_widths, hidden, strict=True):
            tokens = pad_rows([p[offset + 1 : offset + 1 + width] for p in padded], width)  # pair i has token i + 1
            reader_inputs = {self.ids_input: tokens, HIDDEN: block, "lengths": np.clip(lengths - 1 - offset, 0, width)}
            _, state = program(reader_inputs, state)
            offset += width
        count, replicated = self.tokens + 1, programs.replicated
        pairs = programs.run_helper(initial_pairs, hidden, lengths, first, static=(count,), out_shardings=replicated)
        return pairs, state

    def propose(self, drafter_state: DrafterState, draft_step: DraftStep) -> tuple[Drafts, DrafterState]:
        """Propose the first draft from the model's hidden states, and each other draft from the previous one."""
        run_pairs, run_draft = (self.programs.function(key).run for key in self.keys)
        rows, draft_limit = draft_step.rows, draft_step.draft_limit
        ids, hidden, pairs = drafter_state.carry
        # In slots the first token is chosen after `start`; it is the last one of the only pair.
        is_last = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] == pairs[:, None] - 1
        ids = jnp.where(is_last, rows.ids[:, None], ids)

        def read(run: Any, state: StateArrays, ids: Array, hidden: Array, lengths: Array) -> tuple[Array, Array, Any]:
            module_inputs = {self.ids_input: ids, HIDDEN: hidden, "lengths": lengths}
            (logits, hidden), state = run(drafter_state.params, state, module_inputs)
            return logits, hidden.astype(jnp.float32), state

        logits, hidden, state = read(run_pairs, dict(drafter_state.state), ids, hidden, pairs)
        length = state[LENGTH]  # without the drafts below, which are read again once they are accepted
        ids, is_valid, draft_logits, history = choose_draft(draft_step, rows.history, logits)
        is_valid = is_valid & rows.running

        def step(carry: Any, number: Array) -> Any:
            """Choose draft `number` (from 1 on) from the previous draft and its hidden state `[B, 1, H]`, in a scan."""
            state, ids, hidden, history, is_valid = carry
            reads = rows.running & (number < draft_limit)
            logits, hidden, state = read(run_draft, state, ids[:, None], hidden, reads.astype(jnp.int32))
            ids, finite, draft_logits, history = choose_draft(draft_step, history, logits)
            is_valid = is_valid & finite
            return (state, ids, hidden, history, is_valid), (ids, is_valid, draft_logits)

        initial_carry: Any = (state, ids, hidden, history, is_valid)
        (state, *_), more_steps = lax.scan(step, initial_carry, jnp.arange(1, self.tokens, dtype=jnp.int32))
        first = ids, is_valid, draft_logits
        steps: Any = jax.tree.map(lambda a, more: jnp.concatenate([a[None], more]), first, more_steps)
        return Drafts.from_steps(self.tokens, *steps), replace(drafter_state, state=state | {LENGTH: length})

    def accept(self, drafter_state: DrafterState, draft_step: DraftStep, verified: VerifiedTokens) -> DrafterState:
        """Pair each accepted token with the model's hidden state for it."""
        assert verified.hidden is not None  # since `MtpModule.needs_hidden` is true
        hidden = jnp.where(verified.is_emitted[..., None], verified.hidden, 0.0)
        return replace(drafter_state, carry=(verified.ids, hidden, verified.num_emitted))


def initial_pairs(width: int, blocks: tuple[Array, ...], lengths: Array, first: Array) -> tuple[Array, Array, Array]:
    """Return the initial pairs of `MtpModule` after prefill: the first of `width` pairs, which has the hidden state of
    the last prompt token and the first new token; the others are padding.

    Args:
        blocks: hidden states of the prompts, one `[B, S, H]` for each chunk.
        lengths: `[B]`, lengths of the prompts.
        first: `[B, 1]`, the tokens chosen after the prompts; negative for idle rows.
    """
    hidden, offset = jnp.zeros_like(blocks[0][:, 0]), 0
    for block in blocks:
        index = lengths - 1 - offset
        candidate = jnp.take_along_axis(block, index[:, None, None], axis=1, mode="clip")[:, 0]
        hidden = jnp.where(((index >= 0) & (index < block.shape[1]))[:, None], candidate, hidden)
        offset += block.shape[1]
    ids = jnp.pad(jnp.maximum(first, 0), ((0, 0), (0, width - 1)))
    return ids, jnp.pad(hidden[:, None], ((0, 0), (0, width - 1), (0, 0))), jnp.ones_like(lengths)


def empty_pairs(drafter: Drafter | None, rows: int) -> Any:
    """Return the `DrafterState.carry` of empty slots: that of `MtpModule`, and None for other drafters."""
    if not isinstance(drafter, MtpModule):
        return None
    (width,) = (d.type.shape[-1] for d in drafter.unbound_model.flow._inputs if d.name == HIDDEN)
    ids = np.zeros((rows, drafter.tokens + 1), np.int32)
    return ids, np.zeros((*ids.shape, width), np.float32), np.zeros(rows, np.int32)


def mtp_module(model: CompiledModel, tokens: int) -> MtpModule:
    """Return a drafter with the MTP module of the model's checkpoint, which is loaded on first use.

    Raises:
        UnsupportedError: it has none. GraphError: the module does not fit the model. Errors about weights that are
            missing or have another shape are raised by the recipe of the family.
    """
    make = mtp_factory(model.flow)
    if make is None:
        raise UnsupportedError(
            f"speculative='mtp': {model.name} has no module that predicts several tokens (MTP); only Qwen 3.5 has one: "
            "use 'prompt' or another CausalLM"
        )
    module = companion_model(model, make)
    check_module(module, model)
    return MtpModule(tokens, model=module, programs=module.programs, ids_input=module.first_input)


def mtp_factory(flow: Buildable) -> MtpFactory | None:
    """Return the function that builds the MTP module of a flow, or None if the flow has no module."""
    if isinstance(flow, Built) and flow.flow is not flow:
        return mtp_factory(flow.flow)
    return getattr(flow, "_make_mtp", None)


def check_module(module: CompiledModel, model: CompiledModel) -> None:
    """Check that a module reads ids and hidden states, and returns logits and hidden states, of the model's sizes.

    Raises:
        GraphError: names the difference.
    """
    template = model.template("forward")
    width, vocab = template.mir.type(template.head.operands[0]).shape[-1], template.head.vocab_size
    inputs = {d.name: d.type for d in module.flow._inputs}
    graph = module.template("forward").mir
    outputs = dict(zip(graph.output_names, graph.output_types, strict=True))
    fits = (
        list(inputs)[1:] == [HIDDEN] and inputs[HIDDEN].shape[-1:] == (width,)
        and list(outputs) == ["logits", HIDDEN] and outputs["logits"].shape[-1] == vocab
        and outputs[HIDDEN].shape[-1] == width
    )  # fmt: skip
    if not fits:
        raise GraphError(
            f"{module.name} cannot draft for {model.name}: it reads {_type_list(inputs)} and returns "
            f"{_type_list(outputs)}; expected ids and {HIDDEN} [batch, seq, {width}], and logits "
            f"[batch, seq, {vocab}] and {HIDDEN} as wide"
        )


def _type_list(types: Mapping[str, Any]) -> str:
    """Return names and types as text, for error messages."""
    return ", ".join(f"{name} {t}" for name, t in types.items())


# The longest n-gram at the end of the text that is compared with earlier text.
LONGEST_NGRAM = 8


@dataclass(frozen=True)
class PromptLookup(Drafter):
    """Drafter by n-grams of the text itself (prompt lookup)."""

    source_name: ClassVar[str] = "'prompt'"
    reads_tokens: ClassVar[bool] = True

    def propose(self, drafter_state: DrafterState, draft_step: DraftStep) -> tuple[Drafts, DrafterState]:
        """Propose the tokens that follow the match of `find_ngram`; see `Drafter`."""
        tokens, last_index = draft_step.rows.history.tokens, draft_step.state_lengths
        match_index, has_match = find_ngram(tokens, last_index)
        # Past the end of the text the drafts continue themselves, so that a repetition goes on: hence the modulo.
        steps = jnp.arange(self.tokens, dtype=jnp.int32)[None] % jnp.maximum(last_index - match_index, 1)[:, None]
        ids = jnp.take_along_axis(tokens, match_index[:, None] + 1 + steps, axis=1, mode="clip")
        ids = jnp.maximum(ids, 0)  # of an idle row
        return Drafts(ids, jnp.where(has_match, self.tokens, 0)), drafter_state


def find_ngram(tokens: Array, last: Array) -> tuple[Array, Array]:
    """Find an earlier occurrence of the n-gram at the end of a text.

    The longest match counts, of at most `LONGEST_NGRAM` tokens, and the latest of several.

    Args:
        tokens: `[B, T]`.
        last: `[B]`, index of the last token of each text.

    Returns:
        index of the last token of the match, `[B]` int32; and whether there is a match, `[B]` bool.
    """
    width = tokens.shape[1]
    indices = jnp.arange(width, dtype=jnp.int32)[None]
    match_len = jnp.zeros(tokens.shape, jnp.int32)  # number of matching tokens, for a match that ends at each index
    same = indices < last[:, None]
    for back in range(min(LONGEST_NGRAM, width)):
        end = jnp.take_along_axis(tokens, (last - back)[:, None], axis=1, mode="clip")
        earlier = jnp.pad(tokens[:, : width - back], ((0, 0), (back, 0)), constant_values=-1)
        same = same & (earlier == end)
        match_len = match_len + same.astype(jnp.int32)
    longest = match_len.max(axis=1)
    index = jnp.where((match_len == longest[:, None]) & (match_len > 0), indices, 0).max(axis=1)
    return index, longest > 0


# Default number of drafts per step.
DRAFT_TOKENS = 4
# The loop is compiled for this number, and verifies all of them in every step.
MAX_DRAFTS = 64
SOURCES = ("prompt", "mtp")


def make_drafter(speculative: Any, draft_tokens: int, lm: LanguageModel) -> Drafter | None:
    """Return the drafter of a request to `lm`; None for plain decoding.

    Args:
        speculative: "prompt", "mtp", or a draft model: a `CausalLM`, or its `LanguageModel`.
        draft_tokens: number of drafts per step.

    Raises:
        RequestError: `speculative` is neither a source nor None; `draft_tokens` is out of range or without a source; or
            the draft model has another vocabulary or other inputs than tokens. UnsupportedError: the draft model is
            over another mesh; as `mtp_module`.
    """
    count = check_integer("draft_tokens", draft_tokens, 1)
    if count > MAX_DRAFTS:
        raise RequestError(f"draft_tokens is {count}; expected at most {MAX_DRAFTS}")
    if speculative is None:
        if count != DRAFT_TOKENS:
            raise RequestError(f"draft_tokens={count} without speculative=: name a source of drafts, such as 'prompt'")
        return None
    speculative = getattr(speculative, "_lm", speculative)
    if isinstance(speculative, LanguageModel):
        check_draft_model(speculative, lm)
        model, limit = speculative.model, speculative.max_positions
        return DraftModel(count, limit, model=model, programs=model.programs, ids_input=model.first_input)
    if isinstance(speculative, str) and speculative == "prompt":
        return PromptLookup(count)
    if isinstance(speculative, str) and speculative == "mtp":
        return mtp_module(lm.model, count)
    hint = did_you_mean(speculative, SOURCES) if isinstance(speculative, str) else ""
    raise RequestError(f"speculative is {shown(speculative)}; expected 'prompt', 'mtp', another CausalLM or None{hint}")


def check_draft_model(draft: LanguageModel, lm: LanguageModel) -> None:
    """Check that another model may draft: it has the same vocabulary and mesh, enough positions, and no inputs other
    than tokens.

    Raises:
        RequestError, UnsupportedError: as `make_drafter`.
    """
    prefix = f"speculative: {draft.model.name} cannot draft for {lm.model.name}"
    if draft.vocab_size != lm.vocab_size:
        raise RequestError(f"{prefix}: it has {draft.vocab_size} tokens, expected {lm.vocab_size}")
    if draft.tokenizer and lm.tokenizer and not draft.tokenizer.has_same_ids(lm.tokenizer):
        raise RequestError(f"{prefix}: their tokenizers assign other ids; use models with the same tokenizer")
    if draft.required_inputs:
        raise RequestError(f"{prefix}: it reads {listing(draft.required_inputs)} in addition to tokens")
    largest = max((*lm.buckets.prompt, *lm.buckets.context), default=0)
    if draft.max_positions is not None and draft.max_positions < largest:
        raise RequestError(f"{prefix}: it has {draft.max_positions} positions, and the buckets go up to {largest}")
    sharding, draft_sharding = (model.programs.model_sharding for model in (lm.model, draft.model))
    if (sharding and sharding.mesh) != (draft_sharding and draft_sharding.mesh):
        names = ("one device" if d is None else f"a mesh of {d.text()}" for d in (draft_sharding, sharding))
        meshes = " and ".join(names)
        raise UnsupportedError(f"{prefix}: they are on {meshes}; load both with the same mesh=")
