"""LIR → executable: `jax.jit` with what the plan donates, and the proof that it was."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlx_jax.compiler.compile_cache import compile_lowered
from rlx_jax.device import out_of_memory
from rlx_jax.errors import GraphError, ProfileError, first_line
from rlx_jax.lowering.inspect.outline import Cost, cost
from rlx_jax.lowering.lir.donation import DonationProof, examine
from rlx_jax.lowering.lir.implementations import without_deprecation
from rlx_jax.lowering.lir.plan import Lir

HOST = (np.ndarray, np.generic)
Arrays = Mapping[str, Any]
StateArrays = dict[str, Any]
Results = tuple[tuple[Any, ...], StateArrays]
Function = Callable[[Arrays, StateArrays, Arrays], Results]
# Told what is done and how far it is: ("load", bytes of weights read, bytes in all) after each weight, and ("compile
# prefill of batch 1, seq 16", 0, 1) before and (…, 1, 1) after a compile. Called in the thread that does it; what it
# raises ends the work.
Progress = Callable[[str, int, int], None]
# What a program may be wrapped in before it is compiled, such as a loop that generates. Compared by value.
Around = Callable[[Function], Function]


@runtime_checkable
class SaysArguments(Protocol):
    """What is compiled for some arguments of a request, and not for others."""

    def arguments(self) -> Mapping[str, str]:
        """Arguments of `warmup` that it is compiled for, as users say them."""
        ...


@runtime_checkable
class RunsOthers(Protocol):
    """What wraps a program and runs others inside, each behind a state of its own."""

    def beside(self) -> Mapping[str, Lir]:
        """Those programs, by what the names of their arrays begin with among those of the whole state."""
        ...

    def divided(self) -> Shardings | None:
        """On several devices where those programs have their parameters, among the inputs, and their states."""
        ...


@dataclass(frozen=True)
class Shardings:
    """Where a program has its arguments, on several devices: those of parameters and of the state by name, of the
    inputs as they are given. The state it returns stands where it stood; `outputs` are anywhere if None. `gathered` are
    the bytes that parameters take where they are used, beside those that are kept."""

    params: Mapping[str, NamedSharding]
    state: Mapping[str, NamedSharding]
    inputs: Mapping[str, Any]
    outputs: NamedSharding | None
    gathered: int


@dataclass
class Executable:
    """A compiled program. The state and the inputs named in `consumed` are gone after a run."""

    lir: Lir
    call: jax.stages.Compiled
    lowered: jax.stages.Lowered
    seconds: Mapping[str, float]
    peak_bytes: int
    donation: DonationProof | None = None
    consumed: tuple[str, ...] = ()
    placement: tuple[Any, ...] = ()
    loaded: bool = False  # from the compile cache

    @functools.cached_property
    def needs(self) -> Cost:
        """Operations, bytes and scratch memory of a run; of a loop, of one step."""
        return cost(self.lir.graph)

    def fits(self, params: Arrays, state: StateArrays, inputs: Arrays) -> bool:
        """Whether the arguments stand where they stood when it was compiled, or are free to be moved there. Asked of a
        call that failed: it looks at every argument, which takes longer than a call.

        `placement` has the sharding of each argument, in order; None for one that the program does not read.
        """
        arguments = jax.tree.leaves((params, state, *parted(inputs, self.consumed)))
        return all(map(stands, arguments, self.placement))

    def run(self, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Run it. The arguments are those of the pure function; those on the host go to the device."""
        arguments = (params, state, *parted(inputs, self.consumed))
        results: Results = self.call(*on_device(arguments, self.placement))
        return results


T = TypeVar("T")


def on_device(arrays: T, at: Sequence[Any] = ()) -> T:
    """The same tree, where `jax.transfer_guard` is set with arrays of the host on the device: explicitly, as it wants
    it. Otherwise they go with the call, which on a GPU takes 0.3 ms less of the host. `at`: the sharding of each leaf,
    in order, where it matters: on several devices."""
    if not guarded():
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    moved = [jax.device_put(x, at[i] if at else None) if isinstance(x, HOST) else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, moved)  # type: ignore[no-any-return]


def guarded() -> bool:
    """Whether nothing may go to a device that is not sent there explicitly."""
    return jax.config.jax_transfer_guard_host_to_device not in (None, "allow")  # type: ignore[attr-defined]


def anywhere(argument: Any) -> Any:
    """What a program is compiled for: of an array the shape and dtype, wherever that one is."""
    concrete = isinstance(argument, jax.Array) and not isinstance(argument, jax.core.Tracer)
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype) if concrete else argument


def stands(argument: Any, sharding: Any) -> bool:
    """Whether an argument may be given to a program that was compiled for this sharding."""
    if sharding is None or not isinstance(argument, jax.Array):  # what comes from the host goes where it is wanted
        return True
    here = argument.sharding
    return here is sharding or not argument.committed or here.is_equivalent_to(sharding, argument.ndim)


def parted(inputs: Arrays, consumed: tuple[str, ...]) -> tuple[Arrays, ...]:
    """The inputs as arguments: all of them, or those to keep and those to consume."""
    if not consumed:
        return (inputs,)
    return {n: a for n, a in inputs.items() if n not in consumed}, {n: inputs[n] for n in consumed}


