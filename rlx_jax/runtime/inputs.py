"""This module checks and normalizes the inputs of a call on the host, before any `jnp` call.

JAX silently clamps ids out of range and narrows int64, so nothing reaches it unchecked. The dtype and the shape of
every `jax.Array` are checked, and its ids if `host_view` can read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import (
    DTypeError,
    RequestError,
    RlxError,
    SequenceLengthError,
    ShapeError,
    TokenIdError,
    UnboundInputError,
    check_names,
    first_line,
    integer_text,
    listing,
    quote,
    shown,
)
from rlx_jax.errors import check_flag as check_flag
from rlx_jax.errors import check_integer as check_integer
from rlx_jax.io import limits
from rlx_jax.ir.types import MAX_DIM, TensorType, bind_dim, check_elements, is_float, is_static, short_name
from rlx_jax.ir.user_functions import is_consumed
from rlx_jax.lowering.inspect.bounds import Bounds
from rlx_jax.program import InputDecl
from rlx_jax.runtime.arguments import refuse_consumed

# Platforms with arrays that NumPy reads without a copy.
HOST_PLATFORMS = ("cpu",)


def bind_names(
    decls: Sequence[InputDecl], args: Sequence[Any], named: Mapping[str, Any], flow: str, unread: Sequence[str],
    first: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the inputs of a call by name, from its positional and named arguments.

    Args:
        decls: the inputs of the program, in order.
        args, named: the arguments of the call. None for an optional input means that it is absent.
        flow: the name of the flow, for messages.
        unread: the inputs of the flow that no output reads. They shift the positions of later inputs, so optional
            inputs have to be passed by name if there are any.
        first: the first input of the flow if it is unread, else ""; a call may still pass it.

    Raises:
        UnboundInputError: too many arguments, an unknown or unread name, or an input passed twice.
    """
    names = [d.name for d in decls]
    in_order = list(itertools.takewhile(lambda d: not (unread and d.optional), decls))
    if first and first not in named and len(args) == len(in_order) + 1:
        named, args = {first: args[0], **named}, args[1:]
    if len(args) > len(in_order):
        pure = "; model.apply(params, …) takes parameters first" if isinstance(args[0], Mapping) else ""
        takes = f"takes {len(in_order)} input{'s' * (len(in_order) != 1)} ({', '.join(d.name for d in in_order)})"
        idle = f": none of the outputs reads {listing(unread)}" if unread and not pure else ""
        by_name = f"; pass {listing(names[len(in_order) :])} by name" if idle and len(in_order) < len(names) else ""
        raise UnboundInputError(f"{flow}: {takes}, got {len(args)}{pure}{idle}{by_name}")
    values = dict(zip(names, args, strict=False))
    refuse_unread(named, [name for name in unread if name != first], flow)
    accepted = [*names, first] if first in named else names
    check_names(named, accepted, f"{flow}: has no input", "; its inputs are", UnboundInputError)
    for name, value in named.items():
        if name in values:
            raise UnboundInputError(f"{flow}: input {quote(name)} is passed by position and by name")
        values[name] = value
    return {n: v for n, v in values.items() if v is not None}


def check_required(names: Iterable[str], values: Collection[str], flow: str) -> None:
    """Check that a call passes every input that the program reads.

    Raises:
        UnboundInputError: some are missing; the message lists them.
    """
    if missing := [name for name in names if name not in values]:
        raise UnboundInputError(f"{flow}: input {listing(missing)} is missing")


def refuse_unread(names: Iterable[str], unread: Sequence[str], flow: str) -> None:
    """Check that a call passes no input that the program does not read, as it would have no effect.

    Raises:
        UnboundInputError: it does; the message lists them.
    """
    if idle := [name for name in names if name in unread]:
        reason = "is read by none of the outputs: leave it out, or choose other outputs"
        raise UnboundInputError(f"{flow}: input {listing(idle)} {reason}")


