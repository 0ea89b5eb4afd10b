"""Elementwise ops: unary functions, arithmetic, comparison, selection, casts, and fake quantization."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Mir, Value
from rlx_jax.ir.operands import ELEMENTWISE, MOVEMENT, Initial, results_written
from rlx_jax.ir.types import TensorType, device_dtype, is_float, short_name

Array = jax.Array


def _gelu(x: Array) -> Array:
    """Return exact GELU, computed in f32 if x is narrower.

    `jax.nn.gelu` uses erfc, which takes three times as long as erf on a CPU and is more accurate only for tiny results;
    in bf16 it also rounds between its steps.
    """
    x_f32 = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return (0.5 * x_f32 * (1.0 + jax.lax.erf(x_f32 * math.sqrt(0.5)))).astype(x.dtype)


# Functions of one value that have their name in `jax.nn`: silu x σ(x), relu6 min(max(x, 0), 6), selu 1.0507 ·
# elu(x, 1.6733), mish x tanh(softplus x), log_sigmoid ln σ(x), soft_sign x / (1 + |x|), hard_sigmoid relu6(x + 3) / 6,
# hard_silu x hard_sigmoid(x), hard_tanh min(max(x, −1), 1).
_OF_NN = "silu relu sigmoid softplus relu6 selu mish log_sigmoid soft_sign hard_sigmoid hard_silu hard_tanh"
# In `jax.numpy`: round is half to even, trunc towards 0, sign −1, 0 or 1, cbrt ∛x, expm1 eˣ − 1, log1p ln(1 + x).
_OF_NUMPY = (
    "tanh exp log sqrt abs sin cos tan round floor ceil trunc sign square reciprocal cbrt expm1 log1p exp2 log2 sinh "
    "cosh"
)
# In `jax.lax`: stop_gradient is x, with a gradient of 0, and erfc 1 − erf x.
_OF_LAX = "rsqrt neg stop_gradient asin acos atan asinh acosh atanh erf erfc"

UNARY: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,  # ½x(1 + erf(x/√2))
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # ½x(1 + tanh(√(2/π)(x + 0.044715x³)))
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # x σ(1.702x)
    **{name: getattr(jax.nn, name) for name in _OF_NN.split()},
    **{name: getattr(jnp, name) for name in _OF_NUMPY.split()},
    **{name: getattr(jax.lax, name) for name in _OF_LAX.split()},
}

# Unary functions that also accept integers.
NUMERIC_UNARY = ("neg", "abs", "relu", "sign", "square", "stop_gradient")

# Functions of two values, by name. Integer division by 0 gives an unspecified value, as in XLA, and no error.
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
    "shift_right": jnp.right_shift,  # the sign bit is copied
}

# Binary functions of integers; the first three also accept bools.
BITWISE_BINARY = ("and", "or", "xor", "shift_left", "shift_right")

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}


def _truncated(a: Array, b: Array) -> Array:
    """Return a / b rounded towards 0."""
    is_integer = jnp.issubdtype(a.dtype, jnp.integer)
    return jax.lax.div(a, b) if is_integer else jnp.trunc(a / b)


def same_rank(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays with leading axes of 1 added, so that all have the largest rank.

    This is NumPy's broadcasting rule, explicitly, so that no implicit rank promotion occurs.
    """
    rank = max(a.ndim for a in arrays)
    return tuple(jnp.expand_dims(a, tuple(range(rank - a.ndim))) for a in arrays)


def _check_width(op: str, dtype: np.dtype[Any]) -> None:
    """Check that a program can hold a dtype.

    Raises:
        DTypeError: JAX would silently narrow the dtype, such as f64 to f32.
    """
    valid = device_dtype(dtype)
    if valid != dtype:
        raise DTypeError(
            f"{op}: programs do not hold {short_name(dtype)}, because JAX has no 64-bit numbers by default; use "
            f"{short_name(valid)}"
        )


@dataclass(frozen=True)
class Unary(Mir):
    """Apply the function `kind` of `UNARY` to each element."""

    traits = ELEMENTWISE
    choices = {"kind": UNARY}
    notation = "{kind}"

    kind: str

    def check(self, x: TensorType) -> None:
        if self.kind not in NUMERIC_UNARY and not is_float(x.dtype):
            raise DTypeError(f"{self.kind}: needs a floating operand, got {x}")
        if x.dtype.kind == "b":
            raise DTypeError(f"{self.kind}: needs numbers, got {x}")

    def eval(self, x: Array) -> Array:
        return UNARY[self.kind](x)


