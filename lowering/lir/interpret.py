"""Interpreter of MIR graphs: it walks the nodes and calls each op's `eval`. Under `jax.jit` this traces the program.

The plan decides how a region runs: as a Python loop over the body (`unroll`) or as `lax.scan`. In a scan, layer
parameters are stacked arrays that are sliced, by row number if layers share weights, and state is a carry that is
updated in place. With `remat`, a gradient saves few values of each iteration and recomputes the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from rlx_jax.ir.graph import BodyInput, Constant, Graph, Input, Leaf, Mir, Node, Param, StateRead, Value
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.shape import Shard
from rlx_jax.ir.param import Program, Stack, packed_arrays
from rlx_jax.ir.paths import bind_path, path_text
from rlx_jax.ir.region import Repeat
from rlx_jax.lowering.lir.experts import BY_NUMBER, run_sharded
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.packed import PackedWeight, decoded, packed_implementation, packed_weight
from rlx_jax.lowering.lir.per_shard import ShardProgram
from rlx_jax.lowering.lir.plan import CHOICE_OPS, Call, Choice, array_programs, call_of, find_stack, state_leaves
from rlx_jax.lowering.sharding import ModelSharding

AnyArray = Any
TracedNodes = dict[tuple[int, ...], Callable[..., Any]]  # jitted functions of ops, by the numbers of their nodes

# Inlines a jitted function when its caller is traced, so that the program is the same as without `jax.jit`. From JAX
# 0.11 on, `inline=True` inlines later and adds the function to the names of its instructions.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

SAVE_DOTS: Callable[..., Any] = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def save_products(primitive: Any, *types: Any, **options: Any) -> Any:
    """Policy that saves what `SAVE_DOTS` saves, and the results of cuDNN's attention.

    JAX has no public name for that primitive, so its name is matched by prefix.
    """
    return primitive.name.startswith("dot_product_attention_fwd") or SAVE_DOTS(primitive, *types, **options)


# Policies of `jax.checkpoint`: the values that a gradient saves in each iteration, in addition to its operands.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "layer": None,
    "dots": SAVE_DOTS,
    "products": save_products,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@dataclass
class Env:
    """Environment of the interpreter: the arrays of leaves, and how to run.

    Attributes:
        params: parameters by program.
        inputs: inputs by name.
        state: state arrays by name; writes replace them.
        scan: whether regions run under `lax.scan`.
        remat: `none` or a name in `REMAT_POLICIES`.
        choices: the chosen implementations.
        model_sharding: the sharding; None on one device.
        target: the kind of device that the program runs on.
        iteration: the iteration of an unrolled region, else None.
        operands: the operands of the current region.
        layer_params: in a scan, the slices of the parameters that differ between layers.
        traced: in unrolled layers with state, the functions of the body's ops, by node numbers; else None.
    """

    params: Mapping[Program, AnyArray]
    inputs: Mapping[str, AnyArray]
    state: dict[str, AnyArray]
    scan: bool = False
    remat: str = "none"
    choices: Mapping[Call, Choice] = field(default_factory=dict)
    model_sharding: ModelSharding | None = None
    target: str = "cpu"
    iteration: int | None = None
    operands: tuple[AnyArray, ...] = ()
    layer_params: Mapping[Param, AnyArray] = field(default_factory=dict)
    traced: TracedNodes | None = None

    def read_leaf(self, op: Leaf) -> AnyArray:
        """Return the array of a leaf."""
        match op:
            case Input(input=name):
                return self.inputs[name]
            case Param() if self.scan and op.varies:
                return self.gather(op.programs[0], self.layer_params[op])
            case Param():
                return self.gather(op.program_at(self.iteration), self.weight(op.program_at(self.iteration)))
            case StateRead(leaf=leaf):
                return self.state[leaf.key(self.iteration)]
            case BodyInput(index=index):
                return self.operands[index]
            case Constant():
                return jnp.asarray(op.array)
        raise TypeError(op)

    def gather(self, program: Program, array: AnyArray) -> AnyArray:
        """Return a parameter in its compute sharding, gathered from its storage sharding.

        Its gradient is reduce-scattered back to the storage sharding.
        """
        if self.model_sharding is None:
            return array
        if isinstance(array, PackedWeight):
            programs = packed_arrays(program)
            return replace(array, arrays={n: self.gather(programs[n], a) for n, a in array.arrays.items()})
        compute_sharding = self.model_sharding.compute_sharding(program)
        storage_sharding = self.model_sharding.storage_sharding(program)
        if compute_sharding == storage_sharding:
            return array
        # Constraints apply to gradients too: with that to the storage sharding, each device sums its own shard only.
        return lax.with_sharding_constraint(lax.with_sharding_constraint(array, storage_sharding), compute_sharding)

    def weight(self, program: Program) -> AnyArray:
        """Return the array of a program: a parameter, or a row of a stacked one."""
        if program in self.params:
            return self.params[program]
        match = find_stack(self.params, (program,))
        if match is not None:
            stack, (row,) = match
            return self.params[stack][row]
        arrays = array_programs((program,))
        assert arrays, program  # `Layout.check` has run
        return packed_weight(program, {name: self.weight(array) for name, (array,) in arrays.items()})

    def stacked(self, programs: tuple[Program, ...]) -> tuple[AnyArray, tuple[int, ...]]:
        """Return the stacked parameter of all iterations and the row of each; no row numbers if rows are in order."""
        if (stack := Stack(programs)) in self.params:
            return self.params[stack], ()
        match = find_stack(self.params, programs)
        if match is not None:
            return self.params[match[0]], match[1]
        stacks = {name: self.stacked(array) for name, array in array_programs(programs).items()}
        rows = next(iter(stacks.values()))[1]
        return packed_weight(programs[0], {name: stack for name, (stack, _) in stacks.items()}), rows


def interpret(graph: Graph, env: Env) -> tuple[AnyArray, ...]:
    """Run a graph and return its outputs; `env.state` is updated with its writes."""
    values: dict[Value, AnyArray] = {}
    # Consecutive nodes of a block.
    for path, group in itertools.groupby(range(len(graph.nodes)), lambda number: graph.nodes[number].origin.path):
        numbers = tuple(group)
        with jax.named_scope(path_text(bind_path(path, env.iteration)) or graph.name):
            # A region reads the parameters and the state of its iteration.
            if env.traced is None or any(isinstance(graph.nodes[number].op, Repeat) for number in numbers):
                _run_nodes(graph, numbers, values, env)
            else:
                _run_traced(graph, numbers, values, env, env.traced)
    writes = {leaf.key(env.iteration): values[v] for leaf, v in graph.writes}
    env.state.update(writes)
    return tuple(values[v] for v in graph.outputs)


def interpret_shards(program: ShardProgram, env: Env) -> tuple[AnyArray, ...]:
    """Run the program of one device on each, with its shards of the arrays, and update `env.state`."""
    assert (sharding := env.model_sharding) is not None
    programs = list(env.params)
    roles = {name: roles for name, (_, roles) in state_leaves(program.graph, env.scan).items()}
    state = {name: env.state[name] for name in roles}

    def run(params: list[AnyArray], state: dict[str, AnyArray], inputs: dict[str, AnyArray]) -> Any:
        arrays = dict(zip(programs, params, strict=True))
        inner = replace(env, params=arrays, state=dict(state), inputs=inputs, model_sharding=None)
        outputs = interpret(program.graph, inner)
        return outputs, inner.state

    replicated = PartitionSpec()
    params = [sharding.compute_sharding(p).spec for p in programs]
    leaves = {name: sharding.value_sharding(roles[name], array.shape).spec for name, array in state.items()}
    # No check of what all devices have alike: kernels do not declare it.
    specs: Any = {"in_specs": (params, leaves, replicated), "out_specs": (program.outputs, leaves), "check_vma": False}
    outputs: tuple[AnyArray, ...]
    outputs, state = jax.shard_map(run, mesh=sharding.mesh, **specs)(list(env.params.values()), state, dict(env.inputs))
    env.state.update(state)
    return outputs


def _run_nodes(
    graph: Graph, numbers: tuple[int, ...], values: dict[Value, AnyArray], env: Env
) -> list[tuple[AnyArray, ...]]:
    """Run nodes, add their results to `values`, and return the results of each."""
    all_results = []
    for number in numbers:
        node = graph.nodes[number]
        results = _run(graph, node, tuple(values[v] for v in node.inputs), env)
        values.update({Value(number, i): r for i, r in enumerate(results)})
        all_results.append(results)
    return all_results


def _run_traced(
    graph: Graph, numbers: tuple[int, ...], values: dict[Value, AnyArray], env: Env, traced: TracedNodes
) -> None:
    """Run nodes as `_run_nodes` does; ops are traced in the first layer only, unless their types differ in another."""
    leaves = tuple(number for number in numbers if isinstance(graph.nodes[number].op, Leaf))
    _run_nodes(graph, leaves, values, env)
    ops = tuple(number for number in numbers if number not in leaves)
    inputs = tuple(dict.fromkeys(v for number in ops for v in graph.nodes[number].inputs if v in values))
    if ops not in traced:
        # Without arrays, so that none of this layer becomes part of the function.
        layer_env = Env({}, {}, {}, choices=env.choices, model_sharding=env.model_sharding, target=env.target)

        def run(*arrays: AnyArray) -> list[tuple[AnyArray, ...]]:
            return _run_nodes(graph, ops, dict(zip(inputs, arrays, strict=True)), layer_env)

        traced[ops] = jax.jit(run, inline=INLINE)
    for number, results in zip(ops, traced[ops](*(values[v] for v in inputs)), strict=True):
        values.update({Value(number, i): r for i, r in enumerate(results)})


def _run(graph: Graph, node: Node, operands: tuple[AnyArray, ...], env: Env) -> tuple[AnyArray, ...]:
    """Run one node and return its results."""
    op = node.op
    if isinstance(op, Leaf):
        return (env.read_leaf(op),)
    if isinstance(op, Repeat):
        return _scan(op, operands, env) if env.scan else _unroll(op, operands, env)
    assert isinstance(op, Mir), op
    if isinstance(op, Shard) and env.model_sharding is not None:
        (x,) = operands
        return (lax.with_sharding_constraint(x, env.model_sharding.value_sharding(op.roles, x.shape)),)
    choice = env.choices.get(call_of(graph, node)) if isinstance(op, CHOICE_OPS) else None
    takes_packed = (*BY_NUMBER, "matvec", "packed_tiles")
    reads_packed = env.model_sharding is None and choice is not None and choice.implementation in takes_packed
    if any(isinstance(operand, PackedWeight) for operand in operands) and not reads_packed:
        packed_run = packed_implementation(op, operands, env.target)
        if packed_run is not None:
            return (packed_run(op, *operands),)
        operands = tuple(map(decoded, operands))
    run = op.eval
    if choice is not None and choice.implementation != "xla":
        run = functools.partial(IMPLEMENTATIONS[choice.implementation], op)
    if isinstance(op, ExpertFfn) and op.roles and env.model_sharding is not None:
        return (run_sharded(op, run, env.model_sharding, operands),)
    if isinstance(op, TopK) and op.roles and env.model_sharding is not None:
        rows = env.model_sharding.value_sharding(op.roles, operands[0].shape).spec
        run = jax.shard_map(run, mesh=env.model_sharding.mesh, in_specs=rows, out_specs=(rows, rows))
    results = run(*operands)
    return results if isinstance(results, tuple) else (results,)


def take_row(array: AnyArray, row: AnyArray) -> AnyArray:
    """Return one row of a stacked parameter, which may be packed."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, row, keepdims=False), array)


