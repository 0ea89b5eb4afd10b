"""Where the drafts of a request come from: another model, a module of the model's own, or the row's own text.

`DraftModel`: Leviathan et al. 2023. A smaller model of the same vocabulary reads the same text; it draws its drafts
from its own distribution, and `VerifyLoop` keeps them so that the tokens are distributed as the larger one's.

`MtpModule`: DeepSeek-V3, arXiv:2412.19437, section 2.2. The module reads pairs: what the model's head reads of token i,
and token i + 1, at position i. It gives logits of token i + 2 and what its own head reads, which stands for the model's
hidden state where the next draft is made. Of pairs that are certain its state is kept; those of drafts are read once
more, with the model's hidden states, when `verify` has given them.

`PromptLookup`: Saxena 2023, "Prompt Lookup Decoding": where the last tokens of a row stood before, what came after them
there. It costs nothing and needs no second model; it helps where a text repeats what it was given, as in edits,
summaries and code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.compiler.executable import Shardings, StateArrays
from rlx_jax.errors import GraphError, RequestError, UnsupportedError, did_you_mean, listing, shown
from rlx_jax.generate.decode import Array, Sizes
from rlx_jax.generate.request import LanguageModel
from rlx_jax.generate.request_plan import PromptPart, bind_readers, prompt_blocks
from rlx_jax.generate.speculative import Drafter, Drafts, Judged, Own, Turn, after_tokens, choose_draft
from rlx_jax.lowering.lir.plan import Lir
from rlx_jax.program import Buildable, Built, MakesMtp
from rlx_jax.runtime.compile_flow import model_beside
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import ProgramKey, Programs, Variant
from rlx_jax.runtime.sequence_state import LENGTH
from rlx_jax.text.request_checks import pad_rows


@dataclass(frozen=True)
class ProgramDrafter:
    """What drafters have in common that run programs of another model in the loop. Where one is bound, `keys` are those
    programs, and it has no `model`: a compiled loop keeps no parameters alive."""

    tokens: int
    programs: Programs
    ids_input: str
    model: CompiledModel | None = None
    positions: int | None = None
    keys: tuple[ProgramKey, ...] = ()

    @property
    def unbound(self) -> CompiledModel:
        """The model, of what is not bound."""
        assert self.model is not None
        return self.model

    def params(self) -> Any:
        """The parameters of the other model."""
        return self.unbound.require_params("drafting")

    def lir(self) -> Lir | None:
        """The largest of its programs; the state is that of all."""
        return self.programs.function(self.keys[0]).lir

    def shardings(self) -> Shardings | None:
        """As where it runs alone."""
        return self.programs.shardings(self.keys[0], {})


@dataclass(frozen=True)
class DraftModel(ProgramDrafter):
    """See `Drafter`: `extend` of another model for one token. `carried`: arrays of its state that every token changes,
    with the axis of their rows."""

    asked: ClassVar[str] = "another model"
    hidden: ClassVar[bool] = False

    carried: tuple[tuple[str, int], ...] = ()

    def bound(self, sizes: Mapping[str, int]) -> DraftModel:
        """See `Drafter`."""
        model, logits = self.unbound, self.unbound.output_names[:1]
        key = model.as_program("extend").sized({**sizes, "seq": 1}, Variant(outputs=logits, spare=self.tokens))
        back = self.programs.template(model.as_program("verify").key(outputs=logits)).taken_back
        return replace(self, model=None, positions=None, keys=(key,), carried=back)

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Read the prompts; see `Drafter`."""
        variant = Variant(outputs=self.unbound.output_names[:1], spare=self.tokens)
        readers = bind_readers(self.unbound, sizes.widths, sizes.state, variant)
        parts = [PromptPart(width, width) for width in sizes.widths]
        *_, last = prompt_blocks(readers, parts, prompts, sizes.batch, {})
        return None, last.state

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """One token after the other; the last draft is read as well, so that the state has it should it be kept."""
        extend = self.programs.function(self.keys[0]).run
        rows, room, count = turn.rows, turn.room, self.tokens

        def step(carry: Any, number: Array) -> Any:
            state, ids, seen, fine = carry
            reads = rows.running & (number <= room)
            fed = {self.ids_input: ids[:, None], "lengths": reads.astype(jnp.int32)}
            outputs, state = extend(own.params, state, fed)
            ids, here, wanted, seen = choose_draft(turn, seen, outputs[0][:, 0], number)
            fine = fine & here
            after = {name: state[name] for name, _ in self.carried}
            return (state, ids, seen, fine), (ids, fine, wanted, after)

        start = (dict(own.state), rows.ids, rows.seen, rows.running)
        (state, *_), (*steps, after) = lax.scan(step, start, jnp.arange(count + 1, dtype=jnp.int32))
        before = {name: own.state[name] for name, _ in self.carried}
        return Drafts.of_steps(count, *steps), replace(own, kept=(before, after), state=state)

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """The state after the tokens that were taken."""
        before, after = own.kept
        state = own.state | {LENGTH: turn.held + judged.count}
        for name, axis in self.carried:
            every = jnp.moveaxis(after[name], 0, axis + 1)
            state[name] = after_tokens(before[name], every, judged.count, axis)
        return replace(own, kept=None, state=state)


