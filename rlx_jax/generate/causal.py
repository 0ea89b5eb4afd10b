"""`CausalLM`: logits, and generation with a key/value cache, for any causal flow.

The cached programs are derived from the flow's forward program; nothing here knows how.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np

from rlx_jax.compiler.executable import Arrays, Progress, StateArrays
from rlx_jax.errors import BatchMismatchError, DeriveError, RequestError, SequenceLengthError, listing, number, shown
from rlx_jax.generate.decode_state import DecodeState, LastRows, moved_back
from rlx_jax.generate.drafting import DRAFT_TOKENS, Speaker, draft_plan
from rlx_jax.generate.generation import DraftPlan, Generation, NewTokens, Request, RequestPlan, generate
from rlx_jax.generate.request_inputs import NONE, declared, request_inputs
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.serving import (
    Sizes,
    check_samplers,
    pad_step,
    prefill_slots,
    request_sizes,
    warm_blocks,
    warm_contexts,
    warm_requests,
)
from rlx_jax.generate.stopping import cut, settled, split_stops, stopped_at
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.profiles import CompileProfile
from rlx_jax.program import Weights
from rlx_jax.runtime.inputs import random_key
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.report import Report, Speculated
from rlx_jax.runtime.state import as_state
from rlx_jax.text.chat import chat_prompt
from rlx_jax.text.opening import (
    check_logits,
    check_positions,
    check_tokenizer,
    known_positions,
    open_token_model,
    primary,
)
from rlx_jax.text.padding import check_buckets, check_sizes, cropped, pad_block
from rlx_jax.text.requests import Prompts, id_list, split_prompts, token_block, whole_number
from rlx_jax.text.tokenizer import Tokenizer

GREEDY = Sampler()
Inputs = Mapping[str, Any] | None
MAX_SLOTS = 2**30  # of a cache; the next power of two is no dimension of XLA


class CausalLM:
    """A causal language model: `flow` maps token ids `[batch, seq]` to logits `[batch, seq, vocab]`.

    Args:
        flow: a `ModelFlow` whose first input is the ids, or a recipe; or a compiled model, whose programs it shares.
        weights: as in `rlx_jax.compile`.
        tokenizer: for strings; `rlx_jax.load` brings the checkpoint's own.
        max_positions: the longest sequence the model knows, in tokens.
        eos_ids: tokens that end a row.
        progress: told how far loading and compiling are; see `rlx_jax.compiler.executable.Progress`.
    """

    def __init__(
        self,
        flow: Any,
        weights: Weights = None,
        *,
        tokenizer: Tokenizer | None = None,
        profile: CompileProfile | None = None,
        mesh: Any = None,
        strict: bool = True,
        max_positions: int | None = None,
        eos_ids: int | Sequence[int] = (),
        bos_id: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.vocab_size = open_token_model(
            flow,
            weights,
            profile,
            mesh,
            strict,
            progress,
            max_positions,
            programs=("forward", *CACHED_PROGRAMS),
            inputs=True,
        )
        check_logits(self.model, self.vocab_size)
        self.tokenizer, self.max_positions = check_tokenizer(tokenizer), known_positions(self.model)
        self._ids, self._logits = self.model.flow.inputs[0].name, self.model.output_names[:1]
        self.buckets = self.model.settings.buckets
        check_buckets(self.buckets, self.max_positions)
        self._speculated: Speculated | None = None
        self.eos_ids = eos_ids
        if tokenizer and not self.eos_ids:
            self.eos_ids = tokenizer.eos_ids
        if bos_id is not None:
            (bos_id,) = id_list([bos_id], self.vocab_size, "bos_id")
        self.bos_id = bos_id if bos_id is not None else (tokenizer.bos_id if tokenizer else None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a row. May be set, to ids or one id of the vocabulary."""
        return self._eos_ids

    @eos_ids.setter
    def eos_ids(self, ids: int | Sequence[int]) -> None:
        self._eos_ids = tuple(id_list([ids] if isinstance(ids, int | np.integer) else ids, self.vocab_size, "eos_ids"))

    def __repr__(self) -> str:
        positions = self.max_positions or "any number of"
        return (
            f"CausalLM({self.model.name}: vocabulary {self.vocab_size}, {positions} positions, "
            f"target {self.model.settings.target})"
        )

    # -- programs ----------------------------------------------------------------------------

    def logits(
        self, tokens: Any, lengths: Any = None, attention_mask: Any = None, *, inputs: Inputs = None
    ) -> jax.Array:
        """Logits of every position: tokens `[B, S]` ints → `[B, S, V]` float32. At padding they mean nothing.

        Args:
            lengths: `[B]`, valid tokens of right-padded rows.
            attention_mask: `[B, S]`, 1 at the valid tokens of rows padded on the left or on the right; in place of
                `lengths`. Positions count valid tokens.
            inputs: what the flow reads beside tokens, by name: `{"image": pixels}`, a row for each of the tokens.
        """
        block, _, starts = token_block(tokens, self.vocab_size, lengths, attention_mask)
        self._check_positions(block.shape[1], "tokens")
        padded = pad_block(self.buckets, block, self.max_positions) if self._pads else block
        beside = request_inputs(self.model, inputs, len(block)).padded(len(padded))
        out = cropped(self.model.programs, primary(self.model(padded, **beside)), *block.shape)
        return self._moved_back(out, starts)

    def prefill(
        self, tokens: Any, lengths: Any = None, max_len: int | None = None, logits: Literal["all", "last"] = "all",
        attention_mask: Any = None, *, inputs: Inputs = None,
    ) -> tuple[jax.Array, DecodeState]:  # fmt: skip
        """Read prompts into a new state: tokens `[B, S]` right-padded, `lengths` `[B]` ≥ 1 → (`[B, S, V]`, state).

        Args:
            max_len: tokens that a row may hold; by default room for 256 more, within the model's positions.
            logits: "last" gives those of each row's last token only, `[B, V]`.
            attention_mask: as in `logits`, for rows padded on the left.
            inputs: as in `logits`; what is computed of them alone is kept in the state, and `extend` needs none.
        """
        block, valid, starts = token_block(tokens, self.vocab_size, lengths, attention_mask)
        longest = int(valid.max())
        self._check_positions(longest, "the prompt")
        max_len = self._max_len(max_len, longest)
        padded = pad_block(self.buckets, block, max_len or self.max_positions)
        rows, width = padded.shape
        slots = prefill_slots(self.buckets, longest, width, max_len, self.max_positions)
        beside = request_inputs(self.model, inputs, len(block))
        sizes = {**beside.sizes, "batch": rows, "context": slots}
        reader = self._program("prefill").reader(
            {**sizes, "seq": width}, last_only=_last_only(logits), outputs=self._logits, given=beside.given
        )
        out, after = self._run(reader, {}, padded, valid, block.shape[1], beside.padded(rows))
        state = DecodeState(as_state(after), valid, max_len or slots, sizes, self._owner, beside.given)
        return (out if logits == "last" else self._moved_back(out, starts)), state

    def extend(
        self, state: DecodeState, tokens: Any, lengths: Any = None, logits: Literal["all", "last"] = "all"
    ) -> tuple[jax.Array, DecodeState]:
        """Read more tokens after a state: tokens `[B, S]`, `lengths` `[B]` (0 allowed) → (`[B, S, V]`, new state).

        The old state is consumed. Positions at or behind `lengths` mean nothing.

        Raises:
            SequenceLengthError: a row would not fit; the state is unchanged.
            SessionStateError: the state was consumed already.
        """
        if not isinstance(state, DecodeState):
            raise RequestError(f"extend: expected the state that prefill returned, got {type(state).__name__}")
        state.take(self._owner, peek=True)
        block, valid, _ = token_block(tokens, self.vocab_size, lengths, low=0)
        if block.shape[0] != len(state.lengths):
            raise BatchMismatchError(f"extend: the state holds {len(state.lengths)} rows, tokens {block.shape[0]}")
        self._check_room(state, valid)
        padded = pad_step(self.buckets, block, state.sizes)
        reader = self._program("extend").bound(
            {**state.sizes, "seq": padded.shape[1]}, last_only=_last_only(logits), outputs=self._logits,
            given=state.given,
        )  # fmt: skip
        held = state.take(self._owner)
        try:
            out, after = self._run(reader, held.arrays(), padded, valid, block.shape[1])
        except BaseException:
            if not held.length.is_deleted():  # the program did not begin: the state is as it was
                state.state = held
            raise
        return out, replace(state, state=as_state(after), lengths=state.lengths + valid)

    @property
    def _owner(self) -> tuple[Programs, str]:
        """Whose states this model takes: those of its flow's programs, whatever the parameters."""
        return self.model.programs, self.model.name

    def _program(self, name: str) -> CompiledModel:
        return replace(self.model, program=name)

    def _run(
        self, reader: BoundProgram, state: StateArrays, padded: Any, valid: Any, seq: int, beside: Arrays | None = None
    ) -> tuple[jax.Array, StateArrays]:
        """Run a program on checked tokens. Rows behind `valid` and positions from `seq` on are padding, and prefill
        wants one token of such a row."""
        idle = np.full(len(padded) - len(valid), int(reader.model.program == "prefill"))
        lengths = np.concatenate([valid, idle]).astype(np.int32)
        (out, *_), after = reader({self._ids: padded, "lengths": lengths, **(beside or {})}, state)
        if reader.key.last_only:
            return self.model.programs.call(LastRows(len(valid)), out), after
        return cropped(self.model.programs, out, len(valid), seq), after

    @functools.cached_property
    def _pads(self) -> bool:
        """Whether a block may be padded: tokens behind the end of a row change nothing before it, and rows nothing in
        others. That is what has to be proved of a flow before a cached program is derived from it."""
        try:
            return bool(self.model.programs.any_template(self.model.name, "prefill"))
        except DeriveError:
            return False

    def _moved_back(self, array: jax.Array, starts: np.ndarray[Any, Any]) -> jax.Array:
        """`[B, S, …]` with each row where it began."""
        return self.model.programs.call(moved_back, array, starts.astype(np.int32)) if starts.any() else array

    # -- generation --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        sampler: Sampler = GREEDY,
        stop: str | int | Iterable[str | int] = (),
        seed: int = 0,
        attention_mask: Any = None,
        *,
        inputs: Inputs = None,
        speculative: Any = None,
        draft_tokens: int = DRAFT_TOKENS,
    ) -> Any:
        """Continue prompts: strings give strings, id lists give id lists, one gives one; new tokens only.

        Args:
            prompts: a string, a list of strings, an id list, or a list of id lists; rows may differ in length. An empty
                one starts from the begin token; without a begin token it is an error.
            max_new_tokens: at most this many new tokens a row; an end token ends its row and is its last id.
            sampler: how tokens are chosen; greedy by default. See `Sampler`.
            stop: strings that end a row before them, or token ids that end it as an end token does. Ids that are asked
                for as ids end with the token that completes a stop string.
            seed: of the random draws, below 2**64. A row draws from its place in the request, whoever shares the batch.
            attention_mask: `[B, S]`, 1 at the tokens of prompts that are padded to `[B, S]`, on the left or the right.
            inputs: what the flow reads beside tokens, by name: `{"image": pixels}`, a row for each prompt.
            speculative: read several tokens a step, of which those are kept that the model itself would choose:
                "prompt" drafts what followed the same words earlier in the text, another `CausalLM` of the same
                vocabulary what it would say. What came of it is in `report().speculative`.
            draft_tokens: drafts a step.

        Raises:
            RequestError: see `rlx_jax.errors`.
            NumericsError: logits of a row are not finite. The other rows were generated, and are in its `outputs`.
        """
        if attention_mask is not None:
            block, lengths, _ = token_block(prompts, self.vocab_size, mask=attention_mask, what="prompts")
            prompts = [row[:n].tolist() for row, n in zip(block, lengths, strict=True)]
        asked = split_prompts(prompts)
        drafts = self._drafts(speculative, draft_tokens)
        request = self._request(asked, max_new_tokens, sampler, stop, seed, inputs, drafts)
        new = NewTokens([[] for _ in request.rows])
        for _ in self._blocks(request, new):
            pass
        texts = asked.texts is not None
        outputs: list[Any] = [self._text(ids, request.words) for ids in new.rows] if texts else [*new.rows]
        new.check(outputs)
        return outputs[0] if asked.single else outputs

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        sampler: Sampler = GREEDY,
        stop: str | int | Iterable[str | int] = (),
        seed: int = 0,
        *,
        inputs: Inputs = None,
        speculative: Any = None,
        draft_tokens: int = DRAFT_TOKENS,
    ) -> Iterator[Any]:
        """As `generate` for one prompt, in pieces as they come: text of a string, token ids of ids.

        Joined together the pieces are what `generate` returns. Text is held back while it may still change: half of a
        character, or the beginning of a stop string.
        """
        asked = split_prompts(prompt)
        if not asked.single:
            raise RequestError("stream: one prompt at a time; generate takes several")
        drafts = self._drafts(speculative, draft_tokens)
        request = self._request(asked, max_new_tokens, sampler, stop, seed, inputs, drafts)
        return self._pieces(request, asked.texts is not None)

    # -- chat --------------------------------------------------------------------------------

    def chat(
        self,
        messages: Any,
        max_new_tokens: int = 64,
        sampler: Sampler = GREEDY,
        stop: str | int | Iterable[str | int] = (),
        seed: int = 0,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        allow_special: bool = False,
        **variables: Any,
    ) -> Any:
        """The model's reply to a conversation, as text; with `stream` an iterator over its pieces as they come.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, …]`, or a string: one message of the user.
            max_new_tokens, sampler, stop, seed: as in `generate`. The checkpoint's end tokens end the reply.
            tools, chat_template, allow_special, variables: as in `apply_chat_template`.

        Raises:
            RequestError, TokenizerError, LimitError: as `apply_chat_template` and `generate`.
        """
        if not isinstance(stream, bool):
            raise RequestError(f"stream is {shown(stream)}; expected True or False")
        ids = self.apply_chat_template(
            messages, tools=tools, chat_template=chat_template, allow_special=allow_special, **variables
        )
        request = self._request(Prompts(None, [ids], True), max_new_tokens, sampler, stop, seed)
        pieces = self._pieces(request, text=True)
        return pieces if stream else "".join(pieces)

    def apply_chat_template(
        self,
        messages: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        allow_special: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as the checkpoint's template writes it: token ids to generate from, or the text.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, …]`, or a string: one message of the user.
            tools: JSON schemas of functions, for templates that tell the model about them.
            chat_template: the name of one of the checkpoint's templates, or a template to use in their place.
            add_generation_prompt: end with what begins a reply.
            tokenize: ids; or else text, with the names of control tokens as people may have written them.
            allow_special: control tokens that stand in the messages are read as these tokens, not as text.
            variables: others that the template reads, such as `enable_thinking=False`.

        Raises:
            RequestError: there is no template, it refuses the messages or makes a control token of what they hold, or
                they are wrong; the place is named.
            TokenizerError: the template is wrong, or does what the sandbox forbids.
            LimitError: it takes too long, too much memory, or writes too much; see `rlx_jax.text.chat_template`.
        """
        return chat_prompt(
            self._tokenizer("chat needs"),
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            allow_special=allow_special,
            variables=variables,
        )

    # -- warm-up -----------------------------------------------------------------------------

    def warmup(self, max_new_tokens: int = 64, samplers: Sampler | Sequence[Sampler] | None = None) -> None:
        """Run every program once that requests within the profile's buckets can need; then none of them compiles.

        `generate`, `stream` and `chat` are covered, and `prefill` and `extend` with `logits="last"`. What compiles
        later all the same is counted in `report().recompiles`, and is as the profile's `buckets.on_recompile` says.

        Args:
            max_new_tokens: what requests will ask for at most, where the profile has no `buckets.context`.
            samplers: those that requests will use; None stands for every kind.

        Raises:
            RequestError: the profile has no buckets for prompts and batches.
        """
        budget = whole_number("max_new_tokens", max_new_tokens, 1)
        if required := [name for name, d in declared(self.model).items() if not d.optional]:
            raise RequestError(
                f"warmup: requests bring {listing(required)}, of sizes that are not known before they come"
            )
        given = self.model.settings.buckets
        check_sizes(given)
        chosen = check_samplers(samplers)
        self.buckets = replace(given, context=warm_contexts(given, budget, self.max_positions))
        with self.model.programs.warm_up():
            self._run_all(chosen)

    def _run_all(self, samplers: Sequence[Sampler]) -> None:
        for rows, length, slots, sampler in warm_requests(self.buckets, samplers):
            request = Request(((0,) * length,) * rows, slots - length, sampler, (), (), seed=2**32)
            sizes = replace(request_sizes(self.buckets, [length] * rows, 1, self.max_positions), slots=slots)
            for step, _ in enumerate(self._generation(request, sizes)):
                if step == 1:  # the first token, and a block of the loop
                    break
        for rows, width, slots in warm_blocks(self.buckets):
            block = np.zeros((rows, width), np.int32)
            _, state = self.prefill(block, np.ones(rows, int), max_len=slots, logits="last")
            for more in (block, block[:, :1]):
                _, state = self.extend(state, more, np.zeros(rows, int), logits="last")
        for rows in range(1, self.buckets.batch[-1]):  # how many rows there are decides how an answer is cut
            self.prefill(np.zeros((rows, 1), np.int32), max_len=self.buckets.context[0], logits="last")

    # -- a request ---------------------------------------------------------------------------

    def _request(
        self, asked: Prompts, max_new_tokens: int, sampler: Sampler, stop: str | int | Iterable[str | int], seed: int,
        inputs: Inputs = None, drafts: DraftPlan | None = None,
    ) -> Request:  # fmt: skip
        """What was asked for, checked; nothing has run yet."""
        budget = whole_number("max_new_tokens", max_new_tokens, 0)
        rows = self._rows(asked)
        words, ends = self._stops(stop)
        if not isinstance(sampler, Sampler):
            raise RequestError(f"sampler is {shown(sampler)}; expected rlx_jax.Sampler(temperature=0.0)")
        sampler.knobs(self.vocab_size)
        if isinstance(random_key("seed", seed), jax.core.Tracer):
            raise RequestError(
                "generate runs on the host, which reads its tokens: call it outside jax.jit and the like"
            )
        for i, row in enumerate(rows):
            self._check_positions(len(row) + budget, what := f"prompts[{i}]: {len(row)} tokens + {number(budget)} new")
            if drafts is not None:
                check_positions(len(row) + budget, drafts.positions, f"speculative: {what}")
            if len(row) + budget > MAX_SLOTS:
                raise SequenceLengthError(f"{what}: over the limit of {MAX_SLOTS} positions; ask for fewer new tokens")
        beside = request_inputs(self.model, inputs, len(rows)) if rows else NONE
        return Request(tuple(map(tuple, rows)), budget, sampler, tuple(sorted(ends)), words, seed, beside, drafts)

    def _drafts(self, speculative: Any, draft_tokens: int) -> DraftPlan | None:
        other = speculative._speaker if isinstance(speculative, CausalLM) else speculative
        return draft_plan(other, draft_tokens, self._speaker)

    @property
    def _speaker(self) -> Speaker:
        return Speaker(self.model, self.vocab_size, self.tokenizer, self.max_positions)

    def _pieces(self, request: Request, text: bool) -> Iterator[Any]:
        ids: list[int] = []
        new = NewTokens([ids])
        sent: int = 0
        for _ in self._blocks(request, new):
            if not text:
                yield from ids[sent:]
                sent = len(ids)
                continue
            known = settled(self._decode(ids), request.words)
            if len(known) > sent:
                yield known[sent:]
                sent = len(known)
        whole = self._text(ids, request.words) if text else ids
        if text and whole[sent:]:
            yield whole[sent:]
        new.check([whole])

    def _blocks(self, request: Request, new: NewTokens) -> Iterator[None]:
        """Generate: the new tokens of each row are appended to `new`, block by block."""
        if not (request.rows and request.budget):
            return
        sizes = request_sizes(self.buckets, [len(r) for r in request.rows], request.budget, self.max_positions)
        generation = self._generation(request, sizes)
        for block in generation:
            new.append(block)
            self._speculated = generation.speculated or self._speculated
            counts = {i: stopped_at(self._decode, new.rows[i], n, request.words) for i, n in new.grown.items()}
            done = {i: count for i, count in counts.items() if count is not None}
            for i, count in done.items():
                new.end(i, count)
            if done:
                generation.stop(done)
            yield

    def _generation(self, request: Request, sizes: Sizes) -> Generation:
        """The request begins to run: prompts are read, and the first token of each row is chosen."""
        method = request.sampler.method(self.vocab_size)
        method = method.widened() if self.buckets.prompt or self.buckets.batch else method
        ends = np.zeros(self.vocab_size, bool)
        ends[list(request.ends)] = True
        knobs = request.sampler.knobs(self.vocab_size, method.biased)
        plan = RequestPlan(
            method, knobs, ends, request.seed, sizes.batch, sizes.widths, sizes.slots, request.budget,
            self.model.settings.loop, request.inputs, request.drafts,
        )  # fmt: skip
        return generate(self.model, request.rows, plan)

    def _rows(self, asked: Prompts) -> list[list[int]]:
        """Prompts as ids, each with at least one."""
        if asked.texts is not None:
            rows = self._tokenizer().encode_batch(asked.texts)
            rows = [id_list(row, self.vocab_size, f"prompts[{i}]") for i, row in enumerate(rows)]
        else:
            rows = [id_list(row, self.vocab_size, f"prompts[{i}]") for i, row in enumerate(asked.ids or [])]
        for i, row in enumerate(rows):
            if not row and self.bos_id is None:
                raise RequestError(f"prompts[{i}] is empty, and the model has no begin token to start from")
        return [row or [self.bos_id] for row in rows]  # type: ignore[list-item]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer().decode(ids)

    def _text(self, ids: list[int], words: tuple[str, ...]) -> str:
        return cut(self._decode(ids), words)

    def _stops(self, stop: Any) -> tuple[tuple[str, ...], set[int]]:
        words, others = split_stops(stop)
        if words:
            self._tokenizer()
        return words, {*id_list(others, self.vocab_size, "stop"), *self.eos_ids}

    # -- checks ------------------------------------------------------------------------------

    def _tokenizer(self, what: str = "strings need") -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} a tokenizer: there is no tokenizer.json; pass token ids to generate")
        return self.tokenizer

    def _check_positions(self, tokens: int, what: str) -> None:
        check_positions(tokens, self.max_positions, what)

    def _max_len(self, max_len: int | None, longest: int) -> int | None:
        if max_len is None:
            return None
        slots = whole_number("max_len", max_len, 1)
        self._check_positions(slots, "max_len")
        if longest > slots:
            raise SequenceLengthError(f"a prompt of {longest} tokens does not fit max_len={slots}")
        return slots

    def _check_room(self, state: DecodeState, valid: np.ndarray[Any, Any]) -> None:
        after = state.lengths + valid
        if (after > state.capacity).any():
            i = int(np.argmax(after - state.capacity))
            raise SequenceLengthError(
                f"extend: row {i} holds {state.lengths[i]} tokens and would get {valid[i]} more, "
                f"the state has {state.capacity} slots; prefill with a larger max_len"
            )

    def report(self) -> Report:
        """What compiling cost, and the needs of the program that ran last: forward, prefill or extend."""
        programs = ("forward", *CACHED_PROGRAMS)  # a model that was compiled before may have run others
        used = [
            key for key in self.model.programs.executables if key.flow == self.model.name and key.program in programs
        ]
        key = used[-1] if used else None
        report = (self.model if key is None else replace(self.model, program=key.program, last=key)).report()
        return replace(report, speculative=self._speculated)


def _last_only(logits: str) -> bool:
    if logits not in ("all", "last"):
        raise RequestError(f"logits is {shown(logits)}; expected 'all' or 'last'")
    return logits == "last"
