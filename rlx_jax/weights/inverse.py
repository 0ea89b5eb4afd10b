"""Invert parameter programs: from the parameters of a model to the tensors of a checkpoint, by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.device import with_auto_axes
from rlx_jax.errors import WeightError, quote
from rlx_jax.ir import param
from rlx_jax.ir.boxes import box_index, concat_axis
from rlx_jax.ir.packed_values import decode_arrays, decode_on_host


def weights_by_key(leaves: Mapping[param.Program, jax.Array]) -> dict[str, jax.Array]:
    """Invert programs: return the array of every checkpoint key, in its stored shape and dtype.

    A packed tensor has its logical shape and dtype.

    Raises:
        WeightError: the leaves hold only a part of a tensor.
    """
    groups: dict[str, list[Piece]] = {}
    for program, array in decoded_leaves(leaves).items():
        for piece in pieces(program, with_auto_axes(array)):
            groups.setdefault(piece.key.key, []).append(piece)
    return {name: _as_stored(join_pieces(group), group[0].key.type.dtype) for name, group in groups.items()}


def decoded_leaves(leaves: Mapping[param.Program, Any]) -> dict[param.Program, Any]:
    """Return the leaves with one decoded leaf, of the logical type, in place of the arrays of each packed parameter."""
    decoded: dict[param.Program, Any] = {}
    groups: dict[param.Program, dict[str, Any]] = {}
    for program, leaf in leaves.items():
        logical = param.packed_parameter(program)
        array = program.parts[0] if isinstance(program, param.Stack) else program
        if logical is not None and isinstance(array, param.PackedArray):
            groups.setdefault(logical, {})[array.array] = with_auto_axes(leaf)
        else:
            decoded[program] = leaf
    for program, arrays in groups.items():
        scheme = param.packing_of(program)
        assert scheme is not None
        if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
            values = decode_arrays(arrays, scheme)
        else:
            values = decode_on_host({name: np.asarray(array) for name, array in arrays.items()}, scheme)
        decoded[program] = values.astype(program.type.dtype)
    return decoded


class Piece(NamedTuple):
    """A checkpoint tensor in a leaf, in the leaf's dtype: all of it, or the part that `sliced` selects."""

    key: param.Key
    values: Any
    sliced: param.Sliced | param.Strided | None = None

    @property
    def selection(self) -> tuple[slice, ...]:
        """Return the NumPy index of this piece in the stored tensor."""
        if isinstance(self.sliced, param.Strided):
            return self.sliced.index
        return () if self.sliced is None else box_index(self.sliced.source_box)


def pieces(program: param.Program, leaf: Any) -> Iterator[Piece]:
    """Yield the checkpoint tensors, or parts of them, in a leaf: stored shapes, the leaf's dtype, views if possible.

    `leaf` is an array of NumPy or JAX, and so are the values of the pieces.
    """
    if isinstance(program, param.Key):
        yield Piece(program, leaf)
    elif isinstance(program, param.Dequantized):
        yield from pieces(program.of, leaf)  # the decoded numbers are not packed again
    elif isinstance(program, param.Sliced):
        yield Piece(program.source_key, leaf, program)
    elif isinstance(program, param.Strided):
        (key,) = set(param.stored_keys(program))
        yield Piece(key, leaf, program)
    else:
        for part, piece in zip(program.parts, program.split(leaf), strict=True):
            yield from pieces(part, piece)


def join_pieces(pieces: Sequence[Piece]) -> Any:
    """Return all values of one key from its pieces, each of which holds all or a part of them.

    Raises:
        WeightError: a part is in no piece; the message names the key and its existing parts.
    """
    for piece in pieces:
        if piece.sliced is None:
            return piece.values
    if all(isinstance(piece.sliced, param.Strided) for piece in pieces):
        return _join_strided(pieces)
    # Tied leaves repeat a part; iterating in reverse makes the first one count.
    parts = {p.sliced.source_box: p for p in reversed(pieces) if isinstance(p.sliced, param.Sliced)}
    key, ordered = pieces[0].key, [parts[index] for index in sorted(parts)]
    axis = concat_axis(key.type.shape, list(parts))
    if axis is None:
        raise _incomplete_error(key, pieces)
    values = [part.values for part in ordered]
    join = np.concatenate if all(isinstance(v, np.ndarray) for v in values) else jnp.concatenate
    return join(values, axis)


def _join_strided(pieces: Sequence[Piece]) -> Any:
    """Return all values of one key from strided pieces, which alternate along an axis."""
    strided = [(piece.sliced, piece) for piece in reversed(pieces) if isinstance(piece.sliced, param.Strided)]
    parts = {(part.axis, part.step, part.start): piece for part, piece in strided}
    key, ((axis, step, _), *_) = pieces[0].key, parts
    if set(parts) != {(axis, step, start) for start in range(step)}:
        raise _incomplete_error(key, pieces)
    values = [parts[axis, step, start].values for start in range(step)]
    stack = np.stack if all(isinstance(v, np.ndarray) for v in values) else jnp.stack
    return stack(values, axis + 1).reshape(key.type.shape)


def _incomplete_error(key: param.Key, pieces: Sequence[Piece]) -> WeightError:
    """Return the error for a tensor of which the pieces cover only a part."""
    part_names = ", ".join(sorted({str(part.sliced) for part in pieces}))
    return WeightError(f"weight {quote(key.key)} is {key.type}, and the model has only these parts of it: {part_names}")


def _as_stored(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array in its stored dtype."""
    if value.dtype == dtype:
        return value
    # JAX has no 64-bit types by default, so NumPy casts to these.
    in_numpy = dtype.itemsize == 8 and not isinstance(value, jax.core.Tracer)
    return (np.asarray(value) if in_numpy else value).astype(dtype)
