"""What the fusion passes did to a program, and what they left."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from rlx_jax.ir.graph import Constant, Graph, Node, Op, Param, TypeCache, Value
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.contract import MatMul
from rlx_jax.ir.ops.fused import (
    ElementwiseRegion,
    FusedMatMulBiasAct,
    FusedResidualLayerNorm,
    FusedResidualRmsNorm,
    FusedSwiGLU,
)
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.shaping import Narrow
from rlx_jax.ir.types import is_static, path_text
from rlx_jax.lowering.passes.dce import live
from rlx_jax.lowering.passes.fuse_swiglu import GATES, MUL, gated_halves
from rlx_jax.lowering.passes.regions import unfuse_elementwise_regions

ADD = Binary("add")

HINTS = {
    ("matmul_bias_act", "MultiConsumer"): "use the product once: what else reads it can read the biased value",
    ("matmul_bias_act", "BiasRankTooHigh"): "store the bias as [N]",
    ("shared_input_matmul", "NotFused"): "make both a Linear with the same bias, orientation and no activation",
    ("shared_input_matmul", "SharedMatmulCount"): "make all a Linear with the same bias, orientation and no activation",
    ("swiglu", "MultiConsumer"): "use each half and the gate once",
    ("swiglu", "SwigluNotMerged"): "make gate and up a Linear without activation, both with a bias or both without",
}
"""What to do about a pattern that was not fused, by pattern and reason."""


@dataclass(frozen=True)
class Missed:
    """A pattern that is in the program, that an enabled pass looks for, and that it could not fuse.

    node: its number in the dump of its graph or region, where regions of pointwise ops are unfused.
    context: its block path.
    """

    pattern: str
    node: str
    reason: str
    context: str
    detail: str = ""

    @property
    def hint(self) -> str:
        """What to do about it."""
        return HINTS[self.pattern, self.reason]

    def __str__(self) -> str:
        return f"{self.pattern} @ {self.node} ({self.context}) — {self.reason}{self.detail} → {self.hint}"


@dataclass(frozen=True)
class FusionReport:
    """Ops of one program after its passes, and what they missed. A layer that repeats is counted once.

    A miss counts only where its pass ran and the pattern is there: a product without a bias, or two products that
    the profile keeps apart, are none.
    """

    nodes_before: int
    nodes_after: int
    matmul_before: int
    matmul_after: int
    attention: int
    rope: int
    narrow: int
    silu: int
    mul: int
    fused_matmul_bias_act: int
    fused_swiglu: int
    fused_residual_ln: int
    fused_residual_rms_norm: int
    elementwise_region: int
    missed: tuple[Missed, ...] = ()

    @property
    def clean(self) -> bool:
        """Nothing was missed."""
        return not self.missed

    @property
    def summary(self) -> str:
        """One line."""
        missed = Counter(m.pattern for m in self.missed)
        return (
            f"nodes={self.nodes_before}→{self.nodes_after} matmul={self.matmul_before}→{self.matmul_after} "
            f"fused_mm_act={self.fused_matmul_bias_act} fused_swiglu={self.fused_swiglu} "
            f"fused_residual={self.fused_residual_ln + self.fused_residual_rms_norm} "
            f"elementwise_region={self.elementwise_region} missed_mm_act={missed['matmul_bias_act']} "
            f"missed_swiglu={missed['swiglu']} missed_shared_mm={missed['shared_input_matmul']}"
        )

    def __str__(self) -> str:
        lines = ["fusion report:", f"  {self.summary}"]
        if self.missed:
            lines += ["missed patterns:", *(f"  {m}" for m in self.missed)]
        return "\n".join(lines)


def fusion_report(before: Graph, after: Graph, passes: Collection[str], merged: bool, types: TypeCache) -> FusionReport:
    """Compare a MIR program before and after `passes`; `merged` if projections of one input became one before."""
    count = Counter(type(node.op) for node in _live_nodes(after))
    plain = unfuse_elementwise_regions(after, types)
    pointwise = Counter(node.op for node in _live_nodes(plain) if isinstance(node.op, Unary | Binary))
    return FusionReport(
        nodes_before=sum(1 for _ in before.walk()),
        nodes_after=sum(1 for _ in after.walk()),
        matmul_before=sum(isinstance(node.op, MatMul) for node in _live_nodes(before)),
        matmul_after=count[MatMul],
        attention=count[AttentionOp],
        rope=count[RopeOp],
        narrow=count[Narrow],
        silu=pointwise[Unary("silu")],
        mul=pointwise[MUL],
        fused_matmul_bias_act=count[FusedMatMulBiasAct],
        fused_swiglu=count[FusedSwiGLU],
        fused_residual_ln=count[FusedResidualLayerNorm],
        fused_residual_rms_norm=count[FusedResidualRmsNorm],
        elementwise_region=count[ElementwiseRegion],
        missed=tuple(_missed(plain, passes, merged)),
    )


def _live_nodes(graph: Graph) -> Iterator[Node]:
    for number in sorted(live(graph)):
        yield graph.nodes[number]
        for region in graph.nodes[number].op.regions():
            yield from _live_nodes(region)


# -- what was missed ---------------------------------------------------------------------------

Found = tuple[int, str, str, str]
"""Node number, pattern, reason, detail."""


def _missed(graph: Graph, passes: Collection[str], merged: bool) -> Iterator[Missed]:
    weights = Counter(
        g.nodes[v.node].op for g, n in graph.walk() for v in n.inputs if isinstance(g.nodes[v.node].op, Param)
    )

    def visit(graph: Graph) -> Iterator[Missed]:
        found: list[Found] = []
        if "fuse_matmul_bias_act" in passes:
            found += _missed_bias(graph)
        if "fuse_swiglu" in passes:
            found += _missed_swiglu(graph, merged)
        if merged:
            found += _missed_shared(graph, lambda op: weights[op] == 1)
        for number, pattern, reason, detail in sorted(set(found)):
            yield Missed(pattern, f"%{number}", reason, path_text(graph.nodes[number].origin.path) or "—", detail)
        for node in graph.nodes:
            for region in node.op.regions():
                yield from visit(region)

    return visit(graph)


def _missed_bias(graph: Graph) -> Iterator[Found]:
    """A bias is added to a product, and the product is still one of its own."""
    for number in live(graph):
        node = graph.nodes[number]
        if node.op != ADD:
            continue
        for product, bias in (node.inputs, node.inputs[::-1]):
            if not isinstance(graph.nodes[product.node].op, MatMul):
                continue
            width, shape = graph.type(product).shape[-1:], graph.type(bias).shape
            if shape == width:
                yield product.node, "matmul_bias_act", "MultiConsumer", ""
            elif _is_row(shape, width) and isinstance(graph.nodes[bias.node].op, Param | Constant):
                yield product.node, "matmul_bias_act", "BiasRankTooHigh", f"{{{len(shape)}}}"


def _is_row(shape: tuple[object, ...], width: tuple[object, ...]) -> bool:
    return shape[-1:] == width and all(is_static(d) and d == 1 for d in shape[:-1])


def _missed_swiglu(graph: Graph, merged: bool) -> Iterator[Found]:
    """A gate over two halves of one value, or over two products of one input that are merged elsewhere."""
    for number in live(graph):
        node = graph.nodes[number]
        if node.op != MUL:
            continue
        for gate, up in (node.inputs, node.inputs[::-1]):
            if gated_halves(graph, gate, up):
                yield number, "swiglu", "MultiConsumer", ""
            elif merged and _same_input(_gate_product(graph, gate), _product(graph.nodes[up.node])):
                yield number, "swiglu", "SwigluNotMerged", ""


def _product(node: Node, activation: Collection[str] = ("",)) -> Node | None:
    """A product, with its bias perhaps."""
    fused = isinstance(node.op, FusedMatMulBiasAct) and node.op.activation in activation
    return node if fused or isinstance(node.op, MatMul) else None


def _gate_product(graph: Graph, gate: Value) -> Node | None:
    """The product of which `gate` is the activation."""
    node = graph.nodes[gate.node]
    if isinstance(node.op, Unary) and node.op.kind in GATES:
        return _product(graph.nodes[node.inputs[0].node])
    return node if isinstance(node.op, FusedMatMulBiasAct) and node.op.activation in GATES else None


def _same_input(a: Node | None, b: Node | None) -> bool:
    return a is not None and b is not None and a.inputs[0] == b.inputs[0]


def _missed_shared(graph: Graph, mergeable: Callable[[Op], bool]) -> Iterator[Found]:
    """Products of one input whose weights are parameters that nothing else reads."""
    groups: dict[object, list[int]] = defaultdict(list)
    for number in sorted(live(graph)):
        op = graph.nodes[number].op
        if isinstance(op, MatMul | FusedMatMulBiasAct):
            x, *weights = graph.nodes[number].inputs
            if all(mergeable(graph.nodes[w.node].op) for w in weights):
                groups[x, op.f32_result].append(number)
    for numbers in groups.values():
        if len(numbers) == 2:
            yield numbers[0], "shared_input_matmul", "NotFused", ""
        elif len(numbers) > 2:
            yield numbers[0], "shared_input_matmul", "SharedMatmulCount", f"{{{len(numbers)}}}"
