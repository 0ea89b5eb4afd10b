"""Reports of fusion: the sites that each pass matched, fused or missed, and counts of a program's ops.

Passes define the patterns; this module only has the data types and the counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rlx_jax.dataclasses import dataclass
from rlx_jax.ir.graph import Graph, Node, Op
from rlx_jax.ir.ops import fused
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.shape import Narrow, SplitLast
from rlx_jax.ir.paths import path_text
from rlx_jax.lowering.mir.small import live_nodes

# The reason of a match that a pass does not rewrite, because XLA fuses it itself.
LEFT_TO_XLA_REASON = "LeftToXla"


@dataclass(frozen=True)
class FusionSite:
    """Fusion site: a match of a pass's pattern in the program.

    Attributes:
        pattern: the name of the pattern.
        node: the number of the matched node in the graph or region after the pass; `text(level, after=by)` shows it.
        context: the block path.
        by: the name of the pass.
        reason: why the match was not fused; empty if it was.
        detail: more about the reason, such as a count.
        hint: what to change so that it is fused.
        is_miss: whether a site that was not fused counts for `assert_clean`.
    """

    pattern: str
    node: str
    context: str
    by: str
    reason: str = ""
    detail: str = ""
    hint: str = ""
    is_miss: bool = True

    @staticmethod
    def of(pattern: str, by: str, number: int, node: Node, **missed: Any) -> FusionSite:
        """Return the site at node `number` of the HIR graph after the pass, with the block path of `node`."""
        return FusionSite(pattern, f"h{number}", path_text(node.origin.path) or "—", by, **missed)

    def __str__(self) -> str:
        outcome = f"{self.reason}{self.detail} → {self.hint}" if self.reason else "fused"
        return f"{self.pattern} @ {self.node} ({self.context}) — {outcome}"


@dataclass(frozen=True)
class Fused:
    """Result of a fusion pass: the rewritten graph and its fusion sites."""

    graph: Graph
    sites: tuple[FusionSite, ...] = ()


@dataclass(frozen=True)
class FusionReport:
    """Counts of ops in one program after its passes, with the fused and missed sites. Repeated layers count once.

    A site is missed only if its pass ran and the pattern is present, so that a change of the flow would fuse it.
    Products that the profile keeps separate are not missed.

    Attributes:
        sites: the fusion sites.
        left_to_xla: names of the passes that rewrite nothing because XLA fuses their patterns itself.
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
    sites: tuple[FusionSite, ...] = ()
    left_to_xla: tuple[str, ...] = ()

    @property
    def fused(self) -> tuple[FusionSite, ...]:
        """Return the sites that passes fused. Fused ops written by the lowering policy are not among them."""
        return tuple(site for site in self.sites if not site.reason)

    @property
    def missed(self) -> tuple[FusionSite, ...]:
        """Return the sites that passes could not fuse although the pattern is present."""
        return tuple(s for s in self.sites if s.reason not in ("", LEFT_TO_XLA_REASON) and s.is_miss)

    @property
    def near(self) -> tuple[FusionSite, ...]:
        """Return the sites that nearly match a pattern and do not count as missed, such as a pre-norm residual."""
        return tuple(s for s in self.sites if s.reason not in ("", LEFT_TO_XLA_REASON) and not s.is_miss)

    @property
    def matched_by_xla(self) -> tuple[FusionSite, ...]:
        """Return the sites that match a pattern which passes leave to XLA."""
        return tuple(site for site in self.sites if site.reason == LEFT_TO_XLA_REASON)

    @property
    def clean(self) -> bool:
        """Return whether no site was missed."""
        return not self.missed

    @property
    def summary(self) -> str:
        """Return the counts and misses in one line."""
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
        if matched := Counter(site.pattern for site in self.matched_by_xla):
            lines += ["matched, and left to XLA:", *(f"  {pattern} x {n}" for pattern, n in matched.items())]
        if near := Counter((m.pattern, f"{m.reason}{m.detail}", m.hint) for m in self.near):
            lines += ["nearly matched:", *(f"  {p} x {n} — {reason} → {hint}" for (p, reason, hint), n in near.items())]
        if self.left_to_xla:
            lines += ["left to XLA, which fuses these itself:", f"  {', '.join(self.left_to_xla)}"]
        return "\n".join(lines)


def fusion_report(
    before: Graph, after: Graph, sites: tuple[FusionSite, ...], left_to_xla: Sequence[str] = ()
) -> FusionReport:
    """Return the report of a MIR program.

    Args:
        before: the program before its passes.
        after: the program after them.
        sites: the fusion sites of all passes.
        left_to_xla: names of the passes that leave their pattern to XLA.
    """
    count = Counter(type(node.op) for node in _walk_live_nodes(after))
    ops = (op for node in _walk_live_nodes(after) for op in _steps(node.op))
    pointwise = Counter(op for op in ops if isinstance(op, Unary | Binary))
    return FusionReport(
        nodes_before=sum(1 for _ in before.walk()),
        nodes_after=sum(1 for _ in after.walk()),
        matmul_before=sum(isinstance(node.op, MatMul) for node in _walk_live_nodes(before)),
        matmul_after=count[MatMul],
        attention=count[AttentionOp],
        rope=count[RopeOp],
        narrow=count[Narrow] + count[SplitLast],
        silu=pointwise[Unary("silu")],
        mul=pointwise[Binary("mul")],
        fused_matmul_bias_act=count[fused.FusedMatMulBiasAct],
        fused_swiglu=count[fused.FusedSwiGLU],
        fused_residual_ln=count[fused.FusedResidualLayerNorm],
        fused_residual_rms_norm=count[fused.FusedResidualRmsNorm],
        elementwise_region=count[fused.ElementwiseRegion],
        sites=sites,
        left_to_xla=tuple(left_to_xla),
    )


def _steps(op: Op) -> tuple[Op, ...]:
    """Return the ops inside an elementwise region; any other op alone."""
    return tuple(step.op for step in op.steps) if isinstance(op, fused.ElementwiseRegion) else (op,)


def _walk_live_nodes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that contribute to outputs or writes, in regions too."""
    for number in sorted(live_nodes(graph)):
        yield graph.nodes[number]
        for region in graph.nodes[number].op.regions():
            yield from _walk_live_nodes(region)
