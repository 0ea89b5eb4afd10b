"""Declarations of the operands of ops, as text on the op class, and the check of operands against them.

    operands ::= "x:float[B,S,…] index:int[B] bias?"       name ?attribute? :kind? @attribute? [sizes]?
    kind     ::= float | int | num (no bool) | a dtype such as f32 | the name of an earlier operand: its dtype
    size     ::= B (the same size at each occurrence) | heads (an attribute of the op) | 3 | _ (any) | … (any axes)
                 `…L` means the same axes at each occurrence; `!` after a size: static; `?` after a size: or 1

`x@axis`: the attribute `axis` of the op, an int, several or None, is a valid axis of x. `bias?` is optional, like all
operands after it; `bias?biased` exists if the attribute `biased` of the op is true. A final `*` allows more operands.

`fill_notation` reads the other text on op classes, the template of an op in dumps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Literal, TypeVar

import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, GraphError, ShapeError, did_you_mean, quote, wrong_arity
from rlx_jax.ir.types import DTYPE_NAMES, DimLike, TensorType, as_dtype, is_float, is_integer, is_static

T = TypeVar("T")
KINDS = {"float": ("floats", is_float), "int": ("integers", is_integer), "num": ("numbers", lambda t: t != np.bool_)}
_OPERAND = re.compile(
    r"(?P<name>\w+)(?P<condition>\?\w*)?(?::(?P<kind>\w+))?(?:@(?P<axis>\w+))?(?:\[(?P<dims>[^\]]*)\])?"
)


@dataclass(frozen=True)
class Operand:
    """One operand of a declaration, with its parts as text.

    Attributes:
        name: the name in messages.
        condition: None for a required operand, "?" for an optional one, else "?" and the name of the op's attribute
            that is true if the operand exists.
        kind, axis: None if the declaration does not restrict them.
        dims: the sizes between the brackets; None if the operand may have any shape.
    """

    name: str
    condition: str | None
    kind: str | None
    axis: str | None
    dims: str | None

    @property
    def sizes(self) -> tuple[str, ...]:
        """The declared size of each axis, as text."""
        return tuple(filter(None, (self.dims or "").split(",")))

    def text(self, op: Any) -> str:
        """Return the operand as messages show it, with the values of the op's attributes."""
        kind = KINDS[self.kind][0] if self.kind in KINDS else self.kind or ""
        kind = kind if self.kind in (None, *KINDS, *DTYPE_NAMES) else f"of the dtype of {kind}"
        sizes = [
            str(getattr(op, d.rstrip("?"))) if d[0].islower() else d.replace("!", " (a number)") for d in self.sizes
        ]
        return " ".join(part for part in (self.name, kind, f"[{', '.join(sizes)}]" * (self.dims is not None)) if part)


@functools.cache
def parse_operands(declaration: str) -> tuple[Operand, ...]:
    """Return the operands that a text declares, ignoring a final `*`."""
    matches = [_OPERAND.fullmatch(text) for text in declaration.removesuffix("*").split()]
    assert all(matches), declaration
    return tuple(Operand(**match.groupdict()) for match in matches if match)


def operands_of(op: Any, declaration: str) -> list[Operand]:
    """Return the operands that an op with these attributes has, including optional ones."""
    return [w for w in parse_operands(declaration) if w.condition in (None, "?") or getattr(op, w.condition[1:])]


def named_operands(op: Any, operands: Sequence[T]) -> dict[str, T]:
    """Return operands by their declared names."""
    return {w.name: operand for w, operand in zip(operands_of(op, op.operands), operands, strict=True)}


def check_declared(op: Any, operands: Sequence[TensorType]) -> None:
    """Check the attributes and the operands of an op against its `choices` and its declaration.

    Raises:
        GraphError: an attribute or an operand is invalid; the message has the expected ones.
    """
    for attribute, choices in op.choices.items():
        if (value := getattr(op, attribute)) not in choices:
            suggestion = did_you_mean(str(value), choices)
            expected = "" if suggestion and len(choices) > 9 else f"; expected one of {', '.join(choices)}"
            raise GraphError(f"{op.name().removesuffix('_op')}: {attribute} is {quote(value)}{expected}{suggestion}")
    if declaration := op.declaration():
        check_operands(op, op.text().partition("(")[0].removesuffix("_op"), declaration, operands)


