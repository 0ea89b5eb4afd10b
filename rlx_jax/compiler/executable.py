"""This module compiles LIR into an executable: `jax.jit` with donated arguments, and a proof that XLA reuses them."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from rlx_jax.compiler.compile_cache import cache_settings, compile_lowered, trace_key, trace_or_load
from rlx_jax.dataclasses import dataclass
from rlx_jax.device import out_of_memory, running_device
from rlx_jax.errors import GraphError, ProfileError, first_line
from rlx_jax.lowering.inspect.outline import Cost, cost
from rlx_jax.lowering.lir.donation import DonationProof, measure_donation
from rlx_jax.lowering.lir.plan import Lir

# Types of arrays in host memory.
HOST_TYPES = (np.ndarray, np.generic)
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
ProgramWrapper = Callable[[Function], Function]


@runtime_checkable
class HasRequestArguments(Protocol):
    """A wrapper or function that is compiled for particular arguments of a request."""

    def arguments(self) -> Mapping[str, str]:
        """Return the arguments of `warmup` that it is compiled for, as users write them."""
        ...


@runtime_checkable
class HasCompanions(Protocol):
    """A wrapper that runs companion programs, such as a drafter's, each with its own state."""

    def companions(self) -> Mapping[str, Lir]:
        """Return the companion programs, by the prefix that the names of their arrays have in the combined state."""
        ...

    def companion_shardings(self) -> Shardings | None:
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
        gathered_bytes: the bytes that parameters take on a device in their compute sharding, in addition to storage.
    """

    params: Mapping[str, NamedSharding]
    state: Mapping[str, NamedSharding]
    inputs: Mapping[str, Any]
    outputs: NamedSharding | None
    gathered_bytes: int


@dataclass
class Executable:
    """A compiled program.

    Attributes:
        lir: the planned program.
        call: JAX's compiled stage.
        lower: returns JAX's lowered stage; the first call traces a program that was loaded without a trace.
        seconds: the time of the steps "trace", "compile" and "prove".
        donation: the measured memory, and the proof that the state is updated in place; None for a state that is not
            donated, and for a function around a program without a state.
        consumed_inputs: the names of the inputs that a run consumes. It consumes the state too.
        from_cache: whether it comes from the compile cache.
    """

    lir: Lir
    call: jax.stages.Compiled
    lower: Callable[[], jax.stages.Lowered]
    seconds: Mapping[str, float]
    donation: DonationProof | None = None
    consumed_inputs: tuple[str, ...] = ()
    from_cache: bool = False

    @property
    def lowered(self) -> jax.stages.Lowered:
        """Return JAX's lowered stage."""
        return self.lower()

    @functools.cached_property
    def step_cost(self) -> Cost:
        """Return the operations, bytes and scratch memory of a run; for a loop, of one step."""
        return cost(self.lir.graph)

    @functools.cached_property
    def memory(self) -> Any:
        """Return XLA's analysis of the memory of a run, which takes milliseconds."""
        return self.call.memory_analysis()

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Return the bytes of arguments, results and temporaries; a donated state, which is both, counts once."""
        results = self.memory.output_size_in_bytes - self.memory.alias_size_in_bytes
        return int(self.memory.temp_size_in_bytes + self.memory.argument_size_in_bytes + results)

    @functools.cached_property
    def is_too_large(self) -> bool:
        """Return whether it needs more memory than the device has."""
        limit = running_device().memory
        return limit is not None and self.peak_bytes > limit

    @functools.cached_property
    def arg_shardings(self) -> tuple[Any, ...]:
        """Return the sharding of each argument, in order; None for an argument that the program does not read."""
        return tuple(jax.tree.leaves(self.call.input_shardings[0], is_leaf=lambda sharding: sharding is None))

    def accepts(self, params: Arrays, state: StateArrays, inputs: Arrays) -> bool:
        """Return whether all arguments have the shardings that the program was compiled for, or may be moved there.

        This is for a call that failed: examining every argument takes longer than a call.
        """
        arguments = jax.tree.leaves((params, state, *split_consumed(inputs, self.consumed_inputs)))
        return all(map(has_sharding, arguments, self.arg_shardings))

    def run(self, params: Arrays, state: StateArrays, inputs: Arrays) -> Results:
        """Run the program and return its results. Arrays on the host are copied to the device."""
        arguments = (params, state, *split_consumed(inputs, self.consumed_inputs))
        if has_transfer_guard():
            arguments = to_device(arguments, self.arg_shardings)
        results: Results = self.call(*arguments)
        return results


T = TypeVar("T")


def to_device(arrays: T, shardings: Sequence[Any] = ()) -> T:
    """Return the tree with its host arrays on the device, for a `jax.transfer_guard` that requires explicit copies.

    Otherwise the call copies them, which saves 0.3 ms of host time on a GPU.

    Args:
        arrays: a pytree.
        shardings: the sharding of each leaf, in order; empty on one device.
    """
    leaves, tree = jax.tree.flatten(arrays)
    copies = [
        jax.device_put(x, shardings[i] if shardings else None) if isinstance(x, HOST_TYPES) else x
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, copies)  # type: ignore[no-any-return]


def has_transfer_guard() -> bool:
    """Return whether `jax.transfer_guard` forbids implicit copies from the host to a device."""
    return jax.config.jax_transfer_guard_host_to_device not in (None, "allow")  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class HelperCall:
    """A call of a helper function; see `rlx_jax.runtime.programs.Programs.run_helper`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    static: tuple[Any, ...] = ()
    out_shardings: Any = None
    donate: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def key(self) -> Hashable:
        """Return the key of the compiled function."""
        return self.function, self.static, tuple((a.shape, a.dtype) for a in jax.tree.leaves(self.arguments))


