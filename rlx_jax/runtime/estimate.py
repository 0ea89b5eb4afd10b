"""This module estimates what a program costs on a device from its LIR and the device's roofline. Nothing is compiled.

Shapes, FLOPs and bytes are those of the program itself (`op_costs`, `activation_bytes`, `Layout`, the state's types).
On a CPU what attention, mixtures of experts and recurrences reach depends on heads, widths, dtype and implementation
more than on the machine's limits: XLA transposes caches, loops over experts and updates states in loops. So a sample of
each is run once, for few rows and tokens, and its time is scaled with its operations.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.pipeline import Template, make_lir
from rlx_jax.inspection.plan_record import ProgramEstimate
from rlx_jax.inspection.rates import FRESH_BYTES, KernelKind, Rates, least_seconds
from rlx_jax.inspection.work import program_bytes, saved_bytes
from rlx_jax.ir.graph import Graph, Mir, Node, Param
from rlx_jax.ir.operands import zero
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.ops.experts import ExpertFfn, GroupedMatMul
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.ops.recurrent import CausalConvOp, GatedDeltaOp, SelectiveScanOp
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.param import packed_parameter, packing_of
from rlx_jax.ir.paths import Path
from rlx_jax.ir.types import TensorType, is_float, short_name
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.lowering.inspect.outline import OpCost, op_costs
from rlx_jax.lowering.lir.attention import CHUNK_SCORE_BYTES
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.packed import MAX_FUSED_ROWS
from rlx_jax.lowering.lir.plan import GROUPS, PRODUCTS, RECURRENCES, XLA_CHOICE, Lir, call_of
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
    flops = nbytes = 0
    seconds = [0.0, 0.0, 0.0, 0.0]
    sampled = op_samples(lir, programs, template, local) if rates.samples_ops else None
    # The loop of decoding gets its temporaries once for several steps.
    steps = programs.settings.loop.steps if local.get("seq") == 1 else 1
    for index, (entry, op_flops, op_bytes, parts) in enumerate(op_estimates(lir, sharding, rates)):
        if sampled is not None and (sample := sampled(index, entry)) is not None:
            share = op_flops / entry.cost.flops if entry.cost.flops else op_bytes / entry.cost.bytes  # of one device
            parts = (sample * share, 0.0, 0.0, parts[3])
        flops += entry.times * op_flops
        nbytes += entry.times * op_bytes
        seconds = [total + entry.times * part for total, part in zip(seconds, parts, strict=True)]
    workspace = partial(workspace_bytes, lir)
    live = activation_bytes(lir.graph, lir.plan.donate_state, lir.plan.scan, workspace)
    live += sharding.gathered_bytes(programs.layout.params.values()) if sharding is not None else 0
    host = rates.call_seconds + rates.argument_seconds * len(programs.layout.params) if program == "prefill" else 0.0
    compute, memory, start, link = seconds
    if program == "extend" and local["seq"] == 1:
        compute += rates.choose * lir.graph.type(lir.graph.outputs[0]).size
    memory += live * rates.fresh / steps if live > FRESH_BYTES else 0.0
    return ProgramEstimate(program, binding, flops, nbytes, live, compute, memory, start, link, host)


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


# Seconds of an op: for its operations, for its bytes, for the start of its kernel, and for a sum over devices.
OpTimes = tuple[float, float, float, float]


def op_estimates(lir: Lir, sharding: ModelSharding | None, rates: Rates) -> Iterator[tuple[OpCost, int, int, OpTimes]]:
    """Yield each op of a program with the FLOPs and bytes of one run of it on one device, and its seconds by part."""
    groups = {id(node.op.body) for _, node in lir.graph.walk() if isinstance(node.op, GROUPS)}
    for entry in op_costs(lir.graph):
        flops, nbytes, parts = _op_seconds(entry, lir, sharding, rates)
        op = entry.node.op
        if id(entry.graph) in groups and isinstance(op, Mir) and kernel_kind(op) == "reduction":
            parts = (*parts[:2], 0.0, parts[3])  # a norm in the kernel of a product or an attention is no kernel
        yield entry, flops, nbytes, parts


def _op_seconds(entry: OpCost, lir: Lir, sharding: ModelSharding | None, rates: Rates) -> tuple[int, int, OpTimes]:
    """Return the FLOPs and bytes of one run of an op on one device, and its seconds by part."""
    graph, node, cost = entry.graph, entry.node, entry.cost
    assert isinstance(node.op, Mir)
    kind, types = kernel_kind(node.op), [graph.type(v) for v in node.inputs]
    params = [op for v in node.inputs if isinstance(op := graph.nodes[v.node].op, Param)]
    flops, nbytes, unpack, shards, link = cost.flops, cost.bytes - saved_bytes(lir, graph, node), 0.0, 1, 0.0
    if kind == "product" and params:
        weight = params[0]
        rows = math.prod(map(int, types[0].shape[:-1]))
        unpack = _unpack_seconds(weight, lir.plan.packed, rows, lir.plan.target, rates)
        if implementation_of(lir, graph, node) == "lanes":  # converts 16-bit values as fast as f32 is read
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
    if kind == "product" and types[0].nbytes + node.types[0].nbytes > FRESH_BYTES:
        compute *= rates.flops[dtype] / rates.large_flops.get(dtype, rates.flops[dtype])
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


def _unpack_seconds(param: Param, packed: bool, rows: int, target: str, rates: Rates) -> float:
    """Return the seconds in which a product decodes a packed parameter; 0 if it is not packed."""
    scheme = packing_of(param.programs[0]) if packed else None
    if scheme is None:
        return 0.0
    few_rows = rows <= MAX_FUSED_ROWS and target != "cpu"
    per_second = rates.unpack if few_rows else rates.unpack_tiles
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


# -- samples of ops ---------------------------------------------------------------------------

SAMPLED_KINDS = ("attention", "experts", "recurrence")
SAMPLED_OPS = (Unary, CausalConvOp)
# The most bytes of operands of products that are sampled; larger ones reach the measured rates. Samples with fewer
# bytes than the second run so often in a program, with operands of their own, as products do: alone they take longer.
MAX_PRODUCT_BYTES, SAMPLE_COPY_BYTES, SAMPLE_COPIES = 2**24, 2**20, 3
# Products of one row read several weights one after the other, as many as the model has up to the first number. Those
# and short ops run so often in one program.
MAX_COPIES, SAMPLE_RUNS = 8, 48
# So do products of few rows, up to so many weights and bytes: fewer would stay in a cache, and in a step of decoding
# the other weights are read before a weight is read again.
FEW_SAMPLE_ROWS, FEW_SAMPLE_COPIES, FEW_SAMPLE_BYTES = 64, 48, 2**27
# Sizes of samples of one and of more tokens: enough for the rate to be that of larger ones, and milliseconds of work.
SAMPLE_ROWS, SAMPLE_PROMPTS, SAMPLE_TOKENS = 32, 4, 256
# Samples with more operands, such as all experts of a large mixture, are not run.
MAX_SAMPLE_BYTES = 2**28

# For an op of a program, the seconds of a run; None if it is not sampled.
SampledSeconds = Callable[[int, OpCost], float | None]


def op_samples(lir: Lir, programs: Programs, template: Template, sizes: Mapping[str, int]) -> SampledSeconds:
    """Return the function that estimates the n-th op of a program from a sample of it.

    Args:
        lir: the program.
        programs: the programs of the model, for the CPU that runs.
        template: the template of the program.
        sizes: the sizes of its symbols.
    """
    rows = SAMPLE_ROWS if sizes.get("seq") == 1 else SAMPLE_PROMPTS
    limits = {"batch": rows, "seq": SAMPLE_TOKENS, "context": SAMPLE_TOKENS}
    capped = {name: min(size, limits.get(name, size)) for name, size in sizes.items()}
    sample_lir = make_lir(template, capped, programs.settings)
    samples, weight_bytes = list(op_costs(sample_lir.graph)), sum(parameter_bytes(programs).values())

    def seconds(index: int, entry: OpCost) -> float | None:
        op, operands = entry.node.op, [entry.graph.type(value) for value in entry.node.inputs]
        if not isinstance(op, Mir) or index >= len(samples):
            return None
        kind, nbytes = kernel_kind(op), sum(t.nbytes for t in operands)
        if kind == "product":
            params = [p for v in entry.node.inputs if isinstance(p := entry.graph.nodes[v.node].op, Param)]
            is_sampled = nbytes <= MAX_PRODUCT_BYTES and not any(map(lir.stays_packed, params))
        else:
            is_sampled = kind in SAMPLED_KINDS or isinstance(op, SAMPLED_OPS)
        if not is_sampled:
            return None
        sample = samples[index]
        # Few tokens are padded to blocks of experts, and read all weights: their time is not in proportion.
        few = int(operands[5].size) if isinstance(op, ExpertFfn) else math.prod(map(int, operands[0].shape[:-1]))
        if kind in ("product", "experts") and few <= SAMPLE_TOKENS:
            sample = entry
        types = tuple(map(sample.graph.type, sample.node.inputs))
        if sample.node.op != op or sum(t.nbytes for t in types) > MAX_SAMPLE_BYTES:
            return None
        implementation = implementation_of(lir, entry.graph, entry.node)
        cost = sample.cost
        scale = entry.cost.flops / cost.flops if cost.flops else entry.cost.bytes / cost.bytes
        return sample_seconds(op, implementation, types, weight_bytes) * scale

    return seconds


@functools.lru_cache(maxsize=256)
def sample_seconds(op: Mir, implementation: str, types: tuple[TensorType, ...], weight_bytes: int = 0) -> float:
    """Return the seconds of a run of an op on this CPU, without the start of its program.

    Args:
        op, implementation, types: the op, and the types of its operands.
        weight_bytes: the bytes of all parameters, which a step of decoding reads before it reads the same weight again.
    """
    evaluate = functools.partial(IMPLEMENTATIONS[implementation], op)
    # Weights of several layers are not in the cache of a core, other than one that is read again. In a loop threads
    # wake up once for all steps, as in that of decoding.
    nbytes, is_product = sum(t.nbytes for t in types), kernel_kind(op) == "product"
    rows = math.prod(types[0].shape[:-1])
    copies = SAMPLE_COPIES if nbytes < SAMPLE_COPY_BYTES or is_product else 1
    if is_product and rows == 1 and implementation == "xla":  # which compiles fast
        copies = max(copies, min(MAX_COPIES, weight_bytes // nbytes))
    elif is_product and 1 < rows <= FEW_SAMPLE_ROWS:
        copies = max(copies, min(FEW_SAMPLE_COPIES, min(weight_bytes, FEW_SAMPLE_BYTES) // nbytes))
    steps = SAMPLE_RUNS // copies if nbytes < SAMPLE_COPY_BYTES or rows == 1 else 1

    def step(x: jax.Array, operands: list[list[jax.Array]]) -> Any:
        """Run the op after itself: each run has the first value of the one in front of it in its operand."""
        results = []
        for others in operands:
            results.append(jax.tree.leaves(evaluate(x, *others)))
            first = results[-1][0]
            x = x + first[(0,) * first.ndim].astype(x.dtype)
        return x, results

    def run(x: jax.Array, operands: list[list[jax.Array]]) -> Any:
        if steps == 1:
            return step(x, operands)
        empty = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), jax.eval_shape(step, x, operands))
        return jax.lax.fori_loop(0, steps, lambda _, last: step(last[0], operands), (x, empty[1]))

    def update(x: jax.Array, operands: list[list[jax.Array]]) -> Any:
        """Update a state in a loop, as decoding does."""
        (*others, state), *_ = operands
        first = tuple(jax.tree.leaves(evaluate(x, *others, state)))
        return jax.lax.fori_loop(1, SAMPLE_COPIES, lambda _, last: tuple(evaluate(x, *others, last[1])), first)

    with jax.default_device("cpu"):
        # Experts are chosen evenly: an implementation may skip those without tokens.
        experts = int(types[1].shape[0]) if kernel_kind(op) == "experts" else 1
        is_updated = isinstance(op, GatedDeltaOp | SelectiveScanOp) and op.from_state and int(types[0].shape[1]) == 1
        sample = jax.jit(update if is_updated else run)
        x = _sample_array(types[0], experts)
        others = [[_sample_array(t, experts) for t in types[1:]] for _ in range(1 if is_updated else copies)]
        (seconds,) = least_seconds([lambda: jax.block_until_ready(sample(x, others))], 0.05)
    return max(1e-7, (seconds - _start_seconds()) / (SAMPLE_COPIES if is_updated else copies * steps))


@functools.cache
def _start_seconds() -> float:
    """Return the seconds of a program that does nearly nothing on this CPU."""
    with jax.default_device("cpu"):
        start, scalar = jax.jit(lambda x: x + 1), jnp.zeros(())
        return least_seconds([lambda: start(scalar).block_until_ready()], 0.05)[0]


def _sample_array(t: TensorType, limit: int) -> jax.Array:
    """Return zeros in memory of their own, or integers below a limit."""
    if is_float(t.dtype):
        return jnp.asarray(np.full(t.shape, 0, t.dtype))  # pages of np.zeros would be one until they are written
    return jnp.asarray((np.arange(t.size) % limit).astype(t.dtype).reshape(t.shape))