def check_operands(op: Any, name: str, declaration: str, operands: Sequence[TensorType]) -> None:
    """Check the operands of an op against its declaration.

    Raises:
        GraphError: the number of operands is wrong.
        DTypeError, ShapeError: an operand does not fit; the message names it, and lists the expected and the actual
            operands.
    """
    specs, sizes = operands_of(op, declaration), dict[str, Any]()
    least, variadic = sum(spec.condition != "?" for spec in specs), declaration.endswith("*")
    if len(operands) < least or (len(operands) > len(specs) and not variadic):
        count = f"{least} or more" if variadic else str(least) if least == len(specs) else f"{least} to {len(specs)}"
        raise wrong_arity(name, count, len(operands), f": {', '.join(spec.name for spec in specs)}")
    dtypes = {spec.name: operand_type.dtype for spec, operand_type in zip(specs, operands, strict=False)}
    for number, (spec, operand_type) in enumerate(zip(specs, operands, strict=False)):
        check_axes(name, getattr(op, spec.axis) if spec.axis else None, operand_type)
        dtype_fits = _has_kind(operand_type.dtype, spec.kind, dtypes)
        if dtype_fits and (spec.dims is None or _has_shape(op, operand_type.shape, spec.sizes, sizes)):
            continue
        problem = (
            f"{name}: {spec.name} is {operand_type}; expected {', '.join(spec.text(op) for spec in specs)}; got "
            f"{', '.join(map(str, operands))}"
        )
        if dtype_fits:
            raise ShapeError(problem).at_operands(number)
        raise DTypeError(f"{problem}; cast it" + ", or give its input dtype='int32'" * (spec.kind == "int"))


def check_axes(op: str, axes: int | Sequence[int] | None, x: TensorType) -> None:
    """Check that an operand has the given axis or axes; None means no axis.

    Raises:
        ShapeError: it does not; the message begins with `op`.
    """
    for axis in () if axes is None else (axes,) if isinstance(axes, int) else axes:
        if not -x.rank <= axis < x.rank:
            raise ShapeError(f"{op}: {x} has no axis {axis}")


def _has_kind(dtype: np.dtype[Any], kind: str | None, dtypes: dict[str, np.dtype[Any]]) -> bool:
    """Return whether a dtype fits the declared `kind`; `dtypes` has the dtypes of all operands by name."""
    if kind is None or kind in KINDS:
        return kind is None or bool(KINDS[kind][1](dtype))
    return bool(dtype == (dtypes[kind] if kind in dtypes else as_dtype(kind)))


def _has_shape(op: Any, shape: tuple[DimLike, ...], dims: tuple[str, ...], sizes: dict[str, Any]) -> bool:
    """Return whether a shape fits the declared `dims`.

    `sizes` has the sizes of the letters that occurred so far. New letters are added to it.
    """
    ellipsis_index = next((i for i, dim in enumerate(dims) if dim.startswith("…")), None)
    if ellipsis_index is not None:
        count = len(shape) - len(dims) + 1
        ellipsis_sizes, name = shape[ellipsis_index : ellipsis_index + max(count, 0)], dims[ellipsis_index].rstrip("!")
        if count < 0 or (name != "…" and sizes.setdefault(name, ellipsis_sizes) != ellipsis_sizes):
            return False
        if dims[ellipsis_index].endswith("!") and not all(map(is_static, ellipsis_sizes)):
            return False
        dims = (*dims[:ellipsis_index], *("_",) * count, *dims[ellipsis_index + 1 :])
    return len(dims) == len(shape) and all(_has_size(op, s, d, sizes) for s, d in zip(shape, dims, strict=True))


def _has_size(op: Any, size: DimLike, dim: str, sizes: dict[str, Any]) -> bool:
    """Return whether one size fits the declared `dim`; `sizes` is as in `_has_shape`."""
    if not is_static(size) and dim.endswith("!"):
        return False
    name = dim.rstrip("!?")
    if name == "_" or (dim.endswith("?") and is_static(size) and size == 1):
        return True
    if name.isdigit():
        return bool(size == int(name))
    # Lower case is an attribute of the op; upper case is a letter, bound to this size at its first occurrence.
    return bool(size == (getattr(op, name) if name[0].islower() else sizes.setdefault(name, size)))


# Traits of ops, declared on the op class. Passes, plan and reports decide by traits instead of lists of classes.


Types = Sequence[TensorType]
# `(op, operand types, result types) → number of operations or bytes`; the types are static.
Count = Callable[[Any, Types, Types], int]

# compute: products, and other ops that a narrow dtype speeds up; reduction: sums over many values; elementwise:
# functions of single elements; movement: ops that only move values; state: writes of the state in place, in its dtype.
Numeric = Literal["compute", "reduction", "elementwise", "movement", "state"]


def zero(op: Any, operands: Types, results: Types) -> int:
    """Return 0."""
    return 0