def with_compile_cache(
    jitted: Any, arguments: tuple[Any, ...], options: Any = None, content: Any = None
) -> Callable[[], tuple[Callable[..., Any], bool]]:
    """Trace `jitted`, and return a function that compiles or loads it, which may run in another thread.

    It is not traced if `content` is all data that it is traced from, and the cache has its program; see
    `trace_or_load`.

    That returns a function that runs `jitted` with a cached program for these arguments, and whether that was loaded.
    Calls with other types or devices go to `jitted`, which compiles them without the cache. So does every call while
    a debug mode of JAX needs the function itself.
    """
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))
    if traced or cache_settings().directory is None or in_debug_mode():
        return lambda: (jitted, False)
    key = None if content is None else trace_key(content, arguments, options)
    lower = functools.cache(lambda: jitted.lower(*arguments))
    compile_traced = trace_or_load(lower, key, lambda low: compile_lowered(low, arguments, options, key))

    def load() -> tuple[Callable[..., Any], bool]:
        compiled, is_loaded, _ = compile_traced()

        def call(*arrays: Any) -> Any:
            if in_debug_mode():
                return jitted(*arrays)
            try:
                return compiled(*arrays)
            except (TypeError, ValueError):  # JAX checks types and placements before it runs or consumes anything
                return jitted(*arrays)

        return call, is_loaded

    return load


def in_debug_mode() -> bool:
    """Return whether a debug mode is on in which JAX runs the Python function again, operation by operation."""
    config: Any = jax.config
    return bool(config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)


def without_sharding(argument: Any) -> Any:
    """Return the shape and dtype of a concrete array, without its sharding; any other argument unchanged."""
    concrete = isinstance(argument, jax.Array) and not isinstance(argument, jax.core.Tracer)
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype) if concrete else argument


def abstract(argument: Any) -> Any:
    """Return the type of an array, with its sharding if it is committed to devices; any other argument unchanged."""
    if not isinstance(argument, jax.Array) or isinstance(argument, jax.core.Tracer):
        return argument
    sharding = argument.sharding if argument.committed else None
    is_weak = getattr(argument, "weak_type", False)  # arrays of random keys do not have it
    return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding, weak_type=is_weak)


