"""A request: what a caller asks of a language model, checked once on the host."""

from __future__ import annotations

import os.path
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.settings import Buckets
from rlx_jax.errors import RequestError, SequenceLengthError, did_you_mean, listing, number, quote, shown
from rlx_jax.generate.decode_state import DecodeState, check_is_state
from rlx_jax.generate.sampler import Sampler, Sampling
from rlx_jax.generate.speculative import Drafter
from rlx_jax.program import InputDecl
from rlx_jax.runtime.inputs import bind_sizes, host_value, random_key, read_array, whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Programs
from rlx_jax.text.request_checks import NO_TOKENIZER, Prompts, id_list
from rlx_jax.text.token_model import check_positions
from rlx_jax.text.tokenizer import Tokenizer

Inputs = Mapping[str, Any] | None
StopLike = str | int | Iterable[str | int]
MAX_SLOTS = 2**30  # of a cache; the next power of two is no dimension of XLA


@dataclass(frozen=True, eq=False)
class RequestInputs:
    """Checked arrays by name, with the sizes that they give to symbols other than `batch`; `given` are those that the
    flow can do without."""

    arrays: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    rows: Mapping[str, int] = field(default_factory=dict)  # the axis that has the batch

    def padded(self, batch: int) -> dict[str, Any]:
        """The arrays with `batch` rows; those behind the request's are zeros."""
        arrays = dict(self.arrays)
        for name, axis in self.rows.items():
            more = [(0, (batch - size) * (i == axis)) for i, size in enumerate(arrays[name].shape)]
            if any(n for _, n in more):
                arrays[name] = (jnp if isinstance(arrays[name], jax.Array) else np).pad(arrays[name], more)
        return arrays

    def of_row(self, row: int) -> dict[str, Any]:
        """The arrays with this row of the batch alone."""
        return {
            name: a[(slice(None),) * self.rows[name] + (slice(row, row + 1),)] if name in self.rows else a
            for name, a in self.arrays.items()
        }


NONE = RequestInputs()


def declared(model: CompiledModel) -> dict[str, InputDecl]:
    """The inputs that a request brings beside its tokens, by name: those without the dimension `seq` that an output
    reads."""
    idle = unread(model) | {model.first_input}
    return {d.name: d for d in model.flow._inputs if d.name not in idle and "seq" not in d.type.symbols}


def unread(model: CompiledModel) -> frozenset[str]:
    """The inputs that no output reads, whatever optional ones there are."""
    optional = frozenset(d.name for d in model.flow._inputs if d.optional)
    idle = model.programs.unread(model.name, frozenset()) - optional
    return idle & model.programs.unread(model.name, optional) if idle and optional else idle


def request_inputs(
    model: CompiledModel, inputs: Mapping[str, Any] | None, rows: int, known: Mapping[str, InputDecl]
) -> RequestInputs:
    """`inputs=` of a request of so many rows, checked; `known` are those that are `declared`.

    Raises:
        RequestError: one is missing, or the flow has none of that name, or reads it with the tokens.
        ShapeError, DTypeError, TokenIdError: it does not fit. RequestError: it has other rows than the prompts.
    """
    if inputs is not None and not isinstance(inputs, Mapping):
        raise RequestError(f"inputs is {shown(inputs)}; expected a mapping of input names to arrays")
    brought = {name: value for name, value in (inputs or {}).items() if value is not None}
    for name in brought:
        if name not in known:
            with_tokens = name in (d.name for d in model.flow._inputs)
            why = "it belongs to the tokens, which a request brings itself" if with_tokens else "the flow has none"
            why = "none of the outputs reads it" if name in unread(model) else why
            raise RequestError(
                f"inputs: {quote(name)}: {why}; a request may bring {listing(known) or 'nothing beside tokens'}"
                f"{did_you_mean(str(name), known)}"
            )
    missing = [name for name, d in known.items() if not d.optional and name not in brought]
    if missing:
        raise RequestError(f"{model.name}: the flow reads {listing(missing)}: pass inputs={{{missing[0]!r}: …}}")
    if not brought:
        return NONE
    types = {name: known[name].type for name in brought}
    given = frozenset(name for name in brought if known[name].optional)
    ids = model.programs.template(model.key(given)).bounds.ids
    arrays = {
        name: host_value(name, value, types[name], ids.get(name), model.settings.check_ids)
        for name, value in brought.items()
    }
    axes = {name: t.shape.index(d) for name, t in types.items() for d in t.shape if str(d) == "batch"}
    for name, axis in axes.items():
        if arrays[name].ndim > axis and arrays[name].shape[axis] != rows:
            raise RequestError(f"input {name} has {arrays[name].shape[axis]} rows, the request {rows}")
    sizes = bind_sizes(types, arrays, model.name)
    return RequestInputs(arrays, {n: size for n, size in sizes.items() if n != "batch"}, given, axes)


