"""This module checks the arrays of a call: the names and types of parameters, and arrays that were donated before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from rlx_jax import errors
from rlx_jax.compiler.executable import Arrays
from rlx_jax.errors import describe_type, did_you_mean, listing, quote
from rlx_jax.ir.types import short_name
from rlx_jax.ir.user_functions import is_consumed


def is_traced(arrays: Iterable[Any]) -> bool:
    """Return whether any of the arrays is a tracer of `jax.grad`, `jax.jit` or the like."""
    return any(isinstance(a, jax.core.Tracer) for a in arrays)


def refuse_consumed(params: Arrays, inputs: Arrays, cause: Exception | None = None) -> None:
    """Check that no argument was consumed by an earlier call.

    Args:
        params, inputs: the arguments by name.
        cause: the exception of a failed call, which the error is raised from.

    Raises:
        WeightError, SessionStateError: a parameter or an input was donated to an earlier call.
    """
    kinds: tuple[tuple[str, Arrays, type[errors.RlxError]], ...]
    kinds = (("params: leaf", params, errors.WeightError), ("input", inputs, errors.SessionStateError))
    for label, arrays, error_type in kinds:
        for name, array in arrays.items():
            if is_consumed(array):
                raise error_type(
                    f"{label} {quote(name)} has no values any more: an earlier call that donates it consumed it; "
                    "pass an array that is not deleted"
                ) from cause


def refuse_shared(donated: Arrays, params: Arrays, inputs: Arrays, cause: Exception) -> None:
    """Check that no array is both donated and read by a failed call.

    Args:
        donated: the donated arrays, by the name for messages.
        params, inputs: all arguments by name.
        cause: the exception of the call.

    Raises:
        RequestError: an array is; the message has both of its names.
    """
    arrays_by_label = {f"params: leaf {quote(n)}": a for n, a in params.items()}
    arrays_by_label |= {f"input {quote(n)}": a for n, a in inputs.items()} | dict(donated)
    for label, array in donated.items():
        for other, value in arrays_by_label.items():
            if other != label and _address(value) == _address(array):
                raise errors.RequestError(
                    f"{label} is donated to the call, and {other} is the same array: pass a copy, jax.numpy.copy(array)"
                ) from cause


def _address(array: Any) -> int:
    """Return a number that is equal for arrays that share memory: two objects of JAX may be one array."""
    on_one_device = isinstance(array, jax.Array) and len(array.devices()) == 1
    return int(array.unsafe_buffer_pointer()) if on_one_device else -id(array)  # negative, so that it equals no pointer


def check_leaves(params: Any, leaves: Mapping[str, Any]) -> None:
    """Check that a mapping has exactly the parameters of the Layout, by name.

    Raises:
        WeightShapeError: some are missing or unknown; the message lists them.
    """
    if not isinstance(params, Mapping):
        order = "; they precede the inputs: (params, x)" if isinstance(params, np.ndarray | jax.Array) else ""
        raise errors.WeightShapeError(
            f"params: expected a mapping of arrays by name, such as model.params, got {describe_type(params)}{order}"
        )
    missing, extra = [n for n in leaves if n not in params], [n for n in params if n not in leaves]
    if missing or extra:
        parts = {"missing": missing, "unknown": extra}.items()
        close = did_you_mean(str(extra[0]), missing) if extra else ""
        problems = "; ".join(f"{kind} leaves {listing(names, 8)}" for kind, names in parts if names)
        raise errors.WeightShapeError(f"params: {problems}{close}")


def check_params(params: Any, specs: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Check the names, shapes and dtypes of all parameters.

    Raises:
        WeightShapeError: one differs; the message has its name, and what is expected.
    """
    check_leaves(params, specs)
    for name, spec in specs.items():
        got = params[name]
        shape, dtype = getattr(got, "shape", None), getattr(got, "dtype", type(got).__name__)
        if shape != spec.shape or dtype != spec.dtype:
            got_dtype = short_name(dtype) if isinstance(dtype, np.dtype) else dtype
            sizes = "" if shape is None else list(shape)
            expected = f"{short_name(spec.dtype)}{list(spec.shape)}"
            raise errors.WeightShapeError(f"params: leaf {name!r} is {expected}, got {got_dtype}{sizes}")
