"""Parameter programs: a parameter is a small program over checkpoint keys, and holds no data.

The compiler sees only programs and shapes. `rlx_jax.weights.execute` runs a program on a
`WeightSource` to load a parameter, and `inverse` inverts it to save the parameter. It is *exact* if nothing is lost.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import WeightShapeError
from rlx_jax.ir.boxes import Box as Box
from rlx_jax.ir.boxes import axis_index, box_shape, concat_axis, overlaps
from rlx_jax.ir.checkpoint_tensor import BlockArray as BlockArray
from rlx_jax.ir.checkpoint_tensor import Conflict as Conflict
from rlx_jax.ir.checkpoint_tensor import DecodedBox as DecodedBox
from rlx_jax.ir.checkpoint_tensor import Dequantized as Dequantized
from rlx_jax.ir.checkpoint_tensor import Key as Key
from rlx_jax.ir.checkpoint_tensor import LeafStep, UnaryStep, steps
from rlx_jax.ir.checkpoint_tensor import Parts as Parts
from rlx_jax.ir.checkpoint_tensor import Role as Role
from rlx_jax.ir.checkpoint_tensor import Roles as Roles
from rlx_jax.ir.checkpoint_tensor import Sliced as Sliced
from rlx_jax.ir.checkpoint_tensor import Strided as Strided
from rlx_jax.ir.checkpoint_tensor import select_box as select_box
from rlx_jax.ir.checkpoint_tensor import slice_axis as slice_axis
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import Quantized as Quantized
from rlx_jax.ir.packed_values import QuantizedArray as QuantizedArray
from rlx_jax.ir.types import TensorType, is_float, is_lossless_cast, short_name


@dataclass(frozen=True)
class Transposed(UnaryStep):
    """A rank-2 program with its axes swapped."""

    of: Program
    splits_to_views: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        return TensorType(self.of.type.shape[::-1], self.of.type.dtype)

    def __str__(self) -> str:
        return f"transpose({self.of})"

    def box(self, box: Box) -> Program:
        return Transposed(select_box(self.of, box[::-1]))

    def join(self, *values: Any) -> Any:
        return values[0].T

    def split(self, value: Any) -> tuple[Any, ...]:
        return (value.T,)

    def name(self, *names: str) -> str:
        return f"{names[0]}.T"

    def roles(self, *parts: Roles) -> Roles:
        return parts[0][::-1]


@dataclass(frozen=True)
class Cast(UnaryStep):
    """A program in another dtype. Widening is exact; narrowing a float is lossy."""

    of: Program
    dtype: np.dtype[Any]

    @property
    def type(self) -> TensorType:
        return self.of.type.with_dtype(self.dtype)

    @property
    def lossy(self) -> bool:
        """Whether the cast may lose bits of a float."""
        return is_float(self.of.type.dtype) and not is_lossless_cast(self.of.type.dtype, self.dtype)

    def __str__(self) -> str:
        return f"cast({self.of}, {short_name(self.dtype)})"

    def with_parts(self, *parts: Program) -> Program:
        return cast(parts[0], self.dtype)

    def box(self, box: Box) -> Program:
        return cast(select_box(self.of, box), self.dtype)

    def join(self, *values: Any) -> Any:
        return values[0].astype(self.dtype)


@dataclass(frozen=True)
class Joined:
    """Several programs concatenated along `axis`: fused projections, or one program and the zeros that pad it.

    Saving drops the padding, whatever it contains by then, so that the checkpoint tensor keeps its shape.
    """

    parts: tuple[Program, ...]
    axis: int
    lossy: ClassVar[bool] = False
    splits_to_views: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        part_type = self.parts[0].type
        shape = list(part_type.shape)
        shape[self.axis] = sum(p.type.shape[self.axis] for p in self.parts)
        return TensorType(tuple(shape), part_type.dtype)

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, self.parts))}; axis={self.axis})"

    def with_parts(self, *parts: Program) -> Program:
        return Joined(parts, self.axis)

    def box(self, box: Box) -> Program:
        lengths = [part.type.shape[self.axis] for part in self.parts]
        parts = tuple(select_box(self.parts[i], part_box) for i, part_box in overlaps(box, self.axis, lengths))
        return parts[0] if len(parts) == 1 else Joined(parts, self.axis)

    def join(self, *values: Any) -> Any:
        return jnp.concatenate(values, self.axis)

    def split(self, value: Any) -> tuple[Any, ...]:
        ends = itertools.accumulate(part.type.shape[self.axis] for part in self.parts)
        ranges = itertools.pairwise((0, *ends))
        return tuple(value[axis_index(self.axis, start, end)] for start, end in ranges)

    def name(self, *names: str) -> str:
        """Return the names of the parts, folded; if the parts are slices that cover their keys, the keys instead.

        The order of the slices does not matter.
        """
        pairs = [(p, name) for p, name in zip(self.parts, names, strict=True) if not isinstance(p, Zeros)]
        slices = list(itertools.chain.from_iterable(map(_slices, self.parts)))
        boxes: dict[Key, list[Box]] = {}
        for key_slice in slices:
            boxes.setdefault(key_slice.source_key, []).append(key_slice.source_box)
        if not slices or any(concat_axis(key.type.shape, parts) is None for key, parts in boxes.items()):
            return fold_names([name for _, name in pairs])
        full_names = []
        for part, name in pairs:
            for key_slice in _slices(part):
                name = name.replace(str(key_slice), key_slice.source_key.key, 1)
            full_names.append(name)
        return fold_names(list(dict.fromkeys(full_names)))

    def roles(self, *parts: Roles) -> Roles:
        return parts[0]  # only projections with the same sharding are fused


@dataclass(frozen=True)
class Stack:
    """Programs of one type stacked along a new leading axis with the given `role`.

    The axis is the layers of a scan, which no mesh shards (`role` None), or the experts of a mixture.
    """

    parts: tuple[Program, ...]
    role: Role = None
    lossy: ClassVar[bool] = False
    splits_to_views: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        part_type = self.parts[0].type
        return TensorType((len(self.parts), *part_type.shape), part_type.dtype)

    def __str__(self) -> str:
        return f"stack({', '.join(map(str, self.parts))})"

    def with_parts(self, *parts: Program) -> Program:
        return Stack(parts, self.role)

    def box(self, box: Box) -> Program:
        start, stop = box[0]
        return Stack(tuple(select_box(part, box[1:]) for part in self.parts[start:stop]), self.role)

    def join(self, *values: Any) -> Any:
        return jnp.stack(values)

    def split(self, value: Any) -> tuple[Any, ...]:
        return tuple(value[i, ...] for i in range(len(self.parts)))

    def name(self, *names: str) -> str:
        return fold_names(list(names))

    def roles(self, *parts: Roles) -> Roles:
        return (self.role, *parts[0])


@dataclass(frozen=True)
class Zeros(LeafStep):
    """Zeros that no checkpoint stores."""

    type: TensorType
    splits_to_views: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"zeros({self.type})"

    def box(self, box: Box) -> Program:
        return Zeros(TensorType(box_shape(box), self.type.dtype))

    def join(self, *values: Any) -> Any:
        return np.zeros(self.type.shape, self.type.dtype)

    def name(self, *names: str) -> str:
        return str(self)


@dataclass(frozen=True)
class PackedArray(UnaryStep):
    """One array (codes, scales, …) of a parameter that stays packed on the device.

    `of` is the parameter, as `without_casts` returns it: packed tensors, or rows of several of one scheme together.
    """

    of: Program
    array: str
    no_split: ClassVar[str] = QuantizedArray.no_split
    no_join: ClassVar[str] = "arrays are read by the program `stored`"

    @functools.cached_property
    def stored(self) -> Program:
        """The program that reads the array."""
        return array_program(self.of, self.array)

    @property
    def type(self) -> TensorType:
        return self.stored.type

    def __str__(self) -> str:
        return f"{self.array}({self.of})"

    def box(self, box: Box) -> Any:
        return select_box(self.stored, box)

    def name(self, *names: str) -> str:
        return names[0] if self.array == "codes" else f"{names[0]}.{self.array}"

    def roles(self, *parts: Roles) -> Roles:
        return SCHEMES[str(packing_of(self.of))].stored_axes(parts[0])


Stored = Key | Sliced | Strided | Dequantized | DecodedBox
Program = Stored | Transposed | Cast | Joined | Stack | Zeros | BlockArray | Quantized | QuantizedArray | PackedArray


def packing_of(program: Program) -> str | None:
    """Return the scheme of the arrays in which a parameter can be stored; None if it cannot be stored packed.

    It can be if it consists of complete rows of packed tensors of one scheme.
    """
    if isinstance(program, Dequantized | Quantized):
        return program.scheme
    if isinstance(program, Cast):
        return packing_of(program.of)
    if not isinstance(program, Joined | Stack | Strided):
        return None
    parts = [part for part in program.parts if not isinstance(part, Zeros)]
    schemes = {packing_of(part) for part in parts}
    if len(schemes) != 1 or None in schemes:
        return None
    (name,) = schemes
    assert name is not None
    axis = None if isinstance(program, Stack) else _stored_axis(program, name) - program.type.rank
    # Rows that share scales have to be in one part, and so do those that share an order.
    scheme = SCHEMES[name]
    cuts_rows = axis == -2 and (scheme.ordered or any(part.type.shape[-2] % scheme.rows for part in parts))
    return None if axis == -1 or cuts_rows else name


def _stored_axis(program: Joined | Strided, scheme: str) -> int:
    """Return the axis of a step in the arrays of its packed tensors."""
    return int(SCHEMES[scheme].stored_axes(range(program.type.rank))[program.axis])


def without_casts(program: Program) -> Program:
    """Return a program of packed tensors without its casts, in the dtype in which the tensors are decoded."""
    if isinstance(program, Cast):
        return without_casts(program.of)
    if isinstance(program, Dequantized | Quantized):
        return program
    return program.with_parts(*map(without_casts, program.parts))


def array_program(program: Program, array: str) -> Program:
    """Return the program that reads one array of a parameter that can be stored packed."""
    if isinstance(program, Dequantized):
        return dict(program.arrays)[array]
    if isinstance(program, Quantized):
        return QuantizedArray(program.of, program.scheme, array)
    scheme = str(packing_of(program))
    parts = [
        Zeros(SCHEMES[scheme].array_types(part.type.shape)[array])
        if isinstance(part, Zeros)
        else array_program(part, array)
        for part in program.parts
    ]
    if isinstance(program, Stack):
        return program.with_parts(*parts)
    assert isinstance(program, Joined | Strided)
    axis = _stored_axis(program, scheme)
    if isinstance(program, Strided):
        return Strided(parts[0], axis, program.start, program.step)
    return Joined(tuple(parts), axis)


def packed_arrays(program: Program) -> dict[str, PackedArray]:
    """Return the arrays of a parameter by name, if it can be stored packed; else nothing."""
    scheme = packing_of(program)
    if scheme is None:
        return {}
    logical = without_casts(program)
    return {name: PackedArray(logical, name) for name in SCHEMES[scheme].array_types(logical.type.shape)}


def cast(program: Program, dtype: np.dtype[Any]) -> Program:
    """Return `program` in `dtype`.

    A widening cast inside it is dropped, because the other cast alone gives the same value. A cast of a fused program
    becomes casts of its parts, so that fusing and casting commute.
    """
    if program.type.dtype == dtype:
        return program
    if isinstance(program, Cast) and is_lossless_cast(program.of.type.dtype, program.type.dtype):
        return cast(program.of, dtype)
    if isinstance(program, Zeros):
        return Zeros(program.type.with_dtype(dtype))
    if isinstance(program, Joined | Stack):
        return program.with_parts(*(cast(part, dtype) for part in program.parts))
    return Cast(program, dtype)


def concat(parts: tuple[Program, ...], axis: int) -> Program:
    """Return the concatenation of programs along `axis`.

    Raises:
        WeightShapeError: the other axes or the dtypes differ.
    """
    first_type = parts[0].type
    for part in parts[1:]:
        pairs = enumerate(zip(first_type.shape, part.type.shape, strict=True))
        if part.type.dtype != first_type.dtype or any(a != b for i, (a, b) in pairs if i != axis):
            raise WeightShapeError(f"cannot merge {parts[0]} {first_type} with {part} {part.type} along axis {axis}")
    return Joined(parts, axis)


def stride_axis(program: Program, axis: int, start: int, step: int) -> Program:
    """Return every `step`-th row of a program along an axis, from `start` on. A cast stays the outermost step.

    Raises:
        WeightShapeError: `step` does not divide the axis, or `start` is not in 0 … `step` − 1.
    """
    if isinstance(program, Cast):
        return cast(stride_axis(program.of, axis, start, step), program.dtype)
    return Strided(program, axis, start, step)


def pad_axis(program: Program, axis: int, size: int) -> Program:
    """Return `program` padded at the end of an axis with zeros to `size`; `program` itself if it has that size.

    Raises:
        WeightShapeError: it is larger, or has no such axis.
    """
    shape = program.type.shape
    if not (0 <= axis < len(shape) and size >= shape[axis]):
        raise WeightShapeError(f"{program}: {program.type} cannot be padded to {size} along axis {axis}")
    padding = (*shape[:axis], size - shape[axis], *shape[axis + 1 :])
    return program if size == shape[axis] else Joined((program, Zeros(TensorType(padding, program.type.dtype))), axis)


def size_without_padding(program: Program) -> int:
    """Return the number of elements of a program without the zeros that pad it."""
    parts = program.parts if isinstance(program, Joined) else (program,)
    return sum(part.type.size for part in parts if not isinstance(part, Zeros))


def _slices(program: Program) -> Iterator[Sliced]:
    """Return the slices of keys that a program reads, in order; for packed keys the logical slices."""
    if isinstance(program, Sliced):
        yield program
    else:
        for part in program.parts:
            yield from _slices(part)


def packed_parameter(program: Program) -> Program | None:
    """Return the packed parameter of which a leaf of the layout is one array, as without casts; None for other leaves.

    For an array of stacked layers it is the stack of their parameters.
    """
    if isinstance(program, PackedArray):
        return program.of
    layers = [p.of for p in program.parts if isinstance(p, PackedArray)] if isinstance(program, Stack) else []
    return Stack(tuple(layers)) if layers else None


def stored_keys(program: Program) -> Iterator[Key]:
    """Return the checkpoint tensors that a program reads, in order. A packed tensor has its logical type."""
    if isinstance(program, Key):
        yield program
    for part in program.parts:
        yield from stored_keys(part)


def keys_of(program: Program) -> Iterator[str]:
    """Return the checkpoint keys that a program reads, in order."""
    return (stored.key for stored in stored_keys(program))


def packed_keys(program: Program) -> Iterator[tuple[str, str]]:
    """Return the key and the scheme of each packed tensor that a program reads, in order."""
    packed = (step for step in steps(program) if isinstance(step, Dequantized))
    return ((key, step.scheme) for step in packed for key in keys_of(step))


def key_descriptions(program: Program) -> Iterator[tuple[str, str]]:
    """Return the keys that a program reads, each with a description: its type, as `f32[8,4]`, and how it is packed."""
    packed = dict(packed_keys(program))
    for stored in stored_keys(program):
        yield stored.key, f"{stored.type} packed as {packed[stored.key]}" if stored.key in packed else str(stored.type)


def is_lossy(program: Program) -> bool:
    """Return whether running `program` may lose bits of a float."""
    return any(step.lossy for step in steps(program))


def printed_name(program: Program) -> str:
    """Return the printed name of a parameter: `model.layers.{0..3}.self_attn.{q,k,v}_proj.weight`. It is never parsed.

    >>> from rlx_jax.ir.types import tensor_type
    >>> t = tensor_type((2, 2), "f32", "doc")
    >>> printed_name(Joined((Key("a.q_proj.weight", t), Key("a.k_proj.weight", t)), 0))
    'a.{q,k}_proj.weight'
    """
    return program.name(*map(printed_name, program.parts))


# -- names of several keys ---------------------------------------------------------------------


def fold_names(names: list[str]) -> str:
    """Return one text for several names: those that differ in one word fold into `prefix{a,b}suffix`.

    Consecutive numbers become `{0..3}`. Names that differ in several words become a list in braces.

    >>> fold_names(["layers.0.q_proj", "layers.1.q_proj"]), fold_names(["a.q_proj", "a.k_proj"])
    ('layers.{0..1}.q_proj', 'a.{q,k}_proj')
    """
    if len(set(names)) == 1:
        return names[0]
    # Words split at underscores too, so that `q_proj` and `k_proj` fold. The separators
    # added for that are removed at the end.
    tokens = [re.findall(r"\w+|\W", name.replace("_", " _ ").replace(" ", "\0")) for name in names]
    columns = list(zip(*tokens, strict=False))
    varying_columns = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying_columns) != 1 or len({len(t) for t in tokens}) != 1:
        return "{" + ",".join(names) + "}"
    values = list(columns[varying_columns[0]])
    is_consecutive = all(v.isdigit() for v in values) and all(
        int(b) == int(a) + 1 for a, b in itertools.pairwise(values)
    )
    inner = f"{values[0]}..{values[-1]}" if is_consecutive else ",".join(values)
    parts = [f"{{{inner}}}" if i == varying_columns[0] else column[0] for i, column in enumerate(columns)]
    return "".join(parts).replace("\0", "")
