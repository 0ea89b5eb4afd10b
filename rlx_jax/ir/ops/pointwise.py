"""Ops that act on elements: functions of one value, arithmetic, comparison, selection, casts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, did_you_mean, quote
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import ELEMENTWISE, MOVEMENT, Initial, Types, results_written
from rlx_jax.ir.types import TensorType, device_dtype, is_float, short_name

Array = jax.Array

UNARY: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # ½x(1 + erf(x/√2))
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # ½x(1 + tanh(√(2/π)(x + 0.044715x³)))
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
}
"""Functions of one value, by name."""

BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "pow": jnp.power,
}

COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}


def same_rank(*arrays: Array) -> tuple[Array, ...]:
    """Give all arrays the largest rank by leading axes of 1: NumPy's rule, written out."""
    rank = max(a.ndim for a in arrays)
    return tuple(jnp.expand_dims(a, tuple(range(rank - a.ndim))) for a in arrays)


def check_kind(kind: str, known: dict[str, Any]) -> None:
    """A name that its table has."""
    if kind not in known:
        raise GraphError(f"unknown function {quote(kind)}{did_you_mean(kind, known)}")


def _same_dtype(op: str, types: tuple[TensorType, ...]) -> None:
    if len({t.dtype for t in types}) > 1:
        raise DTypeError(f"{op}: operands have dtypes {', '.join(map(str, types))}; cast one of them")


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

    kind: str

    def check(self, *operands: TensorType) -> None:
        check_kind(self.kind, UNARY)
        (x,) = operands
        if self.kind not in ("neg", "abs", "relu") and not is_float(x.dtype):
            raise DTypeError(f"{self.kind}: needs a floating operand, got {x}")
        if x.dtype.kind == "b":
            raise DTypeError(f"{self.kind}: needs numbers, got {x}")

    def eval(self, x: Array) -> Array:
        return UNARY[self.kind](x)

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Binary(Mir):
    """`a ∘ b` with NumPy broadcasting; both operands have one dtype."""

    traits = ELEMENTWISE

    kind: str

    def check(self, *operands: TensorType) -> None:
        check_kind(self.kind, BINARY)
        _same_dtype(self.kind, operands)

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

    kind: str

    def check(self, *operands: TensorType) -> None:
        check_kind(self.kind, COMPARE)
        _same_dtype(self.kind, operands)

    def eval(self, a: Array, b: Array) -> Array:
        return COMPARE[self.kind](*same_rank(a, b))

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Where(Mir):
    """`on_true` where `condition` is not zero, else `on_false`; all three broadcast."""

    traits = ELEMENTWISE

    def check(self, *operands: TensorType) -> None:
        _same_dtype("where", operands[1:])

    def eval(self, condition: Array, on_true: Array, on_false: Array) -> Array:
        condition, on_true, on_false = same_rank(condition, on_true, on_false)
        return jnp.where(condition.astype(bool), on_true, on_false)


def _same_type(op: Any, operands: Types, results: Types) -> int | None:
    """A cast to the dtype that is there already."""
    return 0 if operands[0] == results[0] else None


@dataclass(frozen=True)
class CastTo(Mir):
    """The same values in another dtype."""

    traits = replace(MOVEMENT, widens=False, view=_same_type)

    dtype: np.dtype[Any]

    def check(self, *operands: TensorType) -> None:
        _check_width("cast", self.dtype)

    def eval(self, x: Array) -> Array:
        return x.astype(self.dtype)

    def text(self) -> str:
        return f"cast({short_name(self.dtype)})"


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
