"""Ops that act on elements: functions of one value, arithmetic, comparison, selection, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Mir, Value
from rlx_jax.ir.traits import ELEMENTWISE, MOVEMENT, Initial, results_written
from rlx_jax.ir.types import TensorType, device_dtype, is_float, short_name

Array = jax.Array


def _gelu(x: Array) -> Array:
    """In f32, if x is narrower. jax.nn.gelu has erfc, which on a CPU takes three times as long as erf, for digits of
    tiny results alone; and in bf16 it rounds between its steps."""
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


# Functions of one value, by name.
UNARY: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,  # ½x(1 + erf(x/√2))
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # ½x(1 + tanh(√(2/π)(x + 0.044715x³)))
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # x σ(1.702x)
    "silu": jax.nn.silu,  # x σ(x)
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "rsqrt": jax.lax.rsqrt,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "atan": jnp.arctan,
    "round": jnp.round,  # half to even
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "trunc": jnp.trunc,  # towards 0
    "sign": jnp.sign,  # −1, 0 or 1
    "square": jnp.square,
    "stop_gradient": jax.lax.stop_gradient,  # x, which no gradient goes through
    "reciprocal": jnp.reciprocal,  # 1/x
    "cbrt": jnp.cbrt,  # ∛x
    "expm1": jnp.expm1,  # eˣ − 1
    "log1p": jnp.log1p,  # ln(1 + x)
    "exp2": jnp.exp2,
    "log2": jnp.log2,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,  # 1 − erf x
    "relu6": jax.nn.relu6,  # min(max(x, 0), 6)
    "selu": jax.nn.selu,  # 1.0507 · elu(x, 1.6733)
    "mish": jax.nn.mish,  # x tanh(softplus x)
    "log_sigmoid": jax.nn.log_sigmoid,  # ln σ(x)
    "soft_sign": jax.nn.soft_sign,  # x / (1 + |x|)
    "hard_sigmoid": jax.nn.hard_sigmoid,  # relu6(x + 3) / 6
    "hard_silu": jax.nn.hard_silu,  # x hard_sigmoid(x)
    "hard_tanh": jax.nn.hard_tanh,  # min(max(x, −1), 1)
}

# Those that take whole numbers too.
OF_NUMBERS = ("neg", "abs", "relu", "sign", "square", "stop_gradient")

# Functions of one value and so many numbers, by name.
PARAMETRIC: dict[str, tuple[Callable[..., Array], int]] = {
    "elu": (jax.nn.elu, 1),  # x where x > 0, else α(eˣ − 1)
    "celu": (jax.nn.celu, 1),  # max(x, 0) + min(α(e^(x/α) − 1), 0)
    "leaky_relu": (jax.nn.leaky_relu, 1),  # x where x ≥ 0, else αx
    "squareplus": (jax.nn.squareplus, 1),  # ½(x + √(x² + b))
    "thresholded_relu": (lambda x, theta: jnp.where(x > theta, x, jnp.zeros_like(x)), 1),  # x where x > θ, else 0
    # x + b below −λ, x − b above λ, 0 between them
    "shrink": (lambda x, lambd, bias: jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0 * x)), 2),
}

# Functions of two values, by name. Whole numbers divided by 0 give what XLA gives: no error, and no promise.
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "pow": jnp.power,
    "floor_div": jnp.floor_divide,  # ⌊a / b⌋
    "trunc_div": lambda a, b: _truncated(*jnp.broadcast_arrays(a, b)),  # a / b, towards 0
    "mod": jnp.mod,  # a − b⌊a / b⌋: the sign of b
    "rem": jnp.fmod,  # a − b trunc(a / b): the sign of a
    "atan2": jnp.arctan2,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "shift_left": jnp.left_shift,
    "shift_right": jnp.right_shift,  # the sign is kept
}

# Those of whole numbers; the first three of bools too.
OF_BITS = ("and", "or", "xor", "shift_left", "shift_right")

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}


def _truncated(a: Array, b: Array) -> Array:
    """a / b towards 0."""
    whole = jnp.issubdtype(a.dtype, jnp.integer)
    return jax.lax.div(a, b) if whole else jnp.trunc(a / b)


def same_rank(*arrays: Array) -> tuple[Array, ...]:
    """Give all arrays the largest rank by leading axes of 1: NumPy's rule, written out."""
    rank = max(a.ndim for a in arrays)
    return tuple(jnp.expand_dims(a, tuple(range(rank - a.ndim))) for a in arrays)


def _check_width(op: str, dtype: np.dtype[Any]) -> None:
    held = device_dtype(dtype)
    if held != dtype:
        raise DTypeError(
            f"{op}: programs hold no {short_name(dtype)}, JAX has no 64-bit numbers by default; use {short_name(held)}"
        )