class TurnOptions(Sampling, total=False):
    """Arguments by name of whatever generates: `CausalLM.generate`, `stream`, `chat`, and turns of a conversation."""

    speculative: Any
    draft_tokens: int


class StreamOptions(TurnOptions, total=False):
    """Arguments by name of `CausalLM.stream`."""

    inputs: Inputs
    state: DecodeState | None


class GenerateOptions(StreamOptions, total=False):
    """Arguments by name of `CausalLM.generate` that decide nothing of the type of what it returns."""

    share_prefix: bool


@dataclass(frozen=True)
class LanguageModel:
    """A model that generates, with what a request needs to know of it; fields as in `CausalLM`.

    `inputs` are the inputs that a request brings beside its token ids, by name.
    """

    model: CompiledModel
    vocab_size: int
    tokenizer: Tokenizer | None
    max_positions: int | None
    buckets: Buckets
    bos_id: int | None
    eos_ids: tuple[int, ...]
    inputs: Mapping[str, InputDecl]

    @property
    def owner(self) -> tuple[Programs, str]:
        """Whose states this model takes: those of its flow's programs, whatever the parameters."""
        return self.model.programs, self.model.name

    @property
    def required(self) -> list[str]:
        """The inputs that a request has to bring."""
        return [name for name, d in self.inputs.items() if not d.optional]

    def needed(self, what: str = "strings need", instead: str = "pass token ids") -> Tokenizer:
        """The tokenizer. What a message says: who needs it, and what goes without.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(f"{what} a tokenizer, and this model has none: {NO_TOKENIZER}; or {instead}")
        return self.tokenizer

    def decode(self, ids: list[int]) -> str:
        """The text of new tokens."""
        return self.needed().decode(ids)

    def text(self, ids: list[int], words: tuple[str, ...]) -> str:
        """The text up to the first stop string."""
        return cut(self.decode(ids), words)

    def rows(self, prompts: Prompts) -> list[list[int]]:
        """Prompts as ids, each with at least one.

        Raises:
            RequestError, TokenIdError: an empty one, and there is no begin token; ids that the model does not have.
        """
        given = prompts.ids or [] if prompts.texts is None else self.needed().encode_batch(prompts.texts)
        rows = [id_list(row, self.vocab_size, f"prompts[{i}]") for i, row in enumerate(given)]
        for i, row in enumerate(rows):
            if not row and self.bos_id is None:
                raise RequestError(f"prompts[{i}] is empty, and the model has no begin token to start from")
        return [row or [self.bos_id] for row in rows]  # type: ignore[list-item]

    def stops(self, stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Strings and ids that end a row, end tokens among them.

        Raises:
            RequestError: neither a string, nor an id, nor several; or an empty string. TokenIdError: an id that the
                model does not have.
        """
        if isinstance(stop, np.ndarray | jax.Array) and not isinstance(stop, jax.core.Tracer):
            stop = read_array("stop", stop).tolist()
        single = isinstance(stop, str | int | np.integer)
        if isinstance(stop, bytes | bytearray | Mapping | jax.Array) or not (single or isinstance(stop, Iterable)):
            raise RequestError(f"stop is {shown(stop)}; expected a string, a token id, or a list of them")
        items = [stop] if single else list(stop)
        words = tuple(s for s in items if isinstance(s, str))
        if not all(words):
            raise RequestError("stop: an empty string would end every row at once")
        if words:
            self.needed("stop: strings need")
        ids = id_list([s for s in items if not isinstance(s, str)], self.vocab_size, "stop") if items else []
        return words, tuple(sorted({*ids, *self.eos_ids}))


@dataclass(frozen=True, eq=False)
class Before:
    """A state that holds the first tokens of prompts, which need not be read again.

    Attributes:
        arrays: the state's.
        rows: the row of the state that each prompt goes on from.
        lengths: the tokens of each prompt that it holds, fewer than the prompt has. Where the state's own length is
            another, tokens are taken back, which whoever says so knows to be right.
        slots: of its cache.
        consumed: whether the request may write into its arrays; else it copies them.
    """

    arrays: StateArrays
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: int
    consumed: bool = False


