"""What tracing a function abstractly says of it: result types, how many operands it takes, and jax's errors as ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import GraphError, ShapeError, first_line
from rlx_jax.ir.types import TensorType

READS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def misfit(op: str, operands: Sequence[TensorType], error: Exception) -> GraphError:
    """What jax raised while an op, as dumps print it, was traced, as one of our errors."""
    given, what = ", ".join(map(str, operands)), first_line(error)
    if isinstance(error, READS_NUMBERS):
        return GraphError(
            f"{op} on ({given}) branches on numbers or reads them, and there are none while the flow is "
            f"traced: use jnp.where, jax.lax.cond or jax.lax.select. {what}"
        )
    if type(error).__name__ == "InconclusiveDimensionOperation" or "_DimExpr" in str(error):
        return ShapeError(
            f"{op} on ({given}) branches on a symbolic size or counts with it, and one program serves every "
            f"size: declare the input with a static size to specialise. {what}"
        )
    return ShapeError(f"{op} does not fit operands ({given}): {what}")


def types_of(result: Any) -> tuple[TensorType, ...]:
    """Tensor types of what `jax.eval_shape` returned: an array or a flat tuple or list of arrays."""
    leaves = jax.tree.leaves(result)
    return tuple(TensorType(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves)


def as_in_jit() -> AbstractContextManager[None]:
    """Return a context that traces loops as loops, whatever `jax_disable_jit` is: symbolic sizes have no numbers."""
    return jax.disable_jit(False)


def traced_types(op: Any, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """The types of `op.eval`, traced abstractly; operands of different dtypes or ranks are never promoted."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return types_of(jax.eval_shape(op.eval, *(t.spec for t in operands)))


def kept_types(op: Any, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """`traced_types` of an op whose attributes are values, kept for all builds of a process: tracing one op takes
    longer than everything else that is done for it."""
    names = getattr(op, "__dataclass_fields__", ())
    kinds = tuple(type(getattr(op, name)) for name in names)  # 1, 1.0 and True are equal
    wide = jax.config.jax_enable_x64  # type: ignore[attr-defined]
    return _kept(op, operands, kinds, type(op).eval, bool(wide))


@functools.lru_cache(2**14)
def _kept(
    op: Any, operands: tuple[TensorType, ...], kinds: tuple[type, ...], formula: Callable[..., Any], wide: bool
) -> tuple[TensorType, ...]:
    """`kinds`, `formula` and `wide` tell apart what has other types."""
    return traced_types(op, operands)


def arity(fn: Callable[..., Any]) -> str:
    """How many operands a function takes, in words."""
    parameters = inspect.signature(fn).parameters.values()
    least = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f"{least} or more"
    return str(least) if least == len(parameters) else f"{least} to {len(parameters)}"
