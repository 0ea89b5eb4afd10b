"""A conversation that stays on the device: each turn reads what is new in it.

What is read is what the template writes of all messages, as `CausalLM.chat` does, so that a reply is the one that it
gives to the same messages. Of that the state holds the first tokens already: those that are the same as before.

`TextState`: a text that stays on the device between requests: its tokens, the state after them, and how much of it a
next text begins with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.pipeline import Template
from rlx_jax.errors import RequestError, SequenceLengthError, SessionStateError, number, shown, suggests
from rlx_jax.generate.generation import Generation, NewTokens, answered, pieces
from rlx_jax.generate.request import Before, Mark, Request, StopLike, TurnOptions, common
from rlx_jax.generate.sampler import Sampler
from rlx_jax.generate.speculative import OWN
from rlx_jax.ir.plugins import derive_rule
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.sequence_state import LENGTH
from rlx_jax.text.chat import check_messages, chosen_template
from rlx_jax.text.request_checks import Prompts
from rlx_jax.text.token_model import check_positions

Message = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TurnTaken:
    """A message and its reply to be: all messages, the request, and the number of the turn."""

    messages: list[dict[str, Any]]
    request: Request
    new: NewTokens
    number: int

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of all messages, and what begins the reply."""
        return self.request.rows[0]