# The input of hidden states, and the output.
HIDDEN = "hidden"


@dataclass(frozen=True)
class MtpModule(ProgramDrafter):
    """See `Drafter`: `extend` of the module, the first key for the pairs that a step has made certain, the second for
    one draft.

    It keeps those pairs: tokens `[B, k + 1]`, hidden states `[B, k + 1, H]`, and how many there are `[B]`, at least 1
    in a row that runs.
    """

    asked: ClassVar[str] = "'mtp'"
    hidden: ClassVar[bool] = True

    def bound(self, sizes: Mapping[str, int]) -> MtpModule:
        """See `Drafter`."""
        extend = self.unbound.as_program("extend")
        keys = tuple(extend.sized({**sizes, "seq": seq}) for seq in (self.tokens + 1, 1))
        return replace(self, model=None, keys=keys)

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """Read the pairs of the prompts, all but the last, which waits for its drafts; see `Drafter`."""
        filled = [*prompts, *([0] for _ in range(sizes.batch - len(prompts)))]
        lengths = np.array([len(p) for p in filled], np.int32)
        readers = bind_readers(self.unbound, sizes.widths, sizes.state, Variant(outputs=(HIDDEN,)))
        state: StateArrays = {}
        at = 0
        for reader, width, block in zip(readers, sizes.widths, hidden, strict=True):
            tokens = pad_rows([p[at + 1 : at + 1 + width] for p in filled], width)
            fed = {self.ids_input: tokens, HIDDEN: block, "lengths": np.clip(lengths - 1 - at, 0, width)}
            _, state = reader(fed, state)
            at += width
        kept = programs.call(first_pair, hidden, lengths, first, static=(self.tokens + 1,), at=programs.whole)
        return kept, state

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """The first draft from the model's hidden states, the others each from the one before."""
        first, chain = (self.programs.function(key).run for key in self.keys)
        rows, room = turn.rows, turn.room
        ids, hidden, pairs = own.kept

        def read(run: Any, state: StateArrays, ids: Array, hidden: Array, lengths: Array) -> tuple[Array, Array, Any]:
            fed = {self.ids_input: ids, HIDDEN: hidden, "lengths": lengths}
            (logits, hidden), state = run(own.params, state, fed)
            return logits[:, 0], hidden.astype(jnp.float32), state

        logits, hidden, state = read(first, dict(own.state), ids, hidden, pairs)
        held = state[LENGTH]
        ids, fine, wanted, seen = choose_draft(turn, rows.seen, logits, jnp.int32(0))
        fine = fine & rows.running

        def step(carry: Any, number: Array) -> Any:
            state, ids, hidden, seen, fine = carry
            reads = rows.running & (number < room)
            logits, hidden, state = read(chain, state, ids[:, None], hidden, reads.astype(jnp.int32))
            ids, here, wanted, seen = choose_draft(turn, seen, logits, number)
            fine = fine & here
            return (state, ids, hidden, seen, fine), (ids, fine, wanted)

        begin: Any = (state, ids, hidden, seen, fine)
        (state, *_), others = lax.scan(step, begin, jnp.arange(1, self.tokens, dtype=jnp.int32))
        steps: Any = jax.tree.map(lambda a, more: jnp.concatenate([a[None], more]), (ids, fine, wanted), others)
        return Drafts.of_steps(self.tokens, *steps), replace(own, state=state | {LENGTH: held})

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """Each token that was taken, with what the model's head read for it."""
        assert judged.hidden is not None  # `MtpModule.hidden` asks for it
        hidden = jnp.where(judged.now[..., None], judged.hidden, 0.0)
        return replace(own, kept=(judged.chosen, hidden, judged.count))