def places(shardings: Shardings | None, state: StateArrays, consumed: tuple[str, ...]) -> dict[str, Any]:
    """What `jax.jit` is told of where arguments and results are; on one device nothing."""
    if shardings is None:
        return {}
    before = {name: shardings.state[name] for name in state}
    return {
        "in_shardings": (dict(shardings.params), before, *parted(shardings.inputs, consumed)),
        "out_shardings": (shardings.outputs, dict(shardings.state)),
    }


def compile_program(
    lir: Lir,
    function: Function,
    params: Arrays,
    state: StateArrays,
    inputs: Arrays,
    shardings: Shardings | None = None,
    beside: Mapping[str, Lir] | None = None,
    name: str = "function",
) -> Executable:
    """Trace and compile with XLA; the state is donated, and that is proved. `beside`: see `RunsOthers`; `name`: what
    XLA calls it, as traces do, with `_` for what no identifier has.

    Raises:
        ProfileError: XLA does not take one of the profile's compiler options.
        GraphError: the state that is returned has other types than the one that is read; or the plan is strict, and
            the state is not updated in place.
    """

    def called(params: Arrays, state: StateArrays, kept: Arrays, *consumed: Arrays) -> Results:
        return function(params, state, {**kept, **consumed[0]} if consumed else kept)

    called.__name__ = re.sub(r"\W+", "_", name)

    # With debug_nans jax keeps every argument alive, so there is nothing to donate and nothing to prove.
    may_donate = not jax.config.jax_debug_nans  # type: ignore[attr-defined]
    donates_state = may_donate and lir.plan.donate_state and bool(state)
    consumed = lir.plan.donate_inputs if may_donate else ()
    donated = ((1,) if donates_state else ()) + ((3,) if consumed else ())
    options = dict(lir.plan.compiler_options) or None
    # An array of the state that is written and not read, as in prefill, is an argument too: it gives its memory.
    at = places(shardings, state, consumed)
    jitted = jax.jit(called, donate_argnums=donated, compiler_options=options, keep_unused=donates_state, **at)
    start = time.perf_counter()
    arguments = (params, state, *parted(inputs, consumed))
    with without_deprecation(lir.plan.choices):
        arguments = arguments if shardings is None else jax.tree.map(anywhere, arguments)
        lowered = jitted.lower(*arguments)
    traced = time.perf_counter()
    try:
        # Block paths are in the HLO that `profile()` reads, and not in the StableHLO that the cache compares.
        paths = "\n".join(str(node.origin.path) for _, node in lir.graph.walk())
        with out_of_memory(f"compiling {name}"):
            compiled, loaded = compile_lowered(lowered, arguments, (options, at, paths))
    except jax.errors.JaxRuntimeError as error:
        if not any(f"{wrong} option" in str(error) for wrong in ("compile", "setting")):
            raise
        raise ProfileError(f"backend.{lir.plan.target}.compiler_options: {first_line(error)}") from error
    seconds = {"trace": traced - start, "compile": time.perf_counter() - traced}
    start = time.perf_counter()
    proof = prove(lir, compiled, lowered, shardings, beside or {}, name) if donates_state else None
    seconds["prove"] = time.perf_counter() - start
    placement = tuple(jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda sharding: sharding is None))
    memory: Any = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Executable(lir, compiled, lowered, seconds, peak, proof, consumed, placement, loaded)


def prove(
    lir: Lir, compiled: Any, lowered: Any, shardings: Shardings | None, beside: Mapping[str, Lir], name: str
) -> DonationProof:
    """What a program does with its state; arguments as those of `compile_program`, which says what it raises."""
    held, gathered = ({}, 0) if shardings is None else (shardings.state, shardings.gathered)
    proof = examine(lir, compiled, lowered.out_info[1], held, gathered, beside)
    # A state of other types than the program reads is wrong, not slow: the next call could not take it.
    if (lir.plan.strict or proof.changed) and (problem := proof.problem()):
        cure = "" if proof.changed else "; donation.strict = false in the profile runs it"
        raise GraphError(f"{lir.graph.name}: {name}: {problem}{cure}")
    return proof


def new_arguments(wanted: object, known: Iterable[object]) -> str:
    """Which arguments warm-up lacked for `wanted`, a loop or a function, beside those that it compiled, `known`; empty
    where one of them is for the same arguments, or `wanted` is for all."""
    if not isinstance(wanted, SaysArguments):
        return ""
    ours = wanted.arguments()
    others = [k.arguments() for k in known if isinstance(k, SaysArguments)]
    nearest = max(others, key=lambda theirs: len(ours.items() & theirs.items()), default={})
    differ = [name for name, value in ours.items() if nearest.get(name) != value]
    if not differ:
        return ""
    had = ", ".join(f"{name}={nearest[name]}" for name in differ if name in nearest)
    lacked = ", ".join(f"{name}={ours[name]}" for name in differ)
    return f"warm-up was {f'with {had}, not ' if had else 'without '}{lacked}"
