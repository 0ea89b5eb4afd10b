"""What a fusion pass says of each place that it looked at: fused, or why not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlx_jax.ir.graph import Graph, Node
from rlx_jax.ir.paths import path_text


@dataclass(frozen=True)
class Place:
    """A pattern that a pass looks for, where it is in the program.

    node: the number of its node in the graph, or region, that the pass left: `text(level, after=by)` shows it.
    context: its block path. by: the pass.
    reason: why it was not fused, with `detail` and a `hint` at what to do about it; empty if it was.
    """

    pattern: str
    node: str
    context: str
    by: str
    reason: str = ""
    detail: str = ""
    hint: str = ""

    def __str__(self) -> str:
        what = f"{self.reason}{self.detail} → {self.hint}" if self.reason else "fused"
        return f"{self.pattern} @ {self.node} ({self.context}) — {what}"


@dataclass(frozen=True)
class Pattern:
    """What the places of one pattern have in common.

    hints: by reason. mark: what dumps of the pass's level put before a node's number.
    """

    name: str
    by: str
    hints: tuple[tuple[str, str], ...] = ()
    mark: str = "%"

    def fused(self, number: int, node: Node) -> Place:
        """At node `number` of the graph that the pass leaves, which stands where `node` does."""
        return Place(self.name, f"{self.mark}{number}", path_text(node.origin.path) or "—", self.by)

    def missed(self, number: int, node: Node, reason: str, detail: str = "") -> Place:
        """As `fused`, but for the reason."""
        return replace(self.fused(number, node), reason=reason, detail=detail, hint=dict(self.hints)[reason])


@dataclass(frozen=True)
class Fused:
    """What a pass made of a program, and the places that it looked at."""

    graph: Graph
    places: tuple[Place, ...] = ()
