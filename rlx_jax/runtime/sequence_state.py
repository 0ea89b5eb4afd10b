"""This module defines `State`: the cached keys, values and recurrent states of sequences between two calls.

It creates empty states, checks the state that a call passes, and checks that new tokens fit into its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rlx_jax.compiler.executable import Arrays, Function, Results, StateArrays
from rlx_jax.compiler.pipeline import Template
from rlx_jax.dataclasses import dataclass
from rlx_jax.device import check_device_memory
from rlx_jax.errors import GraphError, RequestError, SequenceLengthError, SessionStateError, listing
from rlx_jax.ir.types import TensorType, bind_dim, check_elements, is_static, short_name, terms_of
from rlx_jax.lowering.lir.plan import returned_leaves, state_leaves
from rlx_jax.lowering.sharding import ModelSharding, shard_type

# The name of the array that counts the tokens of each row.
LENGTH = "length"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of a batch of sequences between two calls, a pytree.

    Attributes:
        length: the number of tokens in each row, `[B]` int32; None for a program that counts no tokens.
        leaves: the other arrays by block path and slot, such as `layers.3.self_attn.k`.
    """

    length: Any
    leaves: Mapping[str, Any]

    def arrays(self) -> StateArrays:
        """Return all arrays by name, including the length, in the form that programs take."""
        return dict(self.leaves) if self.length is None else {LENGTH: self.length, **self.leaves}

    def copy(self) -> State:
        """Return a copy that does not share arrays, so that it stays valid when a call consumes this state.

        Raises:
            SessionStateError: an earlier call consumed this state.
        """
        self.check_alive()
        leaves = {name: jnp.copy(array) for name, array in self.leaves.items()}
        return State(None if self.length is None else jnp.copy(self.length), leaves)

    def check_alive(self) -> None:
        """Check that no call has consumed this state; a traced state is not checked.

        Raises:
            SessionStateError: an earlier call consumed this state.
        """
        for a in self.arrays().values():
            if isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) and a.is_deleted():
                raise SessionStateError("this state was consumed by an earlier call; use the state that it returned")


@dataclass(frozen=True, eq=False)
class EmptyState:
    """A function that creates the zero arrays of an empty state, all in one dispatch. It is compared by identity."""

    types: tuple[tuple[str, TensorType], ...]
    shardings: Mapping[str, NamedSharding]
    label: str

    @property
    def __name__(self) -> str:
        """Return the operation, for error messages."""
        return self.label

    def __call__(self) -> StateArrays:
        empty = {key: jnp.zeros(t.shape, t.dtype) for key, t in self.types}
        shardings = {key: self.shardings[key] for key in empty if key in self.shardings}
        return empty | {
            key: jax.lax.with_sharding_constraint(empty[key], sharding) for key, sharding in shardings.items()
        }


@dataclass(frozen=True)
class FromEmpty:
    """A wrapper around `prefill` that creates the empty state inside the program.

    This takes one dispatch, and XLA writes no zeros that prefill overwrites.
    """

    empty: EmptyState

    def __call__(self, prefill: Function) -> Function:
        def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
            return prefill(params, self.empty(), inputs)

        return function