@dataclass(frozen=True)
class Binary(Mir):
    """Apply the function `kind` of `BINARY` with NumPy broadcasting; both operands have the same dtype."""

    traits = ELEMENTWISE
    choices = {"kind": BINARY}
    operands = "a b:a"
    notation = "{kind}"

    kind: str

    def check(self, a: TensorType, b: TensorType) -> None:
        dtype = a.dtype
        if self.kind in BITWISE_BINARY and not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
            raise DTypeError(f"{self.kind}: needs whole numbers or bools, got {a} and {b}")
        if self.kind.startswith("shift") or self.kind in ("floor_div", "trunc_div", "mod", "rem"):
            if dtype == jnp.bool_:
                raise DTypeError(f"{self.kind}: needs numbers, got {a} and {b}")
        if self.kind == "atan2" and not is_float(dtype):
            raise DTypeError(f"atan2: needs floating operands, got {a} and {b}")

    def eval(self, a: Array, b: Array) -> Array:
        return BINARY[self.kind](*same_rank(a, b))

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 0 for a bias, a weight of rank 0 or 1 that is added or subtracted."""
        return 0.0 if weight.rank < 2 and self.kind in ("add", "sub") else super().initial(operand_index, weight)


@dataclass(frozen=True)
class Compare(Mir):
    """Compare a and b by the function `kind` of `COMPARE`, with NumPy broadcasting; the result is bool."""

    traits = ELEMENTWISE
    choices = {"kind": COMPARE}
    operands = "a b:a"
    notation = "{kind}"

    kind: str

    def eval(self, a: Array, b: Array) -> Array:
        return COMPARE[self.kind](*same_rank(a, b))


@dataclass(frozen=True)
class Where(Mir):
    """Select `on_true` where `condition` is not zero, else `on_false`; all three operands broadcast."""

    traits = ELEMENTWISE
    operands = "condition on_true on_false:on_true"

    def eval(self, condition: Array, on_true: Array, on_false: Array) -> Array:
        condition, on_true, on_false = same_rank(condition, on_true, on_false)
        return jnp.where(condition.astype(bool), on_true, on_false)


@dataclass(frozen=True)
class CastTo(Mir):
    """Convert values to another dtype.

    A value too large for a narrower float becomes infinite, or NaN if the dtype has no infinity (f8_e4m3). With
    `saturate` such values and infinities become the largest finite number of the dtype; NaN remains NaN. Between
    integers the higher bits are dropped, or with `saturate` the nearest representable number is taken.
    """

    # A cast to the dtype of the operand is a view.
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


def _bounds_in(dtype: np.dtype[Any], result_dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the smallest and the largest finite number of `dtype` that `result_dtype` represents, in that dtype."""
    target, source = (jnp.finfo(d) if is_float(d) else jnp.iinfo(d) for d in (dtype, result_dtype))
    low, high = max(float(target.min), float(source.min)), min(float(target.max), float(source.max))
    if not is_float(result_dtype):  # in Python ints, because f32 cannot represent 2³¹ − 1
        return jnp.asarray(max(int(target.min), int(source.min)), result_dtype), jnp.asarray(
            min(int(target.max), int(source.max)), result_dtype
        )
    top = np.asarray(high).astype(result_dtype)
    if float(top) > high:  # the conversion rounded up, past the range of `dtype`
        top = np.nextafter(top, np.asarray(0).astype(result_dtype))
    return jnp.asarray(np.asarray(low).astype(result_dtype)), jnp.asarray(top)


@dataclass(frozen=True)
class FullLike(Mir):
    """Return an array filled with `value`, with the shape of the operand and dtype `dtype`."""

    traits = replace(ELEMENTWISE, widens=False, bytes=results_written)

    value: float
    dtype: np.dtype[Any]

    def check(self, *operands: TensorType) -> None:
        _check_width("full_like", self.dtype)

    def eval(self, x: Array) -> Array:
        return jnp.full_like(x, self.value, self.dtype)


