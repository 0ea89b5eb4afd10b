"""What a sequence leaves behind between two calls of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.device import check_fits
from rlx_jax.errors import GraphError, RequestError, SequenceLengthError, SessionStateError, listing
from rlx_jax.ir.types import TensorType, bound, check_elements, is_static, short_name, terms_of
from rlx_jax.lowering.sharding import on_one

# The name of the tokens that each row holds.
LENGTH = "length"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What a sequence has left behind: `length` `[B]` int32, and the other arrays by name, block path and slot
    (`layers.3.self_attn.k`). A pytree. A program that counts no tokens has no length: None.
    """

    length: Any
    leaves: Mapping[str, Any]

    def arrays(self) -> StateArrays:
        """All arrays, the length among them, as programs take them."""
        return dict(self.leaves) if self.length is None else {LENGTH: self.length, **self.leaves}

    def copy(self) -> State:
        """The same in arrays of its own: a call that consumes one leaves the other.

        Raises:
            SessionStateError: an earlier call consumed this state.
        """
        self.check_alive()
        leaves = {name: jnp.copy(array) for name, array in self.leaves.items()}
        return State(None if self.length is None else jnp.copy(self.length), leaves)

    def check_alive(self) -> None:
        """A traced state cannot be looked at.

        Raises:
            SessionStateError: an earlier call consumed this state.
        """
        for a in self.arrays().values():
            if isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) and a.is_deleted():
                raise SessionStateError("this state was consumed by an earlier call; go on with what that returned")


@dataclass(frozen=True, eq=False)
class EmptyState:
    """Makes the arrays of a state that holds nothing, all of them in one dispatch."""

    types: tuple[tuple[str, TensorType], ...]
    shardings: Mapping[str, NamedSharding] = field(default_factory=dict)

    def __call__(self) -> StateArrays:
        empty = {key: jnp.zeros(t.shape, t.dtype) for key, t in self.types}
        places = {key: self.shardings[key] for key in empty if key in self.shardings}
        return empty | {key: jax.lax.with_sharding_constraint(empty[key], at) for key, at in places.items()}


