"""This module compiles LIR into an executable: `jax.jit` with donated arguments, and a proof that XLA reuses them."""

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
from rlx_jax.lowering.lir.donation import DonationProof, measure_donation
from rlx_jax.lowering.lir.implementations import without_triton_warning
from rlx_jax.lowering.lir.plan import Lir

# Types of arrays in host memory.
HOST = (np.ndarray, np.generic)
Arrays = Mapping[str, Any]
StateArrays = dict[str, Any]
Results = tuple[tuple[Any, ...], StateArrays]
Function = Callable[[Arrays, StateArrays, Arrays], Results]
# A progress callback, called with the name of a step, the amount done and the total: ("load", bytes of weights read,
# all bytes) after each weight; ("compile prefill of batch 1, seq 16", 0, 1) before and (…, 1, 1) after a compile. It is
# called in the thread that does the work, and an exception from it ends the work.
Progress = Callable[[str, int, int], None]
# A wrapper around a program that is compiled with it, such as a generation loop. As a part of keys it is compared by
# value.
Around = Callable[[Function], Function]


@runtime_checkable
class SaysArguments(Protocol):
    """A wrapper or function that is compiled for particular arguments of a request."""

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that it is compiled for, as users write them."""
        ...


@runtime_checkable
class RunsOthers(Protocol):
    """A wrapper that runs companion programs, such as a drafter's, each with its own state."""

    def beside(self) -> Mapping[str, Lir]:
        """Return the companion programs, by the prefix that the names of their arrays have in the combined state."""
        ...

    def divided(self) -> Shardings | None:
        """Return the shardings of the companions' parameters, which are inputs here, and of their states.

        None on one device.
        """
        ...


@dataclass(frozen=True)
class Shardings:
    """The shardings of the arguments and results of a program on several devices.

    Attributes:
        params, state: by name. The returned state has the sharding of the state argument.
        inputs: by name; a pytree for an input that is one.
        outputs: the sharding of all outputs; None leaves it to XLA.
        gathered: the bytes that parameters take on a device in their compute sharding, in addition to storage.
    """

    params: Mapping[str, NamedSharding]
    state: Mapping[str, NamedSharding]
    inputs: Mapping[str, Any]
    outputs: NamedSharding | None
    gathered: int


