"""Checks of user functions: what a function computes at its first trace must be the same at every later trace.

A program traces the function again for every size. If the user changed a captured array in place, or rebound a
variable, the results of the model would differ between sizes. That is an error. The comparison covers the text of the
jaxpr and the captured arrays.

`TokenStep` is a function of one token and one row, which `emit.recurrent` scans over a sequence. It is traced once
for each precision of matrix products.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import GraphError, RlxError, ShapeError, first_line, wrong_arity
from rlx_jax.ir.types import TensorType

# Type inference by abstract tracing: result types of functions, and JAX's tracing errors as errors of rlx_jax.


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


def traced_types(op: Any, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Return the types of `op.eval`, traced abstractly; operands of different dtypes or ranks are never promoted."""
    return types_of(traced_formula(op, operands).out_avals)


def traced_formula(op: Any, operands: tuple[TensorType, ...]) -> Any:
    """Return the jaxpr of `op.eval`, traced as for `traced_types`."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return jax.make_jaxpr(op.eval)(*(t.spec for t in operands))


def formula_key(op: Any) -> Hashable:
    """Return what the traced formula of an op depends on besides its attributes and operands, for a cache key."""
    names = getattr(op, "__dataclass_fields__", ())
    kinds = tuple(type(getattr(op, name)) for name in names)  # 1, 1.0 and True are equal keys
    formula = type(op).expand if hasattr(op, "expand") else type(op).eval
    return kinds, formula, bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]


@functools.lru_cache(2**14)
def cached_types(op: Any, operands: tuple[TensorType, ...], formula: Hashable) -> tuple[TensorType, ...]:
    """Return `traced_types` for an op with plain values as attributes, cached for all builds of the process.

    Tracing an op takes longer than all other work of the compiler for that op. `formula` is its `formula_key`.
    """
    return types_of(cached_formula(op, operands, formula).out_avals)


@functools.lru_cache(2**9)
def cached_formula(op: Any, operands: tuple[TensorType, ...], formula: Hashable) -> Any:
    """Return `traced_formula` for an op with plain values as attributes; the process caches the latest ones.

    Types and proofs of independence share a trace. The cache is small, because a jaxpr is much larger than its types.
    `formula` is the op's `formula_key`.
    """
    return traced_formula(op, operands)


@functools.lru_cache(2**10)
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function."""
    return inspect.signature(function)


def check_formula(op: Any, operands: Sequence[Any]) -> None:
    """Check that the `eval` of an op, which may be a static method, takes so many operands.

    Raises:
        GraphError: it does not.
    """
    formula = op.eval
    is_method = inspect.ismethod(formula)
    own = [formula.__self__] if is_method else []
    try:
        _signature(formula.__func__ if is_method else formula).bind(*own, *operands)
    except TypeError as error:
        raise wrong_arity(op.name(), arity(formula), len(operands)) from error


def arity(fn: Callable[..., Any]) -> str:
    """Return the number of operands that a function takes, as text: "2", "2 to 3" or "2 or more"."""
    parameters = inspect.signature(fn).parameters.values()
    num_required = sum(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f"{num_required} or more"
    return str(num_required) if num_required == len(parameters) else f"{num_required} to {len(parameters)}"


MAX_CAPTURED = 2**20  # bytes that a function may capture

CAPTURED_LIMIT = f"the limit is {MAX_CAPTURED}: name the array as a weight and read it with emit.param(key)"

# The text of a jaxpr and the bytes of the arrays that it captured.
Fingerprint = tuple[str, tuple[bytes, ...]]

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_PRECISION = re.compile(r"^\s*precision=.*\n", re.MULTILINE)
_attempts = itertools.count()


class CapturedArrays:
    """The arrays that the functions of one model captured at its first build, by label, operand types and jaxpr."""

    def __init__(self) -> None:
        self.closed = False  # the first build is complete
        self._arrays: dict[Hashable, set[tuple[bytes, ...]]] = {}

    def record(
        self, label: str, operands: tuple[TensorType, ...], fingerprint: Fingerprint, fn: Callable[..., Any]
    ) -> None:
        """Record a function during the first build, and check one of a later build against the recorded functions.

        Args:
            label: the label of the function, as in messages.
            operands: the types that it was traced with.
            fingerprint: the jaxpr and the captured arrays.
            fn: the function itself, for the message.

        Raises:
            GraphError: the first build traced it to the same jaxpr with other captured arrays.
        """
        text, arrays = fingerprint
        recorded_arrays = self._arrays.get((label, operands, text))
        if self.closed and recorded_arrays is not None and arrays not in recorded_arrays:
            raise GraphError(changed_message(label, fn))
        self._arrays.setdefault((label, operands, text), set()).add(arrays)


def fingerprint(closed: Any, precision: bool = True) -> Fingerprint:
    """Return what a closed jaxpr computes: its text and the bytes of its captured arrays.

    Without `precision`, the text omits the precision of matrix products.
    """
    text = _ADDRESS.sub("", str(closed.jaxpr))  # addresses of functions differ between traces
    arrays = (np.asarray(a).tobytes() for a in captured_arrays(closed) if not isinstance(a, jax.core.Tracer))
    return text if precision else _PRECISION.sub("", text), tuple(arrays)


def trace(fn: Callable[..., Any], operands: Sequence[TensorType]) -> tuple[Any, Any]:
    """Return the jaxpr of a function, and the pytree of its result types.

    JAX may still use cached traces of the functions that `fn` calls; see `trace_uncached`.
    """
    with jax.disable_jit(False):  # a new lambda, because JAX caches the traces of functions that it has seen
        closed_jaxpr, out = jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*(t.spec for t in operands))  # noqa: PLW0108
    return closed_jaxpr, out


