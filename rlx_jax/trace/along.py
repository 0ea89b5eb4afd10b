"""Ops along axes, as methods: reductions, softmax, running sums."""

from __future__ import annotations

from rlx_jax.ir.ops.reduce import Cumsum, Reduce, Softmax
from rlx_jax.trace.pointwise import Pointwise
from rlx_jax.trace.writer import Axes, V


class Along(Pointwise[V]):
    """Reductions and their like."""

    def reduce(self, kind: str, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """`sum`, `mean`, `max`, `min` or `prod` over one axis, several, or all (None). The dtype stays."""
        return self.add_node(Reduce(kind, self._axes(x, axis), keepdims), x)

    def sum(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The sum over `axis`."""
        return self.reduce("sum", x, axis, keepdims=keepdims)

    def mean(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The mean over `axis`."""
        return self.reduce("mean", x, axis, keepdims=keepdims)

    def max(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The largest along `axis`; `maximum` is that of two values."""
        return self.reduce("max", x, axis, keepdims=keepdims)

    def min(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The smallest along `axis`; `minimum` is that of two values."""
        return self.reduce("min", x, axis, keepdims=keepdims)

    def prod(self, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The product over `axis`."""
        return self.reduce("prod", x, axis, keepdims=keepdims)

    def softmax(self, x: V, axis: int = -1) -> V:
        """Softmax along `axis`."""
        return self.add_node(Softmax(self._axis(x, axis)), x)

    sm = softmax

    def cumsum(self, x: V, axis: int = -1, *, exclusive: bool = False) -> V:
        """The running sum along `axis`; `exclusive` leaves each entry out of its own sum."""
        return self.add_node(Cumsum(self._axis(x, axis), exclusive), x)