@dataclass
class Executable:
    """A compiled program.

    Attributes:
        lir: the planned program.
        call, lowered: JAX's compiled and lowered stages.
        seconds: the time of the steps "trace", "compile" and "prove".
        peak_bytes: arguments, results and temporaries together.
        donation: the proof that the state is updated in place; None if it is not donated.
        consumed: the names of the inputs that a run consumes. It consumes the state too.
        placement: the sharding of each argument, in order; None for an argument that the program does not read.
        loaded: whether it comes from the compile cache.
    """

    lir: Lir
    call: jax.stages.Compiled
    lowered: jax.stages.Lowered
    seconds: Mapping[str, float]
    peak_bytes: int
    donation: DonationProof | None = None
    consumed: tuple[str, ...] = ()
    placement: tuple[Any, ...] = ()
    loaded: bool = False

    @functools.cached_property
    def needs(self) -> Cost:
        """Return the operations, bytes and scratch memory of a run; for a loop, of one step."""
        return cost(self.lir.graph)

    def fits(self, params: Arrays, state: StateArrays, inputs: Arrays) -> bool:
        """Return whether all arguments have the shardings that the program was compiled for, or may be moved there.

        This is for a call that failed: examining every argument takes longer than a call.
        """
        arguments = jax.tree.leaves((params, state, *parted(inputs, self.consumed)))
        return all(map(stands, arguments, self.placement))

    def run(self, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Run the program and return its results. Arrays on the host are copied to the device."""
        arguments = (params, state, *parted(inputs, self.consumed))
        results: Results = self.call(*on_device(arguments, self.placement))
        return results


T = TypeVar("T")


def on_device(arrays: T, at: Sequence[Any] = ()) -> T:
    """Return the tree with its host arrays on the device, if `jax.transfer_guard` requires explicit copies.

    Otherwise the tree is returned unchanged, and the call copies them, which saves 0.3 ms of host time on a GPU.

    Args:
        arrays: a pytree.
        at: the sharding of each leaf, in order; empty on one device.
    """
    if not guarded():
        return arrays
    leaves, tree = jax.tree.flatten(arrays)
    copies = [jax.device_put(x, at[i] if at else None) if isinstance(x, HOST) else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(tree, copies)  # type: ignore[no-any-return]


def guarded() -> bool:
    """Return whether `jax.transfer_guard` forbids implicit copies from the host to a device."""
    return jax.config.jax_transfer_guard_host_to_device not in (None, "allow")  # type: ignore[attr-defined]


def anywhere(argument: Any) -> Any:
    """Return the shape and dtype of a concrete array, without its sharding; any other argument unchanged."""
    concrete = isinstance(argument, jax.Array) and not isinstance(argument, jax.core.Tracer)
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype) if concrete else argument


def stands(argument: Any, sharding: Any) -> bool:
    """Return whether an argument can be passed to a program that was compiled for this sharding."""
    if sharding is None or not isinstance(argument, jax.Array):  # host arrays are copied to the required devices
        return True
    current = argument.sharding
    return current is sharding or not argument.committed or current.is_equivalent_to(sharding, argument.ndim)


def parted(inputs: Arrays, consumed: tuple[str, ...]) -> tuple[Arrays, ...]:
    """Split the inputs into one argument, or into two if some are consumed: `jax.jit` donates entire arguments."""
    if not consumed:
        return (inputs,)
    return {n: a for n, a in inputs.items() if n not in consumed}, {n: inputs[n] for n in consumed}


def places(shardings: Shardings | None, state: StateArrays, consumed: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of `jax.jit` for the shardings of arguments and results; empty on one device."""
    if shardings is None:
        return {}
    state_shardings = {name: shardings.state[name] for name in state}
    return {
        "in_shardings": (dict(shardings.params), state_shardings, *parted(shardings.inputs, consumed)),
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
    """Trace a program and compile it with XLA, or load it from the compile cache.

    The state is donated if the plan donates it, and the compiled program is examined for whether it is updated in
    place.

    Args:
        lir: the planned program.
        function: its pure function `(params, state, inputs) → (outputs, state)`, wrapped if it has a wrapper.
        params, state, inputs: the arguments, arrays or `jax.ShapeDtypeStruct`.
        shardings: the shardings on several devices; None on one.
        beside: the companion programs of a wrapper; see `RunsOthers`.
        name: the name of the program in XLA and in traces; characters that an identifier cannot have become `_`.

    Raises:
        ProfileError: XLA refuses one of the profile's compiler options.
        GraphError: the returned state has other types than the state argument; or the plan is strict, and the state is
            not updated in place.
    """

    def called(params: Arrays, state: StateArrays, kept: Arrays, *consumed: Arrays) -> Results:
        return function(params, state, {**kept, **consumed[0]} if consumed else kept)

    called.__name__ = re.sub(r"\W+", "_", name)

    # With debug_nans JAX keeps every argument alive, so nothing is donated, and there is nothing to prove.
    may_donate = not jax.config.jax_debug_nans  # type: ignore[attr-defined]
    donates_state = may_donate and lir.plan.donate_state and bool(state)
    consumed = lir.plan.donate_inputs if may_donate else ()
    donated = ((1,) if donates_state else ()) + ((3,) if consumed else ())
    options = dict(lir.plan.compiler_options) or None
    # `keep_unused`: an array of the state that is written but not read, as in prefill, still donates its memory.
    placements = places(shardings, state, consumed)
    jitted = jax.jit(called, donate_argnums=donated, compiler_options=options, keep_unused=donates_state, **placements)
    start = time.perf_counter()
    arguments = (params, state, *parted(inputs, consumed))
    with without_triton_warning(lir.plan.choices):
        arguments = arguments if shardings is None else jax.tree.map(anywhere, arguments)
        lowered = jitted.lower(*arguments)
    traced = time.perf_counter()
    try:
        # `profile()` reads block paths from the HLO. They are not in the StableHLO, so the cache key needs them too.
        paths = "\n".join(str(node.origin.path) for _, node in lir.graph.walk())
        with out_of_memory(f"compiling {name}"):
            compiled, from_cache = compile_lowered(lowered, arguments, (options, placements, paths))
    except jax.errors.JaxRuntimeError as error:
        if not any(f"{wrong} option" in str(error) for wrong in ("compile", "setting")):
            raise
        raise ProfileError(f"backend.{lir.plan.target}.compiler_options: {first_line(error)}") from error
    seconds = {"trace": traced - start, "compile": time.perf_counter() - traced}
    start = time.perf_counter()
    proof = prove(lir, compiled, lowered, shardings, beside or {}, name) if donates_state else None
    seconds["prove"] = time.perf_counter() - start
    # None is the sharding of an unread argument, and counts as a leaf so that positions match the arguments.
    placement = tuple(jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda sharding: sharding is None))
    memory: Any = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Executable(lir, compiled, lowered, seconds, peak, proof, consumed, placement, from_cache)


def prove(
    lir: Lir, compiled: Any, lowered: Any, shardings: Shardings | None, beside: Mapping[str, Lir], name: str
) -> DonationProof:
    """Return the proof that a compiled program updates its state in place, or its problems.

    The arguments are as in `compile_program`, with JAX's stages.

    Raises:
        GraphError: see `compile_program`.
    """
    state_shardings, gathered = ({}, 0) if shardings is None else (shardings.state, shardings.gathered)
    proof = measure_donation(lir, compiled, lowered.out_info[1], state_shardings, gathered, beside)
    # A copied state is only slow, but one of other types is wrong: the next call would refuse it.
    if (lir.plan.strict or proof.changed) and (problem := proof.problem()):
        cure = "" if proof.changed else "; donation.strict = false in the profile runs it"
        raise GraphError(f"{lir.graph.name}: {name}: {problem}{cure}")
    return proof


def new_arguments(wanted: object, known: Iterable[object]) -> str:
    """Return a message about the request arguments that warm-up did not cover.

    Args:
        wanted: the loop or function to compile.
        known: the loops or functions that warm-up compiled.

    Returns:
        The arguments that differ from the nearest known one; empty if none differ, or if `wanted` does not depend on
        arguments.
    """
    if not isinstance(wanted, SaysArguments):
        return ""
    ours = wanted.arguments()
    candidates = [k.arguments() for k in known if isinstance(k, SaysArguments)]
    nearest = max(candidates, key=lambda theirs: len(ours.items() & theirs.items()), default={})
    differ = [name for name, value in ours.items() if nearest.get(name) != value]
    if not differ:
        return ""
    covered = ", ".join(f"{name}={nearest[name]}" for name in differ if name in nearest)
    uncovered = ", ".join(f"{name}={ours[name]}" for name in differ)
    return f"warm-up was {f'with {covered}, not ' if covered else 'without '}{uncovered}"