def value_or_spec(name: str, value: Any, declared: TensorType, rows: int | None, from_device: bool) -> Any:
    """Return `host_value` of an input, or a `jax.ShapeDtypeStruct`, which has no values, unchanged.

    Raises:
        DTypeError: the `ShapeDtypeStruct` has another dtype. Others as `host_value`.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        if value.dtype != declared.dtype:
            raise DTypeError(f"input {name}: expected {declared}, got {short_name(value.dtype)}")
        return value
    return host_value(name, value, declared, rows, from_device)


def host_view(value: Any, from_device: bool) -> np.ndarray[Any, Any] | None:
    """Return the values of an array if the host can read them, else None.

    An array on a CPU device is read in place, which takes about 5 µs including the check of its ids. An array on an
    accelerator is copied, and only if `from_device`. For an array sharded over several processes the result has the
    addressable shards of this process, flat.
    """
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or is_consumed(value):
        return None
    if not from_device and next(iter(value.devices())).platform not in HOST_PLATFORMS:
        return None
    if value.is_fully_addressable:
        return np.asarray(value)
    return np.concatenate([np.asarray(shard.data).ravel() for shard in value.addressable_shards])


def check_ids(label: str, value: Any, rows: int, from_device: bool) -> None:
    """Check that integer ids are in `[0, rows)`, if the host can read them: see `host_view`.

    Raises:
        TokenIdError: one is not; the message has its position and value.
    """
    if (array := host_view(value, from_device)) is not None:
        ids_in_range(label, array, rows)


def host_value(name: str, value: Any, declared: TensorType, rows: int | None, from_device: bool) -> Any:
    """Return one input as an array of its declared dtype.

    Args:
        name: the name of the input, for messages.
        value: an array of JAX or NumPy, or lists of numbers.
        declared: the type of the input.
        rows: the number of rows of the table that integer ids index; None if the input has no ids.
        from_device: whether ids on an accelerator are checked too.

    Raises:
        TokenIdError: an id is not an integer in `[0, rows)`.
        DTypeError: a dtype change other than between integers, from bool to integers, and float64 → float32; or values
            that do not fit the dtype.
    """
    if isinstance(value, jax.Array):
        if rows is not None and value.dtype.kind in "iu":
            check_ids(name, value, rows, from_device)
        if value.dtype == declared.dtype:
            return value
        if value.dtype.kind in "biu" and np.can_cast(value.dtype, declared.dtype) and not is_float(declared.dtype):
            return value.astype(declared.dtype)
        raise DTypeError(
            f"input {name}: expected {short_name(declared.dtype)}, got a jax array of {short_name(value.dtype)}"
        )
    if rows is not None:
        return token_ids(name, value, rows).astype(declared.dtype)
    array = as_host_array(name, value)
    limits.check_memory(array.size * declared.dtype.itemsize, f"input {name}")
    if array.dtype == declared.dtype:
        return array
    if is_float(declared.dtype):
        if array.dtype == np.float64:
            try:
                with np.errstate(over="raise"):
                    return array.astype(declared.dtype)
            except FloatingPointError as error:
                most = np.max(np.abs(array), where=np.isfinite(array), initial=0)
                raise DTypeError(f"input {name}: up to {most:g} does not fit {short_name(declared.dtype)}") from error
    elif array.dtype.kind == "b" and declared.dtype.kind in "iu":
        return array.astype(declared.dtype)  # a mask
    elif array.dtype.kind in "iu" and declared.dtype.kind in "iu":
        info = np.iinfo(declared.dtype)
        if array.size and (array.min() < info.min or array.max() > info.max):
            low, high = array.min(), array.max()
            raise DTypeError(f"input {name}: values {low} … {high} do not fit {short_name(declared.dtype)}")
        return array.astype(declared.dtype)
    raise DTypeError(
        f"input {name}: expected {short_name(declared.dtype)}, got {short_name(array.dtype)}; convert it first"
    )


def as_row(value: Any) -> Any:
    """Return an array or a `jax.ShapeDtypeStruct` with a leading axis of size 1."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *value.shape), value.dtype)
    return value[None]