def trace_uncached(fn: Callable[..., Any], operands: Sequence[TensorType]) -> Any:
    """Return the jaxpr of a function as it is now, without cached traces of the functions that it calls."""
    # The metadata are a part of the key of JAX's trace caches, so a new value makes all of them miss.
    with set_xla_metadata(rlx_jax_trace=str(next(_attempts))):
        return trace(fn, operands)[0]


def changed_message(label: str, fn: Callable[..., Any]) -> str:
    """Return the error message for a function with captured values that changed after its first trace."""
    return (
        f"{label}: what the function captures{captured_names(fn)} has changed since the model was built, so that "
        "programs of other sizes would not agree with the existing ones. Make it a weight (emit.param) or an input of "
        "the flow, or build and compile a new flow after the change, with a new function where JAX has compiled this "
        "one"
    )


def captured_names(fn: Callable[..., Any]) -> str:
    """Return the names of the numbers and arrays that a function captures, for messages; empty if there are none."""
    try:
        closure_vars = inspect.getclosurevars(fn)
    except TypeError:  # not a Python function, such as a `functools.partial`
        return ""
    variables = {**closure_vars.nonlocals, **closure_vars.globals}
    names = sorted(n for n, v in variables.items() if isinstance(v, np.ndarray | float | int))
    return f" (it reads {', '.join(names)})" if names else ""


def captured_arrays(closed: Any) -> Iterator[Any]:
    """Return the constant arrays in a closed jaxpr, including arrays of nested jits, which its `consts` lack."""
    yield from (c for c in getattr(closed, "consts", ()) if hasattr(c, "nbytes"))
    for equation in closed.eqns:
        for inner in inner_jaxprs(equation):
            yield from captured_arrays(inner)


