"""Ops along axes, as methods: reductions, softmax, running sums, sorting."""

from __future__ import annotations

import math
from typing import Any

from rlx_jax.errors import GraphError, shown
from rlx_jax.ir.ops.order import ArgReduce, Sample, Sort, TopK
from rlx_jax.ir.ops.reduce import Cumsum, Cumulative, LogSoftmax, Reduce, Softmax
from rlx_jax.ir.ops.shape import Reshape
from rlx_jax.trace.pointwise import Pointwise
from rlx_jax.trace.spec_calls import of_kind
from rlx_jax.trace.writer import Axes, V, is_number


class Along(Pointwise[V]):
    """Reductions and their like."""

    def reduce(self, kind: str, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """A reduction of `REDUCE` over one axis, several, or all (None): each is a method too. The dtype stays."""
        return self.add_node(Reduce(kind, self._axes(x, axis), keepdims), x)

    sum = of_kind(reduce, "sum", "The sum over `axis`.")
    mean = of_kind(reduce, "mean", "The mean over `axis`.")
    max = of_kind(reduce, "max", "The largest along `axis`; `maximum` is that of two values.")
    min = of_kind(reduce, "min", "The smallest along `axis`; `minimum` is that of two values.")
    prod = of_kind(reduce, "prod", "The product over `axis`.")
    any = of_kind(reduce, "any", "Whether some entry along `axis` is not 0, as bool.")
    all = of_kind(reduce, "all", "Whether no entry along `axis` is 0, as bool.")
    logsumexp = of_kind(reduce, "logsumexp", "ln Σ eˣ over `axis`, in f32.")

    def var(self, x: V, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> V:
        """Σ(x − mean x)² / (n − ddof) over `axis`, in f32."""
        return self.add_node(Reduce("var", self._axes(x, axis), keepdims, ddof), x)

    def std(self, x: V, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> V:
        """√var."""
        return self.add_node(Reduce("std", self._axes(x, axis), keepdims, ddof), x)

    def norm(self, x: V, ord: float = 2, axis: Axes = None, *, keepdims: bool = False) -> V:
        """The length of the entries over `axis` as one vector: `ord` 1 Σ|x|, 2 √Σx², ∞ max |x|, else (Σ|x|ᵖ)^(1/p)."""
        if not is_number(ord) or not ord > 0:
            raise GraphError(f"{self.path}: norm: ord is a number over 0, or infinite; got {shown(ord)}")
        if ord in (1, math.inf):
            return self.reduce("sum" if ord == 1 else "max", self.abs(x), axis, keepdims=keepdims)
        powers = self.square(x) if ord == 2 else self.pow(self.abs(x), ord)
        total = self.sum(powers, axis, keepdims=keepdims)
        return self.sqrt(total) if ord == 2 else self.pow(total, 1 / ord)

    def softmax(self, x: V, axis: int = -1) -> V:
        """Softmax along `axis`."""
        return self.add_node(Softmax(self._axis(x, axis)), x)

    def log_softmax(self, x: V, axis: int = -1) -> V:
        """The logarithm of the softmax along `axis`."""
        return self.add_node(LogSoftmax(self._axis(x, axis)), x)

    def cumsum(self, x: V, axis: int = -1, *, exclusive: bool = False, reverse: bool = False) -> V:
        """The running sum along `axis`: `exclusive` leaves each entry out of its own, `reverse` starts at the end."""
        return self.add_node(Cumsum(self._axis(x, axis), exclusive, reverse), x)

    def _cumulative(self, kind: str, x: V, axis: int = -1, *, exclusive: bool = False, reverse: bool = False) -> V:
        return self.add_node(Cumulative(kind, self._axis(x, axis), exclusive, reverse), x)

    cumprod = of_kind(_cumulative, "prod", "The running product along `axis`; see `cumsum`.")
    cummax = of_kind(_cumulative, "max", "The running maximum along `axis`; see `cumsum`.")
    cummin = of_kind(_cumulative, "min", "The running minimum along `axis`; see `cumsum`.")
    # -- the largest, and where --------------------------------------------------------------

    def _search(self, kind: str, x: V, axis: int | None = None, *, keepdims: bool = False, last: bool = False) -> V:
        if axis is not None:
            return self.add_node(ArgReduce(kind, self._axis(x, axis), keepdims, last), x)
        found = self.add_node(ArgReduce(kind, 0, False, last), self.add_node(Reshape((-1,)), x))
        return self.add_node(Reshape((1,) * self.type_of(x).rank), found) if keepdims else found

    argmax = of_kind(
        _search,
        "argmax",
        "Where the largest entry along `axis` stands, i32: the first of equal ones, or the `last`. Without an axis, "
        "that of all entries in order.",
    )
    argmin = of_kind(_search, "argmin", "Where the smallest entry stands; see `argmax`.")

    def sort(self, x: V, axis: int = -1, *, descending: bool = False) -> V:
        """The entries along `axis` in order."""
        return self.add_node(Sort(self._axis(x, axis), descending), x)

    def argsort(self, x: V, axis: int = -1, *, descending: bool = False) -> V:
        """Where the entries of `sort` stood, i32; equal ones keep their order."""
        return self.add_node(Sort(self._axis(x, axis), descending, indices=True), x)

    def top_k(self, x: V, k: int, axis: int = -1, *, largest: bool = True) -> tuple[V, V]:
        """The k largest entries along `axis`, or the smallest, the foremost first, and where they stand (i32)."""
        values, at = self.add_all(TopK(k, self._axis(x, axis), largest), x)
        return values, at

    def sample(
        self,
        logits: V,
        seed: V | int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> V:
        """A class of each row of logits `[…, V]`, i32, drawn under `seed`: a number, or an integer value of rank 0.

        The likeliest with a temperature of 0; `top_k` and `top_p` leave out the less likely, see `Sample`.
        """
        given: Any = self.constant(seed, "i32") if is_number(seed) else seed
        return self.add_node(Sample(float(temperature), top_k, top_p), logits, given)