def in_dtype(b: Builder, value: Value, dtype: np.dtype[Any]) -> Value:
    """Return a value in the given dtype, with a cast if it has another."""
    return value if b.type(value).dtype == dtype else b(CastTo(dtype), value)


# Straight-through estimators: gradients of the rounding, see `FakeQuantize`.
STE = ("identity", "clipped", "tanh", "hard_tanh")


@dataclass(frozen=True)
class FakeQuantize(Mir):
    """Quantize x to signed `bits`-bit numbers and back: `clip(round(x/s), ±q) · s` with q = 2^(bits − 1) − 1.

    The scale s is the second operand: one number, or with `axis` one for each entry of this axis. Without the operand
    it is max |x| / q, over all of x or for each entry of `axis`.

    Args:
        ste: gradient of x, by a straight-through estimator: `identity` dy; `clipped` dy where |x| ≤ q s, else 0;
            `tanh` dy (1 − tanh²(x/s)); `hard_tanh` dy max(0, 1 − |x|/(q s)).
        learned: s has a gradient (LSQ, arXiv:1902.08153), Σ dy ψ(x/s) over the elements that share it, with ψ(z) =
            round(z) − z where |z| ≤ q, else ±q. Otherwise s has none.
    """

    traits = ELEMENTWISE
    choices = {"ste": STE}
    operands = "x:float@axis scale?:x"

    bits: int = 8
    axis: int | None = None
    ste: str = "identity"
    learned: bool = False

    def check(self, x: TensorType, *scale: TensorType) -> None:
        if isinstance(self.bits, bool) or not 2 <= self.bits <= 16:
            raise GraphError(f"fake_quantize: bits are 2 to 16, got {self.bits!r}")
        if self.learned and not scale:
            raise GraphError("fake_quantize: a scale that is learned has to be given")
        scale_shape = () if self.axis is None else (x.shape[self.axis],)
        if scale and scale[0].shape != scale_shape:
            raise ShapeError(f"fake_quantize: the scale of {x} is {TensorType(scale_shape, x.dtype)}, got {scale[0]}")

    def eval(self, x: Array, scale: Array | None = None) -> Array:
        x_f32, q_max = x.astype(jnp.float32), 2.0 ** (self.bits - 1) - 1
        reduced_axes = tuple(i for i in range(x.ndim) if self.axis is None or i != self.axis % x.ndim)
        if scale is None:
            # The lower bound avoids 0/0 where all elements are zero.
            s = jnp.maximum(jnp.max(jnp.abs(x_f32), axis=reduced_axes, keepdims=True), 1e-12) / q_max
        else:
            s = jnp.expand_dims(scale.astype(jnp.float32), reduced_axes)
        return _rounded(self.ste, q_max, x_f32, s if self.learned else jax.lax.stop_gradient(s)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(ste: str, q_max: float, x: Array, s: Array) -> Array:
    """Return `clip(round(x/s), ±q_max) · s`, with the gradient of `_backward`."""
    return jnp.clip(jnp.round(x / s), -q_max, q_max) * s


def _forward(ste: str, q_max: float, x: Array, s: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the value, and x and s as residuals of the gradient."""
    return _rounded(ste, q_max, x, s), (x, s)


def _backward(ste: str, q_max: float, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    """Return the gradients of x and s; see `FakeQuantize`."""
    x, s = residuals
    slope = {
        "identity": lambda: jnp.ones_like(x), "clipped": lambda: (jnp.abs(x) <= q_max * s).astype(x.dtype),
        "tanh": lambda: 1 - jnp.tanh(x / s) ** 2, "hard_tanh": lambda: jnp.maximum(0.0, 1 - jnp.abs(x) / (q_max * s)),
    }[ste]()  # fmt: skip
    z = x / s
    scale_slope = jnp.where(jnp.abs(z) <= q_max, jnp.round(z) - z, jnp.sign(z) * q_max)
    shared_axes = tuple(i for i in range(x.ndim) if s.ndim == 0 or s.shape[i] == 1)
    return dy * slope, jnp.sum(dy * scale_slope, axis=shared_axes, keepdims=s.ndim > 0).reshape(s.shape)


_rounded.defvjp(_forward, _backward)