def first_pair(width: int, blocks: tuple[Array, ...], lengths: Array, first: Array) -> tuple[Array, Array, Array]:
    """What `MtpModule` keeps behind the prompts: of `width` pairs the first, made of the last token's hidden states.

    `blocks` are hidden states `[B, S, H]` of the prompts, part by part; `lengths` `[B]` of the prompts; `first`
    `[B, 1]`, the tokens chosen behind them.
    """
    hidden, at = jnp.zeros_like(blocks[0][:, 0]), 0
    for block in blocks:
        number = lengths - 1 - at
        found = jnp.take_along_axis(block, number[:, None, None], axis=1, mode="clip")[:, 0]
        hidden = jnp.where(((number >= 0) & (number < block.shape[1]))[:, None], found, hidden)
        at += block.shape[1]
    ids = jnp.pad(jnp.maximum(first, 0), ((0, 0), (0, width - 1)))
    return ids, jnp.pad(hidden[:, None], ((0, 0), (0, width - 1), (0, 0))), jnp.ones_like(lengths)


# -- which module ------------------------------------------------------------------------------


def mtp_module(model: CompiledModel, tokens: int) -> MtpModule:
    """The module of a model's own checkpoint, which is read when it is first asked for.

    Raises:
        UnsupportedError: it has none. GraphError: what there is does not fit the model. Others, of
            weights that are missing or have another shape, as the family's recipe raises them.
    """
    make = mtp_of(model.flow)
    if make is None:
        raise UnsupportedError(
            f"speculative='mtp': {model.name} has no module that predicts several tokens (MTP); only Qwen 3.5 has one "
            "here: use 'prompt' or another CausalLM"
        )
    module = model_beside(model, make)
    check_module(module, model)
    return MtpModule(tokens, module.programs, module.first_input, module)


def mtp_of(flow: Buildable) -> MakesMtp | None:
    """What makes the module of a flow, if it has one."""
    return mtp_of(flow.flow) if isinstance(flow, Built) and flow.flow is not flow else getattr(flow, "_mtp", None)


def check_module(module: CompiledModel, model: CompiledModel) -> None:
    """A module reads ids and the model's hidden states, and gives the model's logits and hidden states as wide.

    Raises:
        GraphError: names what differs.
    """
    whole = model.template("forward")
    width, vocab = whole.mir.type(whole.head.operands[0]).shape[-1], whole.head.words
    inputs = {d.name: d.type for d in module.flow._inputs}
    graph = module.template("forward").mir
    outputs = {name: graph.type(v) for name, v in zip(graph.output_names, graph.outputs, strict=True)}
    fits = (
        list(inputs)[1:] == [HIDDEN] and inputs[HIDDEN].shape[-1:] == (width,)
        and list(outputs) == ["logits", HIDDEN] and outputs["logits"].shape[-1] == vocab
        and outputs[HIDDEN].shape[-1] == width
    )  # fmt: skip
    if not fits:
        raise GraphError(
            f"{module.name} cannot draft for {model.name}: it reads {_told(inputs)} and gives {_told(outputs)}; "
            f"expected ids and {HIDDEN} [batch, seq, {width}], and logits [batch, seq, {vocab}] and {HIDDEN} as wide"
        )