class Mark(NamedTuple):
    """A place in a prompt, `at` so many tokens, and the arrays of the state that are to be kept as they are there."""

    at: int
    leaves: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One call of `generate`, `stream` or `chat`, or a turn of a conversation, checked.

    Attributes:
        rows: prompts as ids, each with at least one, those that a state holds among them.
        budget: new tokens for each.
        sampler: how to choose them.
        ends, words: ids and texts that end a row.
        text: whether text is returned, not ids.
        inputs: what it brings with the tokens.
        drafter: where drafts come from; None for plain decoding.
        n: answers to each prompt, whose rows stand together; None for one that is no list.
        logprobs: the likeliest tokens to return at each step; None to return no log-probabilities.
        before: the state that the prompts are read behind, if there is one.
        shared: first tokens that all prompts have, which are read once and repeated; 0 to read each prompt by itself.
        mark: what to keep a copy of where a place of the one prompt has been read (`Generation.marked`).
        room: slots that the cache is to have at least.
        ended: called with the `Generation` that has run, or was left.
        reread: why tokens are read that a state held; empty if none are.
    """

    rows: tuple[tuple[int, ...], ...]
    budget: int
    sampler: Sampler = field(default_factory=Sampler)
    ends: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    seed: Any = 0
    text: bool = False
    inputs: RequestInputs = NONE
    drafter: Drafter | None = None
    n: int | None = None
    logprobs: int | None = None
    before: Before | None = None
    shared: int = 0
    mark: Mark | None = None
    room: int = 0
    ended: Callable[[Any], None] | None = None
    reread: str = ""

    @property
    def drawn_from(self) -> int | None:
        """The seed of the draws; None where nothing is drawn, or from a key that the caller has."""
        return int(self.seed) if self.sampler.temperature and not isinstance(self.seed, jax.Array) else None


def check_request(
    lm: LanguageModel, prompts: Prompts, max_new_tokens: Any, sampler: Sampler, stop: Any, seed: Any, *,
    text: bool = False, inputs: Any = None, drafter: Drafter | None = None, n: Any = None, logprobs: Any = None,
    state: Any = None, share_prefix: Any = False,
) -> Request:  # fmt: skip
    """A request, checked; nothing has run yet. Arguments as those of `CausalLM.generate`; `text`: what is returned of
    ids is text too.

    Raises:
        RequestError: see `rlx_jax.errors`.
    """
    check_answers(lm, n, logprobs, sampler, drafter is not None)
    budget = whole_number("max_new_tokens", max_new_tokens, 0)
    before: Before | None = None
    if state is None:
        rows, brought = lm.rows(prompts), NONE
    else:
        rows, before, brought = rows_behind(lm, prompts, state)
    words, ends = lm.stops(stop)
    sampler.knobs(lm.vocab_size)
    if seed is None and sampler.temperature and jax.process_count() > 1:  # each would draw its own
        raise RequestError("seed: give one, the same in every process, where several run a model together")
    if seed is None:  # of 64 bits the upper half takes a program more
        seed = secrets.randbits(32) if sampler.temperature else 0
    if isinstance(random_key("seed", seed), jax.core.Tracer):
        raise RequestError("generate runs on the host, which reads its tokens: call it outside jax.jit and the like")
    for i, row in enumerate(rows):
        check_length(lm, len(row), budget, f"prompts[{i}]", drafter)
    if before is None and rows and (inputs is not None or lm.inputs):
        brought = request_inputs(lm.model, inputs, len(rows), lm.inputs)
    if state is not None or share_prefix is not False:
        check_together(state is not None, share_prefix, inputs, drafter)
    text = text or prompts.texts is not None
    return Request(
        tuple(map(tuple, rows)), budget, sampler, ends, words, seed, text, brought, drafter, n, logprobs, before,
        shared=common(*rows, most=min(map(len, rows)) - 1) if share_prefix and len(rows) > 1 else 0,
    )  # fmt: skip


def check_length(lm: LanguageModel, tokens: int, budget: int, what: str, drafter: Drafter | None) -> None:
    """A prompt of so many tokens and its answer fit the positions of the model, and of what drafts.

    Raises:
        SequenceLengthError: they do not.
    """
    limits = {"": lm.max_positions, "speculative: ": None if drafter is None else drafter.positions}
    for prefix, limit in limits.items():
        if tokens + budget > min(limit or MAX_SLOTS, MAX_SLOTS):
            what = f"{what}: {tokens} tokens + {number(budget)} new"
            check_positions(tokens + budget, limit, f"{prefix}{what}", tokens)
            raise SequenceLengthError(f"{what}: over the limit of {MAX_SLOTS} positions; ask for fewer new tokens")


def check_answers(lm: LanguageModel, n: Any, logprobs: Any, sampler: Sampler | None, drafts: bool) -> None:
    """How many answers each prompt gets, and how many likeliest tokens are returned. Arguments as those of
    `CausalLM.generate`.

    Raises:
        RequestError: no such numbers; several greedy answers, which are one; drafts with them.
    """
    answers = 1 if n is None else whole_number("n", n, 1)
    if answers > 1 and sampler is not None and sampler.temperature == 0:
        raise RequestError(f"n is {answers}, and a greedy sampler gives one answer; pass Sampler(temperature=1.0)")
    if drafts and (answers > 1 or logprobs is not None):
        name = "logprobs" if logprobs is not None else "n"
        raise RequestError(f"{name}= and speculative= do not go together; leave one of them out")
    if logprobs is not None and whole_number("logprobs", logprobs, 0) > lm.vocab_size:
        raise RequestError(f"logprobs is {shown(logprobs)}; the model has {lm.vocab_size} tokens")


def check_together(state: bool, share_prefix: Any, inputs: Any, drafter: Drafter | None) -> None:
    """A state and a shared beginning go together with the rest of a request.

    Raises:
        RequestError: names what does not.
    """
    if not isinstance(share_prefix, bool):
        raise RequestError(f"share_prefix is {shown(share_prefix)}; expected True or False")
    held = "state=" if state else "share_prefix=True"
    if state and share_prefix:
        raise RequestError(
            "state= and share_prefix=True do not go together: extend the state of one row by what prompts share, and "
            "pass them the state"
        )
    if inputs is not None:
        why = "the state has them" if state else "prompts that bring others share no state"
        raise RequestError(f"{held} and inputs= do not go together: {why}; leave one of them out")
    if drafter is not None and drafter.hidden:
        raise RequestError(
            f"{held} and speculative='mtp' do not go together: the module reads hidden states of whole prompts; use "
            "speculative='prompt'"
        )


# -- a request behind a state ------------------------------------------------------------------


def rows_behind(lm: LanguageModel, prompts: Prompts, state: Any) -> tuple[list[list[int]], Before, RequestInputs]:
    """What a state and the prompts of a request behind it are together: full rows, those that the state holds, and
    what it has of the inputs that come with tokens.

    Raises:
        RequestError: no state; an empty prompt. SessionStateError: it was consumed. RequestError: it has several
            rows, and not one for each prompt.
    """
    cache: DecodeState = check_is_state(state, "state")
    arrays = cache.take(lm.owner, peek=True).arrays()
    encode = lm.needed().encode if prompts.texts is not None else None
    texts = [encode(text, add_special_tokens=False) for text in prompts.texts or []] if encode else []
    given: list[Any] = prompts.ids or texts
    new = [id_list(row, lm.vocab_size, f"prompts[{i}]") for i, row in enumerate(given)]
    for i, row in enumerate(new):
        if not row:
            raise RequestError(
                f"prompts[{i}] is empty: a state tells no logits, which are those of the last token that is read; keep "
                "that token out of the state, and pass it here"
            )
    if len(cache.lengths) not in (1, len(new)):
        raise RequestError(
            f"state: it holds {len(cache.lengths)} rows, and there are {len(new)} prompts; pass one prompt for each "
            "row, or a state of one row"
        )
    rows = tuple(range(len(new))) if len(cache.lengths) > 1 else (0,) * len(new)
    held = cache.ids
    sizes = {name: size for name, size in cache.sizes.items() if name not in ("batch", "context")}
    before = Before(arrays, rows, tuple(len(held[row]) for row in rows), cache.sizes["context"])
    full = [held[row] + ids for row, ids in zip(rows, new, strict=True)]
    return full, before, RequestInputs(sizes=sizes, given=cache.given)


def common(*rows: Sequence[int], most: int = MAX_SLOTS) -> int:
    """First tokens that all rows have, at most so many."""
    return min(len(os.path.commonprefix([tuple(row) for row in rows])), most)


TAIL = 32  # tokens without text of their own that may stand in a stop string
# What stands for the bytes of a character of which some are still to come.
PART = "\ufffd"


def stopped_at(decode: Callable[[list[int]], str], ids: list[int], new: int, words: tuple[str, ...]) -> int | None:
    """How many of `ids` it takes for their text to hold a stop string; one of the last `new` completes it, or None."""
    if not words:
        return None
    text = decode(ids[-(new + TAIL + max(map(len, words)) * 4) :])  # of some, which does not take longer and longer
    if not any(word in text for word in words):
        return None
    # The text of some may begin with half of a character, and both may end with one.
    for count in range(len(ids) - new + 1, len(ids) + 1):
        whole = decode(ids[:count]).rstrip(PART)
        if any(word in whole for word in words):
            return count
    return None


def cut(text: str, words: tuple[str, ...]) -> str:
    """`text` up to the first stop string."""
    ends = [at for word in words if (at := text.find(word)) >= 0]
    return text[: min(ends)] if ends else text


def settled(text: str, words: tuple[str, ...]) -> str:
    """The part of a growing text that later tokens cannot take back."""
    text = text.rstrip(PART)
    before = cut(text, words)
    if len(before) < len(text):
        return before
    held = max((n for w in words for n in range(1, len(w)) if text.endswith(w[:n])), default=0)
    return text[: len(text) - held]
