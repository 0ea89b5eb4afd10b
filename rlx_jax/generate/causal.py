"""`CausalLM`: logits, and generation with a key/value cache, for any causal flow.

The cached programs are derived from the flow's forward program; nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from rlx_jax.built import Weights
from rlx_jax.errors import (
    BatchMismatchError,
    RequestError,
    SequenceLengthError,
    SessionStateError,
    ShapeError,
    number,
    shown,
)
from rlx_jax.executable import Progress
from rlx_jax.generate.chat import chat_prompt
from rlx_jax.generate.generation import Plan, append, generate
from rlx_jax.generate.opening import check_positions, check_tokenizer, known_positions, open_token_model, primary
from rlx_jax.generate.requests import (
    Prompts,
    bucket,
    id_list,
    row_lengths,
    split_prompts,
    token_block,
    whole_number,
)
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.tokenizer import Tokenizer
from rlx_jax.model import CompiledModel
from rlx_jax.profiles import CompileProfile
from rlx_jax.report import Report
from rlx_jax.state import State

GREEDY = Sampler()
PROMPT_BUCKET = 16
CONTEXT_BUCKET = 64
MAX_SLOTS = 2**30  # of a cache; the next power of two is no dimension of XLA
ROOM = 256  # free slots after a prompt when prefill is not told max_len


@dataclass(eq=False)
class DecodeState:
    """The cache of a batch: what `prefill` returns and `extend` consumes.

    `lengths` are the tokens each row holds, int64 `[B]` on the host; `capacity` is the number of slots.
    """

    state: State | None
    lengths: np.ndarray[Any, Any]
    capacity: int
    owner: object

    @property
    def length(self) -> Any:
        """Tokens in each row, int32 `[B]` on the device."""
        return self.take(self.owner, peek=True).length

    def take(self, owner: object, peek: bool = False) -> State:
        """The state, once."""
        if owner is not self.owner:
            raise SessionStateError("this state belongs to another model; call prefill of the model you extend with")
        if self.state is None:
            raise SessionStateError("this state was consumed by an earlier call; go on with the state that it returned")
        state = self.state
        if not peek:
            self.state = None
        return state


class CausalLM:
    """A causal language model: `flow` maps token ids `[batch, seq]` to logits `[batch, seq, vocab]`.

    Args:
        flow: a `ModelFlow` whose first input is the ids, or a recipe.
        weights: as in `rlx_jax.compile`.
        tokenizer: for strings; `rlx_jax.load` brings the checkpoint's own.
        max_positions: the longest sequence the model knows, in tokens.
        eos_ids: tokens that end a row.
        progress: told how far loading and compiling are; see `rlx_jax.executable.Progress`.
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
        self.model, self.vocab_size = open_token_model(flow, weights, profile, mesh, strict, progress)
        self._check_width()
        self.tokenizer, self.max_positions = check_tokenizer(tokenizer), known_positions(self.model, max_positions)
        ends = id_list([eos_ids] if isinstance(eos_ids, int) else eos_ids, self.vocab_size, "eos_ids")
        self.eos_ids = tuple(ends) or (tokenizer.eos_ids if tokenizer else ())
        if bos_id is not None:
            (bos_id,) = id_list([bos_id], self.vocab_size, "bos_id")
        self.bos_id = bos_id if bos_id is not None else (tokenizer.bos_id if tokenizer else None)

    # -- programs ----------------------------------------------------------------------------

    def logits(self, tokens: Any, lengths: Any = None) -> jax.Array:
        """Logits of every position: tokens `[B, S]` ints → `[B, S, V]` float32.

        `lengths` `[B]`: valid tokens of right-padded rows; what stands behind them means nothing.
        """
        block = token_block(tokens, self.vocab_size)
        row_lengths(lengths, block, low=1)
        self._check_positions(block.shape[1], "tokens")
        return primary(self.model(block))

    def prefill(
        self, tokens: Any, lengths: Any = None, max_len: int | None = None, logits: Literal["all", "last"] = "all"
    ) -> tuple[jax.Array, DecodeState]:
        """Read prompts into a new state: tokens `[B, S]` right-padded, `lengths` `[B]` ≥ 1 → (`[B, S, V]`, state).

        Args:
            max_len: slots of the cache; by default room for 256 more tokens, within the model's positions.
            logits: "last" gives those of each row's last token only, `[B, V]`.
        """
        block = token_block(tokens, self.vocab_size)
        batch, seq = block.shape
        valid = row_lengths(lengths, block, low=1)
        self._check_positions(int(valid.max()), "the prompt")
        capacity = self._capacity(seq, int(valid.max()), max_len)
        empty = self._program("prefill").init_state(batch, capacity)
        fresh = DecodeState(empty, np.zeros(batch, np.int64), capacity, self.model.compiler)
        return self._run("prefill", fresh, block, valid, logits)

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
        state.take(self.model.compiler, peek=True)
        block = token_block(tokens, self.vocab_size)
        if block.shape[0] != len(state.lengths):
            raise BatchMismatchError(f"extend: the state holds {len(state.lengths)} rows, tokens {block.shape[0]}")
        valid = row_lengths(lengths, block, low=0)
        self._check_room(state, valid)
        return self._run("extend", state, block, valid, logits)

    def _program(self, name: str) -> CompiledModel:
        return replace(self.model, program=name)

    def _run(
        self, name: str, state: DecodeState, tokens: Any, valid: Any, logits: str
    ) -> tuple[jax.Array, DecodeState]:
        """Run a program on checked tokens; the state is consumed when the program starts."""
        if logits not in ("all", "last"):
            raise RequestError(f"logits is {logits!r}; expected 'all' or 'last'")
        program, arrays = self._program(name), state.take(self.model.compiler)
        lengths = np.asarray(valid, np.int32)
        out, after = program.run((tokens,), {"lengths": lengths}, arrays, last_only=logits == "last")
        result = primary(out)[:, 0] if logits == "last" else primary(out)
        return result, DecodeState(after, state.lengths + valid, state.capacity, state.owner)

    # -- generation --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 64,
        sampler: Sampler = GREEDY,
        stop: str | int | Iterable[str | int] = (),
        seed: int = 0,
    ) -> Any:
        """Continue prompts: strings give strings, id lists give id lists, one gives one; new tokens only.

        Args:
            prompts: a string, a list of strings, an id list, or a list of id lists; rows may differ in length. An empty
                one starts from the begin token; without a begin token it is an error.
            max_new_tokens: at most this many new tokens a row; an end token ends its row and is its last id.
            sampler: how tokens are chosen; greedy by default. See `Sampler`.
            stop: strings that end a row before them, or token ids that end it as an end token does.
            seed: of the random draws, below 2**64. A row draws from its place in the request, whoever shares the batch.

        Raises:
            RequestError: see `rlx_jax.errors`; `NumericsError` for logits that are not finite.
        """
        budget = whole_number("max_new_tokens", max_new_tokens, 0)
        asked = split_prompts(prompts)
        rows = self._rows(asked)
        words, ends = self._stops(stop)
        new: list[list[int]] = [[] for _ in rows]
        if rows and budget:
            for _ in self._blocks(rows, new, budget, sampler, ends, words, seed):
                pass
        if asked.texts is None:
            return new[0] if asked.single else new
        texts = [_cut(self._decode(ids), words) for ids in new]
        return texts[0] if asked.single else texts

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 64,
        sampler: Sampler = GREEDY,
        stop: str | int | Iterable[str | int] = (),
        seed: int = 0,
    ) -> Iterator[Any]:
        """As `generate` for one prompt, in pieces as they come: text of a string, token ids of ids.

        Joined together the pieces are what `generate` returns. Text is held back while it may still change: half of a
        character, or the beginning of a stop string.
        """
        budget = whole_number("max_new_tokens", max_new_tokens, 0)
        asked = split_prompts(prompt)
        if not asked.single:
            raise RequestError("stream: one prompt at a time; generate takes several")
        rows = self._rows(asked)
        words, ends = self._stops(stop)
        return self._pieces(asked.texts is not None, rows, budget, sampler, ends, words, seed)

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
        budget = whole_number("max_new_tokens", max_new_tokens, 0)
        words, ends = self._stops(stop)
        ids = self.apply_chat_template(
            messages, tools=tools, chat_template=chat_template, allow_special=allow_special, **variables
        )
        rows = self._rows(Prompts(None, [ids], True))
        pieces = self._pieces(True, rows, budget, sampler, ends, words, seed)
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
            RequestError: there is no template, it refuses the messages, or they are wrong; the place is named.
            TokenizerError: the template is wrong, or does what the sandbox forbids.
            LimitError: it takes too long, too much memory, or writes too much; see `rlx_jax.generate.chat_template`.
        """
        return chat_prompt(
            self._tokenizer("chat"),
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=tokenize,
            allow_special=allow_special,
            variables=variables,
        )

    def _pieces(
        self, text: bool, rows: list[list[int]], budget: int, sampler: Sampler, ends: set[int],
        words: tuple[str, ...], seed: int,
    ) -> Iterator[Any]:  # fmt: skip
        new: list[list[int]] = [[]]
        sent: int = 0
        for _ in self._blocks(rows, new, budget, sampler, ends, words, seed) if budget else ():
            if not text:
                yield from new[0][sent:]
                sent = len(new[0])
                continue
            known = _settled(self._decode(new[0]), words)
            if len(known) > sent:
                yield known[sent:]
                sent = len(known)
        rest = _cut(self._decode(new[0]), words)[sent:] if text else ""
        if rest:
            yield rest

    def _blocks(
        self, rows: list[list[int]], new: list[list[int]], budget: int, sampler: Sampler, ends: set[int],
        words: tuple[str, ...], seed: int,
    ) -> Iterator[None]:  # fmt: skip
        """Generate: the new tokens of each row are appended to `new`, block by block."""
        longest = max(map(len, rows))
        if not isinstance(sampler, Sampler):
            raise RequestError(f"sampler is {shown(sampler)}; expected rlx_jax.Sampler(temperature=0.0)")
        for i, row in enumerate(rows):
            self._check_positions(len(row) + budget, what := f"prompts[{i}]: {len(row)} tokens + {number(budget)} new")
            if len(row) + budget > MAX_SLOTS:
                raise SequenceLengthError(f"{what}: over the limit of {MAX_SLOTS} positions; ask for fewer new tokens")
        width = bucket(longest, PROMPT_BUCKET, self.max_positions)
        slots = bucket(max(longest + budget, width), CONTEXT_BUCKET, self.max_positions)
        cpu = self.model.compiler.settings.target == "cpu"
        plan = Plan(
            sampler, tuple(sorted(ends)), seed, width, slots, budget,
            steps=4 if cpu else 16, early=cpu,
        )  # fmt: skip
        generation = generate(self.model, self.vocab_size, rows, plan)
        for block in generation:
            append(new, block)
            done = [i for i, ids in enumerate(new) if words and any(w in self._decode(ids) for w in words)]
            if done:
                generation.stop(done)
            yield

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

    def _stops(self, stop: str | int | Iterable[str | int]) -> tuple[tuple[str, ...], set[int]]:
        if isinstance(stop, bytes | bytearray) or not isinstance(stop, str | int | Iterable):
            raise RequestError(f"stop is {shown(stop)}; expected a string, a token id, or a list of them")
        items = [stop] if isinstance(stop, str | int) else list(stop)
        words = tuple(s for s in items if isinstance(s, str))
        if any(not w for w in words):
            raise RequestError("stop: an empty string would end every row at once")
        if words:
            self._tokenizer()
        ids = id_list([s for s in items if not isinstance(s, str)], self.vocab_size, "stop")
        return words, {*ids, *self.eos_ids}

    # -- checks ------------------------------------------------------------------------------

    def _check_width(self) -> None:
        """Chosen ids are read back by the embedding, so the logits are as wide as it is high."""
        flow = self.model.compiler.flow
        width = self.model.compiler.template("forward").built.primary_shape[-1]
        if width != self.vocab_size:
            raise ShapeError(
                f"{flow.name}: a CausalLM's output is logits [batch, seq, {self.vocab_size}], as many as the embedding "
                f"has rows; got width {width}"
            )

    def _tokenizer(self, what: str = "strings") -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer: there is no tokenizer.json; pass token ids to generate")
        return self.tokenizer

    def _check_positions(self, tokens: int, what: str) -> None:
        check_positions(tokens, self.max_positions, what)

    def _capacity(self, seq: int, longest: int, max_len: int | None) -> int:
        if max_len is None:
            wanted = -(-(seq + ROOM) // CONTEXT_BUCKET) * CONTEXT_BUCKET
            return max(longest, min(wanted, self.max_positions or wanted))
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
        """What compiling cost, and the last program's needs."""
        return self.model.report()


def _cut(text: str, words: tuple[str, ...]) -> str:
    """`text` up to the first stop string."""
    ends = [at for word in words if (at := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text


def _settled(text: str, words: tuple[str, ...]) -> str:
    """The part of a growing text that later tokens cannot take back."""
    cut = _cut(text, words)
    if len(cut) < len(text):
        return cut
    text = text.rstrip("\ufffd")
    held = max((n for w in words for n in range(1, len(w)) if text.endswith(w[:n])), default=0)
    return text[: len(text) - held]
