"""`Sampler`: how the next token is chosen.

A `Sampler` has the options of the user. A `SamplingSteps` is which of its filters are on, and so part of the compiled
program. The values of the options are operands of the program (`SamplerValues`), so that another temperature compiles
nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.buckets import bucket_size
from rlx_jax.dataclasses import dataclass, field, fields, replace
from rlx_jax.errors import RequestError, TokenIdError, UnsupportedError, listing, quote, shown, suggest_keywords
from rlx_jax.io.folder import Folder
from rlx_jax.runtime.inputs import check_flag, check_integer

Array = jax.Array
# The range of positive normal float32 numbers; devices flush smaller ones to 0.
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Fields of generation_config.json that are not supported, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[float, ...]] = {
    "num_beams": (1,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "guidance_scale": (1,), "min_length": (0,),
    "sequence_bias": (), "suppress_tokens": (), "begin_suppress_tokens": (), "top_h": (),
}  # fmt: skip
# Fields of generation_config.json with another name here.
_RENAMED = {"min_new_tokens": "min_tokens", "bad_words_ids": "bad_words"}
# `bad_words` are padded to multiples of these, so that there are few programs: their number, and their tokens.
BAD_WORDS_BUCKETS = 8, 4
# A function of logits `[B, V]` and earlier tokens `[B, T]`, which returns logits.
LogitsProcessor = Callable[[Array, Array], Array]


@dataclass(frozen=True, eq=False, repr=False)
class Bias(Mapping[int, float]):
    """An immutable, hashable mapping of token id to bias; equal to a dict of the same entries."""

    _entries: dict[int, float]

    def __getitem__(self, key: int) -> float:
        return self._entries[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


@dataclass(frozen=True)
class SamplerOption:
    """The valid values of a sampling parameter, and its help on the command line.

    Attributes:
        metavar, help: `argparse` arguments of its flag.
        low, high: the range of values.
        allow_zero: whether 0 is valid too.
        is_integer: whether the value is an integer of at least 1.
        is_flag: whether the value is True or False.
        sampling_only: whether the parameter changes only the distribution to sample from, and so nothing at
            temperature 0.
    """

    metavar: str
    help: str
    low: float = TINY
    high: float = LARGEST
    allow_zero: bool = False
    is_integer: bool = False
    is_flag: bool = False
    sampling_only: bool = False

    def check(self, name: str, value: Any) -> None:
        """Check a value of the parameter `name`.

        Raises:
            RequestError: it is not valid.
        """
        if self.is_integer:
            check_integer(name, value, 0 if self.allow_zero else 1)
            return
        if self.is_flag:
            check_flag(name, value)
            return
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not -math.inf < value < math.inf:
            raise RequestError(f"{name} is {shown(value)}; expected a finite number")
        low, high = self.low, self.high
        if low <= value <= high or (self.allow_zero and value == 0):
            return
        if low >= 0 and (
            value <= 0 or (high < LARGEST and value > high)
        ):  # the limit is not one of float32, so do not mention it
            lower_bound = "0 or more" if self.allow_zero or not low else "above 0"
            expected = f"a number, {lower_bound}" + (f", at most {high:g}" if high < LARGEST else "")
        else:
            note = " (float32)" if low == TINY or high == LARGEST else ""
            expected = f"{'0, or ' if self.allow_zero else ''}from {low:.3g} to {high:.3g}{note}"
        raise RequestError(f"{name} is {shown(value)}; expected {expected}")


def option(default: Any, metavar: str, help: str, **rules: Any) -> Any:
    """Return a dataclass field of `Sampler` that is a command line option, too; see `SamplerOption`."""
    return field(default=default, metadata={"option": SamplerOption(metavar, help, **rules)})


@dataclass(frozen=True)
class Sampler:
    """Sampling parameters, in the order in which they apply.

    Args:
        logit_bias: added to the logits, by token id; −inf bans a token. Copied.
        repetition_penalty: p > 1 makes tokens less likely that the row has already, prompt included: a positive logit
            is divided by p, a negative one multiplied (Keskar et al. 2019).
        frequency_penalty, presence_penalty: subtracted from the logit of a token that was generated c times, as in the
            APIs of OpenAI and vLLM: `frequency_penalty · c + presence_penalty · (c > 0)`. The prompt does not count.
        min_tokens: end tokens and ids of `stop` have no probability before so many new tokens, and a stop string that
            ends within them does not count.
        ignore_eos: end tokens do not end a row; `stop` does.
        bad_words: sequences that are never completed, each a list of token ids: its last id has no probability after
            the others, which may be a part of the prompt. A string stands for its tokens and, if they are as many and
            begin with another one, its tokens with a space before it.
        logits_processor: a JAX function `(logits, tokens) -> logits` inside the program: logits `[B, V]` float32, and
            `[B, T]` int32 with prompt and answer so far of each row, padded with -1 on the right. B and T are padded
            sizes; what it returns for a row may depend on this row alone.
        temperature: divides the logits. 0 is greedy: the largest logit, the smaller id on a tie.
        top_k: keep the k largest logits (Fan et al. 2018).
        top_p: keep the most likely tokens until their mass reaches p (Holtzman et al. 2019).
        min_p: keep tokens at least p times as likely as the most likely one (Nguyen et al. 2024).

    At least one token is always kept; tokens that tie with the last one kept stay.

    Raises:
        RequestError: a value out of range.
    """

    temperature: float = option(0.0, "T", "0, the default, takes the likeliest token", allow_zero=True)
    top_k: int | None = option(None, "K", "choose among the K likeliest", is_integer=True, sampling_only=True)
    top_p: float | None = option(
        None, "P", "choose among the likeliest that make up the probability P", high=1.0, sampling_only=True
    )
    min_p: float | None = option(
        None, "P", "leave out what is less likely than P times the likeliest", low=0.0, high=1.0, sampling_only=True
    )
    repetition_penalty: float = option(1.0, "R", "above 1: tokens that the text has get less likely")
    logit_bias: Mapping[int, float] | None = None
    presence_penalty: float = option(0.0, "P", "above 0: tokens of the answer get less likely", low=-LARGEST)
    frequency_penalty: float = option(0.0, "P", "above 0: the same by their number in the answer", low=-LARGEST)
    min_tokens: int = option(0, "N", "no end before so many new tokens", is_integer=True, allow_zero=True)
    ignore_eos: bool = option(False, "", "end tokens do not end the answer", is_flag=True)
    bad_words: Sequence[str | Sequence[int]] | None = None
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        for name, rule in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or getattr(Sampler, name) is not None:
                rule.check(name, value)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {quote(self.logit_bias)}; expected a mapping of token id to bias")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", Bias(dict(self.logit_bias)))
        if self.bad_words is not None:
            object.__setattr__(self, "bad_words", check_bad_words(self.bad_words))
        processor: Any = self.logits_processor
        if processor is not None and not (callable(processor) and isinstance(processor, Hashable)):
            raise RequestError(
                f"logits_processor is {shown(processor)}; expected a function (logits, tokens) -> logits"
            )

    @staticmethod
    def from_generation_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Sampler:
        """Return the sampler that a checkpoint recommends, as transformers interprets it.

        It is greedy where `do_sample` is not true. Otherwise missing fields have the defaults of transformers:
        temperature 1, `top_k` 50.

        Args:
            config: a model directory with a `generation_config.json`, or the parsed content of such a file.

        Raises:
            MissingFileError, ConfigError: there is no such file, or it is malformed.
            RequestError: a value is out of range. UnsupportedError: an option is not supported, beams for example.
        """
        if not isinstance(config, Mapping):
            if not isinstance(config, str | os.PathLike):
                raise RequestError(f"from_generation_config: expected a directory or a dict, got {shown(config)}")
            config = Folder.from_path(config).required_json("generation_config.json")
        entries = {_RENAMED.get(name, name): value for name, value in config.items() if value is not None}
        off_values = {name: (False, *off) for name, off in _UNSUPPORTED.items() if name in entries}
        unsupported = [name for name, off in off_values.items() if entries[name] not in off]
        if unsupported:
            raise UnsupportedError(f"generation_config: {listing(unsupported)}: rlx_jax.Sampler has none; leave it out")
        values = {name: entries[name] for name in (*OPTIONS, "bad_words") if name in entries}
        if entries.get("do_sample") is True:
            # transformers turns the filter off with top_k = 0.
            values = {"temperature": 1.0} | values | {"top_k": entries.get("top_k", 50) or None}
            return Sampler(**values)
        sampling_only = {"temperature", *(name for name, rule in OPTIONS.items() if rule.sampling_only)}
        return Sampler(**{name: value for name, value in values.items() if name not in sampling_only})

    def sampling_steps(self, vocab_size: int) -> SamplingSteps:
        """Return which of the filters have an effect for a vocabulary of this size."""
        do_sample, words = self.temperature > 0, self.bad_words or ()
        sequences = [len(word) for word in words if len(word) > 1]
        number, length = map(bucket_size, (len(sequences), max(sequences, default=0)), BAD_WORDS_BUCKETS, (None, None))
        return SamplingSteps(
            do_sample=do_sample,
            penalised=self.repetition_penalty != 1.0,
            biased=bool(self.logit_bias) or len(words) > len(sequences),
            top_k=do_sample and self.top_k is not None and self.top_k < vocab_size,
            top_p=do_sample and self.top_p is not None and self.top_p < 1.0,
            min_p=do_sample and bool(self.min_p),
            counted=bool(self.presence_penalty or self.frequency_penalty),
            delayed=self.min_tokens > 0,
            bad_words=(number, length) if sequences else (0, 0),
            processors=() if self.logits_processor is None else (self.logits_processor,),
        )

    def values(self, vocab_size: int, steps: SamplingSteps | None = None) -> SamplerValues:
        """Return the values of the sampler as operands of a program.

        Args:
            steps: the steps of the program, which may have more than the sampler needs.

        Raises:
            TokenIdError: `logit_bias` has an id out of range. RequestError: one of its values is NaN, +inf or over
                float32, or it and `bad_words` ban every token; or `bad_words` are strings, without a tokenizer.
        """
        steps = steps or self.sampling_steps(vocab_size)
        bias = np.zeros(vocab_size if steps.biased else 0, np.float32)
        for i, value in (self.logit_bias or {}).items():
            if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
                raise TokenIdError(f"logit_bias: id {shown(i)} is not an integer in [0, {vocab_size})")
            is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not is_number or not (value == -math.inf or abs(value) <= LARGEST):
                raise RequestError(f"logit_bias[{i}] is {shown(value)}; expected -inf or a number up to {LARGEST:.3g}")
            bias[i] = value
        bad_words = np.full(steps.bad_words, -1, np.int32)
        sequences = iter(bad_words)
        for word in self.bad_words or ():
            if isinstance(word, str):
                raise RequestError(f"bad_words: {quote(word)} needs a tokenizer; pass token ids")
            if len(word) == 1:
                bias[word[0]] = -math.inf
            else:
                next(sequences)[-len(word) :] = word
        if bias.size and np.isneginf(bias).all():
            raise RequestError(f"{'bad_words' if self.bad_words else 'logit_bias'} bans every token")
        return SamplerValues(
            temperature=np.float32(self.temperature),
            top_k=np.int32(min(self.top_k or vocab_size, vocab_size)),
            # Off is 2, not 1: a cumulative sum of probabilities may round to 1 before the last token.
            top_p=np.float32(2.0 if self.top_p in (None, 1.0) else self.top_p),
            min_p=np.float32(self.min_p or 0.0),
            penalty=np.float32(self.repetition_penalty),
            bias=bias,
            presence=np.float32(self.presence_penalty),
            frequency=np.float32(self.frequency_penalty),
            min_tokens=np.int32(min(self.min_tokens, np.iinfo(np.int32).max)),
            bad_words=bad_words,
            processor=np.int32(steps.processors.index(processor) + 1 if (processor := self.logits_processor) else 0),
        )


Sampler.__init__ = suggest_keywords()(Sampler.__init__)  # type: ignore[method-assign]


class Sampling(TypedDict, total=False):
    """The fields of a `Sampler` as keyword arguments: `generate(…, temperature=0.8, top_p=0.9)`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int
    ignore_eos: bool
    bad_words: Sequence[str | Sequence[int]] | None
    logits_processor: LogitsProcessor | None