def _unroll(op: Repeat, operands: tuple[AnyArray, ...], env: Env) -> tuple[AnyArray, ...]:
    """Run repeated layers as a Python loop: the carries, then the other results of each iteration."""
    carries, shared = operands[: op.carries], operands[op.carries :]
    sides: list[tuple[AnyArray, ...]] = []
    # Bodies that write state have no gradient.
    traced: TracedNodes | None = {} if op.body.writes else None
    for i in range(op.count):

        def step(*operands: AnyArray, i: int = i) -> tuple[AnyArray, ...]:
            return interpret(op.body, replace(env, iteration=i, operands=operands, traced=traced))

        out = _with_remat(step, op, env)(*carries, *shared)
        carries = out[: op.carries]
        sides.append(out[op.carries :])
    return (*carries, *(side for column in zip(*sides, strict=True) for side in column))


def _scan(op: Repeat, operands: tuple[AnyArray, ...], env: Env) -> tuple[AnyArray, ...]:
    """Run repeated layers under `lax.scan`, with the same results as `_unroll`."""
    shared, params = operands[op.carries :], op.body.params()
    varying = [p for p in params if p.varies]
    leaves, picks = zip(*(env.stacked(p.programs) for p in varying), strict=True) if varying else ((), ())
    keys = [read.leaf.key(None) for read in op.body.state_reads() if read.leaf.key(0) != read.leaf.key(1)]
    companion_keys = [leaf.key(None) for leaf, _ in op.body.writes if leaf.every]
    # Sliced from its stacked parameter once instead of in every iteration.
    shared_weights = {p.programs[0]: env.weight(p.programs[0]) for p in params if not p.varies}

    def step(carry: Any, xs: Any) -> Any:
        carried, state = carry
        i, weights = xs
        layer = {k: lax.dynamic_index_in_dim(s, i, keepdims=False) for k, s in zip(keys, state, strict=True)}
        rows = zip(leaves, picks, weights, strict=True)
        layer_params = [take_row(leaf, w) if pick else w for leaf, pick, w in rows]
        inner = replace(
            env,
            params={**env.params, **shared_weights},
            operands=(*carried, *shared),
            layer_params=dict(zip(varying, layer_params, strict=True)),
            state={**env.state, **layer},
            iteration=None,
        )
        out = interpret(op.body, inner)
        state = [lax.dynamic_update_index_in_dim(s, inner.state[k], i, 0) for k, s in zip(keys, state, strict=True)]
        return (out[: op.carries], state), (out[op.carries :], [inner.state[k] for k in companion_keys])

    init = (operands[: op.carries], [env.state[key] for key in keys])
    # Layers that share weights slice their rows by number; otherwise the scan passes each layer its row.
    weights = [jnp.asarray(pick, jnp.int32) if pick else leaf for leaf, pick in zip(leaves, picks, strict=True)]
    xs = (jnp.arange(op.count, dtype=jnp.int32), weights)
    (carries, state), (ys, companions) = lax.scan(_with_remat(step, op, env), init, xs)
    env.state.update(zip((*keys, *companion_keys), (*state, *companions), strict=True))
    return (*carries, *(y[i] for y in ys for i in range(op.count)))


def _with_remat(step: Callable[..., Any], op: Repeat, env: Env) -> Callable[..., Any]:
    """Return one iteration under `jax.checkpoint` if the plan has remat; bodies that write state have no gradient."""
    if env.remat == "none" or op.body.writes:
        return step
    # XLA cannot merge recomputed values with the original ones across a scan's body, so CSE need not be prevented.
    return jax.checkpoint(step, policy=REMAT_POLICIES[env.remat], prevent_cse=not env.scan)
