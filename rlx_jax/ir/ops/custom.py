"""What users bring into a program: small constants, and any JAX function."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import DTypeError, GraphError, first_line, shown
from rlx_jax.ir import user_functions
from rlx_jax.ir.graph import Constant, Graph, Mir, TypeCache, constant
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.traits import Types, product_traits
from rlx_jax.ir.type_inference import types_of
from rlx_jax.ir.types import TensorType, as_dtype, device_dtype, is_float, is_whole, short_name

Array = jax.Array


def check_constants(graph: Graph, types: TypeCache) -> None:
    """The constants of a program and the arrays that its functions captured, each counted once, are small.

    Raises:
        GraphError: together they are over `MAX_CAPTURED`; the largest are named.
    """
    sizes: dict[Any, tuple[int, str]] = {}
    for _, node in graph.walk():
        place = f"{path_text(node.origin.path)} {node.op.text()}"
        if isinstance(node.op, Constant):
            sizes.setdefault(node.op.data, (len(node.op.data), place))
        for array in types.captured.get(node.op, ()):
            traced = isinstance(array, jax.core.Tracer)
            sizes.setdefault(id(array) if traced else np.asarray(array).tobytes(), (array.nbytes, place))
    total = sum(size for size, _ in sizes.values())
    if total > user_functions.MAX_CAPTURED:
        largest = sorted(sizes.values(), reverse=True)[:4]
        told = f"The largest: {'; '.join(f'{place}: {size} bytes' for size, place in largest)}"
        constants = f"{total} bytes of constants in one program"
        raise GraphError(f"{graph.name}: {constants}, {user_functions.CAPTURED_LIMIT}. {told}")


def check_captured(graph: Graph) -> None:
    """Check that the functions of a program compute what they computed when the model was built.

    This stands before the trace of a program and not in `eval`, which also runs where JAX folds constants, as tests of
    slices do: the same function then has another jaxpr.

    Raises:
        GraphError: an array that a function captures has changed.
    """
    for _, node in graph.walk():
        if isinstance(node.op, JaxFn):
            for operands, before in node.op.first:
                if user_functions.meaning(user_functions.trace_anew(node.op.fn, operands), precision=False) != before:
                    where = f"{path_text(node.origin.path)}: {node.op.text()}"
                    raise GraphError(user_functions.changed(where, node.op.fn))


def small_constant(value: Any, dtype: Any = None) -> Constant:
    """A constant of the program, of at most 1 MiB, in its own dtype or in `dtype`; 64-bit numbers become 32-bit ones.

    Raises:
        DTypeError: the dtype cannot hold a value. GraphError: no array of numbers, or a larger one: it is a weight.
    """
    try:
        given = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last: an array of JAX that is consumed
        raise GraphError(f"a constant is a number or an array of them: {first_line(error)}") from error
    if not given.size:
        raise GraphError(f"a constant of shape {list(given.shape)} has no elements; every dimension is at least 1")
    if given.size * given.itemsize > user_functions.MAX_CAPTURED:
        raise GraphError(f"a constant of {given.size * given.itemsize} bytes, {user_functions.CAPTURED_LIMIT}")
    whole = given.dtype == object and all(isinstance(v, int) for v in given.flat)  # beyond 64 bits
    if not (whole or is_float(given.dtype) or given.dtype.kind in "biuc" or is_whole(given.dtype)):
        raise GraphError(f"a constant is a number or an array of them, got {shown(value)}")
    asked = given.dtype if dtype is None and not whole else as_dtype("i32" if dtype is None else dtype)
    wanted = device_dtype(asked)
    with np.errstate(all="ignore"):
        misfits = _misfits(given, wanted)
        if misfits.any():
            found = given.reshape(-1)[int(np.argmax(misfits.reshape(-1)))]
            raise DTypeError(f"a constant of {short_name(wanted)} cannot hold {found}{_way_out(asked, wanted)}")
        return constant(given, wanted)


def _way_out(asked: np.dtype[Any], held: np.dtype[Any]) -> str:
    """What to do where a number of dtype `asked` does not fit the one it is `held` in."""
    if asked == held:
        return "; give it a dtype that does"
    others = "; f32 holds large whole numbers, rounded" if held.kind in "iu" else ": scale it"
    return f", and numbers of {short_name(asked)} are held in {short_name(held)}: programs have 32 bits{others}"


def _misfits(given: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Where `given` has a value that is another one in `dtype`, roundings of floats aside."""
    if given.dtype.kind == "c":
        return (given.imag != 0) if dtype.kind != "c" else np.zeros(given.shape, bool)
    if is_float(dtype) or dtype.kind == "c":
        wide = given.astype(np.float64)
        held = wide.astype(dtype).astype(np.complex128 if dtype.kind == "c" else np.float64)
        return np.asarray(np.isfinite(wide) & ~np.isfinite(held))
    info = None if dtype.kind == "b" else jax.numpy.iinfo(dtype)  # NumPy has none of 4-bit numbers
    low, high = (0, 1) if info is None else (int(info.min), int(info.max))
    if given.dtype.kind in "biuO":
        return np.asarray(~((given >= low) & (given <= high)), bool)
    wide = given.astype(np.float64)
    return np.asarray(~((wide >= low) & (wide <= high) & (wide == np.trunc(wide))))


def traced_flops(op: Any, operands: Types, results: Types) -> int:
    """Of the products and convolutions that an op's `eval` traces to."""
    return jaxpr_flops(jax.make_jaxpr(op.eval)(*(t.spec for t in operands)).jaxpr)


def jaxpr_flops(jaxpr: Any) -> int:
    """A loop counts as often as a scan says, once where its condition says; of branches the dearest."""
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
    """Any JAX function of the operands: `emit.jax(fn, …)`. `fn` returns an array or a tuple of arrays.

    Attributes:
        first: what `fn` computed when the model was built, and on which operands; see `remember`.
    """

    traits = replace(product_traits(traced_flops), widens=True, stored=False)

    fn: Callable[..., Any]
    label: str = ""
    precision: str = "default"
    first: list[tuple[Types, user_functions.Meaning]] = field(default_factory=list, compare=False, repr=False)

    def remember(self, operands: Types) -> Any:
        """Keep what `fn` computes now, as every program has to; return the form of its result."""
        closed, out = user_functions.trace(self.fn, operands)
        self.first.append((operands, user_functions.meaning(closed, precision=False)))
        return out

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        closed, out = jax.make_jaxpr(self.fn, return_shape=True)(*(t.spec for t in operands))
        flat = out if isinstance(out, tuple | list) else (out,)
        if not flat or not all(hasattr(o, "shape") and hasattr(o, "dtype") for o in flat):
            raise GraphError(f"{self.text()} returns {type(out).__name__}; expected an array or a tuple of arrays")
        types.captured[self] = tuple(user_functions.captured_arrays(closed))
        user_functions.check_captures(self.text(), types.captured[self])
        return types_of(closed.out_avals)

    def eval(self, *arrays: Array) -> Any:
        pinned = jax.default_matmul_precision(self.precision) if self.precision != "default" else nullcontext()
        with pinned:
            out = self.fn(*arrays)
        return tuple(jax.tree.leaves(out)) if isinstance(out, tuple | list) else out

    def text(self) -> str:
        return f"jax({self.label or getattr(self.fn, '__name__', 'fn')})"
