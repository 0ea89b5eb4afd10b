"""User-defined parts of a program: small constants and JAX functions, and the checks of what they capture."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import DTypeError, GraphError, first_line, shown
from rlx_jax.ir import user_functions
from rlx_jax.ir.graph import Constant, Graph, Mir, TypeCache, constant
from rlx_jax.ir.operands import Types, product_traits
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import TensorType, as_dtype, device_dtype, is_float, is_integer, short_name
from rlx_jax.ir.user_functions import types_of

Array = jax.Array


def check_constants(graph: Graph, types: TypeCache) -> None:
    """Check that constants and arrays captured by functions are small in total; equal arrays count once.

    Raises:
        GraphError: together they exceed `MAX_CAPTURED` bytes; the message names the largest.
    """
    sizes: dict[Any, tuple[int, str]] = {}
    for _, node in graph.walk():
        location = f"{path_text(node.origin.path)} {node.op.text()}"
        if isinstance(node.op, Constant):
            sizes.setdefault(node.op.data, (len(node.op.data), location))
        for array in types.captured_arrays.get(node.op, ()):
            is_tracer = isinstance(array, jax.core.Tracer)  # a tracer has no bytes to compare
            sizes.setdefault(id(array) if is_tracer else np.asarray(array).tobytes(), (array.nbytes, location))
    total = sum(size for size, _ in sizes.values())
    if total > user_functions.MAX_CAPTURED:
        largest = sorted(sizes.values(), reverse=True)[:4]
        largest_text = f"The largest: {'; '.join(f'{location}: {size} bytes' for size, location in largest)}"
        constants = f"{total} bytes of constants in one program"
        raise GraphError(f"{graph.name}: {constants}, {user_functions.CAPTURED_LIMIT}. {largest_text}")


def check_captured(graph: Graph) -> None:
    """Check that the functions of a program compute the same as when the model was built.

    The check runs before a program is traced, not in `eval`: `eval` also runs in contexts where JAX folds constants,
    such as the slicing checks, and there the same function has another jaxpr.

    Raises:
        GraphError: an array that a function captures has changed.
    """
    for _, node in graph.walk():
        if isinstance(node.op, JaxFn):
            for operands, recorded in node.op.recorded:
                closed_jaxpr = user_functions.trace_uncached(node.op.fn, operands)
                if user_functions.fingerprint(closed_jaxpr, precision=False) != recorded:
                    location = f"{path_text(node.origin.path)}: {node.op.text()}"
                    raise GraphError(user_functions.changed_message(location, node.op.fn))


def small_constant(value: Any, dtype: Any = None) -> Constant:
    """Return a constant of the program from a number or an array of at most 1 MiB.

    Args:
        value: a number, or an array or nested lists of numbers.
        dtype: dtype of the constant, by default the dtype of `value`; 64-bit dtypes become their 32-bit counterparts.

    Raises:
        DTypeError: the dtype cannot hold a value.
        GraphError: `value` has no numbers or no elements, or it is larger than 1 MiB and should be a weight.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a deleted (donated) JAX array
        raise GraphError(f"a constant is a number or an array of them: {first_line(error)}") from error
    if not array.size:
        raise GraphError(f"a constant of shape {list(array.shape)} has no elements; every dimension is at least 1")
    if array.size * array.itemsize > user_functions.MAX_CAPTURED:
        raise GraphError(f"a constant of {array.size * array.itemsize} bytes, {user_functions.CAPTURED_LIMIT}")
    has_big_ints = array.dtype == object and all(isinstance(v, int) for v in array.flat)  # ints beyond 64 bits
    if not (has_big_ints or is_float(array.dtype) or array.dtype.kind in "biuc" or is_integer(array.dtype)):
        raise GraphError(f"a constant is a number or an array of them, got {shown(value)}")
    requested = array.dtype if dtype is None and not has_big_ints else as_dtype("i32" if dtype is None else dtype)
    target = device_dtype(requested)
    with np.errstate(all="ignore"):
        is_invalid = _unrepresentable(array, target)
        if is_invalid.any():
            invalid_value = array.reshape(-1)[int(np.argmax(is_invalid.reshape(-1)))]
            raise DTypeError(
                f"a constant of {short_name(target)} cannot hold {invalid_value}{_range_advice(requested, target)}"
            )
        return constant(array, target)


