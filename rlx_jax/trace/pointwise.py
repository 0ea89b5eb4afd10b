"""Ops that act on elements, as methods: arithmetic, comparison, selection, functions of one value, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, shown
from rlx_jax.ir.graph import Op
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Parametric, Unary, Where
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
        """A function of two values, by its name in `BINARY`: each of them is a method too."""
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

    def floor_divide(self, a: V | float, b: V | float) -> V:
        """⌊a / b⌋. Whole numbers stay whole; divided by 0 they give what XLA gives, and so in the next three."""
        return self.binary("floor_div", a, b)

    def trunc_divide(self, a: V | float, b: V | float) -> V:
        """a / b rounded towards 0: `lax.div` of whole numbers."""
        return self.binary("trunc_div", a, b)

    def mod(self, a: V | float, b: V | float) -> V:
        """a − b ⌊a / b⌋, which has the sign of b."""
        return self.binary("mod", a, b)

    def fmod(self, a: V | float, b: V | float) -> V:
        """a − b · trunc(a / b), which has the sign of a."""
        return self.binary("rem", a, b)

    rem = fmod

    def atan2(self, a: V | float, b: V | float) -> V:
        """The angle of the point (b, a), in (−π, π]."""
        return self.binary("atan2", a, b)

    def bitwise_and(self, a: V | int, b: V | int) -> V:
        """The bits that both have; of bools whether both are True."""
        return self.binary("and", a, b)

    def bitwise_or(self, a: V | int, b: V | int) -> V:
        """The bits that one of them has."""
        return self.binary("or", a, b)

    def bitwise_xor(self, a: V | int, b: V | int) -> V:
        """The bits that one of them alone has."""
        return self.binary("xor", a, b)

    def bitwise_not(self, x: V) -> V:
        """The bits that x does not have."""
        dtype = self.type_of(x).dtype
        unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
        return self.bitwise_xor(x, int(jnp.iinfo(dtype).max) if unsigned else True if dtype == np.bool_ else -1)

    def left_shift(self, a: V | int, b: V | int) -> V:
        """a · 2ᵇ, the higher bits dropped."""
        return self.binary("shift_left", a, b)

    def right_shift(self, a: V | int, b: V | int) -> V:
        """⌊a / 2ᵇ⌋: the sign is kept."""
        return self.binary("shift_right", a, b)

    def _truth(self, x: V | bool) -> V | bool:
        """Whether x is not 0."""
        return bool(x) if is_number(x) else x if self.type_of(x).dtype == np.bool_ else self.ne(x, 0)  # type: ignore[arg-type]

    def logical_and(self, a: V | bool, b: V | bool) -> V:
        """Whether neither is 0, as bool."""
        return self.bitwise_and(self._truth(a), self._truth(b))

    def logical_or(self, a: V | bool, b: V | bool) -> V:
        """Whether one of them is not 0, as bool."""
        return self.bitwise_or(self._truth(a), self._truth(b))

    def logical_xor(self, a: V | bool, b: V | bool) -> V:
        """Whether one of them alone is not 0, as bool."""
        return self.bitwise_xor(self._truth(a), self._truth(b))

    def logical_not(self, x: V) -> V:
        """Whether x is 0, as bool."""
        return self.eq(x, 0)

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
    quick_gelu = _function("quick_gelu", "x σ(1.702x).")
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
    floor = _function("floor", "The largest whole number ≤ x.")
    ceil = _function("ceil", "The smallest whole number ≥ x.")
    trunc = _function("trunc", "The whole number next to x towards 0.")
    sign = _function("sign", "−1, 0 or 1.")
    square = _function("square", "x².")
    reciprocal = _function("reciprocal", "1/x.")
    cbrt = _function("cbrt", "∛x.")
    expm1 = _function("expm1", "eˣ − 1, exact near 0.")
    log1p = _function("log1p", "ln(1 + x), exact near 0.")
    exp2 = _function("exp2", "2ˣ.")
    log2 = _function("log2", "log₂ x.")
    asin = _function("asin", "arcsin x.")
    acos = _function("acos", "arccos x.")
    sinh = _function("sinh", "sinh x.")
    cosh = _function("cosh", "cosh x.")
    asinh = _function("asinh", "arsinh x.")
    acosh = _function("acosh", "arcosh x.")
    atanh = _function("atanh", "artanh x.")
    erf = _function("erf", "The error function.")
    erfc = _function("erfc", "1 − erf x.")
    relu6 = _function("relu6", "min(max(x, 0), 6).")
    selu = _function("selu", "1.0507 elu(x, 1.6733).")
    mish = _function("mish", "x tanh(softplus x).")
    log_sigmoid = _function("log_sigmoid", "ln σ(x).")
    soft_sign = _function("soft_sign", "x / (1 + |x|).")
    hard_sigmoid = _function("hard_sigmoid", "relu6(x + 3) / 6.")
    hard_silu = _function("hard_silu", "x hard_sigmoid(x).")
    hard_tanh = _function("hard_tanh", "min(max(x, −1), 1).")

    hard_swish = hard_silu
    swish = silu

    def parametric(self, kind: str, x: V, *parameters: float) -> V:
        """A function of one value and some numbers, by its name in `PARAMETRIC`: each of them is a method too."""
        for number in parameters:
            if not is_number(number):
                raise GraphError(f"{self.path}: {kind} takes a number beside x, got {shown(number)}")
        return self.add_node(Parametric(kind, tuple(float(p) for p in parameters)), x)

    def elu(self, x: V, alpha: float = 1.0) -> V:
        """x where x > 0, else α(eˣ − 1)."""
        return self.parametric("elu", x, alpha)

    def celu(self, x: V, alpha: float = 1.0) -> V:
        """max(x, 0) + min(α(e^(x/α) − 1), 0)."""
        return self.parametric("celu", x, alpha)

    def leaky_relu(self, x: V, negative_slope: float = 0.01) -> V:
        """x where x ≥ 0, else `negative_slope` · x."""
        return self.parametric("leaky_relu", x, negative_slope)

    def squareplus(self, x: V, b: float = 4.0) -> V:
        """½(x + √(x² + b))."""
        return self.parametric("squareplus", x, b)

    def thresholded_relu(self, x: V, theta: float = 1.0) -> V:
        """x where x > θ, else 0."""
        return self.parametric("thresholded_relu", x, theta)

    def shrink(self, x: V, *, lambd: float = 0.5, bias: float = 0.0) -> V:
        """x + bias where x < −λ, x − bias where x > λ, else 0: hard shrinkage, soft where bias = λ."""
        return self.parametric("shrink", x, lambd, bias)

    def prelu(self, x: V, slope: V | float) -> V:
        """x where x ≥ 0, else slope · x; the slope broadcasts."""
        return self.where(self.lt(x, 0), self.mul(x, slope), x)

    def clip(self, x: V, min: V | float | None = None, max: V | float | None = None) -> V:
        """min(max(x, `min`), `max`): bounds are numbers, values or None; the upper one wins where they cross."""
        x = x if min is None else self.maximum(x, min)
        return x if max is None else self.minimum(x, max)

    def isnan(self, x: V) -> V:
        """Whether x is no number, as bool."""
        return self.ne(x, x)

    def isinf(self, x: V) -> V:
        """Whether x is infinite, as bool; `eq(x, math.inf)` asks for one of the infinities."""
        return self.eq(self.abs(x), math.inf)

    def isfinite(self, x: V) -> V:
        """Whether x is a finite number, as bool."""
        return self.lt(self.abs(x), math.inf)

    def cast(self, x: V, dtype: Any, *, saturate: bool = False) -> V:
        """The same values in another dtype.

        What a narrower float cannot hold becomes infinite, or NaN where it has no infinity (f8_e4m3); of whole numbers
        the higher bits are dropped. With `saturate` it becomes the nearest finite number of the dtype.
        """
        return self.add_node(CastTo(as_dtype(dtype), saturate), x)
