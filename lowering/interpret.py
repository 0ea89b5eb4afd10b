"""Run a MIR graph: walk the nodes and call each op's `eval`. Under `jax.jit` this traces the program.

A region runs as the plan says: a Python loop over the body (`unroll`) or `lax.scan`. In a scan, layer parameters
are stacked leaves that are sliced, and state is a carry that is updated in place. With `remat` a gradient keeps
little of each iteration and computes the rest again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.graph import BodyInput, Constant, Graph, Input, Leaf, Mir, Node, Param, StateRead, Value
from rlx_jax.ir.param import Program, Stack
from rlx_jax.ir.region import Repeat
from rlx_jax.ir.types import bind_path, path_text
from rlx_jax.lowering.choices import Call, Choice, call_of
from rlx_jax.lowering.implementations import CHOSEN, IMPLEMENTATIONS

Array = Any
StateKey = tuple[str, str]

REMAT: dict[str, Callable[..., Any] | None] = {
    "layer": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a gradient keeps of each iteration beside its operands, as a policy of `jax.checkpoint`."""


@dataclass
class Env:
    """What leaves mean: parameters by program, inputs by name, state by (block path, slot)."""

    params: Mapping[Program, Array]
    inputs: Mapping[str, Array]
    state: dict[StateKey, Array]
    scan: bool = False
    remat: str = "none"
    choices: Mapping[Call, Choice] = field(default_factory=dict)
    iteration: int | None = None
    operands: tuple[Array, ...] = ()
    sliced: Mapping[Program, Array] = field(default_factory=dict)

    def leaf(self, op: Leaf) -> Array:
        """The array a leaf stands for."""
        match op:
            case Input(input=name):
                return self.inputs[name]
            case Param(programs=programs) if len(programs) > 1 and self.scan:
                return self.sliced[Stack(programs)]
            case Param():
                return self.params[op.at(self.iteration)]
            case StateRead(leaf=leaf):
                return self.state[leaf.key(self.iteration)]
            case BodyInput(index=index):
                return self.operands[index]
            case Constant():
                return jnp.asarray(op.array)
        raise TypeError(op)


def interpret(graph: Graph, env: Env) -> tuple[Array, ...]:
    """The outputs of `graph`; `env.state` is updated with what it writes."""
    values: dict[Value, Array] = {}
    for number, node in enumerate(graph.nodes):
        with jax.named_scope(path_text(bind_path(node.origin.path, env.iteration)) or graph.name):
            results = _run(graph, node, tuple(values[v] for v in node.inputs), env)
        values.update({Value(number, i): r for i, r in enumerate(results)})
    written = {leaf.key(env.iteration): values[v] for leaf, v in graph.writes}
    env.state.update(written)
    return tuple(values[v] for v in graph.outputs)


def _run(graph: Graph, node: Node, operands: tuple[Array, ...], env: Env) -> tuple[Array, ...]:
    op = node.op
    if isinstance(op, Leaf):
        return (env.leaf(op),)
    if isinstance(op, Repeat):
        return _scan(op, operands, env) if env.scan else _unroll(op, operands, env)
    assert isinstance(op, Mir), op
    choice = env.choices.get(call_of(graph, node)) if isinstance(op, CHOSEN) else None
    out = op.eval(*operands) if choice is None else IMPLEMENTATIONS[choice.implementation](op, *operands)
    return out if isinstance(out, tuple) else (out,)


def _unroll(op: Repeat, operands: tuple[Array, ...], env: Env) -> tuple[Array, ...]:
    carries, shared = operands[: op.carries], operands[op.carries :]
    sides: list[tuple[Array, ...]] = []
    for i in range(op.count):

        def step(*operands: Array, i: int = i) -> tuple[Array, ...]:
            return interpret(op.body, replace(env, iteration=i, operands=operands))

        out = _recomputed(step, op, env)(*carries, *shared)
        carries = out[: op.carries]
        sides.append(out[op.carries :])
    return (*carries, *(side for column in zip(*sides, strict=True) for side in column))


def _scan(op: Repeat, operands: tuple[Array, ...], env: Env) -> tuple[Array, ...]:
    shared = operands[op.carries :]
    stacks = [Stack(p.programs) for p in op.body.params() if len(p.programs) > 1]
    keys = [read.leaf.key(None) for read in op.body.state_reads() if read.leaf.key(0) != read.leaf.key(1)]

    def step(carry: Any, xs: Any) -> Any:
        carried, state = carry
        i, weights = xs
        layer = {k: lax.dynamic_index_in_dim(s, i, keepdims=False) for k, s in zip(keys, state, strict=True)}
        inner = replace(
            env,
            operands=(*carried, *shared),
            sliced=dict(zip(stacks, weights, strict=True)),
            state={**env.state, **layer},
            iteration=None,
        )
        out = interpret(op.body, inner)
        state = [lax.dynamic_update_index_in_dim(s, inner.state[k], i, 0) for k, s in zip(keys, state, strict=True)]
        return (out[: op.carries], state), out[op.carries :]

    init = (operands[: op.carries], [env.state[key] for key in keys])
    xs = (jnp.arange(op.count, dtype=jnp.int32), [env.params[stack] for stack in stacks])
    (carries, state), ys = lax.scan(_recomputed(step, op, env), init, xs)
    env.state.update(zip(keys, state, strict=True))
    return (*carries, *(y[i] for y in ys for i in range(op.count)))


def _recomputed(step: Callable[..., Any], op: Repeat, env: Env) -> Callable[..., Any]:
    """One iteration, under `jax.checkpoint` if the plan says so. A body that writes state is never differentiated."""
    if env.remat == "none" or op.body.writes:
        return step
    # A scan's body is compiled once, so that nothing in it can be merged with what it recomputes.
    return jax.checkpoint(step, policy=REMAT[env.remat], prevent_cse=not env.scan)