@dataclass(eq=False)
class Conversation:
    """What `CausalLM.conversation` returns: messages, and on the device the state after them.

    `messages` is a plain list, which may be changed between turns: what the template then writes otherwise is read
    again, from the first token that differs. A turn that fails or is left before its end is in no message.

    Attributes:
        talker: the `CausalLM` that replies.
        messages: `[{"role": "user", "content": "Hello"}, …]`, the replies among them.
        options: what the template is given beside them.
        max_len: tokens that the conversation may have; None for as many as the model has positions.
        keep_copy: whether what cannot be cut back of the state is kept as it was before the last reply.
    """

    talker: Any = field(repr=False)
    messages: list[dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    max_len: int | None = None
    keep_copy: bool = True
    _text: TextState | None = field(default=None, repr=False)
    _number: int = field(default=0, repr=False)

    @suggests(*TurnOptions.__annotations__)
    def send(
        self, message: Message, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, *, n: int | None = None, logprobs: int | None = None, **options: Unpack[TurnOptions],
    ) -> Any:  # fmt: skip
        """The reply to a message, as text; both are in `messages` then.

        Args:
            message: of the user, as text; or a message of another role, such as a tool, or several; `[]` to answer the
                messages as they are.
            max_new_tokens, sampler, stop, seed, logprobs, options: as in `CausalLM.chat`. With logprobs the reply is a
                `Completion`. There is one new token at least.
            n: refused: a conversation goes on from one answer.

        Raises:
            SequenceLengthError: the conversation and the reply do not fit; it is as it was before.
            RequestError, TokenizerError, LimitError, NumericsError: as `CausalLM.chat`.
        """
        if n is not None:
            raise RequestError(f"n is {shown(n)}: a conversation goes on from one reply; fork() it for each of several")
        taken = self._take(message, max_new_tokens, sampler, stop, seed, logprobs=logprobs, **options)
        (reply,) = answered(self.talker._lm, self._begun(taken), taken.new)
        self._ended(taken, reply if logprobs is None else reply.text)
        return reply

    @suggests(*TurnOptions.__annotations__)
    def stream(
        self, message: Message, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, *, n: int | None = None, logprobs: int | None = None, **options: Unpack[TurnOptions],
    ) -> Iterator[str]:  # fmt: skip
        """As `send`, in pieces as they come; message and reply are in `messages` when the last one has come.

        Raises:
            RequestError: `n` or `logprobs` are given, which pieces of one reply have no place for. Others as `send`.
            SessionStateError: while it is read, another turn has begun.
        """
        refuse_in_stream("stream", n, logprobs)
        return self._pieces(self._take(message, max_new_tokens, sampler, stop, seed, **options))

    def fork(self) -> Conversation:
        """Another conversation that goes on from here by itself, with a copy of the state."""
        text = None if self._text is None else self._text.copy()
        return replace(self, messages=[dict(m) for m in self.messages], _text=text, _number=0)

    # -- a turn ------------------------------------------------------------------------------

    def _pieces(self, taken: TurnTaken) -> Iterator[str]:
        told = ""
        for piece in pieces(self.talker._lm, self._begun(taken), taken.new):
            told += piece
            yield piece
        self._ended(taken, told)

    def _take(self, message: Any, max_new_tokens: int, *asked: Any, **options: Any) -> TurnTaken:
        """What was asked for, checked; nothing has run yet."""
        messages = [*self.messages, *as_messages(message)]
        ids = self._rendered(messages)
        budget = whole_number("max_new_tokens", max_new_tokens, 0)
        if budget == 0:
            raise RequestError(
                "max_new_tokens is 0, and a turn has a reply: to say something without one, add the message to "
                "`messages`"
            )
        self._check_room(len(messages), len(ids), budget)
        request, new = self.talker._request(Prompts(None, [ids], True), budget, *asked, text=True, **options)
        return TurnTaken(messages, request, new, self._number)

    def _rendered(self, messages: list[dict[str, Any]], reply: bool = True) -> list[int]:
        ids: list[int] = self.talker.apply_chat_template(messages, add_generation_prompt=reply, **self.options)
        return ids

    def _check_room(self, messages: int, tokens: int, budget: int) -> None:
        """Raises:
        SequenceLengthError: the conversation is full.
        """
        limits = [n for n in (self.max_len, self.talker._lm.max_positions) if n is not None]
        if limits and tokens + budget > min(limits):
            whose = "max_len" if min(limits) == self.max_len else "the model's positions"
            count = "1 message is" if messages == 1 else f"{messages} messages are"
            raise SequenceLengthError(
                f"conversation: {count} {number(tokens)} tokens, with {number(budget)} new ones more "
                f"than {whose}, {min(limits)}; take old messages out of `messages`, or ask for fewer new tokens"
            )

    def _begun(self, taken: TurnTaken) -> Request:
        """The request, behind what the state holds of it. From here on the state is the request's.

        Raises:
            SessionStateError: the conversation went on since the turn was taken.
        """
        self._check_current(taken.number)
        self._number += 1
        model, request, text = self.talker._lm.model, taken.request, self._text
        self._text = None
        before, why, kept = continued(model, text, taken.ids)
        if text is not None and request.drafter is not None and request.drafter.hidden:
            before = kept = None
            why = "the module for drafts reads hidden states of all tokens, which no state has"
        leaves, ours = self._leaves(taken), self._number
        mark = self._mark(taken, 0 if before is None else before.lengths[0], leaves)
        lacking = kept is None or not set(leaves) <= set(kept.arrays)  # a text may grow over a window
        if mark is None and lacking and leaves and before is not None:
            kept = KeptArrays(before.lengths[0], copied({name: before.arrays[name] for name in leaves}))

        def ended(generation: Generation) -> None:
            copy = kept
            if mark is not None:  # which may not have been read
                copy = None if generation.marked is None else KeptArrays(mark.at, generation.marked)
            if self._number == ours:
                self._text = after(generation, taken.ids, copy)

        return replace(request, before=before, mark=mark, room=self.max_len or 0, reread=why, ended=ended)

    def _leaves(self, taken: TurnTaken) -> tuple[str, ...]:
        """The arrays to keep a copy of, as they are before the reply: those that cannot be cut back."""
        if not self.keep_copy or (taken.request.drafter is not None and taken.request.drafter.hidden):
            return ()
        return kept_at_mark(self.talker._lm.model, len(taken.ids) + taken.request.budget)

    def _mark(self, taken: TurnTaken, start: int, leaves: tuple[str, ...]) -> Mark | None:
        """Where they are copied: behind the messages, where the reply is not begun yet, as some templates write replies
        of earlier turns otherwise than they came. The last token is always read, as a state tells no logits."""
        if not leaves:
            return None
        at = min(common(self._rendered(taken.messages, reply=False), taken.ids), len(taken.ids) - 1)
        return Mark(at, leaves) if start < at else None

    def _ended(self, taken: TurnTaken, reply: str) -> None:
        self._check_current(taken.number + 1)
        self.messages = [*taken.messages, {"role": "assistant", "content": reply}]

    def _check_current(self, turn: int) -> None:
        if self._number != turn:
            raise SessionStateError(
                "conversation: another turn has begun since; read a stream to its end before the next message, or "
                "fork() the conversation"
            )


def open_conversation(
    talker: Any, messages: Any, max_len: Any, keep_copy: Any, options: Mapping[str, Any]
) -> Conversation:
    """As `CausalLM.conversation`.

    Raises:
        RequestError, TokenizerError: as there.
    """
    lm = talker._lm
    tokenizer = lm.needed("chat needs", "generate from token ids")
    variables = options.keys() - {"tools", "chat_template", "allow_special"}
    template = chosen_template(tokenizer, options.get("chat_template"), options.get("tools") is not None, variables)
    none = isinstance(messages, list | tuple) and not messages
    begun = [] if none else check_messages(messages, template)
    if max_len is not None:
        check_positions(whole_number("max_len", max_len, 1), lm.max_positions, "max_len")
    if not isinstance(keep_copy, bool):
        raise RequestError(f"keep_copy is {shown(keep_copy)}; expected True or False")
    return Conversation(talker, begun, options, max_len, keep_copy)


def as_messages(message: Any) -> list[dict[str, Any]]:
    """A message, or several, as a list.

    Raises:
        RequestError: neither text nor messages.
    """
    if isinstance(message, str):
        return [{"role": "user", "content": message}]
    if isinstance(message, Mapping):
        return [dict(message)]
    if not isinstance(message, list | tuple) or not all(isinstance(m, Mapping) for m in message):
        expected = "text, {'role': …, 'content': …}, or a list of such messages"
        raise RequestError(f"message is {shown(message)}; expected {expected}")
    return [dict(m) for m in message]


def refuse_in_stream(where: str, n: Any, logprobs: Any) -> None:
    """A stream is the pieces of one answer.

    Raises:
        RequestError: several are asked for, or what the model says of its tokens.
    """
    for name, value in (("n", n), ("logprobs", logprobs)):
        if value is not None:
            raise RequestError(
                f"{name} is {shown(value)}: {where} gives one answer in pieces, which have no place for it; leave it "
                "out, or ask without a stream"
            )


@dataclass(frozen=True)
class KeptArrays:
    """Arrays of a state as they were after `at` tokens."""

    at: int
    arrays: StateArrays


@dataclass(frozen=True)
class TextState:
    """The tokens of one row, the state after them, and a copy of what cannot be cut back."""

    ids: tuple[int, ...]
    arrays: StateArrays
    slots: int
    kept: KeptArrays | None = None

    def copy(self) -> TextState:
        """The same in arrays of its own."""
        kept = self.kept and KeptArrays(self.kept.at, copied(self.kept.arrays))
        return TextState(self.ids, copied(self.arrays), self.slots, kept)


def copied(arrays: StateArrays) -> StateArrays:
    """In buffers of their own."""
    return {name: jnp.copy(array) for name, array in arrays.items()}


def continued(
    model: CompiledModel, text: TextState | None, ids: Sequence[int]
) -> tuple[Before | None, str, KeptArrays | None]:
    """What the text `ids` can go on from: the state, if any of it is of use, why no more, and the copy that is still
    there. At least its last token is read: a state tells no logits."""
    if text is None:
        return None, "", None
    same, held = common(text.ids, ids), len(text.ids)
    at = wanted = min(same, len(ids) - 1)
    if at == 0:
        return None, f"the text differs from its first token on, and all {held} tokens held were dropped", None
    arrays, why, kept = text.arrays, "", text.kept
    if at < held and not can_cut(model, text, at):
        if text.kept is None or not 0 < text.kept.at <= at or not can_cut(model, text, text.kept.at, text.kept.arrays):
            why = f"the text differs at token {same} of {held} that were held, and its state cannot be taken back"
            return None, why, None
        at = text.kept.at
        arrays = {**arrays, **copied(text.kept.arrays)}  # the request writes into these, and may be asked for again
    if at < held:  # what moves a state to other slots goes by its length
        length = np.full(arrays[LENGTH].shape, at, np.int32)
        arrays = {**arrays, LENGTH: jax.device_put(length, arrays[LENGTH].sharding)}
    if at < wanted:
        why = f"its state was kept at token {at}, and cannot be taken back to another"
    if same < min(held, len(ids)):
        why = f"the text differs at token {same} of {held} that were held" + (f"; {why}" if why else "")
    before = Before(arrays, (0,), (at,), text.slots, consumed=True)
    return before, why, kept if kept is not None and kept.at <= at else None


def can_cut(model: CompiledModel, text: TextState, at: int, besides: Collection[str] = ()) -> bool:
    """Whether the state is right after `at` tokens where its length alone is set to that, `besides` these arrays."""
    held, rings, template = len(text.ids), windows(model), _template(model)

    def cuts(name: str) -> bool:
        if name not in rings:
            return False
        axis = next(i for i, size in enumerate(template.state[name].shape) if str(size) in template.rings)
        slots = text.arrays[name].shape[axis]
        return bool(held <= slots or held - at <= slots - rings[name])

    return all(name in besides or cuts(name) for name in uncut(model))


def kept_at_mark(model: CompiledModel, tokens: int) -> tuple[str, ...]:
    """The arrays to keep a copy of, of a text that gets up to `tokens` long: none where all of it can be cut."""
    rings = windows(model)
    return tuple(name for name in uncut(model) if name not in rings or tokens > rings[name])


def after(generation: Generation, ids: Sequence[int], kept: KeptArrays | None) -> TextState | None:
    """The text of a request of one row that has run or was left; None where its state is gone, as an interrupted call
    takes it along."""
    arrays = {name: array for name, array in generation.state.items() if not name.startswith(OWN)}
    if any(array.is_deleted() for array in arrays.values()):
        return None
    count = int(jax.device_get(arrays[LENGTH])[0])
    whole = (*ids, *generation.chosen(0))
    assert len(ids) <= count <= len(whole)  # else the tokens that it holds are not known
    return TextState(whole[:count], arrays, generation.slots, kept)


# -- which arrays ------------------------------------------------------------------------------


def uncut(model: CompiledModel) -> tuple[str, ...]:
    """The arrays of a state that hold more than a place for each token: rings, and what blocks carry along. Where a
    block keeps a state by the rule of its plugin, that is all of them: nothing is known of those."""
    template = _template(model)
    foreign = any(derive_rule(type(node.op)) is not None for _, node in template.built.hir.walk())
    state = ((name, t) for name, t in template.state.items() if name != LENGTH)
    return tuple(name for name, t in state if foreign or "context" not in t.symbols)


def windows(model: CompiledModel) -> dict[str, int]:
    """The window of each array that is a ring."""
    rings = _template(model).rings
    found = ((name, t.symbols & rings.keys()) for name, t in _template(model).state.items())
    return {name: rings[symbol] for name, symbols in found for symbol in symbols}


def _template(model: CompiledModel) -> Template:
    return model.programs.any_template(model.as_program("extend").key(outputs=model.output_names[:1]))
