"""What operands an op takes, declared as text on its class, and the check of operands against it.

    operands ::= "x:float[B,S,…] index:int[B] bias?"       name ?attribute? :kind? @attribute? [sizes]?
    kind     ::= float | int | num (no bool) | a dtype such as f32 | the name of an operand before it: its dtype
    size     ::= B (one size wherever it stands) | heads (an attribute of the op) | 3 | _ (any) | … (any axes)
                 `…L` stands for the same axes each time; `!` behind a size: a number; `?`: or 1

`x@axis`: the attribute `axis` of the op, a number, several or None, is an axis of x. `bias?` may be left out, with
those behind it; `bias?biased` is there where the attribute `biased` of the op is true. `*` stands for more operands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, did_you_mean, quote, wrong_arity
from rlx_jax.ir.types import DTYPE_NAMES, DimLike, TensorType, as_dtype, is_float, is_static, is_whole

T = TypeVar("T")
KINDS = {"float": ("floats", is_float), "int": ("integers", is_whole), "num": ("numbers", lambda t: t != np.bool_)}
_OPERAND = re.compile(r"(?P<name>\w+)(?P<given>\?\w*)?(?::(?P<kind>\w+))?(?:@(?P<axis>\w+))?(?:\[(?P<dims>[^\]]*)\])?")


@dataclass(frozen=True)
class Operand:
    """One operand of a declaration, as it is written.

    Attributes:
        given: None where there always is one, "?" where it may be left out, else "?" and an attribute that says whether
            there is one.
        kind, axis: None where any is right.
        dims: the sizes between the brackets; None where it may have any shape.
    """

    name: str
    given: str | None
    kind: str | None
    axis: str | None
    dims: str | None

    @property
    def sizes(self) -> tuple[str, ...]:
        """What its sizes are."""
        return tuple(filter(None, (self.dims or "").split(",")))

    def text(self, op: Any) -> str:
        """Return it as messages show it, attributes of the op as numbers."""
        kind = KINDS[self.kind][0] if self.kind in KINDS else self.kind or ""
        kind = kind if self.kind in (None, *KINDS, *DTYPE_NAMES) else f"of the dtype of {kind}"
        sizes = [
            str(getattr(op, d.rstrip("?"))) if d[0].islower() else d.replace("!", " (a number)") for d in self.sizes
        ]
        return " ".join(part for part in (self.name, kind, f"[{', '.join(sizes)}]" * (self.dims is not None)) if part)


@functools.cache
def parse_operands(declaration: str) -> tuple[Operand, ...]:
    """Return the operands that a text declares, without a `*` at its end."""
    matches = [_OPERAND.fullmatch(text) for text in declaration.removesuffix("*").split()]
    assert all(matches), declaration
    return tuple(Operand(**match.groupdict()) for match in matches if match)


def operands_of(op: Any, declaration: str) -> list[Operand]:
    """Return the operands that an op of these attributes has."""
    return [w for w in parse_operands(declaration) if w.given in (None, "?") or getattr(op, w.given[1:])]


def named_operands(op: Any, operands: Sequence[T]) -> dict[str, T]:
    """Return operands by the names that they are declared by."""
    return {w.name: operand for w, operand in zip(operands_of(op, op.operands), operands, strict=True)}


def check_declared(op: Any, operands: Sequence[TensorType]) -> None:
    """Check the attributes and the operands of an op against its `choices` and its declaration.

    Raises:
        GraphError: an attribute or an operand is another one; the message says which are expected.
    """
    for attribute, choices in op.choices.items():
        if (value := getattr(op, attribute)) not in choices:
            close = did_you_mean(str(value), choices)
            known = "" if close and len(choices) > 9 else f"; expected one of {', '.join(choices)}"
            raise GraphError(f"{op.name().removesuffix('_op')}: {attribute} is {quote(value)}{known}{close}")
    if declaration := op.declaration():
        check_operands(op, op.text().partition("(")[0].removesuffix("_op"), declaration, operands)


def check_operands(op: Any, name: str, declaration: str, given: Sequence[TensorType]) -> None:
    """Check the operands of an op against its declaration.

    Raises:
        GraphError: there are more or fewer. DTypeError, ShapeError: one does not fit; the message names it, what is
            expected of all, and all that there are.
    """
    wanted, sizes = operands_of(op, declaration), dict[str, Any]()
    least, more = sum(w.given != "?" for w in wanted), declaration.endswith("*")
    if len(given) < least or (len(given) > len(wanted) and not more):
        count = f"{least} or more" if more else str(least) if least == len(wanted) else f"{least} to {len(wanted)}"
        raise wrong_arity(name, count, len(given), f": {', '.join(w.name for w in wanted)}")
    dtypes = {w.name: t.dtype for w, t in zip(wanted, given, strict=False)}
    for place, (w, t) in enumerate(zip(wanted, given, strict=False)):
        check_axes(name, getattr(op, w.axis) if w.axis else None, t)
        dtype_fits = _has_kind(t.dtype, w.kind, dtypes)
        if dtype_fits and (w.dims is None or _has_shape(op, t.shape, w.sizes, sizes)):
            continue
        problem = (
            f"{name}: {w.name} is {t}; expected {', '.join(w.text(op) for w in wanted)}; got "
            f"{', '.join(map(str, given))}"
        )
        if dtype_fits:
            raise ShapeError(problem).of(place)
        raise DTypeError(f"{problem}; cast it" + ", or give its input dtype='int32'" * (w.kind == "int"))


def check_axes(op: str, axes: int | Sequence[int] | None, x: TensorType) -> None:
    """Check that an operand has an axis, or several."""
    for axis in () if axes is None else (axes,) if isinstance(axes, int) else axes:
        if not -x.rank <= axis < x.rank:
            raise ShapeError(f"{op}: {x} has no axis {axis}")


def _has_kind(dtype: np.dtype[Any], kind: str | None, dtypes: dict[str, np.dtype[Any]]) -> bool:
    if kind is None or kind in KINDS:
        return kind is None or bool(KINDS[kind][1](dtype))
    return bool(dtype == (dtypes[kind] if kind in dtypes else as_dtype(kind)))


def _has_shape(op: Any, shape: tuple[DimLike, ...], dims: tuple[str, ...], sizes: dict[str, Any]) -> bool:
    """Whether a shape fits; `sizes` has what the letters before stand for, and gets those that are new."""
    lead = next((i for i, dim in enumerate(dims) if dim.startswith("…")), None)
    if lead is not None:
        count = len(shape) - len(dims) + 1
        axes, name = shape[lead : lead + max(count, 0)], dims[lead].rstrip("!")
        if count < 0 or (name != "…" and sizes.setdefault(name, axes) != axes):
            return False
        if dims[lead].endswith("!") and not all(map(is_static, axes)):
            return False
        dims = (*dims[:lead], *("_",) * count, *dims[lead + 1 :])
    return len(dims) == len(shape) and all(_has_size(op, s, d, sizes) for s, d in zip(shape, dims, strict=True))


def _has_size(op: Any, size: DimLike, dim: str, sizes: dict[str, Any]) -> bool:
    if not is_static(size) and dim.endswith("!"):
        return False
    name = dim.rstrip("!?")
    if name == "_" or (dim.endswith("?") and is_static(size) and size == 1):
        return True
    if name.isdigit():
        return bool(size == int(name))
    return bool(size == (getattr(op, name) if name[0].islower() else sizes.setdefault(name, size)))
