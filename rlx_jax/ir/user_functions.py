"""What a user's function computes at its first trace: text and captured arrays, compared at each later trace.

A program traces the function again for every size, so that an array changed in place, or a variable bound anew, would
change the answers of a model from one size to the next. That is an error.

`TokenStep`: a function of one token and one row, traced once: what `emit.recurrent` runs over a sequence.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex

from rlx_jax.errors import GraphError, RlxError
from rlx_jax.ir.type_inference import as_in_jit, misfit
from rlx_jax.ir.types import TensorType

MAX_CAPTURED = 2**20  # bytes that a function may capture

CAPTURED_LIMIT = f"the limit is {MAX_CAPTURED}: name the array as a weight and read it with emit.param(key)"

# The text of a jaxpr and the bytes of the arrays that it captured.
Meaning = tuple[str, tuple[bytes, ...]]

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_PRECISION = re.compile(r"^\s*precision=.*\n", re.MULTILINE)
_attempts = itertools.count()


class Captured:
    """The arrays that the functions of one model captured at its first build, by what else is known of a function."""

    def __init__(self) -> None:
        self.closed = False  # the first build is complete
        self._arrays: dict[Hashable, set[tuple[bytes, ...]]] = {}

    def record(self, what: str, operands: tuple[TensorType, ...], meaning: Meaning, fn: Callable[..., Any]) -> None:
        """Record a function of the first build, or check one of a later build against those.

        Raises:
            GraphError: the first build traced it to the same program over other arrays.
        """
        text, arrays = meaning
        known = self._arrays.get((what, operands, text))
        if self.closed and known is not None and arrays not in known:
            raise GraphError(changed(what, fn))
        self._arrays.setdefault((what, operands, text), set()).add(arrays)


def meaning(closed: Any, precision: bool = True) -> Meaning:
    """Return what a closed jaxpr computes; without `precision`, whatever the precision of its products."""
    text = _ADDRESS.sub("", str(closed.jaxpr))
    arrays = (np.asarray(a).tobytes() for a in captured_arrays(closed) if not isinstance(a, jax.core.Tracer))
    return text if precision else _PRECISION.sub("", text), tuple(arrays)


def trace(fn: Callable[..., Any], operands: Sequence[TensorType]) -> tuple[Any, Any]:
    """Return the jaxpr of a function, and what it returns. JAX may know the traces of functions that it calls."""
    with as_in_jit():  # a function of its own, as JAX knows the trace of one that it has seen
        closed, out = jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*(t.spec for t in operands))  # noqa: PLW0108
    return closed, out


def trace_anew(fn: Callable[..., Any], operands: Sequence[TensorType]) -> Any:
    """Return the jaxpr of a function as of now: the metadata keep JAX from using what it knows of functions inside."""
    with set_xla_metadata(rlx_jax_trace=str(next(_attempts))):
        return trace(fn, operands)[0]


def changed(what: str, fn: Callable[..., Any]) -> str:
    """Return the message for a function that would compute something else than at its first trace."""
    try:
        seen = inspect.getclosurevars(fn)
        found = {**seen.nonlocals, **seen.globals}
        names = sorted(n for n, v in found.items() if isinstance(v, np.ndarray | float | int))
    except TypeError:  # no function of Python
        names = []
    read = f" (it reads {', '.join(names)})" if names else ""
    return (
        f"{what}: what the function captures{read} has changed since the model was built, so that programs of other "
        "sizes would not agree with those that are there. Make it a weight (emit.param) or an input of the flow, or "
        "build and compile a new flow after the change, with a new function where JAX has compiled this one"
    )


def captured_arrays(closed: Any) -> Iterator[Any]:
    """The constant arrays in a closed jaxpr; those of nested jits are not among its own `consts`."""
    yield from (c for c in getattr(closed, "consts", ()) if hasattr(c, "nbytes"))
    for equation in closed.eqns:
        for inner in inner_jaxprs(equation):
            yield from captured_arrays(inner)


def check_captures(what: str, arrays: Sequence[Any]) -> None:
    """Check the arrays that a function captures.

    Raises:
        GraphError: an earlier call consumed one, or together they are over `MAX_CAPTURED`; `what` begins the message.
    """
    if any(map(is_consumed, arrays)):
        raise GraphError(f"{what} captures an array that an earlier call consumed: it has no values any more")
    size = sum(array.nbytes for array in arrays)
    if size > MAX_CAPTURED:
        raise GraphError(f"{what} captures {size} bytes of constants, {CAPTURED_LIMIT}")


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """The jaxprs of an equation, closed or open: what a call, a loop or a branch does inside."""
    for value in equation.params.values():
        yield from (item for item in (value if isinstance(value, tuple | list) else (value,)) if hasattr(item, "eqns"))


def is_consumed(array: Any) -> bool:
    """Whether an array was donated to an earlier call, or is traced by `jax.grad` or `jax.vmap` and stands for one that
    was. What `jax.jit` traces has no values to look for.
    """
    while isinstance(array, jax.core.Tracer):
        array = getattr(array, "primal", getattr(array, "val", None))
    return isinstance(array, jax.Array) and array.is_deleted()


@dataclass(frozen=True)
class TokenStep:
    """`fn(*state, *x_t, *params) -> (state, y_t)` on arrays without batch and tokens, of the types `given`.

    It is traced when it is made, and what was traced is what runs: a function that would compute something else when
    it is traced again is refused. Two steps are equal if they compute the same from the same arrays that they captured.

    Attributes:
        label: what dumps and messages call it.
        text, captured: what it computes, but for the precision of products.
        results: the types of what it gives, flat; y_form: the pytree that y is.
    """

    label: str
    given: tuple[TensorType, ...]
    text: str
    captured: tuple[bytes, ...]
    results: tuple[TensorType, ...] = field(compare=False)
    y_form: Any = field(compare=False, repr=False)
    fn: Callable[..., Any] = field(compare=False, repr=False)
    traces: dict[str, Any] = field(compare=False, repr=False)  # by the precision of products

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What it captured."""
        return tuple(captured_arrays(self.traces["default"]))

    @property
    def digest(self) -> str:
        """Of what it computes."""
        parts = (self.text.encode(), *self.captured)
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()[:16]

    @property
    def jaxpr(self) -> Any:
        """What it computes."""
        return self.traces["default"].jaxpr

    def function(self, precision: str) -> Callable[..., Sequence[Any]]:
        """What runs: products in `precision`.

        Raises:
            GraphError: the function is not the one that was traced before.
        """
        if precision not in self.traces:
            with as_in_jit(), jax.default_matmul_precision(precision):
                self.traces[precision] = again = jax.make_jaxpr(self.fn)(*(t.spec for t in self.given))
            if meaning(again, precision=False)[0] != self.text:
                raise GraphError(_unsteady(self.label))
        # Its constants are the user's arrays.
        if meaning(self.traces[precision], precision=False) != (self.text, self.captured):
            raise GraphError(changed(f"recurrent({self.label})", self.fn))
        made: Callable[..., Sequence[Any]] = jex.jaxpr_as_fun(self.traces[precision])
        return made


