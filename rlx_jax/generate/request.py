"""`Request`: one call of `generate`, `stream` or `chat`, checked once on the host before anything runs.

The module also defines `LanguageModel`, the model data that a request needs, and the text functions for stop strings.
"""

from __future__ import annotations

import os.path
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlx_jax.compiler.buckets import Buckets
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.device import is_tracing
from rlx_jax.errors import RequestError, SequenceLengthError, integer_text, listing, shown
from rlx_jax.generate.decode_state import DecodeState, check_is_state
from rlx_jax.generate.prefix_cache import Prefix, PrefixCache
from rlx_jax.generate.request_inputs import NO_INPUTS, Inputs, RequestInputs, check_inputs
from rlx_jax.generate.row_options import BatchProgress, RowOptions
from rlx_jax.generate.sampler import GREEDY, OPTIONS, Sampler, Sampling
from rlx_jax.generate.speculative import Drafter
from rlx_jax.generate.stop_strings import min_length, stop_length, truncate_at_stop
from rlx_jax.program import InputDecl
from rlx_jax.runtime.inputs import check_flag, check_integer, read_array
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.random_keys import key_words
from rlx_jax.text.request_checks import NO_TOKENIZER, Prompts, id_list
from rlx_jax.text.token_model import check_positions
from rlx_jax.text.tokenizer import Tokenizer

MAX_CACHE_LEN = 2**30  # XLA cannot represent the next power of two, 2**31, as a dimension


class DecodingOptions(Sampling, total=False):
    """Keyword arguments common to `CausalLM.generate`, `stream`, `chat`, and turns of a conversation."""

    speculative: Any
    draft_tokens: int


class StreamOptions(DecodingOptions, total=False):
    """Keyword arguments of `CausalLM.stream`."""

    inputs: Inputs
    state: DecodeState | Prefix | None


class GenerateOptions(StreamOptions, total=False):
    """Keyword arguments of `CausalLM.generate` that do not affect its return type."""

    share_prefix: bool | None
    slots: int | None
    progress: Callable[[BatchProgress], None] | None