def all_moved(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that reads every operand once and writes every result once."""
    return sum(t.nbytes for t in (*operands, *results))


def results_moved(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that copies a part of its first operand and reads the others, such as indices."""
    return 2 * sum(t.nbytes for t in results) + sum(t.nbytes for t in operands[1:])


def results_written(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that reads only the shapes of its operands."""
    return sum(t.nbytes for t in results)


def first_moved(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of an op that reads its first operand and only the shapes of the others."""
    return operands[0].nbytes + results[0].nbytes


ViewOffset = Callable[[Any, Types, Types], int | None]


@dataclass(frozen=True)
class Traits:
    """Traits of a tensor op.

    Attributes:
        numeric: the numeric class, for which `precision.mixed` chooses a dtype.
        narrows: the number of leading operands that are cast to that dtype; None means all. Masks and tables keep their
            dtype, because they need its range.
        widens: whether the op runs in f32 if one operand must stay f32 (logits, tables). Otherwise all operands are
            cast to the compute dtype.
        pinned: whether the op has a field `precision`, for the algorithm of its products.
        flops: returns 2 × the multiply-adds of its contractions.
        bytes: returns the bytes that the op reads and writes if it is not fused with others.
        workspace: returns the bytes of scratch memory in addition to operands and results.
        view: returns the byte offset of the result in the first operand if the result is a contiguous part of it;
            otherwise None.
        writes: pairs (result, operand) that share memory if the operand is a donated state leaf.
        stored: whether the op can be serialized to JSON, because its attributes are plain values.
        size_dependent: whether `eval` compares a size with a number, so that result types may differ from the symbolic
            ones for some sizes.
    """

    numeric: Numeric
    narrows: int | None
    widens: bool
    pinned: bool
    flops: Count
    bytes: Count
    workspace: Count
    view: ViewOffset
    writes: tuple[tuple[int, int], ...]
    stored: bool
    size_dependent: bool


# Common traits; an op may change some of them (`dataclasses.replace`).
ELEMENTWISE = Traits(
    "elementwise", narrows=None, widens=True, pinned=False, flops=zero, bytes=all_moved, workspace=zero,
    view=lambda op, operands, results: None, writes=(), stored=True, size_dependent=False,
)  # fmt: skip
REDUCTION = replace(ELEMENTWISE, numeric="reduction")
NORM = replace(REDUCTION, widens=False)
MOVEMENT = replace(ELEMENTWISE, numeric="movement")
TOKENS = replace(MOVEMENT, widens=False, bytes=results_moved)
STATE = replace(ELEMENTWISE, numeric="state", narrows=0, widens=False, writes=((0, 0),))


def product_traits(flops: Count) -> Traits:
    """Return the traits of a matrix product with a field `precision`, given its `flops`."""
    return replace(ELEMENTWISE, numeric="compute", widens=False, pinned=True, flops=flops)


@dataclass(frozen=True)
class BlockTraits:
    """Traits of a block.

    Attributes:
        composite: whether the block expands into other blocks, before programs are derived.
        keeps_f32: whether the block reads or returns f32 tables, so that a compute dtype does not apply to its
            operands.
        stored: whether the block can be serialized to JSON.
    """

    composite: bool
    keeps_f32: bool
    stored: bool


# For most blocks; for blocks that expand into blocks; for blocks that read or return rotary tables and positions.
BLOCK = BlockTraits(composite=False, keeps_f32=False, stored=True)
COMPOSITE = BlockTraits(composite=True, keeps_f32=False, stored=True)
TABLES = BlockTraits(composite=False, keeps_f32=True, stored=True)


@dataclass(frozen=True)
class Normal:
    """A normal distribution with mean 0 and standard deviation 1/√`fan_in`."""

    fan_in: int


# The initialization of a weight: a constant, or a normal distribution.
Initial = float | Normal


def check_traits(cls: type[Any], kind: type[Any], example: str) -> None:
    """Check that a class declares its traits itself.

    Raises:
        GraphError: it does not. `__init_subclass__` calls this, so that the definition of the class raises.
    """
    # Inherited traits do not count: a subclass may compute something else.
    if not isinstance(cls.__dict__.get("traits"), kind):
        raise GraphError(
            f"{cls.__module__}.{cls.__qualname__}: an op declares all of its traits itself: "
            f"traits = {kind.__name__}(…), or one of those in rlx_jax/ir/operands.py, such as {example}"
        )


# `{name}` or `{name?text}`.
_PLACEHOLDER = re.compile(r"\{([\w.]+)(?:\?([^}]*))?\}")


def fill_notation(notation: str, op: object) -> str:
    """Return the text of an op, a template with the values of the op's attributes.

    Args:
        notation: `{name}` is the value of an attribute, and `{name?text}` is `text` if the attribute is true, with its
            value for `*`.
        op: has the attributes.
    """

    def attribute_text(match: re.Match[str]) -> str:
        path, text_if_true = match.groups()
        value = attrgetter(path)(op)
        if text_if_true is None:
            return value_text(value)
        return text_if_true.replace("*", value_text(value)) if value else ""

    return _PLACEHOLDER.sub(attribute_text, notation)


def value_text(value: Any) -> str:
    """Return the value of an attribute as text; for a graph, the number of its nodes."""
    if hasattr(value, "text"):
        return str(value.text())
    if hasattr(value, "nodes"):
        return f"{len(value.nodes)} nodes"
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
