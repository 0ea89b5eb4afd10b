"""Check and normalise the inputs of a call on the host, before any `jnp` call.

JAX clamps ids out of range in silence and narrows int64 without a word, so nothing reaches it unchecked.
jax.Arrays and tracers are taken as they are (checking them would wait for the device).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.built import InputDecl
from rlx_jax.errors import (
    DTypeError,
    SequenceLengthError,
    ShapeError,
    TokenIdError,
    UnboundInputError,
    did_you_mean,
    listing,
    quote,
)
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Input, Op, Value
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.ops.shaping import Narrow, Reshape, Slice, Transpose
from rlx_jax.ir.types import TensorType, is_float, is_static, short_name

INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Bounds:
    """What the program's tables allow: rows behind each id input, and positions that tables know."""

    ids: Mapping[str, int]
    positions: int | None


def bounds_of(graph: Graph) -> Bounds:
    """Find the tables that inputs index, directly or through casts and reshapes."""
    ids: dict[str, int] = {}
    positions: int | None = None
    for inner, node in graph.walk():
        if isinstance(node.op, hir.Embed):
            rows, source = inner.type(node.inputs[0]).shape[0], _source(inner, node.inputs[1])
        elif isinstance(node.op, hir.RopeRows):
            rows, source = node.op.rows, _source(inner, node.inputs[0])
        else:
            continue
        if isinstance(source, Input):
            ids[source.input] = min(rows, ids.get(source.input, rows))
        elif isinstance(source, hir.Positions):
            positions = rows if positions is None else min(rows, positions)
    return Bounds(ids, positions)


def _source(graph: Graph, value: Value) -> Op:
    """Where ids come from, behind ops that move them and change none."""
    node = graph.nodes[value.node]
    while isinstance(node.op, Reshape | Slice | Narrow | Transpose | CastTo):
        node = graph.nodes[node.inputs[0].node]
    return node.op


def bind_names(decls: Sequence[InputDecl], args: Sequence[Any], named: Mapping[str, Any], flow: str) -> dict[str, Any]:
    """Inputs by name from a call's positional and named arguments; None for an optional input means absent."""
    names = [d.name for d in decls]
    if len(args) > len(names):
        raise UnboundInputError(f"{flow}: takes {len(names)} inputs ({', '.join(names)}), got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name not in names:
            raise UnboundInputError(
                f"{flow}: has no input {quote(name)}; its inputs are {listing(names)}{did_you_mean(name, names)}"
            )
        if name in given:
            raise UnboundInputError(f"{flow}: input {quote(name)} is given by position and by name")
        given[name] = value
    given = {n: v for n, v in given.items() if v is not None}
    missing = [d.name for d in decls if not d.optional and d.name not in given]
    if missing:
        raise UnboundInputError(f"{flow}: input {listing(missing)} is not given")
    return given


def host_value(name: str, value: Any, declared: TensorType, rows: int | None) -> Any:
    """One input as an array of its declared dtype. `rows`: the table that integer ids index.

    Raises:
        TokenIdError: an id is not an integer in `[0, rows)`.
        DTypeError: a dtype change other than int64 → int32 and float64 → float32.
    """
    if isinstance(value, jax.Array):
        if value.dtype != declared.dtype:
            raise DTypeError(f"input {name}: expected {short_name(declared.dtype)}, got a jax array of {value.dtype}")
        return value
    array = as_host_array(name, value)
    if rows is not None:
        return checked_ids(array, rows, name).astype(declared.dtype)
    if array.dtype == declared.dtype:
        return array
    if is_float(declared.dtype):
        if array.dtype == np.float64:
            return array.astype(declared.dtype)
    elif array.dtype.kind in "iu" and declared.dtype.kind in "iu":
        info = np.iinfo(declared.dtype)
        if array.size and (array.min() < info.min or array.max() > info.max):
            raise DTypeError(
                f"input {name}: values {array.min()} … {array.max()} do not fit {short_name(declared.dtype)}"
            )
        return array.astype(declared.dtype)
    raise DTypeError(f"input {name}: expected {short_name(declared.dtype)}, got {array.dtype}; convert it first")


def as_host_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    """A NumPy array in native byte order; ragged or non-numeric input is an error."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ShapeError(f"input {name}: not an array: {str(error).splitlines()[0]}") from error
    if array.dtype.kind not in "biufcV" or array.dtype.hasobject:
        raise DTypeError(f"input {name}: expected numbers, got {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def checked_ids(array: np.ndarray[Any, Any], rows: int, what: str) -> np.ndarray[Any, Any]:
    """Integer ids in `[0, rows)`, checked before any cast."""
    if array.dtype.kind not in "iu":
        raise TokenIdError(f"{what}: ids are integers, got {array.dtype}")
    if array.size:
        low, high = array.min(), array.max()
        if low < 0 or high >= rows:
            at = np.argwhere((array < 0) | (array >= rows))[0]
            bad = array[tuple(at)]
            raise TokenIdError(f"{what}: id {bad} at {tuple(int(i) for i in at)} is not in [0, {rows})")
    return array


def bind_sizes(declared: Mapping[str, TensorType], values: Mapping[str, Any], flow: str) -> dict[str, int]:
    """The size of every symbolic dimension, from the shapes of the inputs.

    Raises:
        ShapeError: a rank or a static size differs, or two inputs disagree; the message names both.
    """
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    for name, value in values.items():
        want, shape = declared[name], tuple(value.shape)
        if len(shape) != want.rank:
            raise ShapeError(f"{flow}: input {name} is {want}, got shape {list(shape)}: rank {len(shape)}")
        for axis, (dim, size) in enumerate(zip(want.shape, shape, strict=True)):
            if is_static(dim):
                if size != dim:
                    raise ShapeError(
                        f"{flow}: input {name} is {want}, got {list(shape)}: axis {axis} is {size}, not {dim}"
                    )
                continue
            symbol = str(dim)
            if not is_static(size):
                raise ShapeError(f"{flow}: input {name} has the symbolic size {size}; call with numbers")
            if size < 1:
                raise ShapeError(f"{flow}: input {name}: dimension {symbol} is {size}; sizes are at least 1")
            if sizes.setdefault(symbol, int(size)) != size:
                raise ShapeError(
                    f"{flow}: dimension {symbol} is {sizes[symbol]} in {seen[symbol]} and {size} in {name}"
                )
            seen.setdefault(symbol, name)
    return sizes


def check_new_tokens(lengths: Any, seq: int, low: int) -> None:
    """Each row has between `low` and `seq` new tokens; checked on the host only."""
    if isinstance(lengths, np.ndarray) and lengths.size and not (low <= lengths.min() and lengths.max() <= seq):
        raise SequenceLengthError(f"lengths: expected {low} to {seq}, got {lengths.tolist()[:8]}")


def check_length(seq: int, bounds: Bounds, flow: str) -> None:
    """A sequence fits the position tables."""
    if bounds.positions is not None and seq > bounds.positions:
        raise SequenceLengthError(f"{flow}: {seq} tokens, but the position table has {bounds.positions} rows")