@dataclass(frozen=True)
class LanguageModel:
    """The part of a `CausalLM` that requests need: its model, tokenizer, limits and special tokens.

    Fields are as in `CausalLM`; `ids_input` is the name of the input of tokens, `inputs` are the model's
    `request_inputs`, and `prefixes` are the cached prefixes.
    """

    model: CompiledModel
    ids_input: str
    vocab_size: int
    tokenizer: Tokenizer | None
    max_positions: int | None
    buckets: Buckets
    bos_id: int | None
    eos_ids: tuple[int, ...]
    inputs: Mapping[str, InputDecl]
    prefixes: PrefixCache

    @property
    def owner(self) -> tuple[Programs, str]:
        """Return the key that marks states of this model: its flow's programs, whatever the parameters."""
        return self.model.programs, self.model.name

    @property
    def required_inputs(self) -> list[str]:
        """Return the names of the inputs that a request has to pass."""
        return [name for name, d in self.inputs.items() if not d.optional]

    def require_tokenizer(self, subject: str = "strings need", alternative: str = "pass token ids") -> Tokenizer:
        """Return the tokenizer.

        Args:
            subject: beginning of the error message: what needs a tokenizer.
            alternative: end of the error message: what works without one.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError(f"{subject} a tokenizer, and this model has none: {NO_TOKENIZER}; or {alternative}")
        return self.tokenizer

    def decode(self, ids: list[int]) -> str:
        """Return the text of new tokens."""
        return self.require_tokenizer().decode(ids)

    def answer_text(self, ids: list[int], stop_strings: tuple[str, ...], min_tokens: int = 0) -> str:
        """Return the text of new tokens up to the first stop string that ends after `min_tokens` of them."""
        start = min_length(self.decode, ids, min_tokens) if stop_strings else 0
        return truncate_at_stop(self.decode(ids), stop_strings, start)

    def find_end(self, options: RowOptions, ids: list[int], num_new: int) -> int | None:
        """Return the length of an answer up to its first stop string, or None; see `stop_length`."""
        return stop_length(self.decode, ids, num_new, options.stop_strings, options.sampler.min_tokens)

    def encode_prompts(self, prompts: Prompts, start: int = 0) -> list[list[int]]:
        """Return prompts as ids, each with at least one: an empty prompt becomes the begin token.

        Args:
            prompts: the prompts.
            start: the index of the first one, for messages.

        Raises:
            RequestError: a prompt is empty, and there is no begin token. TokenIdError: the model does not have an id.
        """
        prompt_ids = prompts.ids or []
        if prompts.texts is not None:
            prompt_ids = self.require_tokenizer().encode_batch(prompts.texts)
        rows = [id_list(row, self.vocab_size, f"prompts[{i}]") for i, row in enumerate(prompt_ids, start)]
        for i, row in enumerate(rows, start):
            if not row and self.bos_id is None:
                raise RequestError(f"prompts[{i}] is empty, and the model has no begin token to start from")
        return [row or [self.bos_id] for row in rows]  # type: ignore[list-item]

    def bind_sampler(self, sampler: Sampler) -> Sampler:
        """Return a sampler with the strings of its `bad_words` as token ids.

        As in vLLM, a string stands for its tokens without a space before it, and for those with one if they are as many
        and the first of them differs.

        Raises:
            RequestError: there is no tokenizer. TokenIdError: the model does not have an id.
        """
        words: list[Sequence[int]] = []
        for i, word in enumerate(sampler.bad_words or ()):
            if not isinstance(word, str):
                words.append(word)
                continue
            encode, text = self.require_tokenizer("bad_words: strings need").encode, word.lstrip(" ")
            plain, spaced = (encode(prefix + text, add_special_tokens=False) for prefix in ("", " "))
            if not plain:
                raise RequestError(f"bad_words[{i}] is {shown(word)}, which has no tokens")
            words += [plain, spaced] if len(plain) == len(spaced) and plain[0] != spaced[0] else [plain]
        ids = [tuple(id_list(word, self.vocab_size, f"bad_words[{i}]")) for i, word in enumerate(words)]
        return replace(sampler, bad_words=tuple(dict.fromkeys(ids))) if ids else sampler


class SnapshotPoint(NamedTuple):
    """A position in a prompt, after `num_tokens` tokens, and the names of the state arrays to copy there.

    `CausalLM.conversation` marks the end of the messages, to return to it if the reply is rendered differently later.
    """

    num_tokens: int
    array_names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One checked call of `generate`, `stream` or `chat`, or a turn of a conversation.

    Attributes:
        rows: prompts as ids, each with at least one; they include the tokens that a state already has.
        options: the options of all prompts, or of each prompt.
        as_text: whether text is returned, not ids.
        inputs: the inputs other than tokens.
        drafter: the source of drafts; None for plain decoding.
        n: number of answers to each prompt, in adjacent rows; None for one answer that is not in a list.
        logprobs: number of likeliest tokens to return at each step; None to return no log-probabilities.
        prefixes: the prefix of each prompt, rows of one state that they continue; empty if there is none.
        owns_prefix: whether the request may write into the arrays of that state; else it copies them. Only then may the
            prefix of a single prompt be shorter than the state, which the caller guarantees to be correct when
            truncated.
        share_prefix: whether prompts share prefixes: True also those that are short, None where they run in slots.
        snapshot_point: position in the single prompt at which to copy arrays of the state, into `Generation.snapshot`.
        min_cache_len: lower bound of `cache_len`, the length of the cache.
        on_end: callback for the `Generation` when it has run or was abandoned.
        reread: why prefill repeats tokens that a state had; empty if it repeats none.
        slots: number of slots for continuous batching; None to choose.
        progress: callback for the progress of many prompts.
        is_stream: whether tokens are returned as soon as they are chosen, by programs of one or two steps.
    """

    rows: tuple[tuple[int, ...], ...]
    options: tuple[RowOptions, ...]
    as_text: bool = False
    inputs: RequestInputs = NO_INPUTS
    drafter: Drafter | None = None
    n: int | None = None
    logprobs: int | None = None
    prefixes: tuple[Prefix, ...] = ()
    owns_prefix: bool = False
    share_prefix: bool | None = None
    snapshot_point: SnapshotPoint | None = None
    min_cache_len: int = 0
    on_end: Callable[[Any], None] | None = None
    reread: str = ""
    slots: int | None = None
    progress: Callable[[BatchProgress], None] | None = None
    is_stream: bool = False

    @property
    def budget(self) -> int:
        """Return the most new tokens of a row."""
        return max(options.budget for options in self.options)

    def row_options(self, row: int) -> RowOptions:
        """Return the options of one row: its sampler, what ends it, and its random draws."""
        prompt, answer = divmod(row, self.n or 1)
        if len(self.options) == 1:
            return replace(self.options[0], draw=row)
        return replace(self.options[prompt], draw=self.options[prompt].draw + answer)

    @property
    def sampling_seed(self) -> int | None:
        """Return the seed of the random draws; None where decoding is greedy, each prompt has a seed of its own, or the
        caller passed a key."""
        seed, is_shared = self.options[0].seed, len(self.options) == 1 or self.options[1].draw > 0
        is_random = any(options.sampler.temperature for options in self.options)
        return int(seed) if is_random and is_shared and not isinstance(seed, jax.Array) else None


