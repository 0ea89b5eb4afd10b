"""Ops that act on elements, as methods: arithmetic, comparison, selection, functions of one value, casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Op
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Unary, Where
from rlx_jax.ir.types import as_dtype
from rlx_jax.trace.writer import Shape, V, Writer, is_number

T = TypeVar("T")


def _function(kind: str, formula: str) -> Callable[[Any, T], T]:
    """The method of a function of one value in `UNARY`."""

    def method(writer: Any, x: T) -> T:
        made: T = writer.activation(kind, x)
        return made

    method.__name__ = method.__qualname__ = kind
    method.__doc__ = formula
    return method


class Pointwise(Writer[V]):
    """Arithmetic and functions of elements."""

    # -- arithmetic: NumPy's broadcasting, one dtype -----------------------------------------

    def binary(self, kind: str, a: V | float, b: V | float, *, out_shape: Shape | None = None) -> V:
        """`add`, `sub`, `mul`, `div`, `max`, `min` or `pow`."""
        return self.add_node(Binary(kind), *self._pair(kind, a, b), out_shape=out_shape)

    def add(self, a: V | float, b: V | float) -> V:
        """a + b."""
        if isinstance(a, Op):
            raise GraphError(f"{self.path}: add(a, b) is the sum of two values; add_node({a.name()}, …) appends an op")
        return self.binary("add", a, b)

    def sub(self, a: V | float, b: V | float) -> V:
        """a − b."""
        return self.binary("sub", a, b)

    def mul(self, a: V | float, b: V | float) -> V:
        """a · b, element by element."""
        return self.binary("mul", a, b)

    def div(self, a: V | float, b: V | float) -> V:
        """a / b."""
        return self.binary("div", a, b)

    def pow(self, a: V | float, b: V | float) -> V:
        """aᵇ."""
        return self.binary("pow", a, b)

    def maximum(self, a: V | float, b: V | float) -> V:
        """The larger of two, element by element."""
        return self.binary("max", a, b)

    def minimum(self, a: V | float, b: V | float) -> V:
        """The smaller of two, element by element."""
        return self.binary("min", a, b)

    def compare(self, kind: str, a: V | float, b: V | float) -> V:
        """`eq`, `ne`, `lt`, `le`, `gt` or `ge`, as bool."""
        return self.add_node(Compare(kind), *self._pair(kind, a, b))

    def eq(self, a: V | float, b: V | float) -> V:
        """a = b, as bool."""
        return self.compare("eq", a, b)

    def ne(self, a: V | float, b: V | float) -> V:
        """a ≠ b, as bool."""
        return self.compare("ne", a, b)

    def lt(self, a: V | float, b: V | float) -> V:
        """a < b, as bool."""
        return self.compare("lt", a, b)

    def le(self, a: V | float, b: V | float) -> V:
        """a ≤ b, as bool."""
        return self.compare("le", a, b)

    def gt(self, a: V | float, b: V | float) -> V:
        """a > b, as bool."""
        return self.compare("gt", a, b)

    def ge(self, a: V | float, b: V | float) -> V:
        """a ≥ b, as bool."""
        return self.compare("ge", a, b)

    def where(self, condition: V, on_true: V | float, on_false: V | float) -> V:
        """`on_true` where `condition` is not zero, else `on_false`; each of these may be a number."""
        if is_number(on_true) and is_number(on_false):
            on_true = self.constant(np.asarray([on_true, on_false])[0])  # the dtype that holds both
        return self.add_node(Where(), condition, *self._pair("where", on_true, on_false))

    # -- functions of one value --------------------------------------------------------------

    def activation(self, kind: str, x: V) -> V:
        """A function of one value, by its name in `UNARY`: each of them is a method too."""
        return self.add_node(Unary(kind), x)

    sigmoid = _function("sigmoid", "σ(x).")
    silu = _function("silu", "x σ(x).")
    gelu = _function("gelu", "½x(1 + erf(x/√2)).")
    gelu_tanh = _function("gelu_tanh", "½x(1 + tanh(√(2/π)(x + 0.044715x³))).")
    relu = _function("relu", "max(x, 0).")
    softplus = _function("softplus", "ln(1 + eˣ).")
    tanh = _function("tanh", "tanh x.")
    exp = _function("exp", "eˣ.")
    log = _function("log", "ln x.")
    sqrt = _function("sqrt", "√x.")
    rsqrt = _function("rsqrt", "1/√x.")
    neg = _function("neg", "−x.")
    abs = _function("abs", "|x|.")
    sin = _function("sin", "sin x.")
    cos = _function("cos", "cos x.")
    tan = _function("tan", "tan x.")
    atan = _function("atan", "arctan x.")
    round = _function("round", "The nearest whole number, halves to the even one.")

    gelu_approx = gelu_tanh

    def cast(self, x: V, dtype: Any) -> V:
        """The same values in another dtype."""
        return self.add_node(CastTo(as_dtype(dtype)), x)
