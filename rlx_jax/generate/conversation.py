"""`Conversation`: a chat with its state on the device, where each turn prefills only the new tokens.

A turn renders all messages with the chat template, as `CausalLM.chat` does, so that the replies are the same. The state
already has the common prefix of this text and the previous one, and prefill starts after it.

`CachedText` is what remains on the device between two turns: the tokens of the text and the state after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.pipeline import Template
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import RequestError, SequenceLengthError, SessionStateError, integer_text, shown, suggest_keywords
from rlx_jax.generate.generation import Generation, NewTokens, stream_request
from rlx_jax.generate.many import run_prompts
from rlx_jax.generate.prefix_cache import Prefix
from rlx_jax.generate.request import DecodingOptions, Request, SnapshotPoint, common_prefix_len
from rlx_jax.generate.row_options import StopLike
from rlx_jax.generate.sampler import SAMPLING, Sampler
from rlx_jax.generate.speculative import DRAFTER_PREFIX
from rlx_jax.plugins import derive_rule
from rlx_jax.runtime.inputs import check_flag, check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.sequence_state import LENGTH
from rlx_jax.text.chat import check_messages, choose_checked_template
from rlx_jax.text.request_checks import Prompts
from rlx_jax.text.token_model import check_positions

Message = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A checked turn, before its reply is generated: all messages, the request, and the number of the turn."""

    messages: list[dict[str, Any]]
    request: Request
    new: NewTokens
    number: int

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the ids of all messages, with the beginning of the reply."""
        return self.request.rows[0]


@dataclass(eq=False)
class Conversation:
    """A conversation: its messages, and the state after them on the device. `CausalLM.conversation` returns one.

    `messages` is a plain list and may be changed between turns: prefill then restarts at the first token that differs.
    A turn that fails, or that is abandoned before its end, adds no message.

    Attributes:
        causal_lm: the `CausalLM` that replies.
        messages: `[{"role": "user", "content": "Hello"}, …]`, replies included.
        options: other arguments of the chat template.
        max_len: the most tokens of the conversation; None for as many as the model has positions.
        keep_copy: whether to retain a copy, from before the last reply, of the arrays of the state that cannot be
            truncated.
    """

    causal_lm: Any = field(repr=False)
    messages: list[dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    max_len: int | None = None
    keep_copy: bool = True
    _text: CachedText | None = field(default=None, repr=False)
    _turn_number: int = field(default=0, repr=False)

    @suggest_keywords(*DecodingOptions.__annotations__)
    def send(
        self, message: Message, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, *, n: int | None = None, logprobs: int | None = None, **options: Unpack[DecodingOptions],
    ) -> Any:  # fmt: skip
        """Return the reply to a message, as text, and append both to `messages`.

        Args:
            message: text of the user; a message of another role, such as a tool; or several messages. `[]` replies to
                the messages as they are.
            max_new_tokens, sampler, stop, seed, logprobs, options: as in `CausalLM.chat`, with at least one new token.
                With `logprobs` the reply is a `Completion`.
            n: an error: a conversation continues one answer.

        Raises:
            SequenceLengthError: the conversation and the reply do not fit; the conversation is unchanged.
            RequestError, TokenizerError, LimitError, NumericsError: as `CausalLM.chat`.
        """
        if n is not None:
            raise RequestError(f"n is {shown(n)}: a conversation continues from one reply; fork() it to get several")
        turn = self._check_turn(message, max_new_tokens, sampler, stop, seed, logprobs=logprobs, **options)
        (reply,) = run_prompts(self.causal_lm._lm, self._begin_turn(turn), turn.new)
        self._finish_turn(turn, reply if logprobs is None else reply.text)
        return reply

    @suggest_keywords(*DecodingOptions.__annotations__)
    def stream(
        self, message: Message, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, *, n: int | None = None, logprobs: int | None = None, **options: Unpack[DecodingOptions],
    ) -> Iterator[str]:  # fmt: skip
        """Yield the reply to a message as it grows; arguments as in `send`.

        Message and reply are appended to `messages` at the end of the iteration.

        Raises:
            RequestError: `n` or `logprobs` are given, which a stream of one reply cannot return. Others as `send`.
            SessionStateError: another turn began during the iteration.
        """
        check_stream_options("stream", n, logprobs)
        return self._stream_turn(self._check_turn(message, max_new_tokens, sampler, stop, seed, **options))

    def fork(self) -> Conversation:
        """Return an independent copy of the conversation, with a copy of the state."""
        text = None if self._text is None else self._text.copy()
        return replace(self, messages=[dict(m) for m in self.messages], _text=text, _turn_number=0)

    # -- a turn ------------------------------------------------------------------------------

    def _stream_turn(self, turn: Turn) -> Iterator[str]:
        """Run a turn and yield its reply as it grows; append it to the messages at the end."""
        reply = ""
        for piece in stream_request(self.causal_lm._lm, self._begin_turn(turn), turn.new):
            reply += piece
            yield piece
        self._finish_turn(turn, reply)

    def _check_turn(self, message: Any, max_new_tokens: int, *args: Any, **options: Any) -> Turn:
        """Check the arguments of a turn and return it; nothing has run yet."""
        messages = [*self.messages, *to_messages(message)]
        ids = self._render(messages)
        budget = check_integer("max_new_tokens", max_new_tokens, 0)
        if budget == 0:
            raise RequestError("max_new_tokens is 0; to add a message without a reply, append it to `messages`")
        self._check_length(len(messages), len(ids), budget)
        request, new = self.causal_lm._make_request(Prompts(None, [ids], True), budget, *args, text=True, **options)
        return Turn(messages, request, new, self._turn_number)

    def _render(self, messages: list[dict[str, Any]], reply: bool = True) -> list[int]:
        """Return messages as ids by the chat template, with the beginning of a reply or without."""
        ids: list[int] = self.causal_lm.apply_chat_template(messages, add_generation_prompt=reply, **self.options)
        return ids

    def _check_length(self, messages: int, tokens: int, budget: int) -> None:
        """Check that the conversation fits with `budget` new tokens.

        Raises:
            SequenceLengthError: it does not.
        """
        limits = [n for n in (self.max_len, self.causal_lm._lm.max_positions) if n is not None]
        if limits and tokens + budget > min(limits):
            limit_name = "max_len" if min(limits) == self.max_len else "the model's positions"
            count = "1 message is" if messages == 1 else f"{messages} messages are"
            raise SequenceLengthError(
                f"conversation: {count} {integer_text(tokens)} tokens, with {integer_text(budget)} new ones more "
                f"than {limit_name}, {min(limits)}; remove old messages from `messages`, or reduce max_new_tokens"
            )

    def _begin_turn(self, turn: Turn) -> Request:
        """Return the request of a turn with the state as its prefix. The request now owns the state.

        Raises:
            SessionStateError: another turn began after this one was checked.
        """
        self._check_current(turn.number)
        self._turn_number += 1
        model, request, text = self.causal_lm._lm.model, turn.request, self._text
        self._text = None  # a request that fails may have consumed the state
        prefix, reason, backup = find_prefix(model, text, turn.ids)
        if text is not None and request.drafter is not None and request.drafter.needs_hidden:
            prefix = backup = None
            reason = "the module for drafts reads hidden states of all tokens, which no state has"
        array_names, turn_number = self._snapshot_arrays(turn), self._turn_number
        start = 0 if prefix is None else len(prefix.ids)
        snapshot_point = self._snapshot_point(turn, start, array_names)
        # A retained copy may be incomplete: an array joins `array_names` when the text outgrows its sliding window.
        needs_copy = backup is None or not set(array_names) <= set(backup.arrays)
        if snapshot_point is None and needs_copy and array_names and prefix is not None and prefix.arrays:
            backup = StateSnapshot(start, copy_arrays({name: prefix.arrays[name] for name in array_names}))

        def on_end(generation: Generation) -> None:
            copy, arrays = backup, generation.snapshot
            if snapshot_point is not None:  # a request that failed early may not have reached it
                copy = None if arrays is None else StateSnapshot(snapshot_point.num_tokens, arrays)
            if self._turn_number == turn_number:  # otherwise a later turn has begun, and this state is outdated
                self._text = cached_text(generation, [*turn.ids, *turn.new.rows[0].ids], copy)

        return replace(
            request, prefixes=() if prefix is None else (prefix,), owns_prefix=prefix is not None,
            snapshot_point=snapshot_point, min_cache_len=self.max_len or 0, reread=reason,
            on_end=on_end,
        )  # fmt: skip

    def _snapshot_arrays(self, turn: Turn) -> tuple[str, ...]:
        """Return the names of the arrays to copy before the reply: the ones that cannot be truncated."""
        if not self.keep_copy or (turn.request.drafter is not None and turn.request.drafter.needs_hidden):
            return ()
        model, tokens = self.causal_lm._lm.model, len(turn.ids) + turn.request.budget
        rings = ring_windows(model)  # a ring buffer that the text does not outgrow can be truncated
        return tuple(name for name in untruncatable_arrays(model) if name not in rings or tokens > rings[name])

    def _snapshot_point(self, turn: Turn, start: int, array_names: tuple[str, ...]) -> SnapshotPoint | None:
        """Return the position at which to copy the arrays: after the messages, before the beginning of the reply.

        Some templates render the replies of earlier turns differently from how they were generated, so that the next
        turn can only continue from there. The position is at most the last token, as prefill needs one token to compute
        logits.
        """
        if not array_names:
            return None
        position = min(common_prefix_len(self._render(turn.messages, reply=False), turn.ids), len(turn.ids) - 1)
        return SnapshotPoint(position, array_names) if start < position else None

    def _finish_turn(self, turn: Turn, reply: str) -> None:
        """Append the messages of a turn and its reply."""
        self._check_current(turn.number + 1)
        self.messages = [*turn.messages, {"role": "assistant", "content": reply}]

    def _check_current(self, number: int) -> None:
        """Check that no other turn has begun since turn number `number`."""
        if self._turn_number != number:
            raise SessionStateError(
                "conversation: another turn has begun since; read a stream to its end before the next message, or "
                "fork() the conversation"
            )


def open_conversation(
    causal_lm: Any, messages: Any, max_len: Any, keep_copy: Any, options: Mapping[str, Any]
) -> Conversation:
    """Check the arguments of `CausalLM.conversation` and return the conversation.

    Raises:
        RequestError, TokenizerError: as there.
    """
    lm = causal_lm._lm
    tokenizer = lm.require_tokenizer("chat needs", "generate from token ids")
    variables = options.keys() - {"tools", "chat_template", "allow_special"}
    has_tools = options.get("tools") is not None
    template = choose_checked_template(tokenizer, options.get("chat_template"), has_tools, variables, SAMPLING)
    is_empty = isinstance(messages, list | tuple) and not messages
    first_messages = [] if is_empty else check_messages(messages, template)
    if max_len is not None:
        check_positions(check_integer("max_len", max_len, 1), lm.max_positions, "max_len")
    check_flag("keep_copy", keep_copy)
    return Conversation(causal_lm, first_messages, options, max_len, keep_copy)


def to_messages(message: Any) -> list[dict[str, Any]]:
    """Return a message, or several, as a list.

    Raises:
        RequestError: `message` is neither text nor messages.
    """
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if isinstance(message, Mapping):
        return [dict(message)]
    if not isinstance(message, list | tuple) or not all(isinstance(m, Mapping) for m in message):
        expected = "text, {'role': …, 'content': …}, or a list of such messages"
        raise RequestError(f"message is {shown(message)}; expected {expected}")
    return [dict(m) for m in message]


def check_stream_options(method: str, n: Any, logprobs: Any) -> None:
    """Check that a stream has no options for several answers or for log-probabilities.

    Raises:
        RequestError: it has one.
    """
    for name, value in (("n", n), ("logprobs", logprobs)):
        if value is not None:
            raise RequestError(f"{name} is {shown(value)}: {method} returns one answer in pieces, without it")


@dataclass(frozen=True)
class StateSnapshot:
    """Copies of arrays of a state, taken after `num_tokens` tokens."""

    num_tokens: int
    arrays: StateArrays


@dataclass(frozen=True)
class CachedText:
    """The tokens of one row, and the state after them.

    Attributes:
        ids: the tokens.
        arrays: arrays of the state.
        cache_len: length of its cache.
        snapshot: an earlier copy of the arrays that cannot be truncated.
    """

    ids: tuple[int, ...]
    arrays: StateArrays
    cache_len: int
    snapshot: StateSnapshot | None = None

    def copy(self) -> CachedText:
        """Return a copy with new arrays."""
        snapshot = self.snapshot and StateSnapshot(self.snapshot.num_tokens, copy_arrays(self.snapshot.arrays))
        return CachedText(self.ids, copy_arrays(self.arrays), self.cache_len, snapshot)


def copy_arrays(arrays: StateArrays) -> StateArrays:
    """Return copies of arrays in new buffers."""
    return {name: jnp.copy(array) for name, array in arrays.items()}


def find_prefix(
    model: CompiledModel, text: CachedText | None, ids: Sequence[int]
) -> tuple[Prefix | None, str, StateSnapshot | None]:
    """Find the longest prefix of `ids` that the state of the previous text has.

    Returns:
        the prefix, None if nothing of the state is usable; the reason why the prefix is not longer, or ""; and the
        retained copy, if it is still valid. The prefix is shorter than `ids`, as prefill needs one token to compute
        logits.
    """
    if text is None:
        return None, "", None
    shared, total = common_prefix_len(text.ids, ids), len(text.ids)
    start = shared_len = min(shared, len(ids) - 1)
    if start == 0:
        return None, f"the text differs from its first token on, and all {total} cached tokens were dropped", None
    arrays, reason, backup = text.arrays, "", text.snapshot
    if start < total and not can_truncate(model, text, start):
        if (
            text.snapshot is None
            or not 0 < text.snapshot.num_tokens <= start
            or not can_truncate(model, text, text.snapshot.num_tokens, text.snapshot.arrays)
        ):
            reason = f"the text differs at token {shared} of {total} cached ones, and its state cannot be rolled back"
            return None, reason, None
        start = text.snapshot.num_tokens
        # Copied once more, as the request writes into its arrays, and the next turn may need the retained ones again.
        arrays = {**arrays, **copy_arrays(text.snapshot.arrays)}
    if start < total:  # `move_state` uses the length in the state to locate tokens in the cache
        length = np.full(arrays[LENGTH].shape, start, np.int32)
        arrays = {**arrays, LENGTH: jax.device_put(length, arrays[LENGTH].sharding)}
    if start < shared_len:
        reason = f"the copy of its state is at token {start}, and cannot be rolled back to another"
    if shared < min(total, len(ids)):
        reason = f"the text differs at token {shared} of {total} cached ones" + (f"; {reason}" if reason else "")
    prefix = Prefix(tuple(ids[:start]), 0, text.cache_len, arrays=arrays)
    return prefix, reason, backup if backup is not None and backup.num_tokens <= start else None


def can_truncate(model: CompiledModel, text: CachedText, length: int, replaced: Collection[str] = ()) -> bool:
    """Return whether the state can be truncated to `length` tokens by setting its length alone.

    Args:
        replaced: arrays that are replaced anyhow, and need no check.
    """
    num_tokens, rings, template = len(text.ids), ring_windows(model), _template(model)

    def is_truncatable(name: str) -> bool:
        if name not in rings:
            return False
        axis = next(i for i, size in enumerate(template.state[name].shape) if str(size) in template.rings)
        slots = text.arrays[name].shape[axis]
        # Either the ring buffer has never wrapped around, or the dropped tokens overwrote none of the window before
        # them.
        return bool(num_tokens <= slots or num_tokens - length <= slots - rings[name])

    return all(name in replaced or is_truncatable(name) for name in untruncatable_arrays(model))


def cached_text(generation: Generation, ids: list[int], snapshot: StateSnapshot | None) -> CachedText | None:
    """Return the text of a request of one row that has run or was abandoned; None if its state is gone, as after an
    interrupted call, which has donated it.

    Args:
        ids: prompt and answer. Later tokens of the state, which were computed ahead, are -1, as no text has them.
    """
    arrays = {name: array for name, array in generation.loop.state.items() if not name.startswith(DRAFTER_PREFIX)}
    if any(array.is_deleted() for array in arrays.values()):
        return None
    length = int(jax.device_get(arrays[LENGTH])[0])
    all_ids = ids[:length] + [-1] * (length - len(ids))
    return CachedText(tuple(all_ids), arrays, generation.cache_len, snapshot)


# -- which arrays ------------------------------------------------------------------------------


def untruncatable_arrays(model: CompiledModel) -> tuple[str, ...]:
    """Return the names of the state arrays that setting the length does not truncate.

    These are the arrays without one slot per token: ring buffers and recurrent states. If a block has a state by the
    derive rule of a plugin, they are all arrays, as nothing is known about them.
    """
    template = _template(model)
    has_plugin_rule = any(derive_rule(type(node.op)) is not None for _, node in template.built.hir.walk())
    state = ((name, t) for name, t in template.state.items() if name != LENGTH)
    return tuple(name for name, t in state if has_plugin_rule or "context" not in t.symbols)


def ring_windows(model: CompiledModel) -> dict[str, int]:
    """Return the window size, in tokens, of each array that is a ring buffer."""
    rings = _template(model).rings
    ring_symbols = ((name, t.symbols & rings.keys()) for name, t in _template(model).state.items())
    return {name: rings[symbol] for name, symbols in ring_symbols for symbol in symbols}


def _template(model: CompiledModel) -> Template:
    """Return the template of `extend`, for the symbolic types of the state."""
    return model.programs.any_template(model.as_program("extend").key(outputs=model.output_names[:1]))