def make_options(
    lm: LanguageModel, max_new_tokens: Any, sampler: Sampler, stop: Any, seed: Any, draw: int = 0, where: str = "",
    name: str = "max_new_tokens",
) -> RowOptions:  # fmt: skip
    """Check the options of a row, and return them.

    Args:
        max_new_tokens, stop: as in `CausalLM.generate`.
        sampler, seed: the result of `check_sampler` and `choose_seed`.
        draw: as in `RowOptions`.
        where: the prompt with a colon, for messages.
        name: `max_new_tokens` for messages.

    Raises:
        RequestError, TokenIdError: as `CausalLM.generate`; or the answer must have more tokens than it may have.
    """
    budget = check_integer(f"{where}{name}", max_new_tokens, 0)
    if isinstance(stop, np.ndarray | jax.Array) and not isinstance(stop, jax.core.Tracer):
        stop = read_array("stop", stop).tolist()
    single = isinstance(stop, str | int | np.integer)
    if isinstance(stop, bytes | bytearray | Mapping | jax.Array) or not (single or isinstance(stop, Iterable)):
        raise RequestError(f"stop is {shown(stop)}; expected a string, a token id, or a list of them")
    items = [stop] if single else list(stop)
    stop_strings = tuple(s for s in items if isinstance(s, str))
    if not all(stop_strings):
        raise RequestError("stop: an empty string would end every row at once")
    if stop_strings:
        lm.require_tokenizer("stop: strings need")
    ids = id_list([s for s in items if not isinstance(s, str)], lm.vocab_size, "stop") if items else []
    stop_ids = tuple(sorted({*ids, *(() if sampler.ignore_eos else lm.eos_ids)}))
    if sampler.min_tokens > budget:
        text = f"{where}min_tokens is {sampler.min_tokens}, and max_new_tokens is {budget}"
        raise RequestError(f"{text}; pass at most as many")
    return RowOptions(budget, sampler, stop_ids, stop_strings, seed, draw)


def check_sampler(lm: LanguageModel | None, sampler: Any, options: Mapping[str, Any] | None = None) -> Sampler:
    """Return the sampler of a request: `sampler`, or one with the fields `options`, or the greedy one.

    Args:
        lm: the model whose vocabulary it is checked for; None for any.

    Raises:
        RequestError: `sampler` is no sampler; both are given; a value is out of range; or a filter is given at
            temperature 0, where it has no effect.
        TokenIdError: the model does not have an id. Others as `LanguageModel.bind_sampler` and `Sampler.values`.
    """
    options = options or {}
    if sampler is not None and not isinstance(sampler, Sampler):
        raise RequestError(f"sampler is {shown(sampler)}; expected rlx_jax.Sampler(temperature=0.0)")
    if sampler is not None and options:
        raise RequestError(f"sampler= and {listing(options)} both select tokens; pass one of them")
    result: Sampler = sampler or (Sampler(**options) if options else GREEDY)
    filters = [name for name, rule in OPTIONS.items() if rule.sampling_only and options.get(name) is not None]
    if filters and not result.temperature:
        raise RequestError(
            f"{filters[0]} is {shown(options[filters[0]])}, and temperature 0 takes the likeliest token, so that "
            "it has no effect; pass a temperature, such as temperature=1.0"
        )
    if lm is not None and (result.logit_bias or result.bad_words):
        result = lm.bind_sampler(result)
        result.values(lm.vocab_size)
    return result