@dataclass(frozen=True)
class Unary(Mir):
    """`f(x)` element by element, `f` from `UNARY`."""

    traits = ELEMENTWISE
    choices = {"kind": UNARY}

    kind: str

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if self.kind not in OF_NUMBERS and not is_float(x.dtype):
            raise DTypeError(f"{self.kind}: needs a floating operand, got {x}")
        if x.dtype.kind == "b":
            raise DTypeError(f"{self.kind}: needs numbers, got {x}")

    def eval(self, x: Array) -> Array:
        return UNARY[self.kind](x)

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Parametric(Mir):
    """`f(x; p …)` element by element: f from `PARAMETRIC`, the numbers p its `parameters`."""

    traits = ELEMENTWISE
    choices = {"kind": PARAMETRIC}
    operands = "x:float"

    kind: str
    parameters: tuple[float, ...]

    def check(self, *operands: TensorType) -> None:
        count = PARAMETRIC[self.kind][1]
        if len(self.parameters) != count or not all(math.isfinite(p) for p in self.parameters):
            raise GraphError(f"{self.kind}: takes {count} finite numbers, got {list(self.parameters)}")

    def eval(self, x: Array) -> Array:
        return PARAMETRIC[self.kind][0](x, *self.parameters)

    def text(self) -> str:
        return f"{self.kind}({', '.join(f'{p:g}' for p in self.parameters)})"


@dataclass(frozen=True)
class Binary(Mir):
    """`a ∘ b` with NumPy broadcasting; both operands have one dtype."""

    traits = ELEMENTWISE
    choices = {"kind": BINARY}
    operands = "a b:a"

    kind: str

    def check(self, *operands: TensorType) -> None:
        dtype = operands[0].dtype
        if self.kind in OF_BITS and not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
            raise DTypeError(f"{self.kind}: needs whole numbers or bools, got {operands[0]} and {operands[1]}")
        if self.kind.startswith("shift") or self.kind in ("floor_div", "trunc_div", "mod", "rem"):
            if dtype == jnp.bool_:
                raise DTypeError(f"{self.kind}: needs numbers, got {operands[0]} and {operands[1]}")
        if self.kind == "atan2" and not is_float(dtype):
            raise DTypeError(f"atan2: needs floating operands, got {operands[0]} and {operands[1]}")

    def eval(self, a: Array, b: Array) -> Array:
        return BINARY[self.kind](*same_rank(a, b))

    def initial(self, place: int, weight: TensorType) -> Initial:
        """What is added starts at 0."""
        return 0.0 if weight.rank < 2 and self.kind in ("add", "sub") else super().initial(place, weight)

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Compare(Mir):
    """`a ∘ b` as bool, with NumPy broadcasting."""

    traits = ELEMENTWISE
    choices = {"kind": COMPARE}
    operands = "a b:a"

    kind: str

    def eval(self, a: Array, b: Array) -> Array:
        return COMPARE[self.kind](*same_rank(a, b))

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Where(Mir):
    """`on_true` where `condition` is not zero, else `on_false`; all three broadcast."""

    traits = ELEMENTWISE
    operands = "condition on_true on_false:on_true"

    def eval(self, condition: Array, on_true: Array, on_false: Array) -> Array:
        condition, on_true, on_false = same_rank(condition, on_true, on_false)
        return jnp.where(condition.astype(bool), on_true, on_false)


@dataclass(frozen=True)
class CastTo(Mir):
    """The same values in another dtype.

    What a narrower float cannot hold becomes infinite, or NaN where the dtype has no infinity (f8_e4m3). With
    `saturate` it becomes the largest finite number of the dtype, infinities too; NaN stays NaN. Between whole numbers
    the higher bits are dropped, with `saturate` the nearest number is taken.
    """

    # A cast to the dtype that is there already is a view.
    traits = replace(MOVEMENT, widens=False, view=lambda op, x, out: 0 if x[0] == out[0] else None)

    dtype: np.dtype[Any]
    saturate: bool = False

    def check(self, *operands: TensorType) -> None:
        _check_width("cast", self.dtype)

    def eval(self, x: Array) -> Array:
        if self.saturate and jnp.bool_ not in (self.dtype, x.dtype):
            x = jnp.clip(x, *_bounds_in(self.dtype, x.dtype))
        return x.astype(self.dtype)

    def text(self) -> str:
        return f"cast({short_name(self.dtype)}{', saturate' if self.saturate else ''})"


