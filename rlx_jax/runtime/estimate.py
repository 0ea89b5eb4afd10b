"""This module estimates what a program costs on a device from its LIR and the device's roofline.

Shapes, FLOPs and bytes are those of the program itself (`op_costs`, `activation_bytes`, `Layout`, the state's types).
On the CPU that runs, a few layers of the program run too, with random weights: estimates are the roofline's, times what
they took beyond their own roofline. There the speed of XLA depends more on heads, widths, dtypes, implementations,
fusion and the weights that fit the caches than on the peak rates of the machine.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.pipeline import Template, make_lir
from rlx_jax.dataclasses import replace
from rlx_jax.inspection.plan_record import ProgramEstimate
from rlx_jax.inspection.rates import KernelKind, Rates, least_seconds
from rlx_jax.inspection.work import program_bytes, saved_bytes
from rlx_jax.ir.graph import Graph, Mir, Node, Param, TypeCache
from rlx_jax.ir.kernel_group import DeltaGroup
from rlx_jax.ir.operands import zero
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.experts import ExpertFfn, GroupedMatMul
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.ops.recurrent import GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.param import Program, packed_parameter, packing_of
from rlx_jax.ir.paths import Path
from rlx_jax.ir.region import Repeat, first_programs
from rlx_jax.ir.types import TensorType, is_float, short_name
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.lowering.inspect.outline import OpCost, op_costs
from rlx_jax.lowering.lir.attention import CHUNK_SCORE_BYTES
from rlx_jax.lowering.lir.interpret import Env, interpret
from rlx_jax.lowering.lir.packed import MAX_FUSED_ROWS
from rlx_jax.lowering.lir.plan import (
    GROUPS,
    PRODUCTS,
    RECURRENCES,
    XLA_CHOICE,
    Layout,
    Lir,
    array_programs,
    call_of,
    find_stack,
    state_leaves,
)
from rlx_jax.lowering.sharding import ModelSharding, shard_type
from rlx_jax.runtime.programs import Programs
from rlx_jax.runtime.sequence_state import LENGTH, state_shardings

# The part of the scratch arrays of a chunked recurrence that is live at once, fitted to XLA's peaks in f32 and bf16 on
# a CPU and on an H200; scratch has the dtype of the values.
LIVE_SCRATCH: Mapping[type, float] = {GatedDeltaOp: 0.58, SelectiveScanOp: 0.39}
GPU_LIVE_SCRATCH: Mapping[type, float] = {GatedDeltaOp: 0.46, SelectiveScanOp: 0.56}
SCRATCH_PASSES = {"chunks_at_once": 1, "blocked": 2}
# The workspace that XLA allocates for a product by cuBLAS on Hopper. It is 4 MiB on other GPUs: estimates are higher.
CUBLAS_WORKSPACE = 2**25


def estimate_program(
    programs: Programs, template: Template, program: str, sizes: Mapping[str, int], rates: Rates
) -> ProgramEstimate:
    """Estimate one run of a program.

    Over a mesh the program is that of one device's rows. Products, attention and recurrences are divided as their
    weights and heads are; all other values, such as the hidden states, are taken for replicated along those axes.

    Args:
        programs: the programs of the model.
        template: the template of the program.
        program: its name.
        sizes: the size of each symbol.
        rates: the device.
    """
    sharding = programs.model_sharding
    binding = {name: size for name, size in sizes.items() if name in template.symbols}
    local = dict(binding)
    if sharding is not None and "batch" in local:
        local["batch"] //= sharding.num_batch_shards(local["batch"])
    lir = make_lir(template, local, programs.settings)
    estimate = _roofline(programs, lir, program, binding, sharding, rates)
    measured = rates.samples and lir.shard is None
    share = _measured_share(programs, template, program, local, rates) if measured else 1.0
    parts = {f"{name}_seconds": getattr(estimate, f"{name}_seconds") * share for name in ("compute", "memory", "start")}
    return replace(estimate, **parts)


def _roofline(
    programs: Programs, lir: Lir, program: str, sizes: Mapping[str, int], sharding: ModelSharding | None, rates: Rates
) -> ProgramEstimate:
    """Return the estimate of a planned program from the limits of the device alone."""
    flops = nbytes = 0
    seconds = [0.0, 0.0, 0.0, 0.0]
    for entry, op_flops, op_bytes, parts in op_estimates(lir, sharding, rates):
        flops += entry.times * op_flops
        nbytes += entry.times * op_bytes
        seconds = [total + entry.times * part for total, part in zip(seconds, parts, strict=True)]
    workspace = partial(workspace_bytes, lir)
    live = activation_bytes(lir.graph, lir.plan.donate_state, lir.plan.scan, workspace)
    live += sharding.gathered_bytes(programs.layout.params.values()) if sharding is not None else 0
    host = rates.call_seconds + rates.argument_seconds * len(programs.layout.params) if program == "prefill" else 0.0
    compute, memory, start, link = seconds
    return ProgramEstimate(program, sizes, flops, nbytes, live, compute, memory, start, link, host)


# How many layers samples have, the most that fit: bytes of parameters that few caches hold, about a
# second's operations, and so many bytes of state. With more parameters in one layer than the last, none is run.
SAMPLE_LAYERS = (16, 8, 4, 2, 1)
MAX_LAYER_BYTES, MAX_SAMPLE_FLOPS, MAX_STATE_BYTES, MAX_SAMPLE_BYTES = 2**28, 2**37, 2**30, 2**31


def _measured_share(
    programs: Programs, template: Template, program: str, sizes: Mapping[str, int], rates: Rates
) -> float:
    """Return how long a program takes on the CPU that runs, as a multiple of its roofline: that of a part of it."""
    is_step, sizes = program == "extend" and sizes["seq"] == 1, dict(sizes)
    while True:
        lir = make_lir(template, sizes, programs.settings)
        for layers in (0,) if lir.plan.scan else SAMPLE_LAYERS:
            part = replace(lir, graph=cut_layers(lir.graph, layers) if layers else lir.graph)
            nbytes = read_bytes(part.graph, programs.layout)
            state = sum(t.nbytes for t, _ in state_leaves(part.graph, part.plan.scan).values())
            estimate = _roofline(programs, part, program, sizes, None, rates)
            fits = nbytes <= (MAX_SAMPLE_BYTES if layers <= 1 else MAX_LAYER_BYTES) and state <= MAX_STATE_BYTES
            if fits and (is_step or estimate.flops <= MAX_SAMPLE_FLOPS):
                steps = programs.settings.loop.steps if is_step else 1
                return sample_seconds(part, programs.layout, steps) / sum(estimate.parts.values())
        halved = next((n for n in ("batch", "context" if is_step else "seq") if sizes.get(n, 1) > 1), None)
        if nbytes > MAX_SAMPLE_BYTES or halved is None:
            return 1.0
        sizes[halved] //= 2


def block_seconds(lir: Lir, rates: Rates) -> Mapping[Path, float]:
    """Return the estimated seconds of each block in a run of a program, in all layers together."""
    seconds: dict[Path, float] = defaultdict(float)
    for entry, _, _, parts in op_estimates(lir, None, rates):
        seconds[entry.node.origin.path] += entry.times * sum(parts)
    return seconds


def kernel_kind(op: Mir) -> KernelKind | None:
    """Return the kind of kernel that runs an op; None if it only moves values, which XLA fuses into other ops."""
    if isinstance(op, AttentionOp):
        return "attention"
    if isinstance(op, ExpertFfn | GroupedMatMul):
        return "experts"
    if isinstance(op, RECURRENCES):
        return "recurrence"
    if op.traits.flops is not zero:
        return "product"
    kinds: dict[str, KernelKind] = {"reduction": "reduction", "elementwise": "fused"}
    return kinds.get(op.traits.numeric)


# The start of a kernel of one row with a bf16 weight, to the start of another product: 2.6 µs on an H200.
ONE_ROW_START = 0.74

# Seconds of an op: for its operations, for its bytes, for the start of its kernel, and for a sum over devices.
OpTimes = tuple[float, float, float, float]


def op_estimates(lir: Lir, sharding: ModelSharding | None, rates: Rates) -> Iterator[tuple[OpCost, int, int, OpTimes]]:
    """Yield each op of a program with the FLOPs and bytes of one run of it on one device, and its seconds by part."""
    groups = {id(node.op.body) for _, node in lir.graph.walk() if isinstance(node.op, GROUPS)}
    deltas = {id(node.op.body) for _, node in lir.graph.walk() if isinstance(node.op, DeltaGroup)}
    for entry in op_costs(lir.graph):
        is_grouped, op = id(entry.graph) in groups, entry.node.op
        flops, nbytes, parts = _op_seconds(entry, lir, sharding, rates, is_grouped)
        kind = kernel_kind(op) if isinstance(op, Mir) else None
        if id(entry.graph) in deltas and kind != "recurrence":
            parts = (0.0, 0.0, 0.0, parts[3])  # in registers of the rule's kernels
        elif is_grouped and kind == "reduction":
            parts = (*parts[:2], 0.0, parts[3])  # a norm in the kernel of a product or an attention is no kernel
        yield entry, flops, nbytes, parts


def _op_seconds(
    entry: OpCost, lir: Lir, sharding: ModelSharding | None, rates: Rates, is_grouped: bool
) -> tuple[int, int, OpTimes]:
    """Return the FLOPs and bytes of one run of an op on one device, and its seconds by part."""
    graph, node, cost = entry.graph, entry.node, entry.cost
    assert isinstance(node.op, Mir)
    kind, types = kernel_kind(node.op), [graph.type(v) for v in node.inputs]
    params = [param for v in node.inputs if (param := lir.param_of(graph, v)) is not None]
    flops, nbytes, unpack, shards, link = cost.flops, cost.bytes - saved_bytes(lir, graph, node), 0.0, 1, 0.0
    if kind == "product" and params and not is_grouped:  # kernels decode while they wait for memory
        weight = params[0]
        rows = math.prod(map(int, types[0].shape[:-1]))
        name = implementation_of(lir, graph, node)
        is_fused = name == "packed_tiles" or (rows <= MAX_FUSED_ROWS and lir.plan.target != "cpu")
        unpack = _unpack_seconds(weight, lir.plan.packed, is_fused, rates)
        if name == "lanes":  # converts 16-bit values as fast as f32 is read
            unpack += program_bytes(weight.programs[0], lir.stays_packed(weight)) / rates.bandwidth
    # Arrays that XLA writes to memory between its kernels: of all chunks, and copied weights, which are read again.
    nbytes += SCRATCH_PASSES.get(implementation_of(lir, graph, node), 0) * cost.workspace
    if sharding is not None:
        shards, link = _division(node, params, sharding, rates)
    if kind is None:
        return 0, 0, (0.0, 0.0, 0.0, link)
    dtype = short_name(types[0].dtype) if types else "f32"
    flops, nbytes = flops // shards, nbytes // shards
    dtype = dtype if dtype in rates.flops else "f32"
    compute, memory, start = rates.parts(kind, flops, nbytes, dtype)
    if kind == "product" and is_grouped and types[0].shape[0] == 1 and not any(map(lir.stays_packed, params)):
        start *= ONE_ROW_START
    return flops, nbytes, (compute + unpack / shards, memory, start, link)


def workspace_bytes(lir: Lir, graph: Graph, node: Node) -> int:
    """Return the bytes that XLA needs while an op runs, in addition to its operands and results."""
    types, on_cpu = [graph.type(value) for value in node.inputs], lir.plan.target == "cpu"
    if isinstance(node.op, RECURRENCES):
        live = (LIVE_SCRATCH if on_cpu else GPU_LIVE_SCRATCH).get(type(node.op), 1.0)
        live *= types[0].dtype.itemsize / 4
        return int(live * node.op.traits.workspace(node.op, types, node.types))
    if isinstance(node.op, ExpertFfn):
        # The inputs and results of all choices, which are padded to blocks on a CPU.
        # XLA:CPU computes it in f32, of copies with 16 bits.
        size = types[0].dtype.itemsize
        per_value = (22 if size == 2 else 20) if on_cpu else 2 * size
        rows = per_value * types[5].size * int(types[0].shape[-1])
        # Each block of rows has a copy of the weights of its expert; an expert has a few blocks.
        experts = int(types[1].shape[0])
        copies = min(types[5].size, 3 * experts) if implementation_of(lir, graph, node) == "blocked" else 0
        return rows + copies * sum(t.nbytes for t in types[1:4]) // experts
    if isinstance(node.op, PRODUCTS) and lir.plan.target == "cuda":
        return CUBLAS_WORKSPACE if implementation_of(lir, graph, node) == "xla" else 0
    if on_cpu and node.op == Unary("gelu_tanh"):
        # XLA:CPU does not fuse all of it, except in one row, and computes it in f32.
        return 23 * node.types[0].size if int(node.types[0].shape[0]) > 1 else 0
    if not isinstance(node.op, AttentionOp):
        return 0
    q, k, v = types[:3]
    name = implementation_of(lir, graph, node)
    if name == "cudnn":  # queries at positions have a mask [B,1,S,T] of their dtype
        is_masked = node.op.extra and int(q.shape[1]) > 1
        return q.dtype.itemsize * int(q.shape[0]) * int(q.shape[1]) * int(k.shape[1]) if is_masked else 0
    scores = 4 * node.op.heads * math.prod(map(int, (q.shape[0], q.shape[1], k.shape[1])))
    # Otherwise a CPU transposes keys and values, or holds the scores in f32 and their 16-bit products.
    arrays = 1 if not on_cpu or (name == "heads_first" and q.dtype.itemsize == 4) else 2
    return arrays * min(scores, CHUNK_SCORE_BYTES if name == "query_chunks" else scores) + k.nbytes + v.nbytes


def implementation_of(lir: Lir, graph: Graph, node: Node) -> str:
    """Return the name of the implementation that the plan chose for an op."""
    return lir.plan.choices.get(call_of(graph, node), XLA_CHOICE).implementation


def _unpack_seconds(param: Param, packed: bool, is_fused: bool, rates: Rates) -> float:
    """Return the seconds in which a product decodes a packed parameter; 0 if it is not packed."""
    scheme = packing_of(param.programs[0]) if packed else None
    if scheme is None:
        return 0.0
    per_second = rates.unpack if is_fused else rates.unpack_tiles
    return param.type.size / per_second[SCHEMES[scheme].codes[0].bits < 8]


def _division(node: Node, params: list[Param], sharding: ModelSharding, rates: Rates) -> tuple[int, float]:
    """Return over how many devices an op is divided, and the seconds of the sum over devices that follows it."""
    if isinstance(node.op, (AttentionOp, *RECURRENCES)):
        return sharding.num_shards("heads"), 0.0
    if not params or not isinstance(node.op, (*PRODUCTS, ExpertFfn, Gather)):
        return 1, 0.0
    weight = params[0]
    counts = [sharding.num_weight_shards(weight.programs[0], axis) for axis in range(weight.type.rank)]
    # The axis that is summed over: of an embedding the rows, of experts any.
    contract = getattr(node.op, "contract", 0)
    summed = counts[contract] if isinstance(node.op, PRODUCTS) else math.prod(counts)
    link = rates.link_seconds + sum(t.nbytes for t in node.types) / rates.link if summed > 1 else 0.0
    return math.prod(counts), link


# -- bytes that are exact ----------------------------------------------------------------------


def parameter_bytes(programs: Programs) -> dict[str, int]:
    """Return the bytes of the parameters of one device by packed scheme; by dtype if they are not packed."""
    shardings, sizes = programs.storage_shardings() or {}, Counter[str]()
    for name, program in programs.layout.params.items():
        parameter = packed_parameter(program)
        scheme = None if parameter is None else packing_of(parameter)
        sizes[scheme or short_name(program.type.dtype)] += shard_type(program.type, shardings.get(name)).nbytes
    return dict(sizes)


def state_bytes_by_kind(programs: Programs, template: Template, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the state of one device by kind of layer."""
    sharding = programs.model_sharding
    shardings = {} if sharding is None else state_shardings(template, sizes, sharding)
    result = Counter[str]()
    for name, array_type in template.state.items():
        nbytes = shard_type(array_type.bind(sizes), shardings.get(name)).nbytes
        result[_layer_kind(name, array_type, template)] += nbytes
    return dict(result)


def _layer_kind(name: str, array_type: TensorType, template: Template) -> str:
    """Return the kind of layer that an array of the state belongs to."""
    if name == LENGTH:
        return "lengths"
    if "context" in array_type.symbols:
        return "full"
    return "window" if any(symbol in template.rings for symbol in array_type.symbols) else "recurrent"


# -- the speed of this CPU ---------------------------------------------------------------------


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