@dataclass(frozen=True)
class FromEmpty:
    """Around `prefill`: it makes the empty state itself. One dispatch, and nothing is written that is written over."""

    empty: EmptyState

    def __call__(self, prefill: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            return prefill(params, self.empty(), inputs)

        return function


def empty_state(
    types: Mapping[str, TensorType], binding: Mapping[str, int], what: str, shardings: Mapping[str, NamedSharding]
) -> EmptyState:
    """An empty state of these sizes, divided over devices as `shardings` say.

    Raises:
        GraphError: a size is not given. ShapeError, DeviceOutOfMemoryError: too large.
    """
    bound = {k: t.bind(binding) for k, t in types.items()}
    open_sizes = sorted({s for t in bound.values() for s in t.symbols})
    if open_sizes:
        raise GraphError(f"init_state: give {', '.join(open_sizes)}=")
    for name, t in bound.items():
        check_elements(t.shape, f"init_state: {name} {t}")

    def nbytes(sizes: Mapping[str, int]) -> int:
        return sum(on_one(t.bind(sizes), shardings.get(name)).nbytes for name, t in types.items())

    check_fits(nbytes(binding), what, lambda limit: _what_fits(nbytes, binding, limit))
    return EmptyState(tuple(bound.items()), shardings)


def _what_fits(nbytes: Callable[[Mapping[str, int]], int], binding: Mapping[str, int], limit: int) -> str:
    """The longest context, or else the most rows, of which a state takes no more than `limit` bytes."""
    for size, beside in (("context", "batch"), ("batch", "context")):
        if size in binding and nbytes({**binding, size: 1}) <= limit:
            low, high = 1, binding[size]  # `low` fits, `high` does not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if nbytes({**binding, size: middle}) <= limit else (low, middle)
            return f"with a {beside} of {binding.get(beside)} a {size} of {low:,} would fit, without the parameters"
    return "use smaller sizes"


def as_state(arrays: StateArrays) -> State:
    """The inverse of `State.arrays`."""
    return State(arrays.get(LENGTH), {k: v for k, v in arrays.items() if k != LENGTH})


def given_state(
    program: str, types: Mapping[str, TensorType], state: State | None, sizes: dict[str, int]
) -> StateArrays:
    """The arrays of the state that a call of `program` brings, checked; their sizes are added to `sizes`.

    Raises:
        GraphError: the program takes none, or one that is not given. SessionStateError, RequestError: it does not
            fit; or it holds tokens, which prefill would not attend to.
    """
    if bool(types) != (state is not None):
        raise GraphError(f"program {program} {'needs' if types else 'takes no'} state=; see init_state")
    if state is None:
        return {}
    if not isinstance(state, State):
        raise GraphError(f"state= is what init_state or an earlier call returned, got {type(state).__name__}")
    state.check_alive()
    arrays = state.arrays()
    check_state(arrays, types, sizes)
    if program == "prefill" and not isinstance(state.length, jax.core.Tracer):  # which cannot be looked at
        if (held := jax.device_get(state.length)).any():
            raise SessionStateError(
                f"prefill starts from an empty state, see init_state; this one holds {held.tolist()[:8]} "
                "tokens in its rows: go on with extend"
            )
    return arrays


def check_state(arrays: StateArrays, types: Mapping[str, TensorType], sizes: dict[str, int]) -> None:
    """A state has the leaves of its program; their sizes are added to `sizes`.

    Raises:
        SessionStateError: other leaves, or leaves of another shape or dtype: it belongs to another model.
        RequestError: another number of rows than the inputs.
    """
    if set(arrays) != set(types):
        raise SessionStateError(
            f"this state belongs to another model, or to other optional inputs (init_state(…, given=…)): it has leaves "
            f"{listing(sorted(arrays), 4)}, the program {listing(sorted(types), 4)}"
        )
    for key, t in types.items():
        shape, dtype = tuple(arrays[key].shape), arrays[key].dtype
        if len(shape) != t.rank or dtype != t.dtype:
            raise SessionStateError(f"state {key}: expected {t}, got {short_name(dtype)} {list(shape)}")
        for dim, size in zip(t.shape, shape, strict=True):
            if not is_static(dim) and len(terms := terms_of(dim)) > 1:
                _solve(terms, int(size), sizes)
                dim = bound(dim, sizes)
            known = dim if is_static(dim) else sizes.setdefault(str(dim), int(size))
            if known != size and str(dim) == "batch":
                raise RequestError(f"the state holds {size} rows, the inputs {known}")
            if known != size:
                raise SessionStateError(f"state {key}: {dim} is {known} elsewhere, got {list(shape)}")


def _solve(terms: Sequence[str], size: int, sizes: dict[str, int]) -> None:
    """Of a sum of `size`, the one symbol that is not known, added to `sizes`."""
    unknown = [term for term in terms if term.isidentifier() and term not in sizes]
    if len(unknown) == 1:
        rest = (sizes[term] if term.isidentifier() else int(term) for term in terms if term != unknown[0])
        sizes[unknown[0]] = size - sum(rest)


def check_room(
    length: Any, new: Any, slots: int | None, cure: str = "init_state(batch, context) makes a larger one"
) -> None:
    """What the rows hold and the tokens to come fit the slots; traced ones cannot be looked at.

    Raises:
        SequenceLengthError: a row would go past the last slot.
    """
    if slots is None or isinstance(length, jax.core.Tracer) or isinstance(new, jax.core.Tracer):
        return
    held, more = (np.asarray(jax.device_get(counts), np.int64) for counts in (length, new))
    row = int(np.argmax(held + more))
    if held[row] + more[row] > slots:
        raise SequenceLengthError(
            f"extend: row {row} holds {held[row]} tokens and would get {more[row]} more, the state has {slots} slots; "
            f"{cure}"
        )
