"""A function of one token and one row, traced once: what `emit.recurrent` runs over a sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from rlx_jax.errors import GraphError, RlxError
from rlx_jax.ir.captured import captured_arrays, changed, check_captures, inner_jaxprs, meaning, trace
from rlx_jax.ir.inference import as_in_jit, misfit
from rlx_jax.ir.types import TensorType


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
        raise misfit(f"recurrent({label})", given, error) from error
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
