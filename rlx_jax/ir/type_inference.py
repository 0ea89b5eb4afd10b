"""Type inference by abstract tracing: result types of functions, and JAX's tracing errors as errors of rlx_jax."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import GraphError, ShapeError, first_line
from rlx_jax.ir.types import TensorType

# The errors that JAX raises if traced code needs the value of an array.
CONCRETE_VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def trace_error(op: str, operands: Sequence[TensorType], error: Exception) -> GraphError:
    """Return the error of rlx_jax for an error that JAX raised while it traced an op.

    Args:
        op: the op as dumps print it.
        operands: their types.
        error: the exception of JAX.
    """
    operand_types, detail = ", ".join(map(str, operands)), first_line(error)
    if isinstance(error, CONCRETE_VALUE_ERRORS):
        return GraphError(
            f"{op} on ({operand_types}) branches on numbers or reads them, and there are none while the flow is "
            f"traced: use jnp.where, jax.lax.cond or jax.lax.select. {detail}"
        )
    # JAX exports no class for symbolic dimensions, and some failures are plain TypeErrors that mention it.
    if type(error).__name__ == "InconclusiveDimensionOperation" or "_DimExpr" in str(error):
        return ShapeError(
            f"{op} on ({operand_types}) branches on a symbolic size or counts with it, and one program serves every "
            f"size: declare the input with a static size to specialise. {detail}"
        )
    return ShapeError(f"{op} does not fit operands ({operand_types}): {detail}")


def types_of(result: Any) -> tuple[TensorType, ...]:
    """Return the tensor types of a result of `jax.eval_shape`: an array, or a flat tuple or list of arrays."""
    leaves = jax.tree.leaves(result)
    return tuple(TensorType(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)


def without_disable_jit() -> AbstractContextManager[None]:
    """Return a context in which loops are traced as loops, even with `jax_disable_jit`.

    Without it, JAX would run loops in Python, which fails for symbolic sizes.
    """
    return jax.disable_jit(False)


def traced_types(op: Any, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the types of `op.eval`, traced abstractly; operands of different dtypes or ranks are never promoted."""
    return types_of(traced_formula(op, operands).out_avals)


def traced_formula(op: Any, operands: tuple[TensorType, ...]) -> Any:
    """Return the jaxpr of `op.eval`, traced as for `traced_types`."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return jax.make_jaxpr(op.eval)(*(t.spec for t in operands))


def cached_formula(op: Any, operands: tuple[TensorType, ...]) -> Any:
    """Return `traced_formula` for an op with plain values as attributes; the process caches the latest ones.

    Types and proofs of independence share a trace. The cache is small, because a jaxpr is much larger than its types.
    """
    return _cached_formula(op, operands, formula_key(op))


def cached_types(op: Any, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return `traced_types` for an op with plain values as attributes, cached for all builds of the process.

    Tracing an op takes longer than all other work of the compiler for that op.
    """
    return _cached_types(op, operands, formula_key(op))


def formula_key(op: Any) -> Hashable:
    """Return what the traced formula of an op depends on besides its attributes and operands, for a cache key."""
    names = getattr(op, "__dataclass_fields__", ())
    kinds = tuple(type(getattr(op, name)) for name in names)  # 1, 1.0 and True are equal keys
    formula = type(op).expand if hasattr(op, "expand") else type(op).eval
    return kinds, formula, bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


@functools.lru_cache(2**14)
def _cached_types(op: Any, operands: tuple[TensorType, ...], formula: Hashable) -> tuple[TensorType, ...]:
    """Return `traced_types`; `formula` is in the cache key because the result depends on it."""
    return types_of(_cached_formula(op, operands, formula).out_avals)


@functools.lru_cache(2**9)
def _cached_formula(op: Any, operands: tuple[TensorType, ...], formula: Hashable) -> Any:
    """Return `traced_formula`; `formula` is in the cache key because the result depends on it."""
    return traced_formula(op, operands)


def arity(fn: Callable[..., Any]) -> str:
    """Return the number of operands that a function takes, as text: "2", "2 to 3" or "2 or more"."""
    parameters = inspect.signature(fn).parameters.values()
    num_required = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f"{num_required} or more"
    return str(num_required) if num_required == len(parameters) else f"{num_required} to {len(parameters)}"
