"""Parts of an axis between bounds that are sizes of values: what a joint sequence is taken apart by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.extend import core as jex

from rlx_jax.errors import ShapeError
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.ops.shape import SizeOf, check_axis
from rlx_jax.ir.traits import MOVEMENT, results_moved
from rlx_jax.ir.types import DimLike, TensorType

Array = jax.Array


@dataclass(frozen=True)
class Bound:
    """In a `CutAxis`: `offset` and all of `sizes` less those of `minus`, behind the front of the axis, or with
    `from_end` before its end. A size that counts twice stands there twice."""

    sizes: tuple[SizeOf, ...] = ()
    offset: int = 0
    from_end: bool = False
    minus: tuple[SizeOf, ...] = ()

    def at(self, size: DimLike, shapes: Sequence[tuple[DimLike, ...]]) -> DimLike:
        """The index on an axis of this size."""
        more, less = (sum(shapes[s.operand][s.axis] for s in sizes) for sizes in (self.sizes, self.minus))
        distance = more - less + self.offset
        return size - distance if self.from_end else distance

    def __str__(self) -> str:
        parts = [f"+{s}" for s in self.sizes] + [f"-{s}" for s in self.minus] + [f"{self.offset:+}"] * bool(self.offset)
        sum_ = "".join(parts).removeprefix("+") or "0"
        return f"end-({sum_})" if self.from_end else sum_


END = Bound(from_end=True)


@dataclass(frozen=True)
class CutAxis(Mir):
    """`x[…, start:stop, …]` along one axis. Operands: x, then values that only lend the sizes of their axes.

    The result has `stop − start` entries, exactly: of `a + b` entries, those from `a` on are `b`. Bounds never name a
    symbol, so that binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, narrows=1, bytes=results_moved)

    axis: int
    start: Bound = Bound()
    stop: Bound = END

    def _bounds(self, shapes: Sequence[tuple[DimLike, ...]]) -> tuple[DimLike, DimLike]:
        size = shapes[0][self.axis]
        return self.start.at(size, shapes), self.stop.at(size, shapes)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        x = operands[0]
        check_axis("cut", self.axis, x)
        for size in (size for bound in (self.start, self.stop) for size in (*bound.sizes, *bound.minus)):
            if not 0 <= size.operand < len(operands):
                raise ShapeError(f"cut: there is no operand {size.operand} of {len(operands)}")
            check_axis("cut", size.axis, operands[size.operand])
        start, stop = self._bounds([t.shape for t in operands])
        if _is_below(start, 0) or _is_below(x.shape[self.axis], stop) or _is_below(stop - start, 1):
            raise ShapeError(
                f"cut: {start}:{stop} along axis {self.axis} of {x}; expected at least one entry, and none outside"
            )
        axis = self.axis % x.rank
        return (TensorType((*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype),)

    def eval(self, x: Array, *lenders: Array) -> Array:
        start, stop = self._bounds([a.shape for a in (x, *lenders)])
        return jax.lax.slice_in_dim(x, start, stop, axis=self.axis)

    def text(self) -> str:
        return f"cut({self.axis}, {self.start}:{self.stop})"


def _is_below(a: DimLike, b: DimLike) -> bool:
    """Whether a < b for every size of the symbols. What some sizes decide is asked again when they are bound."""
    try:
        return bool(a < b)
    except jex.InconclusiveDimensionOperation:
        return False