def check_request(
    lm: LanguageModel, prompts: Prompts, options: tuple[RowOptions, ...], *, text: bool = False, inputs: Any = None,
    drafter: Drafter | None = None, n: Any = None, logprobs: Any = None, state: Any = None, share_prefix: Any = None,
    slots: Any = None, progress: Any = None,
) -> Request:  # fmt: skip
    """Check the arguments of `CausalLM.generate` and return the request; nothing has run yet.

    Args:
        options: as in `Request`.
        text: return text also for prompts that are ids.

    Raises:
        RequestError: see `rlx_jax.errors`.
    """
    if n is not None or logprobs is not None:
        check_answers(lm, n, logprobs, drafter is not None)
    greedy = any(row.sampler.temperature == 0 for row in options)
    if greedy and (n or 1) > 1:
        raise RequestError(f"n is {n}, and a greedy sampler gives one answer; pass Sampler(temperature=1.0)")
    if progress is not None and not callable(progress):
        raise RequestError(f"progress is {shown(progress)}; expected a callback, such as print")
    prefixes: tuple[Prefix, ...] = ()
    if state is None:
        rows, checked_inputs = lm.encode_prompts(prompts), NO_INPUTS
    else:
        rows, prefixes, checked_inputs = join_state(lm, prompts, state)
    for i, row in enumerate(rows):
        check_length(lm, len(row), options[i if len(options) > 1 else 0].budget, f"prompts[{i}]", drafter)
    if state is None and rows and (inputs is not None or lm.inputs):
        checked_inputs = check_inputs(lm.model, inputs, len(rows), lm.inputs)
    if state is not None or share_prefix is not None:
        check_combination(state is not None, share_prefix, inputs, drafter)
    text = text or prompts.texts is not None
    return Request(
        tuple(map(tuple, rows)), options, text, checked_inputs, drafter, n, logprobs, prefixes, False, share_prefix,
        slots=None if slots is None else check_integer("slots", slots, 1), progress=progress,
    )  # fmt: skip


def choose_seed(seed: Any, sampler: Sampler) -> Any:
    """Return a checked seed, a new one in place of None.

    Raises:
        RequestError: it is none; it is traced; or several processes would choose different ones.
    """
    if seed is None and sampler.temperature and jax.process_count() > 1:
        raise RequestError("seed: give one, the same in every process, where several run a model together")
    words = 0 if seed is None else key_words("seed", seed)
    if seed is None:  # 32 bits: a larger seed needs a second program to fold in its upper half
        seed = secrets.randbits(32) if sampler.temperature else 0
    if is_tracing():
        words = jax.device_put(words)  # traced in jax.jit, whatever the seed is
    if isinstance(words, jax.core.Tracer):
        raise RequestError("generate runs on the host, which reads its tokens: call it outside jax.jit and the like")
    return seed


def check_length(lm: LanguageModel, tokens: int, budget: int, name: str, drafter: Drafter | None) -> None:
    """Check that a prompt and its answer fit the positions of the model and of the drafter.

    Args:
        tokens: length of the prompt.
        budget: number of new tokens.
        name: the prompt, for the error message.

    Raises:
        SequenceLengthError: they do not.
    """
    limits = {"": lm.max_positions, "speculative: ": None if drafter is None else drafter.max_positions}
    for option, limit in limits.items():
        if tokens + budget > min(limit or MAX_CACHE_LEN, MAX_CACHE_LEN):
            name = f"{name}: {tokens} tokens + {integer_text(budget)} new"
            check_positions(tokens + budget, limit, f"{option}{name}", tokens)
            raise SequenceLengthError(f"{name}: over the limit of {MAX_CACHE_LEN} positions; ask for fewer new tokens")


