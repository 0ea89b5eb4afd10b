"""`Sampler`: how the next token is chosen.

A `Sampler` has the options of the user. A `SamplingSteps` is which of its filters are on, and so part of the compiled
program. The values of the options are operands of the program (`SamplerValues`), so that another temperature compiles
nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import RequestError, TokenIdError, UnsupportedError, listing, quote, shown
from rlx_jax.io.folder import Folder
from rlx_jax.ir.former_names import former_names
from rlx_jax.runtime.inputs import check_integer

Array = jax.Array
# The range of positive normal float32 numbers; devices flush smaller ones to 0.
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# Fields of generation_config.json that are not supported, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[float, ...]] = {
    "num_beams": (1,), "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "guidance_scale": (1,), "min_length": (0,), "min_new_tokens": (0,),
    "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": (), "begin_suppress_tokens": (), "top_h": (),
}  # fmt: skip


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
        sampling_only: whether the parameter changes only the distribution to sample from, and so nothing at
            temperature 0.
    """

    metavar: str
    help: str
    low: float = TINY
    high: float = LARGEST
    allow_zero: bool = False
    is_integer: bool = False
    sampling_only: bool = False

    def check(self, name: str, value: Any) -> None:
        """Check a value of the parameter `name`.

        Raises:
            RequestError: it is not valid.
        """
        if self.is_integer:
            check_integer(name, value, 1)
            return
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not -math.inf < value < math.inf:
            raise RequestError(f"{name} is {shown(value)}; expected a finite number")
        low, high = self.low, self.high
        if low <= value <= high or (self.allow_zero and value == 0):
            return
        if value <= 0 or (high < LARGEST and value > high):  # the limit is not one of float32, so do not mention it
            lower_bound = "0 or more" if self.allow_zero or not low else "above 0"
            expected = f"a number, {lower_bound}" + (f", at most {high:g}" if high < LARGEST else "")
        else:
            note = " (float32)" if low == TINY or high == LARGEST else ""
            expected = f"{'0, or ' if self.allow_zero else ''}from {low:.3g} to {high:.3g}{note}"
        raise RequestError(f"{name} is {shown(value)}; expected {expected}")


def option(default: Any, metavar: str, help: str, **rules: Any) -> Any:
    """Return a dataclass field of `Sampler` that is a command line option, too; see `SamplerOption`."""
    return field(default=default, metadata={"option": SamplerOption(metavar, help, **rules)})


@former_names(knobs="values", method="sampling_steps")
@dataclass(frozen=True)
class Sampler:
    """Sampling parameters, in the order in which they apply.

    Args:
        logit_bias: added to the logits, by token id; −inf bans a token. Copied.
        repetition_penalty: p > 1 makes tokens less likely that the row has already, prompt included: a positive logit
            is divided by p, a negative one multiplied (Keskar et al. 2019).
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

    def __post_init__(self) -> None:
        for name, rule in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or getattr(Sampler, name) is not None:
                rule.check(name, value)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {quote(self.logit_bias)}; expected a mapping of token id to bias")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", Bias(dict(self.logit_bias)))

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
        entries = {name: value for name, value in config.items() if value is not None}
        unsupported = [
            name for name, off in _UNSUPPORTED.items() if name in entries and entries[name] not in (False, *off)
        ]
        if unsupported:
            raise UnsupportedError(f"generation_config: {listing(unsupported)}: rlx_jax.Sampler has none; leave it out")
        values = {name: entries[name] for name in OPTIONS if name in entries}
        if entries.get("do_sample") is True:
            # transformers turns the filter off with top_k = 0.
            values = {"temperature": 1.0} | values | {"top_k": entries.get("top_k", 50) or None}
            return Sampler(**values)
        return Sampler(
            **{n: value for n, value in values.items() if n != "temperature" and not OPTIONS[n].sampling_only}
        )

    def sampling_steps(self, vocab_size: int) -> SamplingSteps:
        """Return which of the filters have an effect for a vocabulary of this size."""
        do_sample = self.temperature > 0
        return SamplingSteps(
            do_sample=do_sample,
            penalised=self.repetition_penalty != 1.0,
            biased=bool(self.logit_bias),
            top_k=do_sample and self.top_k is not None and self.top_k < vocab_size,
            top_p=do_sample and self.top_p is not None and self.top_p < 1.0,
            min_p=do_sample and bool(self.min_p),
        )

    def values(self, vocab_size: int, biased: bool = False) -> SamplerValues:
        """Return the values of the sampler as operands of a program.

        Args:
            biased: include a bias for every token, even if the sampler has none, as the program expects one.

        Raises:
            TokenIdError: `logit_bias` has an id out of range. RequestError: one of its values is NaN, +inf or over
                float32, or it bans every token.
        """
        bias = np.zeros(vocab_size if self.logit_bias or biased else 0, np.float32)
        for i, value in (self.logit_bias or {}).items():
            if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab_size:
                raise TokenIdError(f"logit_bias: id {shown(i)} is not an integer in [0, {vocab_size})")
            is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not is_number or not (value == -math.inf or abs(value) <= LARGEST):
                raise RequestError(
                    f"logit_bias[{i}] is {shown(value)}; expected -inf or a number of at most {LARGEST:.3g} (float32)"
                )
            bias[i] = value
        if bias.size and np.isneginf(bias).all():
            raise RequestError("logit_bias bans every token")
        return SamplerValues(
            temperature=np.float32(self.temperature),
            top_k=np.int32(min(self.top_k or vocab_size, vocab_size)),
            # Off is 2, not 1: a cumulative sum of probabilities may round to 1 before the last token.
            top_p=np.float32(2.0 if self.top_p in (None, 1.0) else self.top_p),
            min_p=np.float32(self.min_p or 0.0),
            penalty=np.float32(self.repetition_penalty),
            bias=bias,
        )


class Sampling(TypedDict, total=False):
    """The fields of a `Sampler` as keyword arguments: `generate(…, temperature=0.8, top_p=0.9)`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None