SAMPLING = tuple(f.name for f in fields(Sampler))
# The fields that are options of the command line: numbers and flags.
OPTIONS: dict[str, SamplerOption] = {f.name: f.metadata["option"] for f in fields(Sampler) if f.metadata}
GREEDY = Sampler()


def check_bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return `bad_words`, checked as far as it is possible without a model.

    Raises:
        RequestError: they are no list of strings and lists of token ids; or one of them is empty.
    """
    if isinstance(words, str | bytes | Mapping) or not isinstance(words, Sequence):
        raise RequestError(f"bad_words is {shown(words)}; expected a list of strings and of lists of token ids")
    for i, word in enumerate(words):
        if isinstance(word, bytes) or not isinstance(word, str | Sequence | np.ndarray) or not len(word):
            raise RequestError(f"bad_words[{i}] is {shown(word)}; expected a string or a list of ids, and not empty")
    return tuple(word if isinstance(word, str) else tuple(word) for word in words)


@dataclass(frozen=True)
class SamplingSteps:
    """The steps of choosing a token that a program is compiled with; all off is greedy.

    Attributes:
        counted: a presence or frequency penalty. delayed: `min_tokens`.
        bad_words: the padded number and length of `bad_words` of several tokens; those of one are a bias.
        processors: the different functions `logits_processor` of the rows.
    """

    do_sample: bool = False
    penalised: bool = False
    biased: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    counted: bool = False
    delayed: bool = False
    bad_words: tuple[int, int] = (0, 0)
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def changes_logits(self) -> bool:
        """Return whether a penalty, a bias or `min_tokens` changes the logits."""
        return self.penalised or self.biased or self.counted or self.delayed

    @property
    def reads_tokens(self) -> bool:
        """Return whether a step reads the earlier tokens in their order."""
        return self.bad_words > (0, 0) or bool(self.processors)

    @property
    def text(self) -> str:
        """Return in words which samplers it serves, for reports."""
        logits = "repetition_penalty or another change of logits"
        number, length = self.bad_words
        extra = f", and {number} bad_words of {length} tokens" if number else ""
        extra += "".join(f", and logits_processor={getattr(fn, '__name__', fn)}" for fn in self.processors)
        if not self.do_sample:
            return (f"greedy ones with {logits}" if self.changes_logits else "greedy ones") + extra
        filters = self.top_k or self.top_p or self.min_p or self.changes_logits
        return (f"random ones with top_k, top_p, min_p, {logits}" if filters else "random ones without filters") + extra

    def union(self, other: SamplingSteps) -> SamplingSteps:
        """Return steps that serve both samplers: a step that is on and has no effect changes no token."""
        flags = {f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)}
        number, length = (max(pair) for pair in zip(self.bad_words, other.bad_words, strict=True))
        processors = tuple(dict.fromkeys((*self.processors, *other.processors)))
        return replace(SamplingSteps(**flags), bad_words=(number, length), processors=processors)

    def widened(self) -> SamplingSteps:
        """Return one of four methods that chooses the same tokens, so that few programs serve every sampler; for each
        size of `bad_words` and each function there are four."""
        logits = self.changes_logits
        filters = self.do_sample and (logits or self.top_k or self.top_p or self.min_p)
        logits = logits or filters
        return SamplingSteps(
            self.do_sample, logits, logits, filters, filters, filters, logits, logits, self.bad_words,
            self.processors,
        )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerValues:
    """The values of a sampler as operands: float32 scalars (`top_k` and `min_tokens` int32); `bias` `[V]` float32, or
    `[0]` without a bias; `bad_words` `[W, L]` int32, each padded with -1 on the left; and `processor`, the number of
    the function `logits_processor` among those of the program, from 1 on, or 0.

    With one sampler for each row they are `[B, 1]`, `[B, V]` or `[B, 0]`, and `[B, W, L]`; a row of temperature 0 is
    then greedy.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    bias: Any
    presence: Any
    frequency: Any
    min_tokens: Any
    bad_words: Any
    processor: Any