def check_answers(lm: LanguageModel, n: Any, logprobs: Any, drafts: bool = False) -> None:
    """Check `n` and `logprobs` of `CausalLM.generate`.

    Raises:
        RequestError: a number is out of range; or one of the options is combined with drafts.
    """
    answers = 1 if n is None else check_integer("n", n, 1)
    if drafts and (answers > 1 or logprobs is not None):
        name = "logprobs" if logprobs is not None else "n"
        raise RequestError(f"{name}= and speculative= do not go together; leave one of them out")
    if logprobs is not None and check_integer("logprobs", logprobs, 0) > lm.vocab_size:
        raise RequestError(f"logprobs is {shown(logprobs)}; the model has {lm.vocab_size} tokens")


def check_combination(state: bool, share_prefix: Any, inputs: Any, drafter: Drafter | None) -> None:
    """Check that `state=` or `share_prefix=` can be combined with the other options of a request.

    Raises:
        RequestError: names the option that cannot.
    """
    if share_prefix is not None:
        check_flag("share_prefix", share_prefix)
    if not state and not share_prefix:
        return
    option = "state=" if state else "share_prefix=True"
    if state and share_prefix:
        raise RequestError(
            "state= and share_prefix=True do not go together: extend the state of one row by what prompts share, and "
            "pass them the state"
        )
    if inputs is not None:
        reason = "the state has them" if state else "prompts with other inputs share no state"
        raise RequestError(f"{option} and inputs= do not go together: {reason}; leave one of them out")
    if drafter is not None and drafter.needs_hidden:
        raise RequestError(
            f"{option} and speculative='mtp' do not go together: the module reads hidden states of whole prompts; use "
            "speculative='prompt'"
        )


def join_state(
    lm: LanguageModel, prompts: Prompts, state: Any
) -> tuple[list[list[int]], tuple[Prefix, ...], RequestInputs]:
    """Join a state and the prompts that continue it.

    Returns:
        the full rows of ids, tokens of the state included; the prefix of each; and the inputs that the state was
        prefilled with.

    Raises:
        RequestError: `state` is no state; a prompt is empty; or the state has several rows, and not one for each
            prompt. SessionStateError: the state was consumed.
    """
    state = state.decode_state(lm.owner, lm.model) if isinstance(state, Prefix) else state
    cache: DecodeState = check_is_state(state, "state")
    arrays = cache.take(lm.owner, peek=True).arrays()
    encode = lm.require_tokenizer().encode if prompts.texts is not None else None
    texts = [encode(text, add_special_tokens=False) for text in prompts.texts or []] if encode else []
    prompt_ids: list[Any] = prompts.ids or texts
    new = [id_list(row, lm.vocab_size, f"prompts[{i}]") for i, row in enumerate(prompt_ids)]
    for i, row in enumerate(new):
        if not row:
            raise RequestError(
                f"prompts[{i}] is empty: a state has no logits, and the next token needs the logits of the last one; "
                "leave that token out of the state, and pass it here"
            )
    if len(cache.lengths) not in (1, len(new)):
        raise RequestError(
            f"state: it has {len(cache.lengths)} rows, and there are {len(new)} prompts; pass one prompt for each "
            "row, or a state of one row"
        )
    rows = tuple(range(len(new))) if len(cache.lengths) > 1 else (0,) * len(new)
    state_ids = cache.ids
    sizes = {name: size for name, size in cache.sizes.items() if name not in ("batch", "context")}
    prefixes = tuple(Prefix(tuple(state_ids[row]), 0, cache.sizes["context"], arrays=arrays, row=row) for row in rows)
    full = [state_ids[row] + ids for row, ids in zip(rows, new, strict=True)]
    return full, prefixes, RequestInputs(sizes=sizes, optional_inputs=cache.optional_inputs)


def common_prefix_len(*rows: Sequence[int], limit: int = MAX_CACHE_LEN) -> int:
    """Return the length of the common prefix of all rows, at most `limit`."""
    return min(len(os.path.commonprefix([tuple(row) for row in rows])), limit)
