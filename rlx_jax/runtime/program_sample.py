"""Measure the speed of a planned program on this CPU by running a few of its layers with random weights.

On a CPU the speed of XLA depends more on heads, widths, dtypes, implementations, fusion and the weights that fit the
caches than on the peak rates of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import replace
from rlx_jax.inspection.rates import least_seconds
from rlx_jax.ir.graph import Graph, Node, TypeCache
from rlx_jax.ir.param import Program
from rlx_jax.ir.region import Repeat, first_programs
from rlx_jax.ir.types import TensorType, is_float
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.lowering.lir.plan import Layout, Lir, array_programs, find_stack, state_leaves

# Number of dispatches of a decoding run. Before the first one the caches contain other data.
DISPATCHES = 8
# Number of random values, repeated in every parameter. It divides no axis, so that a router selects experts evenly.
RANDOM_VALUES = 1_000_003


def cut_layers(graph: Graph, layers: int) -> Graph:
    """Return a program with the first `layers` iterations of each of its repeated regions."""

    types = TypeCache()

    def cut(node: Node) -> Node:
        op = node.op
        if not isinstance(op, Repeat) or len(node.types) != op.carries or op.count <= layers:
            return node
        return replace(node, op=replace(op, count=layers, body=first_programs(op.body, layers, types)))

    return replace(graph, nodes=tuple(map(cut, graph.nodes)))


def read_bytes(graph: Graph, layout: Layout) -> int:
    """Return the bytes of the stored parameters that a program reads."""
    return sum(program.type.nbytes for program in set(_stored(graph, layout)))


def _stored(graph: Graph, layout: Layout) -> Iterator[Program]:
    """Yield the stored parameters that a program reads."""
    names = layout.by_program()
    for program in (program for param in graph.params() for program in param.programs):
        arrays = [program] if program in names or find_stack(names, (program,)) else []
        for array in arrays or [a for (a,) in array_programs((program,)).values()]:
            stack = None if array in names else find_stack(names, (array,))
            yield stack[0] if stack is not None else array


def sample_run(lir: Lir, layout: Layout, steps: int) -> Callable[[], Any]:
    """Return a function that runs a program on this CPU with random parameters, once or for several decoding steps."""
    graph = lir.graph
    random = np.random.default_rng(0).standard_normal(RANDOM_VALUES, np.float32) * 0.02

    def array(t: TensorType) -> jax.Array:
        values = random if is_float(t.dtype) else np.arange(RANDOM_VALUES) % 97
        return jnp.asarray(np.resize(values.astype(t.dtype), t.shape))

    def step(params: dict[Program, Any], state: dict[str, Any], inputs: dict[str, Any]) -> Any:
        env = Env(params, inputs, dict(state), lir.plan.scan, "none", lir.plan.choices, None, lir.plan.target)
        return interpret(graph, env), env.state

    def run(params: list[Any], state: dict[str, Any], inputs: dict[str, Any]) -> Any:
        arrays = dict(zip(stored, params, strict=True))
        if steps == 1:
            return step(arrays, state, inputs)

        def decode(_: Any, carry: Any) -> Any:
            tokens, state = carry
            (logits, *_), state = step(arrays, state, inputs | {name: tokens})
            chosen = logits.argmax(-1).astype(tokens.dtype)
            return chosen.reshape(tokens.shape) if chosen.size == tokens.size else tokens, state

        return jax.lax.fori_loop(0, steps, decode, (inputs[name], state))

    with jax.default_device("cpu"):
        stored = list(dict.fromkeys(_stored(graph, layout)))
        params = [array(program.type) for program in stored]
        inputs = {i.input: array(i.type) for i in graph.inputs}
        name = graph.inputs[0].input
        tokens = int(inputs[name].shape[-1]) if inputs[name].ndim > 1 else 1
        inputs |= {n: jnp.full_like(a, tokens) for n, a in inputs.items() if a.ndim == 1}
        state = {n: jnp.asarray(np.zeros(t.shape, t.dtype)) for n, (t, _) in state_leaves(graph, lir.plan.scan).items()}
        function = jax.jit(run, donate_argnums=1, compiler_options=dict(lir.plan.compiler_options) or None)
        states = [state]

    def call() -> None:
        with jax.default_device("cpu"):
            for _ in range(DISPATCHES if steps > 1 else 1):
                results, states[0] = function(params, states[0], inputs)
            jax.block_until_ready(results)

    return call


def sample_seconds(lir: Lir, layout: Layout, steps: int) -> float:
    """Return the seconds that a program takes; for several decoding steps, the seconds of one."""
    (seconds,) = least_seconds([sample_run(lir, layout, steps)], 0.5)
    return seconds / (steps * DISPATCHES if steps > 1 else 1)
