"""Work of the blocks of a program: operations, and the bytes that must move even if each block is one fused kernel."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.inspection.rates import Rates
from rlx_jax.ir.graph import Graph, Leaf, Mir, Node, Param, Value
from rlx_jax.ir.operands import zero
from rlx_jax.ir.param import Program, packed_arrays
from rlx_jax.ir.paths import Path
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.lowering.inspect.outline import OpCost, op_costs
from rlx_jax.lowering.lir.plan import Lir


@dataclass(frozen=True)
class Work:
    """What the ops of a block do in a run, in all layers together, if they compute in one dtype.

    Attributes:
        dtype: the short name of the floating dtype.
        flops: twice the number of multiply-adds of contractions.
        bytes: bytes of parameters and cache, of operands that other blocks computed, and of results that others read.
        param_bytes: the part of `bytes` that is parameters.
    """

    dtype: str
    flops: int = 0
    bytes: int = 0
    param_bytes: int = 0

    def limits(self, rates: Rates) -> tuple[float, float]:
        """Return the shortest seconds for the operations, and for the bytes."""
        return rates.limits(self.flops, self.bytes, rated_dtype(self.dtype))


def rated_dtype(name: str) -> str:
    """Return the dtype with rates in which values of a dtype are multiplied: packed and 8-bit ones in bf16."""
    return name if name in ("f32", "f16") else "bf16"


def block_work(lir: Lir) -> dict[Path, tuple[Work, ...]]:
    """Return the work of each block of a planned program, by dtype; dead nodes do none."""
    works: dict[Path, dict[str, Work]] = defaultdict(dict)
    leaving: dict[int, set[Value]] = {}
    read: dict[tuple[int, Path], set[Value]] = defaultdict(set)
    for entry in op_costs(lir.graph):
        graph, node, times = entry.graph, entry.node, entry.times
        if node.op.regions() or _is_view(node):
            continue
        if id(graph) not in leaving:
            leaving[id(graph)] = _leaving(graph)
        path, types = node.origin.path, [*map(graph.type, node.inputs), *node.types]
        dtype = next((short_name(t.dtype) for t in types if is_float(t.dtype)), "f32")
        nbytes, param_bytes = _bytes(lir, entry, leaving[id(graph)], read[id(graph), path])
        work = works[path].get(dtype, Work(dtype))
        works[path][dtype] = Work(
            dtype,
            work.flops + times * entry.cost.flops,
            work.bytes + times * nbytes,
            work.param_bytes + times * param_bytes,
        )
    return {path: tuple(by_dtype.values()) for path, by_dtype in works.items()}


def program_bytes(program: Program, packed: bool) -> int:
    """Return the bytes that a parameter takes on the device, packed or not."""
    arrays = packed_arrays(program) if packed else {}
    return sum(array.type.nbytes for array in arrays.values()) or program.type.nbytes


def saved_bytes(lir: Lir, graph: Graph, node: Node) -> int:
    """Return by how many bytes the cost of an op is too high, because parameters that it reads are packed."""
    params = [(i, param) for i, v in enumerate(node.inputs) if (param := lir.param_of(graph, v)) is not None]
    return sum(_param_bytes(lir, graph, node, position, param)[1] for position, param in params)


def _source(graph: Graph, value: Value) -> Value:
    """Return the value that a value is a reshape of."""
    while _is_view(graph.nodes[value.node]):
        value = graph.nodes[value.node].inputs[0]
    return value


def _is_view(node: Node) -> bool:
    """Return whether a node moves nothing, as a reshape."""
    return isinstance(node.op, Mir) and node.op.traits.bytes is zero


def _leaving(graph: Graph) -> set[Value]:
    """Return the values that leave their block: another block reads them, or they are results of the graph."""
    leaving = {_source(graph, value) for value in graph.roots()}
    for node in graph.nodes:
        if not _is_view(node):
            sources = (_source(graph, value) for value in node.inputs)
            leaving |= {v for v in sources if graph.nodes[v.node].origin.path != node.origin.path}
    return leaving


def _bytes(lir: Lir, entry: OpCost, leaving: set[Value], read: set[Value]) -> tuple[int, int]:
    """Return the bytes that an op moves if its block is one kernel, and the part of them that is parameters.

    Args:
        leaving: values that leave their block.
        read: values that the block has read already; it is extended.
    """
    graph, node, nbytes, param_bytes = entry.graph, entry.node, entry.cost.bytes, 0
    for position, value in enumerate(node.inputs):
        source = _source(graph, value)
        producer = graph.nodes[source.node]
        if (param := lir.param_of(graph, source)) is not None:
            stored, saved = _param_bytes(lir, graph, node, position, param)
            nbytes, param_bytes = nbytes - saved, param_bytes + stored
        elif source in read or _is_fused(producer, node):
            nbytes -= graph.type(value).nbytes
        read.add(source)
    if isinstance(node.op, Mir) and node.op.traits.numeric != "state":
        nbytes -= sum(t.nbytes for i, t in enumerate(node.types) if Value(entry.number, i) not in leaving)
    return max(nbytes, param_bytes), param_bytes


def _is_fused(producer: Node, node: Node) -> bool:
    """Return whether a value is computed in the same block, and not a cache, which is in memory anyway."""
    if isinstance(producer.op, Leaf) or producer.origin.path != node.origin.path:
        return False
    return not (isinstance(producer.op, Mir) and producer.op.traits.numeric == "state")


def _param_bytes(lir: Lir, graph: Graph, node: Node, position: int, param: Param) -> tuple[int, int]:
    """Return the bytes that an op reads of a parameter as it is stored, and by how many `traits.bytes` has more.

    How much of it the op reads (all, the rows of some tokens, the chosen experts) is the change of `traits.bytes` with
    the size of its elements.
    """
    op = node.op
    assert isinstance(op, Mir)
    operands = [graph.type(v) for v in node.inputs]
    in_bytes = [*operands]
    size = operands[position].dtype.itemsize
    in_bytes[position] = operands[position].with_dtype(np.dtype(np.int8))
    if size == 1:
        return operands[position].nbytes, 0
    difference = op.traits.bytes(op, operands, node.types) - op.traits.bytes(op, in_bytes, node.types)
    counted = difference * size // (size - 1)
    full = len(param.programs) * param.type.nbytes
    # Layers that share a parameter read it each: the mean of a layer, not the bytes of the distinct programs.
    packed = lir.stays_packed(param)
    stored = sum(program_bytes(program, packed) for program in param.programs)
    share = stored / full if full else 1.0
    return round(counted * share), round(counted * (1 - share))