def choose_tokens(steps: SamplingSteps, values: SamplerValues, logits: Array, keys: Array) -> Array:
    """Choose one token for each row: logits `[B, V]` float32 after `adjust_logits` → ids `[B]` int32.

    Args:
        keys: `[B]` random keys, used only if `steps.do_sample`. The token of a row depends on its own key and logits
            alone.
    """
    if not steps.do_sample:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return sample(warp_logits(steps, values, logits), keys)


def warp_logits(steps: SamplingSteps, values: SamplerValues, logits: Array) -> Array:
    """Return the logits of the distribution that a token is sampled from.

    They are the logits `[N, V]` after `adjust_logits`, divided by the temperature, and −inf for tokens that a filter
    excludes. Where slots have a temperature each, a greedy slot's distribution has all its mass on the likeliest token.
    """
    is_greedy = values.temperature == 0 if jnp.ndim(values.temperature) else None
    temperature = values.temperature if is_greedy is None else jnp.where(is_greedy, 1, values.temperature)
    # Subtract the maximum first, so that the quotient is at most 0 and no small temperature makes it overflow.
    warped = keep_likely(steps, values, (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    if is_greedy is None:
        return warped
    is_likeliest = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None] == jnp.argmax(logits, axis=-1)[:, None]
    return jnp.where(is_greedy, jnp.where(is_likeliest, 0, -jnp.inf), warped)


def sample(logits: Array, keys: Array) -> Array:
    """Sample one token for each row from the softmax of `[N, V]` logits, with one key per row: ids `[N]` int32."""
    # Gumbel-max trick: the argmax of logits plus Gumbel noise is distributed as their softmax.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def keep_likely(steps: SamplingSteps, values: SamplerValues, logits: Array) -> Array:
    """Return the logits `[B, V]` with −inf for the tokens that top-k, top-p or min-p exclude."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    floor = jnp.full_like(peak, -jnp.inf)
    if steps.top_k or steps.top_p:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        if steps.top_k:
            last_index = jnp.full((logits.shape[0], 1), values.top_k - 1, jnp.int32)
            floor = jnp.take_along_axis(ranked, last_index, axis=-1)
            ranked = jnp.where(ranked >= floor, ranked, -jnp.inf)
        if steps.top_p:
            mass = jax.nn.softmax(ranked, axis=-1)
            mass_before = jnp.cumsum(mass, axis=-1) - mass
            num_kept = jnp.sum(mass_before < values.top_p, axis=-1, keepdims=True, dtype=jnp.int32)
            # The tokens that top-k excluded rank last; a top-p that is off, or a rounded sum, reaches them. Their logit
            # is −inf, so the maximum keeps the limit of top-k.
            floor = jnp.maximum(floor, jnp.take_along_axis(ranked, num_kept - 1, axis=-1))
    if steps.min_p:
        floor = jnp.maximum(floor, peak + jnp.log(values.min_p))
    # The minimum with `peak` keeps at least one token.
    return jnp.where(logits >= jnp.minimum(floor, peak), logits, -jnp.inf)


def finite_rows(logits: Array, greedy: Array | None = None) -> Array:
    """Return in which rows of logits `[B, V]` a token can be chosen: no NaN, and a finite largest logit.

    Args:
        greedy: `[B]`, index of the maximum, if it is known already. The maximum of a row with NaN is NaN.
    """
    if greedy is None:
        return jnp.isfinite(jnp.max(logits, axis=-1))
    return jnp.isfinite(jnp.take_along_axis(logits, greedy[:, None], axis=-1, mode="clip")[:, 0])