def has_sharding(argument: Any, sharding: Any) -> bool:
    """Return whether an argument can be passed to a program that was compiled for this sharding."""
    if sharding is None or not isinstance(argument, jax.Array):  # host arrays are copied to the required devices
        return True
    current = argument.sharding
    return current is sharding or not argument.committed or current.is_equivalent_to(sharding, argument.ndim)


def split_consumed(inputs: Arrays, consumed: tuple[str, ...]) -> tuple[Arrays, ...]:
    """Split the inputs into one argument, or into two if some are consumed: `jax.jit` donates entire arguments."""
    if not consumed:
        return (inputs,)
    return {n: a for n, a in inputs.items() if n not in consumed}, {n: inputs[n] for n in consumed}


def sharding_options(shardings: Shardings | None, state: StateArrays, consumed: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of `jax.jit` for the shardings of arguments and results; empty on one device."""
    if shardings is None:
        return {}
    state_shardings = {name: shardings.state[name] for name in state}
    return {
        "in_shardings": (dict(shardings.params), state_shardings, *split_consumed(shardings.inputs, consumed)),
        "out_shardings": (shardings.outputs, dict(shardings.state)),
    }


def trace_program(
    lir: Lir, function: Function, params: Arrays, state: StateArrays, inputs: Arrays,
    shardings: Shardings | None = None, companions: Mapping[str, Lir] | None = None, name: str = "function",
    wrapped: bool = False, content: Any = None,
    take: Callable[[str], Future[jax.stages.Compiled | None] | None] | None = None,
) -> Callable[[], Executable]:  # fmt: skip
    """Trace a program, and return a function that compiles it or loads it, which may run in another thread.

    A program that the compile cache has for `content` and the arguments is not traced; see `trace_or_load`. If the plan
    donates the state, the compiled program is examined for whether it is updated in place.

    Args:
        lir: the planned program.
        function: its pure function `(params, state, inputs) → (outputs, state)`, wrapped if it has a wrapper.
        params, state, inputs: the arguments, arrays or `jax.ShapeDtypeStruct`.
        shardings: the shardings on several devices; None on one.
        companions: the companion programs of a wrapper; see `HasCompanions`.
        name: the name of the program in XLA and in traces; characters that an identifier cannot have become `_`.
        wrapped: whether `function` is a wrapper around the program.
        content: all data that `function` is traced from; None if it is not known.
        take: returns the program of a record in the compile cache that a thread loads already.

    Raises:
        ProfileError: XLA refuses one of the profile's compiler options.
        GraphError: the returned state has other types than its argument; or as `check_donation`, if the plan is strict.
    """
    # With debug_nans JAX keeps every argument alive, so nothing is donated, and there is nothing to prove.
    may_donate = not jax.config.jax_debug_nans  # type: ignore[attr-defined]
    donates_state = may_donate and lir.plan.donate_state and bool(state)
    consumed_inputs = lir.plan.donate_inputs if may_donate else ()
    donated = ((1,) if donates_state else ()) + ((3,) if consumed_inputs else ())
    options = dict(lir.plan.compiler_options) or None
    placements = sharding_options(shardings, state, consumed_inputs)
    # `keep_unused`: an array of the state that is written but not read, as in prefill, still donates its memory.
    jitted = jax.jit(
        with_split_inputs(function, name), donate_argnums=donated, compiler_options=options,
        keep_unused=donates_state, **placements,
    )  # fmt: skip
    start = time.perf_counter()
    arguments = (params, state, *split_consumed(inputs, consumed_inputs))
    arguments = arguments if shardings is None else jax.tree.map(without_sharding, arguments)
    traced_from = content, name, (donated, options, donates_state)
    key = None if content is None or shardings is not None else trace_key(traced_from, arguments, None)
    types = jax.tree.map(abstract, arguments)  # no arrays, as `lower` outlives this call
    lower = functools.cache(lambda: jitted.lower(*types))
    compile_lir = partial(compile_or_load, lir, name, arguments, (options, placements), key)
    load = trace_or_load(lower, key, compile_lir, None if key is None or take is None else take(key))
    trace_seconds = time.perf_counter() - start
    # A state that is not donated is copied, as the plan says. A wrapper computes values that are not in the plan.
    is_checked = donates_state or (may_donate and not state and not wrapped)

    def compile_traced() -> Executable:
        start = time.perf_counter()
        compiled, from_cache, results = load()
        end = time.perf_counter()
        proof = check_donation(lir, shardings, companions or {}, name, compiled, results) if is_checked else None
        seconds = {"trace": trace_seconds, "compile": end - start, "prove": time.perf_counter() - end}
        return Executable(lir, compiled, lower, seconds, proof, consumed_inputs, from_cache)

    return compile_traced


def with_split_inputs(function: Function, name: str) -> Callable[..., Results]:
    """Return the function with its inputs as `split_consumed` splits them, and with `name` as its name in XLA."""

    def split_function(params: Arrays, state: StateArrays, inputs: Arrays, *consumed: Arrays) -> Results:
        return function(params, state, {**inputs, **consumed[0]} if consumed else inputs)

    split_function.__name__ = re.sub(r"\W+", "_", name)
    return split_function


def compile_or_load(
    lir: Lir, name: str, arguments: Any, options: tuple[Any, ...], record_key: str | None, lowered: jax.stages.Lowered
) -> tuple[jax.stages.Compiled, bool]:
    """Return the compiled program of a plan, as `compile_lowered` does; `name` is its name in error messages.

    Raises:
        ProfileError: XLA refuses one of the profile's compiler options.
    """
    # `profile()` reads block paths from the HLO. They are not in the StableHLO, so the cache key needs them too.
    paths = "\n".join(str(node.origin.path) for _, node in lir.graph.walk())
    try:
        with out_of_memory(f"compiling {name}"):
            return compile_lowered(lowered, arguments, (*options, paths), record_key)
    except jax.errors.JaxRuntimeError as error:
        if not any(f"{kind} option" in str(error) for kind in ("compile", "setting")):
            raise
        raise ProfileError(f"backend.{lir.plan.target}.compiler_options: {first_line(error)}") from error


def check_donation(
    lir: Lir, shardings: Shardings | None, companions: Mapping[str, Lir], name: str, compiled: Any, results: Any
) -> DonationProof:
    """Return the measured memory of a compiled program, with what it takes more than planned.

    The arguments are as in `trace_program`, with JAX's compiled stage and the types of the results.

    Raises:
        GraphError: the returned state has other types; or the plan is strict, and the state is not updated in place or
            there are more temporaries than planned.
    """
    state_shardings, gathered_bytes = ({}, 0) if shardings is None else (shardings.state, shardings.gathered_bytes)
    proof = measure_donation(lir, compiled, results[1], state_shardings, gathered_bytes, companions)
    # A copied state is only slow, but one of other types is wrong: the next call would refuse it.
    if (lir.plan.strict or proof.changed) and (problem := proof.problem()):
        cure = "" if proof.changed else "; donation.strict = false in the profile runs it"
        raise GraphError(f"{lir.graph.name}: {name}: {problem}{cure}")
    return proof


def uncovered_arguments(wrapper: object, compiled_wrappers: Iterable[object]) -> str:
    """Return a message about the request arguments that warm-up did not cover.

    Args:
        wrapper: the loop or function to compile.
        compiled_wrappers: the loops or functions that warm-up compiled.

    Returns:
        The arguments that differ from the nearest known one; empty if none differ, or if `wrapper` does not depend on
        arguments.
    """
    if not isinstance(wrapper, HasRequestArguments):
        return ""
    ours = wrapper.arguments()
    candidates = [k.arguments() for k in compiled_wrappers if isinstance(k, HasRequestArguments)]
    nearest = max(candidates, key=lambda theirs: len(ours.items() & theirs.items()), default={})
    differ = [name for name, value in ours.items() if nearest.get(name) != value]
    if not differ:
        return ""
    covered = ", ".join(f"{name}={nearest[name]}" for name in differ if name in nearest)
    uncovered = ", ".join(f"{name}={ours[name]}" for name in differ)
    return f"warm-up was {f'with {covered}, not ' if covered else 'without '}{uncovered}"