SAMPLING = tuple(f.name for f in fields(Sampler))
# The fields that are options of the command line: all but the bias.
OPTIONS: dict[str, SamplerOption] = {f.name: f.metadata["option"] for f in fields(Sampler) if f.metadata}
GREEDY = Sampler()


def resolve_sampler(sampler: Any, options: Mapping[str, Any]) -> Sampler:
    """Return the sampler of a request: `sampler`, or one with the fields `options`, or the greedy one.

    Raises:
        RequestError: `sampler` is no sampler; both are given; a value is out of range; or a filter is given at
            temperature 0, where it has no effect.
    """
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
    return result


@dataclass(frozen=True)
class SamplingSteps:
    """The steps of choosing a token that a program is compiled with; all off is greedy."""

    do_sample: bool = False
    penalised: bool = False
    biased: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @property
    def text(self) -> str:
        """Return in words which samplers it serves, for reports."""
        logits = "repetition_penalty or logit_bias"
        if not self.do_sample:
            return f"greedy ones with {logits}" if self.penalised or self.biased else "greedy ones"
        filters = self.top_k or self.top_p or self.min_p or self.penalised or self.biased
        return f"random ones with top_k, top_p, min_p, {logits}" if filters else "random ones without filters"

    def union(self, other: SamplingSteps) -> SamplingSteps:
        """Return steps that serve both samplers: a step that is on and has no effect changes no token."""
        return SamplingSteps(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(self)))

    def widened(self) -> SamplingSteps:
        """Return one of four methods that chooses the same tokens, so that few programs serve every sampler."""
        logits = self.penalised or self.biased
        filters = logits or self.top_k or self.top_p or self.min_p
        if self.do_sample and filters:
            return SamplingSteps(True, True, True, True, True, True)
        return SamplingSteps(do_sample=self.do_sample, penalised=logits, biased=logits)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerValues:
    """The values of a sampler as operands: float32 scalars (`top_k` int32), and `bias` `[V]` float32, or `[0]` without
    a bias.

    With one sampler for each row they are `[B, 1]` and `[B, V]` or `[B, 0]`; a row of temperature 0 is then greedy.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    bias: Any


def adjust_logits(steps: SamplingSteps, values: SamplerValues, logits: Array, seen_tokens: Array) -> Array:
    """Return the logits `[B, V]` float32 with bias and penalty, clipped to the largest float32 number.

    Args:
        seen_tokens: `[B, V]` bool, the tokens that a row has already; used only if `steps.penalised`.
    """
    if steps.biased:
        logits = logits + jnp.atleast_2d(values.bias)
    if steps.penalised:
        logits = jnp.where(seen_tokens, jnp.where(logits > 0, logits / values.penalty, logits * values.penalty), logits)
    return jnp.minimum(logits, LARGEST) if steps.biased or steps.penalised else logits


def choose_tokens(steps: SamplingSteps, values: SamplerValues, logits: Array, keys: Array) -> Array:
    """Choose one token for each row: logits `[B, V]` float32 after `adjust_logits` → ids `[B]` int32.

    Args:
        keys: `[B]` random keys, used only if `steps.do_sample`. The token of a row depends on its own key and logits
            alone.
    """
    if not steps.do_sample:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if jnp.ndim(values.temperature) == 0:
        return sample(warp_logits(steps, values, logits), keys)
    is_greedy = values.temperature == 0
    values = replace(values, temperature=jnp.where(is_greedy, 1, values.temperature))
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy[:, 0], greedy, sample(warp_logits(steps, values, logits), keys))


def warp_logits(steps: SamplingSteps, values: SamplerValues, logits: Array) -> Array:
    """Return the logits of the distribution that a token is sampled from.

    They are the logits `[N, V]` after `adjust_logits`, divided by the temperature, and −inf for tokens that a filter
    excludes.
    """
    # Subtract the maximum first, so that the quotient is at most 0 and no small temperature makes it overflow.
    return keep_likely(steps, values, (logits - jnp.max(logits, axis=-1, keepdims=True)) / values.temperature)


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