def _bounds_in(dtype: np.dtype[Any], held: np.dtype[Any]) -> tuple[Array, Array]:
    """The smallest and the largest finite number of `dtype` that is one of `held` too."""
    info, own = (jnp.finfo(d) if is_float(d) else jnp.iinfo(d) for d in (dtype, held))
    low, high = max(float(info.min), float(own.min)), min(float(info.max), float(own.max))
    if not is_float(held):  # in Python's own numbers: 2³¹ − 1 is no f32
        return jnp.asarray(max(int(info.min), int(own.min)), held), jnp.asarray(min(int(info.max), int(own.max)), held)
    top = np.asarray(high).astype(held)
    if float(top) > high:
        top = np.nextafter(top, np.asarray(0).astype(held))
    return jnp.asarray(np.asarray(low).astype(held)), jnp.asarray(top)


@dataclass(frozen=True)
class FullLike(Mir):
    """`value` in the shape of the operand, as `dtype`."""

    traits = replace(ELEMENTWISE, widens=False, bytes=results_written)

    value: float
    dtype: np.dtype[Any]

    def check(self, *operands: TensorType) -> None:
        _check_width("full_like", self.dtype)

    def eval(self, x: Array) -> Array:
        return jnp.full_like(x, self.value, self.dtype)


def in_dtype(b: Builder, value: Value, dtype: np.dtype[Any]) -> Value:
    """A value in a dtype, cast where it has another."""
    return value if b.type(value).dtype == dtype else b(CastTo(dtype), value)


# -- numbers rounded to few bits and back -------------------------------------------------------

STE = ("identity", "clipped", "tanh", "hard_tanh")


@dataclass(frozen=True)
class FakeQuantize(Mir):
    """`clip(round(x/s), ±q) · s` with q = 2^(bits − 1) − 1: x rounded to a signed number of so many bits, and back.

    s is the second operand, of rank 0 or, with an `axis`, a number for each of its entries; without the operand it is
    max |x| / q, of all of x or along each entry of `axis`. The gradient goes straight through the rounding, by `ste`:
    dy (`identity`); dy where |x| ≤ q s, else 0 (`clipped`); dy (1 − tanh²(x/s)) (`tanh`); dy max(0, 1 − |x|/(q s))
    (`hard_tanh`). s gets none, unless it is `learned` (LSQ, arXiv:1902.08153): then Σ dy ψ(x/s) over what shares it,
    ψ(z) = round(z) − z where |z| ≤ q, else ±q.
    """

    traits = ELEMENTWISE
    choices = {"ste": STE}
    operands = "x:float@axis scale?:x"

    bits: int = 8
    axis: int | None = None
    ste: str = "identity"
    learned: bool = False

    def check(self, *operands: TensorType) -> None:
        x, *scale = operands
        if isinstance(self.bits, bool) or not 2 <= self.bits <= 16:
            raise GraphError(f"fake_quantize: bits are 2 to 16, got {self.bits!r}")
        if self.learned and not scale:
            raise GraphError("fake_quantize: a scale that is learned has to be given")
        want = () if self.axis is None else (x.shape[self.axis],)
        if scale and scale[0].shape != want:
            raise ShapeError(f"fake_quantize: the scale of {x} is {TensorType(want, x.dtype)}, got {scale[0]}")

    def eval(self, x: Array, scale: Array | None = None) -> Array:
        wide, most = x.astype(jnp.float32), 2.0 ** (self.bits - 1) - 1
        rest = tuple(i for i in range(x.ndim) if self.axis is None or i != self.axis % x.ndim)
        if scale is None:
            s = jnp.maximum(jnp.max(jnp.abs(wide), axis=rest, keepdims=True), 1e-12) / most
        else:
            s = jnp.expand_dims(scale.astype(jnp.float32), rest)
        return _rounded(self.ste, most, wide, s if self.learned else jax.lax.stop_gradient(s)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(ste: str, most: float, x: Array, s: Array) -> Array:
    return jnp.clip(jnp.round(x / s), -most, most) * s


def _forward(ste: str, most: float, x: Array, s: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rounded(ste, most, x, s), (x, s)


def _backward(ste: str, most: float, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, s = kept
    slope = {
        "identity": lambda: jnp.ones_like(x), "clipped": lambda: (jnp.abs(x) <= most * s).astype(x.dtype),
        "tanh": lambda: 1 - jnp.tanh(x / s) ** 2, "hard_tanh": lambda: jnp.maximum(0.0, 1 - jnp.abs(x) / (most * s)),
    }[ste]()  # fmt: skip
    z = x / s
    by_scale = jnp.where(jnp.abs(z) <= most, jnp.round(z) - z, jnp.sign(z) * most)
    shared = tuple(i for i in range(x.ndim) if s.ndim == 0 or s.shape[i] == 1)
    return dy * slope, jnp.sum(dy * by_scale, axis=shared, keepdims=s.ndim > 0).reshape(s.shape)


_rounded.defvjp(_forward, _backward)