def _told(types: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {t}" for name, t in types.items())


# Tokens of an end of the text that are compared at most.
LONGEST = 8


@dataclass(frozen=True)
class PromptLookup:
    """See `Drafter`. It keeps the tokens of each row, `[B, T]` int32, of as many as the request has slots."""

    asked: ClassVar[str] = "'prompt'"
    hidden: ClassVar[bool] = False
    positions: ClassVar[int | None] = None

    tokens: int
    slots: int = 0  # where it is bound: they are in no size of a program whose layers all have windows or states

    def bound(self, sizes: Mapping[str, int]) -> PromptLookup:
        """For a cache of this size."""
        return replace(self, slots=sizes["context"])

    def params(self) -> None:
        """It has none."""

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """The tokens of prompts `[batch, slots]`, with the first new one of each."""
        tokens, lengths = np.zeros((sizes.batch, sizes.slots), np.int32), np.zeros(sizes.batch, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return programs.call(written, tokens, lengths, first, at=programs.whole), {}

    def lir(self) -> None:
        """It runs no program of its own."""

    def shardings(self) -> None:
        """So there is nothing to divide."""

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """What came after the place that `find_place` finds; see `Drafter`."""
        tokens, last = own.kept, turn.held
        place, found = find_place(tokens, last)
        # Behind the end of the text come the drafts themselves: what repeats goes on repeating.
        steps = jnp.arange(self.tokens, dtype=jnp.int32)[None] % jnp.maximum(last - place, 1)[:, None]
        ids = jnp.take_along_axis(tokens, place[:, None] + 1 + steps, axis=1, mode="clip")
        return Drafts(ids, jnp.where(found, self.tokens, 0)), own

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """Put the new tokens behind the others."""
        tokens = own.kept
        behind = turn.held[:, None] + 1 + jnp.arange(judged.now.shape[1], dtype=jnp.int32)[None]
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        at = jnp.where(judged.now, behind, tokens.shape[1])
        return replace(own, kept=tokens.at[rows, at].set(judged.chosen, mode="drop"))


def find_place(tokens: Array, last: Array) -> tuple[Array, Array]:
    """Where the end of a text stood before: tokens `[B, T]`, the index of the last one `[B]` → (index of the last token
    there `[B]` int32, whether there is one `[B]` bool).

    Of all earlier places that end with the same token the one with most tokens in common, `LONGEST` at most, and of
    several the latest.
    """
    width = tokens.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)[None]
    alike = jnp.zeros(tokens.shape, jnp.int32)
    same = at < last[:, None]
    for back in range(min(LONGEST, width)):
        end = jnp.take_along_axis(tokens, (last - back)[:, None], axis=1, mode="clip")
        earlier = jnp.pad(tokens[:, : width - back], ((0, 0), (back, 0)), constant_values=-1)
        same = same & (earlier == end)
        alike = alike + same.astype(jnp.int32)
    most = alike.max(axis=1)
    place = jnp.where((alike == most[:, None]) & (alike > 0), at, 0).max(axis=1)
    return place, most > 0


def written(tokens: Array, at: Array, first: Array) -> Array:
    """`tokens` `[B, T]` with `first` `[B, 1]` at index `at` `[B]` of its row; what is no token changes nothing."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return tokens.at[rows, jnp.where(first[:, 0] >= 0, at, tokens.shape[1])].set(first[:, 0], mode="drop")


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
