"""`PrefixCache`: the states of prompt prefixes that several prompts share, within a byte budget.

A state is only valid at exactly the end of its prefix, as ring buffers and recurrent states cannot be truncated. So
prefixes end where prompts part, and are copied as a whole. `Slots` computes them, and copies them into its rows.
Token ids are sorted as bytes, which are compared fast: sequences with a common beginning are then next to each other.
"""

from __future__ import annotations

import re
import weakref
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from rlx_jax.compiler.buckets import bucket_size
from rlx_jax.compiler.executable import StateArrays
from rlx_jax.device import running_device
from rlx_jax.errors import RequestError, SessionStateError, shown
from rlx_jax.generate.decode_state import DecodeState
from rlx_jax.runtime.estimate import state_bytes_by_kind
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import BoundProgram, CompiledModel
from rlx_jax.runtime.program_key import Variant
from rlx_jax.runtime.sequence_state import as_state

ID_BYTES = 4


def longest_prefix(keys: Sequence[bytes], ids: Sequence[int]) -> tuple[int, ...] | None:
    """Return the longest of some sequences with which `ids` begins; `keys` are the sequences as bytes, sorted."""
    key = id_bytes(ids)
    # A sequence with which `key` begins is not after it. The last one before it either is such a sequence, or what it
    # shares with `key` is the most that any can have.
    while index := bisect_right(keys, key):
        candidate = keys[index - 1]
        if key.startswith(candidate):
            return tuple(ids[: len(candidate) // ID_BYTES])
        key = key[: ID_BYTES * common_len(key, candidate)]
    return None


def shared_prefixes(rows: Sequence[Sequence[int]], min_len: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the longest sequences with which sets of two or more rows begin: those at which rows end or part.

    Args:
        rows: the rows.
        min_len: shorter sequences are left out.

    Returns:
        the length of each sequence, and the numbers of the rows.
    """
    keys = [id_bytes(row) for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    # Of the sequences with which the latest row begins: their lengths, ascending, and the first row in the order.
    latest: list[tuple[int, int]] = []
    lengths = [common_len(keys[a], keys[b]) for a, b in pairwise(order)]
    for i, shared in enumerate((*lengths, 0)):
        first = i
        while latest and latest[-1][0] > shared:
            length, first = latest.pop()
            yield length, order[first : i + 1]
        if shared >= max(min_len, 1) and not (latest and latest[-1][0] == shared):
            latest.append((shared, first))


def id_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes. They sort differently from the ids, but sequences with a common beginning adjoin."""
    return array("i", ids).tobytes()


def common_len(first: bytes, second: bytes) -> int:
    """Return the number of tokens that both sequences begin with."""
    size = min(len(first), len(second))
    differs = np.frombuffer(first, np.int32, size // ID_BYTES) != np.frombuffer(second, np.int32, size // ID_BYTES)
    return int(differs.argmax()) if differs.any() else size // ID_BYTES


# Shorter prefixes are prefilled with each prompt: to copy a state takes some time, too. Chosen without a measurement.
MIN_PREFIX = 64
# The smallest cache length of a prefix.
PREFIX_BUCKET = 64
# The part of the device's memory for prefixes of one call, without `prefix_cache=`.
DEFAULT_PART = 1 / 32


class ParamsIdentity:
    """The parameters of a model by identity, without keeping them alive: a state belongs to the ones it came from."""

    def __init__(self, model: CompiledModel) -> None:
        self._programs, self._name = weakref.ref(model.programs), model.name
        self._refs = {name: weakref.ref(array) for name, array in (model.params or {}).items()}

    def matches(self, model: CompiledModel) -> bool:
        """Return whether a model has these parameters and this flow."""
        params = model.params or {}
        same_flow = self._programs() is model.programs and self._name == model.name
        return same_flow and params.keys() == self._refs.keys() and all(r() is params[n] for n, r in self._refs.items())


@dataclass(eq=False)
class Prefix:
    """The beginning of prompts, with its state on the device. `CausalLM.prefix` returns one.

    Pass it as `state=` to `generate`; full prompts that begin with its tokens use it by themselves where they run in
    slots. It remains in memory until `release`.

    Attributes:
        ids: the tokens.
        nbytes: bytes of its state on one device.
        cache_len: length of its cache.
        params: the parameters that it was computed with; None for a state of the caller.
        parent: a shorter prefix; the state is computed from its state.
        arrays: the state; None before it is computed, and after it was evicted.
        row: its row in the state.
        cache: the cache that a named prefix belongs to.
    """

    ids: tuple[int, ...]
    nbytes: int
    cache_len: int = field(repr=False)
    params: ParamsIdentity | None = field(default=None, repr=False)
    parent: Prefix | None = field(default=None, repr=False)
    arrays: StateArrays | None = field(default=None, repr=False)
    row: int = field(default=0, repr=False)
    cache: PrefixCache | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Prefix({len(self.ids):,} tokens, {self.nbytes:,} bytes{'' if self.arrays else ', released'})"

    @property
    def is_named(self) -> bool:
        """Return whether the user holds it, so that it is not evicted."""
        return self.cache is not None

    def release(self) -> None:
        """Free the memory of the prefix; it cannot be used any more."""
        if self.cache is not None and self.cache.entries.get(self.ids) is self:
            self.cache.remove(self)
        self.arrays = None

    def decode_state(self, owner: object, model: CompiledModel) -> DecodeState:
        """Return the state as `prefill` does, for requests that copy it.

        Raises:
            SessionStateError: the prefix was released, or belongs to another model or to other parameters.
        """
        if self.params is None or not self.params.matches(model):
            raise SessionStateError(f"{self!r} is of another model or other parameters; call prefix of this model")
        if self.arrays is None:
            raise SessionStateError(f"{self!r} has no state any more; call prefix again")
        sizes, text = {"batch": 1, "context": self.cache_len}, np.array([self.ids], np.int32)
        lengths = np.array([len(self.ids)])
        return DecodeState(as_state(self.arrays), lengths, self.cache_len, sizes, owner, text=text)


class PrefixCache:
    """The prefixes of one `CausalLM`.

    Prefixes that are not named are evicted, the least recently used first, so that all of them fit a budget.

    Args:
        size: bytes on one device for prefixes that are retained between calls; None to retain none, with a default
            budget within a call.

    Attributes:
        budget: bytes of all prefixes together.
        entries: the prefixes by their tokens, the latest use last.
    """

    def __init__(self, size: int | None = None) -> None:
        memory = running_device().memory if size is None else None
        self.size, self.budget = size, int(DEFAULT_PART * (memory or 2**33)) if size is None else size
        self.entries: OrderedDict[tuple[int, ...], Prefix] = OrderedDict()
        self._keys: list[bytes] = []  # the tokens of each, sorted
        self._params: ParamsIdentity | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all prefixes."""
        return sum(prefix.nbytes for prefix in self.entries.values())

    @property
    def named_bytes(self) -> int:
        """Return the bytes of named prefixes, which are never evicted."""
        return sum(prefix.nbytes for prefix in self.entries.values() if prefix.is_named)

    def begin(self, model: CompiledModel) -> ParamsIdentity:
        """Return the identity of the model's parameters; drop prefixes that other parameters computed."""
        if self._params is None or not self._params.matches(model):
            self.clear()
            self._params = ParamsIdentity(model)
        return self._params

    def clear(self) -> None:
        """Drop all prefixes. Objects of named ones keep their state."""
        for prefix in [*self.entries.values()]:
            self.remove(prefix)

    def for_call(self) -> PrefixCache:
        """Return the cache of one call: this one if it retains prefixes, else a new one with the named ones."""
        if self.size is not None:
            return self
        cache = PrefixCache()
        cache._params = self._params
        for prefix in self.entries.values():
            cache.store(prefix, prefix.arrays)
        return cache

    def longest(self, ids: Sequence[int]) -> Prefix | None:
        """Return the longest prefix with which `ids` begins, which counts as a use."""
        if (best := longest_prefix(self._keys, ids)) is None:
            return None
        self.entries.move_to_end(best)
        return self.entries[best]

    def cached(self, model: CompiledModel, ids: Sequence[int]) -> Prefix | None:
        """Return the longest prefix that is cached and with which `ids` begins; None if the cache rounds."""
        if not self.entries or model.settings.rounds_cache:
            return None
        self.begin(model)
        return self.longest(ids)

    def store(self, prefix: Prefix, arrays: StateArrays | None) -> bool:
        """Store the state of a prefix, and evict others if need be; of two equal prefixes the later one remains.

        Returns:
            False if it does not fit next to the named ones, or if other parameters have been in use since.
        """
        old = self.entries.get(prefix.ids)
        if prefix.params is not self._params:
            return False
        if old is not None and old.is_named and not prefix.is_named:  # named since the request began
            prefix.arrays, prefix.row = old.arrays, old.row
            return True
        if prefix.nbytes + self.named_bytes - (old.nbytes if old is not None and old.is_named else 0) > self.budget:
            return False
        if old is not None:
            self.remove(old)
        for other in [each for each in self.entries.values() if not each.is_named]:
            if self.nbytes + prefix.nbytes <= self.budget:
                break
            self.remove(other)
        insort(self._keys, id_bytes(prefix.ids))
        self.entries[prefix.ids], prefix.arrays = prefix, arrays
        return True

    def remove(self, prefix: Prefix) -> None:
        """Remove a prefix, and free its state unless it is named."""
        del self._keys[bisect_left(self._keys, id_bytes(prefix.ids))], self.entries[prefix.ids]
        prefix.arrays = prefix.arrays if prefix.is_named else None

    def assign(
        self, model: CompiledModel, rows: Sequence[Sequence[int]], width: Callable[[int, bool], int],
        share_prefix: bool | None, cache_limit: int | None,
    ) -> list[Prefix | None]:  # fmt: skip
        """Return the prefix of each prompt: a cached one, or one that prompts share and that saves prefill.

        A prompt keeps one token at least, which gives the logits of the first new one.

        Args:
            rows: the prompts.
            width: the padded width that so many tokens are prefilled with, by whether they follow a prefix.
            share_prefix: as in `Request`; True shares what all prompts begin with, however short it is.
            cache_limit: the most positions of the model.
        """
        if share_prefix is False or not self.budget or (model.settings.rounds_cache and not share_prefix):
            return [None] * len(rows)
        params = self.begin(model)
        prefixes = [self.longest(row[:-1]) for row in rows]
        in_use = {prefix.ids: prefix.nbytes for prefix in prefixes if prefix is not None and not prefix.is_named}
        free_bytes = self.budget - self.named_bytes - sum(in_use.values())

        def start(row: int) -> int:
            prefix = prefixes[row]
            return 0 if prefix is None else len(prefix.ids)

        shared = shared_prefixes([row[:-1] for row in rows], 1 if share_prefix else MIN_PREFIX)
        # What most prompts share comes first, so that a prefix comes before the ones that continue it.
        for length, sharers in sorted(shared, key=lambda prefix: -len(prefix[1])):
            is_forced = bool(share_prefix) and len(sharers) == len(rows)
            later = [i for i in sharers if start(i) < length]
            if len(later) < 2 or not (is_forced or length >= MIN_PREFIX):
                continue
            parent = max((prefixes[i] for i in later), key=lambda p: 0 if p is None else len(p.ids))
            widths = ((width(len(rows[i]) - start(i), start(i) > 0), width(len(rows[i]) - length, True)) for i in later)
            gain = sum(alone - after for alone, after in widths)
            cost = width(length - (0 if parent is None else len(parent.ids)), parent is not None)
            if gain <= cost and not is_forced:
                continue
            cache_len = bucket_size(length, PREFIX_BUCKET, cache_limit)
            nbytes = state_bytes(model, 1, cache_len)
            if nbytes <= free_bytes:
                free_bytes -= nbytes
                prefix = Prefix(tuple(rows[sharers[0]][:length]), nbytes, cache_len, params, parent)
                for i in later:
                    prefixes[i] = prefix
        return prefixes


def one_row(model: CompiledModel, cache_len: int) -> BoundProgram:
    """Return a program with a state of one row; it does not run, only the shapes of its state are used."""
    extend = model.as_program("extend")
    sizes = {"batch": 1, "context": cache_len, "seq": 1}
    return BoundProgram(extend, extend.key_for_sizes(sizes, Variant(True, model.output_names[:1])))


def state_bytes(model: CompiledModel, rows: int, cache_len: int) -> int:
    """Return the bytes of a state on one device."""
    programs, model = model.programs, model.as_program("extend")
    template = programs.template(model.key(frozenset(), model.output_names[:1], True))
    ring_sizes = programs.ring_sizes(template, cache_len)
    state_sizes = {**model.flow._binding, **ring_sizes, "batch": rows, "context": cache_len}
    return sum(state_bytes_by_kind(programs, template, state_sizes).values())


def parse_size(value: Any) -> int | None:
    """Return a number of bytes: of `prefix_cache=`, an integer or text such as "2GiB"; None for None.

    Raises:
        RequestError: it is none.
    """
    if value is None or not isinstance(value, str):
        return None if value is None else check_integer("prefix_cache", value, 0)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B", value.strip())
    if match is None:
        raise RequestError(f"prefix_cache is {shown(value)}; expected a number of bytes, or text such as '2GiB'")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def _get_size(lm: Any) -> int | None:
    """Return the bytes for prefixes of prompts that are retained between calls; None to retain none, and 0 to share
    none. May be set, also to text such as "2GiB", which drops all prefixes; named ones still serve as `state=`."""
    prefixes: PrefixCache = lm._prefixes
    return prefixes.size


def _set_size(lm: Any, size: Any) -> None:
    lm._prefixes = PrefixCache(parse_size(size))


prefix_cache = property(_get_size, _set_size)
