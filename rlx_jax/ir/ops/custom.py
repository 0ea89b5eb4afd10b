"""User-defined parts of a program: small constants, JAX functions and what they capture, and exported programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import DTypeError, GraphError, ShapeError, UnsupportedError, first_line, shown, wrong_arity
from rlx_jax.ir import user_functions
from rlx_jax.ir.graph import Constant, Graph, Mir, TypeCache, constant
from rlx_jax.ir.operands import MOVEMENT, Types, product_traits
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.types import TensorType, as_dtype, device_dtype, is_float, is_integer, is_static, short_name, terms_of
from rlx_jax.ir.user_functions import types_of

Array = jax.Array


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


# Runs a program: `(parameters, state, inputs, sizes by symbol) → (outputs, state)`, arrays by name.
RunExported = Callable[[dict[str, Any], dict[str, Any], dict[str, Any], Mapping[str, int]], tuple[Any, dict[str, Any]]]


def unknown_flops(op: Any, operands: Types, results: Types) -> int:
    """Raise an error: StableHLO is not counted.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{op.text()}: an artifact has compiled programs without their ops, so FLOPs, bytes and times of blocks are "
        "not known: ask the model that was exported"
    )


@dataclass(frozen=True)
class ExportedCall(Mir):
    """Call an exported program: parameters, state arrays, inputs → outputs, new state arrays.

    Attributes:
        run: the program.
        params, state, inputs: the names of the operands, in this order.
        operand_types, result_types: the types with symbolic sizes.
        rings: the window of each ring buffer of the state, by the symbol of its size.
        rows_mix: why rows may influence each other; empty if they are independent.
        left_context: the block that reads all preceding tokens; empty if there is none.
    """

    traits = replace(MOVEMENT, flops=unknown_flops, stored=False)
    notation = "exported_call"

    run: RunExported
    params: tuple[str, ...]
    state: tuple[str, ...]
    inputs: tuple[str, ...]
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    rings: tuple[tuple[str, int], ...] = ()
    rows_mix: str = ""
    left_context: str = ""

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        sizes = self.sizes([t.shape for t in operands])
        for declared, t in zip(self.operand_types, operands, strict=True):
            if declared.bind(sizes) != t:
                raise ShapeError(f"{self.text()}: expected {declared}, got {t}")
        return tuple(t.bind(sizes) for t in self.result_types)

    def sizes(self, shapes: Sequence[tuple[Any, ...]]) -> dict[str, int]:
        """Return the size of each symbol of the operand types that these shapes of the operands determine."""
        if len(shapes) != len(self.operand_types):
            raise wrong_arity(self.text(), str(len(self.operand_types)), len(shapes))
        sizes: dict[str, int] = {}
        for declared, shape in zip(self.operand_types, shapes, strict=True):
            for dim, size in zip(declared.shape, shape, strict=False):
                if not is_static(dim) and is_static(size) and terms_of(dim) == (str(dim),):
                    sizes.setdefault(str(dim), int(size))
        return sizes

    def eval(self, *arrays: Any) -> tuple[Any, ...]:
        params, rest = arrays[: len(self.params)], arrays[len(self.params) :]
        state, inputs = rest[: len(self.state)], rest[len(self.state) :]
        outputs, new_state = self.run(
            dict(zip(self.params, params, strict=True)), dict(zip(self.state, state, strict=True)),
            dict(zip(self.inputs, inputs, strict=True)), self.sizes([array.shape for array in arrays]),
        )  # fmt: skip
        return (*outputs, *(new_state[name] for name in self.state))


def is_exported(graph: Graph) -> bool:
    """Return whether a graph calls an exported program, which it does not know the ops of."""
    return any(isinstance(node.op, ExportedCall) for node in graph.nodes)
