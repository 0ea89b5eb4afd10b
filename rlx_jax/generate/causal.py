"""`CausalLM`: logits, and generation with a key/value cache, for any causal flow.

The cached programs are derived from the flow's forward program; nothing here knows how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.built import Weights
from rlx_jax.errors import (
    BatchMismatchError,
    NumericsError,
    RequestError,
    SequenceLengthError,
    SessionStateError,
)
from rlx_jax.generate.opening import check_positions, known_positions, open_token_model, primary
from rlx_jax.generate.requests import (
    Prompts,
    bucket,
    id_list,
    pad_rows,
    row_lengths,
    split_prompts,
    token_block,
    whole_number,
)
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.tokenizer import Tokenizer
from rlx_jax.model import CompiledModel, Report, State
from rlx_jax.profiles import CompileProfile

GREEDY = Sampler()
PROMPT_BUCKET = 16
CONTEXT_BUCKET = 64
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
    ) -> None:
        self.model, self.vocab_size = open_token_model(flow, weights, profile, mesh, strict)
        self.tokenizer, self.max_positions = tokenizer, known_positions(self.model, max_positions)
        self.eos_ids = ((eos_ids,) if isinstance(eos_ids, int) else tuple(eos_ids)) or (
            tokenizer.eos_ids if tokenizer else ()
        )
        self.bos_id = bos_id if bos_id is not None else (tokenizer.bos_id if tokenizer else None)
        self._pick = jax.jit(_greedy)

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
            prompts: a string, a list of strings, an id list, or a list of id lists; rows may differ in length.
            max_new_tokens: at most this many new tokens a row; an end token ends its row and is its last id.
            sampler: greedy for now.
            stop: strings that end a row before them, or token ids that end it as an end token does.
            seed: of the random draws; greedy makes none.

        Raises:
            RequestError: see `rlx_jax.errors`; `NumericsError` for logits that are not finite.
        """
        sampler.require_greedy()
        whole_number("seed", seed, 0)
        budget = whole_number("max_new_tokens", max_new_tokens, 0)
        asked = split_prompts(prompts)
        rows = self._rows(asked)
        words, ends = self._stops(stop)
        if not rows or budget == 0:
            new: list[list[int]] = [[] for _ in rows]
        else:
            new = self._greedy(rows, budget, ends, words)
        if asked.texts is None:
            return new[0] if asked.single else new
        texts = [_cut(self._decode(ids), words) for ids in new]
        return texts[0] if asked.single else texts

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

    def _greedy(self, rows: list[list[int]], budget: int, ends: set[int], words: tuple[str, ...]) -> list[list[int]]:
        """The loop: prefill, then one token for every row until all have ended."""
        longest = max(map(len, rows))
        for i, row in enumerate(rows):
            self._check_positions(len(row) + budget, f"prompts[{i}]: {len(row)} tokens + {budget} new")
        block = pad_rows(rows, bucket(longest, PROMPT_BUCKET, self.max_positions))
        slots = bucket(max(longest + budget, block.shape[1]), CONTEXT_BUCKET, self.max_positions)
        logits, state = self.prefill(block, [len(r) for r in rows], max_len=slots, logits="last")
        new: list[list[int]] = [[] for _ in rows]
        running = list(range(len(rows)))
        one = np.ones(len(rows), np.int64)
        for step in range(budget):
            ids, finite = self._pick(logits)
            self._check_finite(np.asarray(finite), step, running)
            chosen = np.asarray(ids)[:, 0]
            for i in running:
                new[i].append(int(chosen[i]))
            running = [i for i in running if not self._ended(new[i], ends, words)]
            if not running or step + 1 == budget:
                break
            logits, state = self._run("extend", state, ids, one, "last")
        return new

    def _ended(self, ids: list[int], ends: set[int], words: tuple[str, ...]) -> bool:
        return ids[-1] in ends or (bool(words) and any(w in self._decode(ids) for w in words))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer().decode(ids)

    def _stops(self, stop: str | int | Iterable[str | int]) -> tuple[tuple[str, ...], set[int]]:
        items = [stop] if isinstance(stop, str | int) else list(stop)
        words = tuple(s for s in items if isinstance(s, str))
        if any(not w for w in words):
            raise RequestError("stop: an empty string would end every row at once")
        if words:
            self._tokenizer()
        ids = id_list([s for s in items if not isinstance(s, str)], self.vocab_size, "stop")
        return words, {*ids, *self.eos_ids}

    # -- checks ------------------------------------------------------------------------------

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("strings need a tokenizer: the checkpoint has no tokenizer.json; pass token ids")
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

    def _check_finite(self, finite: np.ndarray[Any, Any], step: int, running: list[int]) -> None:
        bad = [i for i in running if not finite[i]]
        if bad:
            raise NumericsError(f"the logits of step {step} are not finite in rows {bad[:8]}")

    def report(self) -> Report:
        """What compiling cost, and the last program's needs."""
        return self.model.report()


def _greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits `[B, V]` → ids int32 `[B, 1]`, and whether each row is free of NaN."""
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return ids[:, None], ~jnp.isnan(logits).any(axis=-1) & jnp.isfinite(jnp.max(logits, axis=-1))


def _cut(text: str, words: tuple[str, ...]) -> str:
    """`text` up to the first stop string."""
    ends = [at for word in words if (at := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text
