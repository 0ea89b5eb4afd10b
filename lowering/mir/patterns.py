"""Find the fusion patterns that passes leave to XLA, and the values that nearly match one.

A finder yields a fusion site for each match in one graph or region. Nothing is rewritten: XLA fuses the matches itself.
A near match counts as missed if the pattern is present and cannot be one kernel; others, such as the residual of a
pre-norm layer, which the next layer reads too, only appear in the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.ir.graph import Graph, Node, Op, Value
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.reduce import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.shape import Narrow, Reshape, SplitLast
from rlx_jax.ir.paths import path_text
from rlx_jax.ir.queries import find_readers
from rlx_jax.lowering.fusion import LEFT_TO_XLA_REASON, FusionSite


@dataclass(frozen=True)
class Matcher:
    """A graph with the readers of its nodes, for finders.

    Attributes:
        graph: a program or a region.
        readers: as `find_readers` returns them.
    """

    graph: Graph
    readers: Mapping[Value, Sequence[int]]

    def op(self, value: Value) -> Op:
        """Return the op that computes a value."""
        return self.graph.nodes[value.node].op

    def only_reader(self, value: Value) -> Node | None:
        """Return the node that alone reads a value, once; None for an output and other values."""
        readers = self.readers.get(value, ())
        return self.graph.nodes[readers[0]] if len(readers) == 1 and readers[0] >= 0 else None


Finder = Callable[[Matcher, int, Node], FusionSite | None]

PROJECTION = MatMul | FusedMatMulBiasAct
ONE_READER = "read the value once, or compute it again for the other reader"
LEFT_HINT = "nothing: XLA fuses it"


def find_sites(name: str, graph: Graph) -> Iterator[FusionSite]:
    """Yield the fusion sites of a pass in a graph and its regions."""
    finder = FINDERS[name]
    for inner in dict.fromkeys(g for g, _ in graph.walk()):
        matcher = Matcher(inner, find_readers(inner))
        for number, node in enumerate(inner.nodes):
            if (site := finder(matcher, number, node)) is not None:
                yield replace(site, node=f"%{number}", context=path_text(node.origin.path) or "—", by=name)


def _site(
    pattern: str, reason: str = LEFT_TO_XLA_REASON, hint: str = LEFT_HINT, detail: str = "", is_miss: bool = False
) -> FusionSite:
    """Return the site of a match, or with a reason that of a near match; `find_sites` adds its location."""
    return FusionSite(pattern, "", "", "", reason, detail, hint, is_miss)


def _matmul_bias_act(m: Matcher, number: int, node: Node) -> FusionSite | None:
    if not isinstance(node.op, MatMul):
        return None
    readers = [m.graph.nodes[i] for i in m.readers.get(Value(number), ()) if i >= 0]
    sums = [reader for reader in readers if reader.op == Binary("add")]
    ranks = [min(m.graph.type(v).rank for v in add.inputs) for add in sums]
    if any(rank <= 1 for rank in ranks):
        if m.only_reader(Value(number)) is None:
            return _site("matmul_bias_act", "MultiConsumer", ONE_READER, is_miss=True)
        return _site("matmul_bias_act")
    if ranks:
        return _site("matmul_bias_act", "BiasRankTooHigh", "nothing: a residual is no bias", f"{{{max(ranks)}}}")
    return None


def _residual_norm(pattern: str, kind: type[Op]) -> Finder:
    """Return the finder of a norm of a residual sum."""

    def find(m: Matcher, number: int, node: Node) -> FusionSite | None:
        if not isinstance(node.op, kind) or m.op(node.inputs[0]) != Binary("add"):
            return None
        if m.only_reader(node.inputs[0]) is None:
            hint = "nothing: a pre-norm layer reads the sum again, as its residual"
            return _site(pattern, "MultiConsumer", hint)
        return _site(pattern)

    return find


def _swiglu(m: Matcher, number: int, node: Node) -> FusionSite | None:
    if node.op != Binary("mul"):
        return None
    for gate, up in (node.inputs, node.inputs[::-1]):
        if m.op(gate) != Unary("silu"):
            continue
        (gate,) = m.graph.nodes[gate.node].inputs
        ops, sources = (m.op(gate), m.op(up)), [m.graph.nodes[v.node].inputs[:1] for v in (gate, up)]
        are_products = all(isinstance(op, MatMul) for op in ops)
        if sources[0] == sources[1] and (are_products or all(isinstance(op, Narrow | SplitLast) for op in ops)):
            return _site("swiglu")
        if are_products:
            return _site("swiglu", "SwigluNotSharedInput", "compute gate and up from one value", is_miss=True)
    return None


def _rms_norm_reshape(m: Matcher, number: int, node: Node) -> FusionSite | None:
    if not isinstance(node.op, Reshape) or not isinstance(m.op(node.inputs[0]), RmsNormOp):
        return None
    if node.types[0].rank != 2 or node.types[0].shape[-1] != m.graph.type(node.inputs[0]).shape[-1]:
        return None
    if m.only_reader(node.inputs[0]) is None:
        return _site("rms_norm_reshape", "MultiConsumer", ONE_READER)
    return _site("rms_norm_reshape")


def _attention_block(m: Matcher, number: int, node: Node) -> FusionSite | None:
    if not isinstance(node.op, AttentionOp):
        return None
    sources = set()
    for value in node.inputs[:3]:
        value = m.graph.nodes[value.node].inputs[0] if isinstance(m.op(value), RopeOp) else value
        if not isinstance(m.op(value), PROJECTION | SplitLast | Narrow):
            return None
        sources.add(m.graph.nodes[value.node].inputs[0])
    reader = m.only_reader(Value(number))
    if len(sources) > 1 or reader is None or not isinstance(reader.op, PROJECTION):
        return None
    if node.op.causal:
        hint = "nothing: fused_attn is bidirectional; attention has kernels of its own"
        return _site("attention_block", "Causal", hint)
    return _site("attention_block")


def _elementwise_region(m: Matcher, number: int, node: Node) -> FusionSite | None:
    reader = m.only_reader(Value(number))
    if not isinstance(node.op, Unary | Binary) or (reader is not None and isinstance(reader.op, Unary | Binary)):
        return None
    steps, pending = 0, [number]
    while pending:
        steps += 1
        for value in m.graph.nodes[pending.pop()].inputs:
            if isinstance(m.op(value), Unary | Binary) and m.only_reader(value) is not None:
                pending.append(value.node)
    return _site("elementwise_region", detail=f"{{{steps} steps}}") if steps > 1 else None


# The finder of each pass that leaves its pattern to XLA.
FINDERS: dict[str, Finder] = {
    "fuse_attention_block": _attention_block,
    "fuse_matmul_bias_act": _matmul_bias_act,
    "fuse_residual_layer_norm": _residual_norm("residual_ln", LayerNormOp),
    "fuse_residual_rms_norm": _residual_norm("residual_rms_norm", RmsNormOp),
    "fuse_rms_norm_reshape": _rms_norm_reshape,
    "fuse_swiglu": _swiglu,
    "mark_elementwise_regions": _elementwise_region,
}
