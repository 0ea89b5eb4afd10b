"""`check_processors`: the user's functions `logits_processor`, traced and checked before a program runs them."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from rlx_jax.errors import RequestError, RlxError, listing
from rlx_jax.generate.sampler import LogitsProcessor
from rlx_jax.ir.types import TensorType
from rlx_jax.ir.user_functions import (
    MAX_CAPTURED,
    callbacks,
    captured_arrays,
    captured_names,
    fingerprint,
    is_consumed,
    trace_error,
    trace_uncached,
)
from rlx_jax.runtime.programs import Programs


def check_processors(
    programs: Programs, processors: Iterable[LogitsProcessor], batches: Iterable[int], vocab_size: int, max_tokens: int
) -> None:
    """Check the functions of a request; none of its programs has run yet.

    A program has what a function captures as constants. So the function is traced again for each request, and compared
    with its first trace.

    Args:
        batches: the numbers of rows that programs call the functions with.

    Raises:
        RequestError: a function fails, returns anything else than logits, calls Python at run time, captures values
            that a program cannot have, or differs from its first trace.
    """
    for processor, batch in ((processor, batch) for processor in processors for batch in batches):
        label = f"logits_processor {getattr(processor, '__name__', type(processor).__name__)}"
        types = (
            TensorType((batch, vocab_size), np.dtype(np.float32)), TensorType((batch, max_tokens), np.dtype(np.int32)),
        )  # fmt: skip
        try:
            closed_jaxpr = trace_uncached(processor, types)
        except (RlxError, RecursionError):
            raise
        except Exception as error:  # whatever the function or JAX raises
            raise RequestError(str(trace_error(label, types, error))) from error
        results = [TensorType(tuple(a.shape), np.dtype(a.dtype)) for a in closed_jaxpr.out_avals]
        if results != [types[0]]:
            raise RequestError(f"{label} returns {', '.join(map(str, results)) or 'nothing'}; expected {types[0]}")
        if impure := sorted({*(type(e).__name__ for e in closed_jaxpr.effects), *callbacks(closed_jaxpr.jaxpr)}):
            raise RequestError(
                f"{label} has side effects, {listing(impure)}; expected a pure function of its arguments"
            )
        arrays = list(captured_arrays(closed_jaxpr))
        if any(isinstance(array, jax.core.Tracer) or is_consumed(array) for array in arrays):
            raise RequestError(f"{label} captures an array of another trace, or one that an earlier call consumed")
        if (size := sum(array.nbytes for array in arrays)) > MAX_CAPTURED:
            raise RequestError(f"{label} captures {size:,} bytes of arrays; at most {MAX_CAPTURED:,} are possible")
        content = fingerprint(closed_jaxpr)
        if content != programs.request_keys((check_processors, processor, types), lambda: content):  # noqa: B023
            raise RequestError(
                f"{label}: what it captures{captured_names(processor)} has changed since its program was compiled; "
                "pass a new function"
            )
