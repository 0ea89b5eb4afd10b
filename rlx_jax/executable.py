"""LIR → executable: `jax.jit` with what the plan donates, and the proof that it was."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from rlx_jax.errors import GraphError, ProfileError, RlxWarning
from rlx_jax.ir.graph import first_line
from rlx_jax.lowering.donation import Donation, examine
from rlx_jax.lowering.plan import Lir

Arrays = Mapping[str, Any]
StateArrays = dict[tuple[str, str], Any]
Results = tuple[tuple[Any, ...], StateArrays]
Function = Callable[[Arrays, StateArrays, Arrays], Results]
Progress = Callable[[str, int, int], None]
"""Told what is done and how far it is: ("load", bytes of weights read, bytes in all) after each weight, and ("compile
prefill of batch 1, seq 16", 0, 1) before and (…, 1, 1) after a compile. Called in the thread that does it; what it
raises ends the work."""
Around = Callable[[Function], Function]
"""What a program may be wrapped in before it is compiled, such as a loop that generates. Compared by value."""


@dataclass
class Executable:
    """A compiled program. The state and the inputs named in `consumed` are gone after a run."""

    lir: Lir
    call: jax.stages.Compiled
    lowered: jax.stages.Lowered
    seconds: Mapping[str, float]
    peak_bytes: int
    donation: Donation | None = None
    consumed: tuple[str, ...] = ()

    def run(self, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Run it. The arguments are those of the pure function."""
        results: Results = self.call(params, state, *parted(inputs, self.consumed))
        return results


def parted(inputs: Arrays, consumed: tuple[str, ...]) -> tuple[Arrays, ...]:
    """The inputs as arguments: all of them, or those to keep and those to consume."""
    if not consumed:
        return (inputs,)
    return {n: a for n, a in inputs.items() if n not in consumed}, {n: inputs[n] for n in consumed}


def compile_program(lir: Lir, function: Function, params: Arrays, state: StateArrays, inputs: Arrays) -> Executable:
    """Trace and compile with XLA; the state is donated, and that is proved.

    Raises:
        ProfileError: XLA does not take one of the profile's compiler options.
    """

    def consuming(params: Arrays, state: StateArrays, kept: Arrays, consumed: Arrays) -> Results:
        return function(params, state, {**kept, **consumed})

    # With debug_nans jax keeps every argument alive, so there is nothing to donate and nothing to prove.
    may_donate = not jax.config.jax_debug_nans  # type: ignore[attr-defined]
    donates_state = may_donate and lir.plan.donate_state and bool(state)
    consumed = lir.plan.donate_inputs if may_donate else ()
    donated = ((1,) if donates_state else ()) + ((3,) if consumed else ())
    options = dict(lir.plan.compiler_options) or None
    jitted = jax.jit(consuming if consumed else function, donate_argnums=donated, compiler_options=options)
    start = time.perf_counter()
    lowered = jitted.lower(params, state, *parted(inputs, consumed))
    traced = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not any(f"{wrong} option" in str(error) for wrong in ("compile", "setting")):
            raise
        raise ProfileError(f"backend.{lir.plan.target}.compiler_options: {first_line(error)}") from error
    seconds = {"trace": traced - start, "compile": time.perf_counter() - traced}
    proof = prove_donation(lir, compiled) if donates_state else None
    memory: Any = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Executable(lir, compiled, lowered, seconds, peak, proof, consumed)


def prove_donation(lir: Lir, compiled: jax.stages.Compiled) -> Donation:
    """The state is consumed in place, or this is an error.

    Raises:
        GraphError: bytes that are not aliased. Larger temporaries or copies of a cache are a warning.
    """
    donation = examine(lir, compiled)
    problems = donation.problems()
    if problems and donation.aliased_bytes < donation.state_bytes:
        raise GraphError(f"{lir.graph.name}: the state is not updated in place: {'; '.join(problems)}")
    if problems:
        warnings.warn(f"{lir.graph.name}: {'; '.join(problems)}", RlxWarning, stacklevel=2)
    return donation