def _range_advice(requested: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Return the end of the message about a number that does not fit its dtype: the reason and a remedy.

    Args:
        requested: the requested dtype.
        target: the dtype that the program uses for it.
    """
    if requested == target:
        return "; give it a dtype that does"
    remedy = "; f32 holds large whole numbers, rounded" if target.kind in "iu" else ": scale it"
    return f", and numbers of {short_name(requested)} are stored in {short_name(target)}: programs have 32 bits{remedy}"


def _unrepresentable(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a mask of the `values` that `dtype` cannot represent; rounding of floats is accepted."""
    if values.dtype.kind == "c":
        return (values.imag != 0) if dtype.kind != "c" else np.zeros(values.shape, bool)
    if is_float(dtype) or dtype.kind == "c":
        exact = values.astype(np.float64)
        converted = exact.astype(dtype).astype(np.complex128 if dtype.kind == "c" else np.float64)
        return np.asarray(np.isfinite(exact) & ~np.isfinite(converted))
    info = None if dtype.kind == "b" else jax.numpy.iinfo(dtype)  # NumPy has no iinfo of 4-bit integers
    low, high = (0, 1) if info is None else (int(info.min), int(info.max))
    if values.dtype.kind in "biuO":
        return np.asarray(~((values >= low) & (values <= high)), bool)
    exact = values.astype(np.float64)
    return np.asarray(~((exact >= low) & (exact <= high) & (exact == np.trunc(exact))))


def traced_flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of an op: of the products and convolutions in the jaxpr of its `eval`."""
    return jaxpr_flops(jax.make_jaxpr(op.eval)(*(t.spec for t in operands)).jaxpr)


def jaxpr_flops(jaxpr: Any) -> int:
    """Return the FLOPs of the products and convolutions of a jaxpr.

    The body of a scan counts once per iteration, the body of a while loop once (the number of iterations is unknown),
    and of the branches of a cond the most expensive one counts.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        elif name == "conv_general_dilated":
            features, *summed = (equation.invars[1].aval.shape[i] for i in params["dimension_numbers"].rhs_spec)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(summed)
        inner = list(map(jaxpr_flops, user_functions.inner_jaxprs(equation)))
        total += max(inner, default=0) if name == "cond" else sum(inner) * (params["length"] if name == "scan" else 1)
    return total


@dataclass(frozen=True)
class JaxFn(Mir):
    """Call a user-defined JAX function on the operands, see `emit.jax`; `fn` returns an array or a tuple of arrays.

    Attributes:
        fn: the function.
        label: name in dumps and messages, by default the name of the function.
        precision: default precision of matrix products inside the function.
        recorded: operand types and the fingerprint of `fn` on them when the model was built; see `record_trace`.
    """

    traits = replace(product_traits(traced_flops), widens=True, stored=False)

    fn: Callable[..., Any]
    label: str = ""
    precision: str = "default"
    recorded: list[tuple[Types, user_functions.Fingerprint]] = field(default_factory=list, compare=False, repr=False)

    def record_trace(self, operands: Types) -> Any:
        """Record what `fn` computes now, for `check_captured`, and return the structure of its result."""
        closed, result = user_functions.trace(self.fn, operands)
        self.recorded.append((operands, user_functions.fingerprint(closed, precision=False)))
        return result

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        closed, result = jax.make_jaxpr(self.fn, return_shape=True)(*(t.spec for t in operands))
        leaves = result if isinstance(result, tuple | list) else (result,)
        if not leaves or not all(hasattr(o, "shape") and hasattr(o, "dtype") for o in leaves):
            raise GraphError(f"{self.text()} returns {type(result).__name__}; expected an array or a tuple of arrays")
        types.captured_arrays[self] = tuple(user_functions.captured_arrays(closed))
        user_functions.check_captures(self.text(), types.captured_arrays[self])
        return types_of(closed.out_avals)

    def eval(self, *arrays: Array) -> Any:
        precision = jax.default_matmul_precision(self.precision) if self.precision != "default" else nullcontext()
        with precision:
            result = self.fn(*arrays)
        return tuple(jax.tree.leaves(result)) if isinstance(result, tuple | list) else result

    def text(self) -> str:
        return f"jax({self.label or getattr(self.fn, '__name__', 'fn')})"