def with_last_token(run: Function) -> Function:
    """Return a program of each row's last token, with its first output without the axis of tokens: `[B, V]`."""

    def function(params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        (first, *others), new_state = run(params, state, inputs)
        return (first[:, 0], *others), new_state

    return function


def state_shardings(
    template: Template, sizes: Mapping[str, int], model_sharding: ModelSharding, of_results: bool = False
) -> dict[str, NamedSharding]:
    """Return the sharding of each array of the state that a program takes; with `of_results`, that it returns."""
    leaves = (returned_leaves if of_results else state_leaves)(template.mir, template.scan)
    return {name: model_sharding.value_sharding(roles, t.bind(sizes).shape) for name, (t, roles) in leaves.items()}


def empty_state(
    types: Mapping[str, TensorType], binding: Mapping[str, int], label: str, shardings: Mapping[str, NamedSharding]
) -> EmptyState:
    """Return the function that creates an empty state of these sizes.

    Args:
        types: the types of the arrays, with symbolic sizes.
        binding: the sizes by symbol.
        label: the operation, for the message of a `DeviceOutOfMemoryError`.
        shardings: the shardings of the arrays; empty on one device.

    Raises:
        GraphError: a size is missing. ShapeError, DeviceOutOfMemoryError: the state is too large.
    """
    bound_types = {k: t.bind(binding) for k, t in types.items()}
    missing = sorted({s for t in bound_types.values() for s in t.symbols})
    if missing:
        raise GraphError(f"init_state: pass {', '.join(missing)}=")
    for name, t in bound_types.items():
        check_elements(t.shape, f"init_state: {name} {t}")

    def nbytes(sizes: Mapping[str, int]) -> int:
        return sum(shard_type(t.bind(sizes), shardings.get(name)).nbytes for name, t in types.items())

    check_device_memory(nbytes(binding), label, lambda limit: _fitting_size(nbytes, binding, limit))
    return EmptyState(tuple(bound_types.items()), shardings, label)


def _fitting_size(nbytes: Callable[[Mapping[str, int]], int], binding: Mapping[str, int], limit: int) -> str:
    """Return an advice: the longest context, or else the most rows, with which a state fits in `limit` bytes."""
    for size, fixed in (("context", "batch"), ("batch", "context")):
        if size in binding and nbytes({**binding, size: 1}) <= limit:
            low, high = 1, binding[size]  # `low` fits, `high` does not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if nbytes({**binding, size: middle}) <= limit else (low, middle)
            return f"with a {fixed} of {binding.get(fixed)} a {size} of {low:,} would fit, without the parameters"
    return "use smaller sizes"


def as_state(arrays: StateArrays) -> State:
    """Return the state of these arrays; the inverse of `State.arrays`."""
    return State(arrays.get(LENGTH), {k: v for k, v in arrays.items() if k != LENGTH})


def state_arrays(
    program: str, types: Mapping[str, TensorType], state: State | None, sizes: dict[str, int]
) -> StateArrays:
    """Check the state that a call of `program` passes, and return its arrays. Their sizes are added to `sizes`.

    Raises:
        GraphError: the program takes no state, or needs one.
        SessionStateError, RequestError: the state does not fit the program, or has tokens, which prefill would not
            attend to.
    """
    if bool(types) != (state is not None):
        raise GraphError(f"program {program} {'needs' if types else 'takes no'} state=; see init_state")
    if state is None:
        return {}
    if not isinstance(state, State):
        raise GraphError(f"state= takes the result of init_state or of an earlier call, got {type(state).__name__}")
    state.check_alive()
    arrays = state.arrays()
    check_state(arrays, types, sizes)
    if program == "prefill" and not isinstance(state.length, jax.core.Tracer):  # a tracer has no values
        if (lengths := jax.device_get(state.length)).any():
            raise SessionStateError(
                f"prefill starts from an empty state, see init_state; its rows have {lengths.tolist()[:8]} "
                "tokens: continue with extend"
            )
    return arrays


def check_state(arrays: StateArrays, types: Mapping[str, TensorType], sizes: dict[str, int]) -> None:
    """Check that a state has the arrays of its program; their sizes are added to `sizes`.

    Raises:
        SessionStateError: it has other arrays, or arrays of another shape or dtype: it belongs to another model.
        RequestError: it has another number of rows than the inputs.
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
            # A dimension that is a sum of symbols determines the one that is still unknown.
            if not is_static(dim) and len(terms := terms_of(dim)) > 1:
                _solve(terms, int(size), sizes)
                dim = bind_dim(dim, sizes)
            expected = dim if is_static(dim) else sizes.setdefault(str(dim), int(size))
            # Another number of rows is a mistake in the request; any other size means a state of another model.
            if expected != size and str(dim) == "batch":
                raise RequestError(f"the state has {size} rows, the inputs have {expected}")
            if expected != size:
                raise SessionStateError(f"state {key}: {dim} is {expected} elsewhere, got {list(shape)}")


def _solve(terms: Sequence[str], size: int, sizes: dict[str, int]) -> None:
    """Compute the one unknown symbol of a sum of terms that is `size`, and add it to `sizes`."""
    unknown = [term for term in terms if term.isidentifier() and term not in sizes]
    if len(unknown) == 1:
        known_terms = (sizes[term] if term.isidentifier() else int(term) for term in terms if term != unknown[0])
        sizes[unknown[0]] = size - sum(known_terms)


def check_capacity(
    length: Any, new: Any, slots: int | None, remedy: str = "init_state(batch, context) makes a larger one"
) -> None:
    """Check that the tokens of each row and its new ones fit the slots; traced values are not checked.

    Args:
        length: the number of tokens in each row, `[B]`.
        new: the number of new tokens of each row, `[B]`.
        slots: the slots of the state; None if it has none.
        remedy: the remedy, for the message.

    Raises:
        SequenceLengthError: a row would go past the last slot.
    """
    if slots is None or isinstance(length, jax.core.Tracer) or isinstance(new, jax.core.Tracer):
        return
    past, extra = (np.asarray(jax.device_get(counts), np.int64) for counts in (length, new))
    row = int(np.argmax(past + extra))
    if past[row] + extra[row] > slots:
        raise SequenceLengthError(
            f"extend: row {row} has {past[row]} tokens and would get {extra[row]} more; the state has {slots} slots; "
            f"{remedy}"
        )
