"""Ops that act on elements: functions of one value, arithmetic, comparison, selection, casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, did_you_mean, quote
from rlx_jax.ir.graph import Constant, Mir, TypeCache, constant, types_of
from rlx_jax.ir.types import TensorType, as_dtype, is_float, short_name

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


def _check_kind(kind: str, known: dict[str, Any]) -> None:
    if kind not in known:
        raise GraphError(f"unknown function {quote(kind)}{did_you_mean(kind, known)}")


def _same_dtype(op: str, types: tuple[TensorType, ...]) -> None:
    if len({t.dtype for t in types}) > 1:
        raise DTypeError(f"{op}: operands have dtypes {', '.join(map(str, types))}; cast one of them")


@dataclass(frozen=True)
class Unary(Mir):
    """`f(x)` element by element, `f` from `UNARY`."""

    kind: str

    def check(self, *operands: TensorType) -> None:
        _check_kind(self.kind, UNARY)
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

    kind: str

    def check(self, *operands: TensorType) -> None:
        _check_kind(self.kind, BINARY)
        _same_dtype(self.kind, operands)

    def eval(self, a: Array, b: Array) -> Array:
        return BINARY[self.kind](*same_rank(a, b))

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Compare(Mir):
    """`a ∘ b` as bool, with NumPy broadcasting."""

    kind: str

    def check(self, *operands: TensorType) -> None:
        _check_kind(self.kind, COMPARE)
        _same_dtype(self.kind, operands)

    def eval(self, a: Array, b: Array) -> Array:
        return COMPARE[self.kind](*same_rank(a, b))

    def text(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Where(Mir):
    """`on_true` where `condition` is not zero, else `on_false`; all three broadcast."""

    def check(self, *operands: TensorType) -> None:
        _same_dtype("where", operands[1:])

    def eval(self, condition: Array, on_true: Array, on_false: Array) -> Array:
        condition, on_true, on_false = same_rank(condition, on_true, on_false)
        return jnp.where(condition.astype(bool), on_true, on_false)


@dataclass(frozen=True)
class CastTo(Mir):
    """The same values in another dtype."""

    dtype: np.dtype[Any]

    def eval(self, x: Array) -> Array:
        return x.astype(self.dtype)

    def text(self) -> str:
        return f"cast({short_name(self.dtype)})"


@dataclass(frozen=True)
class FullLike(Mir):
    """`value` in the shape of the operand, as `dtype`."""

    value: float
    dtype: np.dtype[Any]

    def eval(self, x: Array) -> Array:
        return jnp.full_like(x, self.value, self.dtype)


MAX_CAPTURED = 2**20  # bytes


def small_constant(value: Any, dtype: Any) -> Constant:
    """A constant of the program, of at most 1 MiB.

    Raises:
        GraphError: a larger one: it is a weight.
    """
    op = constant(value, as_dtype(dtype))
    if len(op.data) > MAX_CAPTURED:
        raise GraphError(f"a constant of {len(op.data)} bytes, over {MAX_CAPTURED}; make it a weight")
    return op


def captured_arrays(closed: Any) -> Iterator[Any]:
    """The constant arrays in a closed jaxpr; those of nested jits are not among its own `consts`."""
    yield from (c for c in closed.consts if hasattr(c, "nbytes"))
    for inner in _inner(closed.jaxpr):
        yield from captured_arrays(inner)


def _inner(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if hasattr(item, "jaxpr") and hasattr(item, "consts"):
                    yield item
                elif hasattr(item, "eqns"):
                    yield from _inner(item)


@dataclass(frozen=True)
class JaxFn(Mir):
    """Any JAX function of the operands: `emit.jax(fn, …)`. `fn` returns an array or a tuple of arrays."""

    fn: Callable[..., Any]
    label: str = ""
    precision: str = "default"

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        closed, out = jax.make_jaxpr(self.fn, return_shape=True)(*(t.spec for t in operands))
        flat = out if isinstance(out, tuple | list) else (out,)
        if not flat or not all(hasattr(o, "shape") and hasattr(o, "dtype") for o in flat):
            raise GraphError(f"{self.text()} returns {type(out).__name__}; expected an array or a tuple of arrays")
        captured = sum(c.nbytes for c in captured_arrays(closed))
        if captured > MAX_CAPTURED:
            raise GraphError(
                f"{self.text()} captures {captured} bytes of constants, the limit is {MAX_CAPTURED}: "
                "name the array as a weight and read it with emit.param(key)"
            )
        return types_of(closed.out_avals)

    def eval(self, *arrays: Array) -> Any:
        pinned = jax.default_matmul_precision(self.precision) if self.precision != "default" else nullcontext()
        with pinned:
            out = self.fn(*arrays)
        return tuple(jax.tree.leaves(out)) if isinstance(out, tuple | list) else out

    def text(self) -> str:
        return f"jax({self.label or getattr(self.fn, '__name__', 'fn')})"