def traced_step(label: str, fn: Callable[..., Any], given: Sequence[TensorType]) -> TokenStep:
    """The step that a function is.

    Raises:
        GraphError: it has effects, calls back to Python, captures what another trace computes or an array that an
            earlier call consumed, or is another function when it is traced again.
    """
    try:
        closed, (_, y) = trace(fn, given)
        again, _ = trace(fn, given)
    except jax.errors.UnexpectedTracerError as error:
        raise GraphError(_of_another_trace(label)) from error
    except (RlxError, RecursionError):
        raise
    except Exception as error:  # whatever jax raises on shapes that do not fit
        raise GraphError(str(misfit(f"recurrent({label})", given, error))) from error
    arrays = list(captured_arrays(closed))
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise GraphError(_of_another_trace(label))
    check_captures(f"recurrent({label})", arrays)
    outside = sorted({*(type(e).__name__ for e in closed.effects), *callbacks(closed.jaxpr)})
    if outside:
        raise GraphError(
            f"recurrent({label}) has effects beside its results ({', '.join(outside)}): a step is a pure function of "
            "the state, the token and the parameters"
        )
    text, captured = meaning(closed, precision=False)
    if (text, captured) != meaning(again, precision=False):
        raise GraphError(_unsteady(label))
    results = tuple(TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in closed.out_avals)
    form = jax.tree.structure(y)
    return TokenStep(label, tuple(given), text, captured, results, form, fn, {"default": closed})


def callbacks(jaxpr: Any) -> set[str]:
    """The primitives of a jaxpr, those inside of others included, that call Python when they run, or draw anew."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    found = {name for name in names if "callback" in name or name == "rng_uniform"}
    return found.union(*(callbacks(inner) for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)))


def _of_another_trace(label: str) -> str:
    return (
        f"recurrent({label}) reads a value that another trace computes (a global of a jitted function, a value of "
        "jax.grad or jax.vmap around the build): give it as one of the parameters"
    )


def _unsteady(label: str) -> str:
    return (
        f"recurrent({label}) is another function each time that it is traced: it reads or writes something beside its "
        "arguments (a counter, a random number of NumPy), so that prefill and decode would not agree. Carry it in the "
        "state, or give it as a parameter"
    )