def check_captures(label: str, arrays: Sequence[Any]) -> None:
    """Check the arrays that a function captures.

    Raises:
        GraphError: an earlier call consumed (donated) one of them, or together they exceed `MAX_CAPTURED` bytes. The
            message begins with `label`.
    """
    if any(map(is_consumed, arrays)):
        raise GraphError(f"{label} captures an array that an earlier call consumed: it has no values any more")
    size = sum(array.nbytes for array in arrays)
    if size > MAX_CAPTURED:
        raise GraphError(f"{label} captures {size} bytes of constants, {CAPTURED_LIMIT}")


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Return the jaxprs inside an equation, closed or open, such as the body of a call, a loop or a branch."""
    for value in equation.params.values():
        yield from (item for item in (value if isinstance(value, tuple | list) else (value,)) if hasattr(item, "eqns"))


def is_consumed(array: Any) -> bool:
    """Return whether an array was donated to an earlier call and so has no values any more.

    For a tracer of `jax.grad` or `jax.vmap` this is true if the underlying array was donated. A tracer of `jax.jit` has
    no underlying array, so the result is False.
    """
    while isinstance(array, jax.core.Tracer):  # transformations nest
        array = getattr(array, "primal", getattr(array, "val", None))
    return isinstance(array, jax.Array) and array.is_deleted()


@dataclass(frozen=True)
class TokenStep:
    """A step function `fn(*state, *x_t, *params) -> (state, y_t)` on arrays without the batch and token axes.

    It is traced when it is created, and programs run that trace: a function that computes something else when it is
    traced again is refused. Two steps are equal if they have the same operand types, jaxpr and captured arrays.

    Attributes:
        label: the name in dumps and messages.
        operand_types: the types of the operands.
        text, captured: the jaxpr, without the precision of products, and the bytes of the captured arrays.
        results: the types of the flattened results.
        y_treedef: the pytree structure of y.
        traces: the closed jaxprs by the precision of products.
    """

    label: str
    operand_types: tuple[TensorType, ...]
    text: str
    captured: tuple[bytes, ...]
    results: tuple[TensorType, ...] = field(compare=False)
    y_treedef: Any = field(compare=False, repr=False)
    fn: Callable[..., Any] = field(compare=False, repr=False)
    traces: dict[str, Any] = field(compare=False, repr=False)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The captured arrays."""
        return tuple(captured_arrays(self.traces["default"]))

    @property
    def digest(self) -> str:
        """A hash of the jaxpr and the captured arrays: 16 hexadecimal digits."""
        # Each part is preceded by its length, so that different splits of the same bytes have different hashes.
        parts = (self.text.encode(), *self.captured)
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()[:16]

    @property
    def jaxpr(self) -> Any:
        """The open jaxpr at default precision."""
        return self.traces["default"].jaxpr

    def function(self, precision: str) -> Callable[..., Sequence[Any]]:
        """Return the function that programs run, with matrix products in `precision`.

        Raises:
            GraphError: the user's function computes something else than when it was traced first.
        """
        if precision not in self.traces:
            with jax.disable_jit(False), jax.default_matmul_precision(precision):
                self.traces[precision] = retraced = jax.make_jaxpr(self.fn)(*(t.spec for t in self.operand_types))
            if fingerprint(retraced, precision=False)[0] != self.text:
                raise GraphError(_impure_message(self.label))
        # A cached trace refers to the user's arrays themselves, which may have changed in place since.
        if fingerprint(self.traces[precision], precision=False) != (self.text, self.captured):
            raise GraphError(changed_message(f"recurrent({self.label})", self.fn))
        traced_fn: Callable[..., Sequence[Any]] = jex.jaxpr_as_fun(self.traces[precision])
        return traced_fn


def trace_step(label: str, fn: Callable[..., Any], operand_types: Sequence[TensorType]) -> TokenStep:
    """Trace a function and return it as a `TokenStep`.

    Raises:
        GraphError: it has side effects, calls back to Python, captures a tracer of another trace or an array that an
            earlier call consumed, or computes something else when it is traced again.
    """
    try:
        closed_jaxpr, (_, y) = trace(fn, operand_types)
        retraced, _ = trace(fn, operand_types)
    except jax.errors.UnexpectedTracerError as error:
        raise GraphError(_foreign_tracer_message(label)) from error
    except (RlxError, RecursionError):
        raise
    except Exception as error:  # whatever jax raises on shapes that do not fit
        raise GraphError(str(trace_error(f"recurrent({label})", operand_types, error))) from error
    arrays = list(captured_arrays(closed_jaxpr))
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise GraphError(_foreign_tracer_message(label))
    check_captures(f"recurrent({label})", arrays)
    effects = sorted({*(type(e).__name__ for e in closed_jaxpr.effects), *callbacks(closed_jaxpr.jaxpr)})
    if effects:
        raise GraphError(
            f"recurrent({label}) has side effects ({', '.join(effects)}): a step is a pure function of "
            "the state, the token and the parameters"
        )
    text, captured = fingerprint(closed_jaxpr, precision=False)
    if (text, captured) != fingerprint(retraced, precision=False):
        raise GraphError(_impure_message(label))
    results = tuple(TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in closed_jaxpr.out_avals)
    y_treedef = jax.tree.structure(y)
    return TokenStep(label, tuple(operand_types), text, captured, results, y_treedef, fn, {"default": closed_jaxpr})


def callbacks(jaxpr: Any) -> set[str]:
    """Return the primitives in a jaxpr, at any depth, that call Python at run time or draw new random numbers."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    impure = {name for name in names if "callback" in name or name == "rng_uniform"}
    return impure.union(*(callbacks(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)))


def _foreign_tracer_message(label: str) -> str:
    return (
        f"recurrent({label}) reads a value that another trace computes (a global of a jitted function, a value of "
        "jax.grad or jax.vmap around the build): give it as one of the parameters"
    )


def _impure_message(label: str) -> str:
    return (
        f"recurrent({label}) is another function each time that it is traced: it reads or writes something other than "
        "its arguments (a counter, a random number of NumPy), so that prefill and decode would not agree. Carry it in "
        "the state, or give it as a parameter"
    )
