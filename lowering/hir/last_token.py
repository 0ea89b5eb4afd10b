"""Outputs of the last token alone: its gather is moved above all that treats tokens alone."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Leaf, Node, Op, TypeCache, Value
from rlx_jax.ir.rewrite import Rewrite, rewrite
from rlx_jax.ir.types import symbol
from rlx_jax.lowering.hir.rules import rule_of
from rlx_jax.lowering.hir.trials import prove, try_slices, why_not_alone


def last_token_only(graph: Graph, types: TypeCache) -> Graph:
    """Gather the last token above the token-wise suffix, so that the head sees one row for each sequence.

    The suffix goes on through attention on the side of its queries: its last query reads what the last row needs.
    """
    try_slices(graph, types, rule_of)
    suffix = _suffix(graph, types)

    def enter(inner: Graph) -> Rewrite:
        moved: dict[Value, Value] = {}

        def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
            if inner is not graph or number not in suffix:
                return None
            gathered = []
            for at, (old, new) in enumerate(zip(node.inputs, inputs, strict=True)):
                if by_row(node.op, at) and old.node not in suffix and "seq" in b.type(new).symbols:
                    if new not in moved:
                        moved[new] = b(hir.LastToken(), new)
                    new = moved[new]
                gathered.append(new)
            op = node.op
            return b.add(replace(op, last=True) if isinstance(op, hir.Attention) else op, *gathered)

        return fn

    out = rewrite(graph, enter, types, "last_token_only")
    b = Builder.resume(out, types)
    outputs = [b(hir.LastToken(), v) if "seq" in out.type(v).symbols else v for v in out.outputs]
    return b.finish(outputs, out.output_names)


def _suffix(graph: Graph, types: TypeCache) -> set[int]:
    """Nodes whose rows only outputs and other suffix nodes read, one by one, and that treat tokens alone."""
    users: dict[int, set[int]] = {}
    whole = {v.node for _, v in graph.writes}
    for number, node in enumerate(graph.nodes):
        for at, v in enumerate(node.inputs):
            users.setdefault(v.node, set()).add(number)
            if not by_row(node.op, at):
                whole.add(v.node)
    suffix: set[int] = set()
    for number in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[number]
        plain = not (isinstance(node.op, Leaf) or node.op.regions() or rule_of(node.op))
        if number in whole or not users.get(number, set()) <= suffix:
            continue
        operands = tuple(graph.type(v) for v in node.inputs)
        if has_last_query(node.op) and all(t.shape[1] == symbol("seq") for t in operands[:3]):
            suffix.add(number)
        if not plain:
            continue
        if "seq" in operands[0].symbols or any("seq" in t.symbols for t in operands):
            verdict = types.ask(prove, node.op, operands, "seq")
            alone = verdict.token_wise and not why_not_alone(types, node, operands, "seq")
            if alone and all(axis == 1 for axis in verdict.out_axes):
                if all(t.shape[1:2] == (symbol("seq"),) for t in operands if "seq" in t.symbols):
                    suffix.add(number)
    return suffix


def has_last_query(op: Op) -> bool:
    """Whether the op is attention whose last query, given alone, is still the last: queries stand where keys end."""
    return isinstance(op, hir.Attention) and op.causal and not op.extra


def by_row(op: Op, operand: int) -> bool:
    """Whether a row of the result needs only that row of the operand."""
    return operand == 0 or not isinstance(op, hir.Attention)
