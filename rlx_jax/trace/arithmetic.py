"""The methods for elementwise ops (arithmetic, comparison, casts) and ops along axes (reductions, softmax, sorting)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Op
from rlx_jax.ir.ops.index import ArgReduce, Sample, Sort, TopK
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare, Unary, Where
from rlx_jax.ir.ops.reduce import Cumsum, Cumulative, LogSoftmax, Reduce, Softmax
from rlx_jax.ir.ops.shape import Reshape
from rlx_jax.ir.types import Dim, DimLike, as_dtype
from rlx_jax.trace.checks import bind_kind
from rlx_jax.trace.writer import Axes, V, Writer, is_number


class Arithmetic(Writer[V]):
    """Elementwise ops, reductions, sorting and sampling."""

    # -- arithmetic: NumPy's broadcasting, one dtype -----------------------------------------

    def binary(self, kind: str, a: V | float, b: V | float) -> V:
        """Return an elementwise function of two values by its name in `BINARY`; each function is a method too."""
        return self.add_node(Binary(kind), *self._pair(kind, a, b))

    def add(self, a: V | float, b: V | float) -> V:
        """Return a + b."""
        if isinstance(a, Op):
            raise GraphError(f"{self.path}: add(a, b) is the sum of two values; add_node({a.name()}, …) appends an op")
        return self.binary("add", a, b)

    sub = bind_kind(binary, "sub", "a − b.")
    mul = bind_kind(binary, "mul", "a · b, element by element.")
    div = bind_kind(binary, "div", "a / b.")
    pow = bind_kind(binary, "pow", "aᵇ.")
    maximum = bind_kind(binary, "max", "The larger of two, element by element.")
    minimum = bind_kind(binary, "min", "The smaller of two, element by element.")
    floor_divide = bind_kind(
        binary, "floor_div", "⌊a / b⌋. Integers divided by 0 behave as in XLA, also in the next 3."
    )
    trunc_divide = bind_kind(binary, "trunc_div", "a / b rounded towards 0: `lax.div` of whole numbers.")
    mod = bind_kind(binary, "mod", "a − b ⌊a / b⌋, which has the sign of b.")
    fmod = bind_kind(binary, "rem", "a − b · trunc(a / b), which has the sign of a.")
    rem = fmod

    atan2 = bind_kind(binary, "atan2", "The angle of the point (b, a), in (−π, π].")
    bitwise_and = bind_kind(binary, "and", "The bits that both have; of bools whether both are True.")
    bitwise_or = bind_kind(binary, "or", "The bits that one of them has.")
    bitwise_xor = bind_kind(binary, "xor", "The bits that one of them alone has.")

    def bitwise_not(self, x: V) -> V:
        """Return x with all bits inverted; for bools, `not x`."""
        dtype = self.type_of(x).dtype
        unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
        # XOR with all bits set, which is −1 for signed integers.
        return self.bitwise_xor(x, int(jnp.iinfo(dtype).max) if unsigned else True if dtype == np.bool_ else -1)

    left_shift = bind_kind(binary, "shift_left", "a · 2ᵇ, the higher bits dropped.")
    right_shift = bind_kind(binary, "shift_right", "⌊a / 2ᵇ⌋: the sign is kept.")

    def _as_bool(self, x: V | bool) -> V | bool:
        """Return whether x is not 0, as bool."""
        return bool(x) if is_number(x) else x if self.type_of(x).dtype == np.bool_ else self.ne(x, 0)  # type: ignore[arg-type]

    def _logical(self, kind: str, a: V | bool, b: V | bool) -> V:
        return self.binary(kind, self._as_bool(a), self._as_bool(b))

    logical_and = bind_kind(_logical, "and", "Whether neither is 0, as bool.")
    logical_or = bind_kind(_logical, "or", "Whether one of them is not 0, as bool.")
    logical_xor = bind_kind(_logical, "xor", "Whether one of them alone is not 0, as bool.")

    def logical_not(self, x: V) -> V:
        """Return whether x is 0, as bool."""
        return self.eq(x, 0)

    def compare(self, kind: str, a: V | float, b: V | float) -> V:
        """Return the comparison `eq`, `ne`, `lt`, `le`, `gt` or `ge`, as bool."""
        return self.add_node(Compare(kind), *self._pair(kind, a, b))

    eq = bind_kind(compare, "eq", "a = b, as bool.")
    ne = bind_kind(compare, "ne", "a ≠ b, as bool.")
    lt = bind_kind(compare, "lt", "a < b, as bool.")
    le = bind_kind(compare, "le", "a ≤ b, as bool.")
    gt = bind_kind(compare, "gt", "a > b, as bool.")
    ge = bind_kind(compare, "ge", "a ≥ b, as bool.")

    def where(self, condition: V, on_true: V | float, on_false: V | float) -> V:
        """Return `on_true` where `condition` is not zero, else `on_false`; each of the two may be a number."""
        if is_number(on_true) and is_number(on_false):
            on_true = self.constant(np.asarray([on_true, on_false])[0])  # NumPy's common dtype of both numbers
        return self.add_node(Where(), condition, *self._pair("where", on_true, on_false))

    # -- functions of one value --------------------------------------------------------------

    def activation(self, kind: str, x: V) -> V:
        """Return an elementwise function of one value by its name in `UNARY`; each function is a method too."""
        return self.add_node(Unary(kind), x)

    sigmoid = bind_kind(activation, "sigmoid", "σ(x).")
    silu = bind_kind(activation, "silu", "x σ(x).")
    gelu = bind_kind(activation, "gelu", "½x(1 + erf(x/√2)).")
    gelu_tanh = bind_kind(activation, "gelu_tanh", "½x(1 + tanh(√(2/π)(x + 0.044715x³))).")
    quick_gelu = bind_kind(activation, "quick_gelu", "x σ(1.702x).")
    relu = bind_kind(activation, "relu", "max(x, 0).")
    softplus = bind_kind(activation, "softplus", "ln(1 + eˣ).")
    tanh = bind_kind(activation, "tanh", "tanh x.")
    exp = bind_kind(activation, "exp", "eˣ.")
    log = bind_kind(activation, "log", "ln x.")
    sqrt = bind_kind(activation, "sqrt", "√x.")
    rsqrt = bind_kind(activation, "rsqrt", "1/√x.")
    neg = bind_kind(activation, "neg", "−x.")
    abs = bind_kind(activation, "abs", "|x|.")
    sin = bind_kind(activation, "sin", "sin x.")
    cos = bind_kind(activation, "cos", "cos x.")
    tan = bind_kind(activation, "tan", "tan x.")
    atan = bind_kind(activation, "atan", "arctan x.")
    round = bind_kind(activation, "round", "The nearest whole number, halves to the even one.")
    floor = bind_kind(activation, "floor", "The largest whole number ≤ x.")
    ceil = bind_kind(activation, "ceil", "The smallest whole number ≥ x.")
    trunc = bind_kind(activation, "trunc", "The whole number next to x towards 0.")
    sign = bind_kind(activation, "sign", "−1, 0 or 1.")
    square = bind_kind(activation, "square", "x².")
    reciprocal = bind_kind(activation, "reciprocal", "1/x.")
    cbrt = bind_kind(activation, "cbrt", "∛x.")
    expm1 = bind_kind(activation, "expm1", "eˣ − 1, exact near 0.")
    log1p = bind_kind(activation, "log1p", "ln(1 + x), exact near 0.")
    exp2 = bind_kind(activation, "exp2", "2ˣ.")
    log2 = bind_kind(activation, "log2", "log₂ x.")
    asin = bind_kind(activation, "asin", "arcsin x.")
    acos = bind_kind(activation, "acos", "arccos x.")
    sinh = bind_kind(activation, "sinh", "sinh x.")
    cosh = bind_kind(activation, "cosh", "cosh x.")
    asinh = bind_kind(activation, "asinh", "arsinh x.")
    acosh = bind_kind(activation, "acosh", "arcosh x.")
    atanh = bind_kind(activation, "atanh", "artanh x.")
    erf = bind_kind(activation, "erf", "The error function.")
    erfc = bind_kind(activation, "erfc", "1 − erf x.")
    relu6 = bind_kind(activation, "relu6", "min(max(x, 0), 6).")
    selu = bind_kind(activation, "selu", "1.0507 elu(x, 1.6733).")
    mish = bind_kind(activation, "mish", "x tanh(softplus x).")
    log_sigmoid = bind_kind(activation, "log_sigmoid", "ln σ(x).")
    soft_sign = bind_kind(activation, "soft_sign", "x / (1 + |x|).")
    hard_sigmoid = bind_kind(activation, "hard_sigmoid", "relu6(x + 3) / 6.")
    hard_silu = bind_kind(activation, "hard_silu", "x hard_sigmoid(x).")
    hard_tanh = bind_kind(activation, "hard_tanh", "min(max(x, −1), 1).")

    hard_swish = hard_silu
    swish = silu

    def elu(self, x: V, alpha: float = 1.0) -> V:
        """Return x where x > 0, else α(eˣ − 1)."""
        is_positive = self.gt(x, 0)
        # The exponent is 0 where it is not selected: an infinite one would make the gradient NaN.
        return self.where(is_positive, x, self.mul(self.expm1(self.where(is_positive, 0.0, x)), alpha))

    def leaky_relu(self, x: V, negative_slope: float = 0.01) -> V:
        """Return x where x ≥ 0, else `negative_slope` · x."""
        return self.prelu(x, negative_slope)

    def prelu(self, x: V, slope: V | float) -> V:
        """Return x where x ≥ 0, else slope · x; the slope broadcasts."""
        return self.where(self.lt(x, 0), self.mul(x, slope), x)

    def clip(self, x: V, min: V | float | None = None, max: V | float | None = None) -> V:
        """Return min(max(x, `min`), `max`): bounds are numbers, values or None. The upper bound wins if they cross."""
        x = x if min is None else self.maximum(x, min)
        return x if max is None else self.minimum(x, max)

    def isnan(self, x: V) -> V:
        """Return whether x is NaN, as bool."""
        return self.ne(x, x)  # NaN is the only value that differs from itself

    def isinf(self, x: V) -> V:
        """Return whether x is infinite, as bool; `eq(x, math.inf)` tests for one sign."""
        return self.eq(self.abs(x), math.inf)

    def isfinite(self, x: V) -> V:
        """Return whether x is finite, as bool."""
        return self.lt(self.abs(x), math.inf)

    def cast(self, x: V, dtype: Any, *, saturate: bool = False) -> V:
        """Return x cast to another dtype.

        A value out of range becomes infinite, or NaN in a dtype without infinity (f8_e4m3); integers lose their higher
        bits. With `saturate` it becomes the nearest finite number of the dtype.
        """
        return self.add_node(CastTo(as_dtype(dtype), saturate), x)

    # -- along axes: reductions and their like -------------------------------------------------

    def reduce(self, kind: str, x: V, axis: Axes = None, *, keepdims: bool = False) -> V:
        """Return a reduction by its name in `REDUCE` over one axis, several, or all (None), in the dtype of x."""
        return self.add_node(Reduce(kind, self._axes(x, axis), keepdims), x)

    sum = bind_kind(reduce, "sum", "The sum over `axis`.")
    mean = bind_kind(reduce, "mean", "The mean over `axis`.")
    max = bind_kind(reduce, "max", "The largest along `axis`; `maximum` compares two values.")
    min = bind_kind(reduce, "min", "The smallest along `axis`; `minimum` compares two values.")
    prod = bind_kind(reduce, "prod", "The product over `axis`.")
    any = bind_kind(reduce, "any", "Whether some entry along `axis` is not 0, as bool.")
    all = bind_kind(reduce, "all", "Whether no entry along `axis` is 0, as bool.")
    logsumexp = bind_kind(reduce, "logsumexp", "ln Σ eˣ over `axis`, in f32.")

    def var(self, x: V, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> V:
        """Return Σ(x − mean x)² / (n − ddof) over `axis`, in f32."""
        return self.add_node(Reduce("var", self._axes(x, axis), keepdims, ddof), x)

    def std(self, x: V, axis: Axes = None, *, ddof: int = 0, keepdims: bool = False) -> V:
        """Return the standard deviation √var; see `var`."""
        return self.add_node(Reduce("std", self._axes(x, axis), keepdims, ddof), x)

    def norm(self, x: V, ord: float = 2, axis: Axes = None, *, keepdims: bool = False) -> V:
        """Return the vector norm over `axis`: Σ|x| for `ord` 1, √Σx² for 2, max |x| for ∞, else (Σ|x|ᵖ)^(1/p)."""
        if not is_number(ord) or not ord > 0:
            raise GraphError(f"{self.path}: norm: ord is a number over 0, or infinite; got {shown(ord)}")
        if ord in (1, math.inf):  # no powers and roots, which would round
            return self.reduce("sum" if ord == 1 else "max", self.abs(x), axis, keepdims=keepdims)
        powers = self.square(x) if ord == 2 else self.pow(self.abs(x), ord)
        total = self.sum(powers, axis, keepdims=keepdims)
        return self.sqrt(total) if ord == 2 else self.pow(total, 1 / ord)

    def softmax(self, x: V, axis: int = -1) -> V:
        """Return the softmax along `axis`."""
        return self.add_node(Softmax(self._axis(x, axis)), x)

    def log_softmax(self, x: V, axis: int = -1) -> V:
        """Return the logarithm of the softmax along `axis`."""
        return self.add_node(LogSoftmax(self._axis(x, axis)), x)

    def cumsum(self, x: V, axis: int = -1, *, exclusive: bool = False, reverse: bool = False) -> V:
        """Return the running sum along `axis`; `exclusive` omits the current entry, `reverse` starts at the end."""
        return self.add_node(Cumsum(self._axis(x, axis), exclusive, reverse), x)

    def _cumulative(self, kind: str, x: V, axis: int = -1, *, exclusive: bool = False, reverse: bool = False) -> V:
        return self.add_node(Cumulative(kind, self._axis(x, axis), exclusive, reverse), x)

    cumprod = bind_kind(_cumulative, "prod", "The running product along `axis`; see `cumsum`.")
    cummax = bind_kind(_cumulative, "max", "The running maximum along `axis`; see `cumsum`.")
    cummin = bind_kind(_cumulative, "min", "The running minimum along `axis`; see `cumsum`.")
    # -- the largest, and where --------------------------------------------------------------

    def _arg_reduce(self, kind: str, x: V, axis: int | None = None, *, keepdims: bool = False, last: bool = False) -> V:
        if axis is not None:
            return self.add_node(ArgReduce(kind, self._axis(x, axis), keepdims, last), x)
        # Without an axis, the index is into all entries in order.
        index = self.add_node(ArgReduce(kind, 0, False, last), self.add_node(Reshape((-1,)), x))
        return self.add_node(Reshape((1,) * self.type_of(x).rank), index) if keepdims else index

    argmax = bind_kind(
        _arg_reduce,
        "argmax",
        "The index of the largest entry along `axis`, i32: the first of equal ones, or the `last`. Without an axis, "
        "the index into all entries in order.",
    )
    argmin = bind_kind(_arg_reduce, "argmin", "The index of the smallest entry; see `argmax`.")

    def sort(self, x: V, axis: int = -1, *, descending: bool = False) -> V:
        """Return the entries sorted along `axis`."""
        return self.add_node(Sort(self._axis(x, axis), descending), x)

    def argsort(self, x: V, axis: int = -1, *, descending: bool = False) -> V:
        """Return the indices, i32, that sort the entries along `axis`; equal entries keep their order."""
        return self.add_node(Sort(self._axis(x, axis), descending, indices=True), x)

    def top_k(self, x: V, k: int, axis: int = -1, *, largest: bool = True) -> tuple[V, V]:
        """Return the k largest entries along `axis`, or the smallest, best first, and their indices (i32)."""
        values, indices = self.add_all(TopK(k, self._axis(x, axis), largest), x)
        return values, indices

    def sample(
        self, logits: V, seed: V | int, *, temperature: float = 1.0, top_k: int | None = None,
        top_p: float | None = None,
    ) -> V:  # fmt: skip
        """Return a random class, i32, for each row of logits `[…, V]`; `seed` is a number or an integer value of rank
        0.

        A temperature of 0 returns the most likely class. `top_k` and `top_p` exclude less likely classes; see `Sample`.
        """
        seed_value: Any = self.constant(seed, "i32") if is_number(seed) else seed
        return self.add_node(Sample(float(temperature), top_k, top_p), logits, seed_value)


# Slices with symbolic bounds, which are sizes of other values: `x[:, :t.shape[1]]`.


def is_symbolic_slice(key: Any) -> bool:
    """Return whether one entry of an index is a slice with a symbolic bound."""
    return isinstance(key, slice) and any(isinstance(bound, Dim) for bound in (key.start, key.stop))


def find_symbolic_slices(keys: Sequence[Any], rank: int, where: str) -> list[tuple[int, slice]]:
    """Return the slices with symbolic bounds in an index, each with its axis.

    Raises:
        GraphError: such a slice has a step. ShapeError: more entries than axes.
    """
    ellipsis_position = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    leading = sum(k is not None for k in keys[:ellipsis_position])
    trailing = sum(k is not None for k in keys[ellipsis_position + 1 :])
    if leading + trailing > rank and any(map(is_symbolic_slice, keys)):
        raise ShapeError(f"{where}: {leading + trailing} indices for a value of rank {rank}")
    axes = iter([*range(leading), *range(rank - trailing, rank)])
    slices = []
    for key in keys:
        axis = next(axes, 0) if key is not None and key is not Ellipsis else 0
        if is_symbolic_slice(key):
            if key.step not in (None, 1):
                raise GraphError(f"{where}: a slice to a symbolic size has no step; got {key!r}")
            slices.append((axis, key))
    return slices


# Limit of the sizes in a bound, which the op lists one by one. No sensible slice has as many.
MAX_TERMS = 64
_TERM = re.compile(r"([+-]?) ?(?:(\d+)\*)?(\w+) ?")


def sum_terms(dim: DimLike) -> list[tuple[str, int]]:
    """Return the terms of a sum: `[("seq", 2), ("past", -1), ("", 3)]` for `2*seq - past + 3`, where `""` is the
    constant. The list is empty if the dimension is no such sum."""
    text, position, terms = str(dim), 0, list[tuple[str, int]]()
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None or not (match[1] or position == 0) or not (match[3].isidentifier() or match[3].isdigit()):
            return []
        sign, times = -1 if match[1] == "-" else 1, int(match[2] or 1)
        is_constant = match[3].isdigit()
        terms.append(("" if is_constant else match[3], sign * times * (int(match[3]) if is_constant else 1)))
        position = match.end()
    return terms