def as_host_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return a value as a NumPy array in native byte order.

    Raises:
        ShapeError: ragged lists. DTypeError: a masked array, or values that are no numbers.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise DTypeError(f"input {name}: a masked array, and its mask would be lost; pass .filled(value)")
    array = read_array(f"input {name}", value, lambda why: ShapeError(f"input {name}: not an array: {why}"))
    if array.dtype.kind not in "biufcV" or array.dtype.hasobject:
        got = "text" if array.dtype.kind in "UT" else short_name(array.dtype)
        raise DTypeError(f"input {name}: expected numbers, got {got}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_array(label: str, value: Any, make_error: Callable[[str], RlxError] | None = None) -> np.ndarray[Any, Any]:
    """Return `numpy.asarray(value)`, with errors that explain the cause.

    Args:
        label: the name of the value, for messages.
        value: anything that NumPy may convert.
        make_error: a function from NumPy's message to the error to raise if NumPy cannot convert the value; None to
            raise NumPy's own error.

    Raises:
        SessionStateError: an array of JAX that an earlier call consumed.
        RequestError: a traced array, an array of another library that NumPy cannot read, or a mapping, such as the
            result of a transformers tokenizer.
    """
    if isinstance(value, Mapping):
        hint = ": pass its 'input_ids', and its 'attention_mask' where the call takes one" * ("input_ids" in value)
        raise RequestError(f"{label}: expected an array or lists, got {type(value).__name__}{hint}")
    try:
        return np.asarray(value)
    except jax.errors.TracerArrayConversionError:
        raise RequestError(
            f"{label}: traced by jax.jit or the like, and it is read on the host: make this call outside, or trace the "
            "compiled program, model.apply(params, …) or, of a CausalLM, lm.model.apply(params, ids)"
        ) from None
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        refuse_consumed({}, {label.removeprefix("input "): value}, error)
        foreign = is_foreign(value)
        if not foreign and not isinstance(error, RuntimeError):
            if make_error is None:
                raise
            raise make_error(first_line(error)) from error
        remedy = "; pass a NumPy array, tensor.detach().cpu().numpy() of a torch tensor" * foreign
        raise RequestError(f"{label}: {type(value).__name__} cannot be read: {first_line(error)}{remedy}") from error


def is_foreign(value: Any) -> bool:
    """Return whether a value is an array of a library other than NumPy and JAX, such as a torch tensor."""
    return hasattr(value, "__array__") and not isinstance(value, np.ndarray | np.generic | jax.Array)


def token_ids(label: str, value: Any, rows: int) -> np.ndarray[Any, Any]:
    """Return ids of any shape as an integer array, checked to be in `[0, rows)` before any cast.

    Raises:
        TokenIdError: ragged, not integers, or out of range; the message has the position and the value.
    """
    return ids_in_range(label, to_id_array(label, value, rows), rows)


def to_id_array(
    label: str, value: Any, rows: int, padding: str = "pass lengths= where the model takes it"
) -> np.ndarray[Any, Any]:
    """Return ids as an array of integers, without the check of their range; the first half of `token_ids`.

    Args:
        label: the name of the value, for messages.
        value: an array or lists.
        rows: the number of rows of the table, for messages.
        padding: the advice for callers who pad rows, for messages.

    Raises:
        TokenIdError: ragged, or not integers. RequestError: traced.
    """
    ragged = TokenIdError(f"{label}: the rows differ in length, expected [batch, seq]; pad them, and {padding}")
    array = read_array(label, value, lambda _: ragged)
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise _ids_error(label, value, array, rows)
    if isinstance(value, np.ma.MaskedArray):
        raise TokenIdError(f"{label}: a masked array, and its mask would be lost; pass .filled(id), and {padding}")
    check_elements(array.shape, label)  # before `ids_in_range` scans all of them
    limits.check_memory(array.size * 4, label)
    return array


def ids_in_range(label: str, array: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    """Return ids in native byte order, checked to be in `[0, rows)`; the second half of `token_ids`.

    Raises:
        TokenIdError: one is out of range; the message has its position and value.
    """
    if array.size == 0:
        return array
    low, high = array.min(), array.max()
    if low < 0 or high >= rows:
        index = np.argwhere((array < 0) | (array >= rows))[0]
        raise TokenIdError(f"{label}: id {array[tuple(index)]} at {tuple(int(i) for i in index)} is not in [0, {rows})")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _ids_error(label: str, value: Any, array: np.ndarray[Any, Any], rows: int) -> TokenIdError:
    """Return the error for a value that has no ids.

    For a list it names the first item that is no id; an array has one dtype for all items.
    """
    if isinstance(value, list | tuple):
        for index, item in np.ndenumerate(np.asarray(value, object)):
            if isinstance(item, bool | np.bool_) or not isinstance(item, int | np.integer):
                return TokenIdError(f"{label}: a token id is an integer, got {shown(item)} at {index}")
            if not 0 <= item < rows:
                return TokenIdError(f"{label}: id {integer_text(int(item))} at {index} is not in [0, {rows})")
    got = array.dtype if array.dtype != object else type(value).__name__
    if array.dtype.kind in "UT":
        advice = "generate, score and embed take text and tokenize it"
        return TokenIdError(f"{label}: expected ids, got text; {advice}")
    return TokenIdError(f"{label}: ids are integers in [0, {rows}), got {got}")


def bind_sizes(
    declared: Mapping[str, TensorType], values: Mapping[str, Any], flow: str, *, allow_symbolic: bool = False
) -> dict[str, int]:
    """Return the size of every symbolic dimension, inferred from the shapes of the inputs.

    Args:
        declared: the types of the inputs by name.
        values: the arrays by name.
        flow: the name of the flow, for messages.
        allow_symbolic: whether sizes may be symbols, as `jax.export` traces; the caller checks sums of them.

    Raises:
        ShapeError: a rank or a static size differs, or two inputs disagree; the message names both.
    """
    sizes: dict[str, int] = {}
    input_of: dict[str, str] = {}
    # Dimensions such as `past+seq` are checked at the end, when the size of every symbol is known.
    sums: list[tuple[str, int, Any, int]] = []
    for name, value in values.items():
        expected, shape = declared[name], tuple(value.shape)
        if len(shape) != expected.rank:
            misses_batch = len(shape) == expected.rank - 1 and not is_static(expected.shape[0])
            one_row = f"; {name}[None] is a {expected.shape[0]} of one" if misses_batch else ""
            raise ShapeError(f"{flow}: input {name} is {expected}, got shape {list(shape)}: rank {len(shape)}{one_row}")
        for axis, (dim, size) in enumerate(zip(expected.shape, shape, strict=True)):
            if is_static(dim):
                if size != dim:
                    raise ShapeError(
                        f"{flow}: input {name} is {expected}, got {list(shape)}: axis {axis} is {size}, not {dim}"
                    )
                continue
            symbol = str(dim)
            if not is_static(size) and not allow_symbolic:
                raise ShapeError(f"{flow}: input {name} has the symbolic size {size}; call with numbers")
            if is_static(size) and not 1 <= size <= MAX_DIM:
                raise ShapeError(f"{flow}: input {name}: dimension {symbol} is {size}; sizes are 1 to {MAX_DIM}")
            if not symbol.isidentifier():
                sums.append((name, axis, dim, size))
                continue
            if sizes.setdefault(symbol, int(size) if is_static(size) else size) != size:
                raise ShapeError(f"{flow}: {symbol} is {sizes[symbol]} in {input_of[symbol]} and {size} in {name}")
            input_of.setdefault(symbol, name)
        check_elements(shape, f"{flow}: input {name}")
    for name, axis, dim, size in sums if all(map(is_static, sizes.values())) else ():
        expected = bind_dim(dim, sizes)
        if size != expected:
            raise ShapeError(f"{flow}: input {name}: axis {axis} is {size}, expected {dim}, which is {expected}")
    return sizes


def check_new_tokens(lengths: Any, seq: int, low: int, slots: int | None) -> None:
    """Check that each row has `low` to `seq` new tokens, and no more than the state has slots.

    Lengths that are no NumPy array are not checked.

    Raises:
        SequenceLengthError: a row has fewer or more.
    """
    if not isinstance(lengths, np.ndarray) or not lengths.size:
        return
    if lengths.min() < low or lengths.max() > seq:
        raise SequenceLengthError(f"lengths: expected {low} to {seq}, got {lengths.tolist()[:8]}")
    if slots is not None and lengths.max() > slots:
        raise SequenceLengthError(
            f"lengths: {lengths.max()} new tokens do not fit a state of {slots} slots; init_state(batch, context) "
            "makes a larger one"
        )


def check_rows(values: Mapping[str, Any], bounds: Bounds, sizes: Mapping[str, int], from_device: bool) -> None:
    """Check ids that index an axis with a size that depends on the call.

    Raises:
        TokenIdError: one is out of range; the message has the input, the id, its position and the range.
    """
    for name, rows in bounds.rows.items():
        check_ids(f"input {name}", values.get(name), min(bind_dim(dim, sizes) for dim in rows), from_device)


def check_total_length(sizes: Mapping[str, int], bounds: Bounds, flow: str) -> None:
    """Check that the sequence length of a call, the sum of `bounds.position_dims`, fits the model's positions.

    Raises:
        SequenceLengthError: it is longer.
    """
    length = sum(bind_dim(dim, sizes) for dim in bounds.position_dims)
    if is_static(length):  # explicit decode of states alone has no cached keys, hence no size of the past
        check_length(length, bounds, flow)


def check_symbolic_length(sizes: Mapping[str, Any], bounds: Bounds, flow: str) -> None:
    """Check that no sequence of a program with symbolic sizes can be longer than the model's positions.

    Raises:
        SequenceLengthError: the symbols have no such limit; the message has the constraint that gives it.
    """
    length = sum(sizes.get(str(dim), dim) for dim in bounds.position_dims)
    if bounds.positions is None or is_static(length):
        check_length(length, bounds, flow)
        return
    if jax.core.max_dim(length, bounds.positions) != bounds.positions:
        raise SequenceLengthError(
            f"{flow}: {length} tokens, and the model has {bounds.positions} positions: "
            f"jax.export.symbolic_shape(…, constraints=['{length} <= {bounds.positions}'])"
        )


def check_length(seq: int, bounds: Bounds, flow: str) -> None:
    """Check that a sequence of `seq` tokens fits the positions of the model.

    Raises:
        SequenceLengthError: it is longer.
    """
    if bounds.positions is not None and seq > bounds.positions:
        raise SequenceLengthError(f"{flow}: {seq} tokens, and the model has {bounds.positions} positions")
