"""The pass that packs weights by a scheme of integers, which the profile selects (`precision.weights`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rlx_jax.errors import ProfileError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Node, Param, TypeCache, Value
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.param import Program, Quantized, printed_name
from rlx_jax.ir.paths import Path, bind_path, path_text
from rlx_jax.ir.rewrite import everywhere, rewrite
from rlx_jax.lowering.hir.weights import make_param, transposed
from rlx_jax.lowering.mir.small import dce

# Returns the scheme of the weights of a block, or "keep"; None if other blocks that read them may decide.
SchemeAt = Callable[[Path], str | None]


def quantize_weights(graph: Graph, scheme_at: SchemeAt, types: TypeCache) -> Graph:
    """Rewrite linear(x, w) → linear(x, quantize(w)), and likewise embeddings and experts.

    Groups of values lie along the axis that a product contracts. Weights of which this axis does not consist of whole
    groups stay as they are, and so do those that other blocks read, and the router of a mixture: a small error there
    selects other experts.
    """
    schemes = _schemes(graph, scheme_at)

    def fn(b: Builder, number: int, node: Node, inputs: tuple[Value, ...]) -> tuple[Value, ...] | None:
        op = node.op
        if isinstance(op, Param) and any(program in schemes for program in op.programs):
            return (b.leaf(make_param(_packed(program, schemes) for program in op.programs)),)
        weight = b.nodes[inputs[1].node].op if isinstance(op, hir.Linear) else None
        if isinstance(op, hir.Linear) and op.contract == 0 and isinstance(weight, Param):
            if isinstance(weight.programs[0], Quantized):
                return b.add(replace(op, contract=1), *inputs)
        return None

    return dce(rewrite(graph, everywhere(fn), types, "quantize"), types) if schemes else graph


def _packed(program: Program, schemes: Mapping[Program, tuple[str, bool]]) -> Program:
    """Return a weight by its scheme, with its axes swapped if its products contract the first one."""
    if program not in schemes:
        return program
    scheme, turned = schemes[program]
    return Quantized(transposed(program) if turned else program, scheme)


def _schemes(graph: Graph, scheme_at: SchemeAt) -> dict[Program, tuple[str, bool]]:
    """Return the weights to pack: for each the scheme, and whether its products contract its first axis.

    Raises:
        ProfileError: two blocks that read a weight have different schemes.
    """
    chosen: dict[Program, str] = {}
    schemes: dict[Program, tuple[str, bool]] = {}
    fixed: set[Program] = set()
    turned_groups: list[tuple[Program, ...]] = []
    routers = {
        number for inner, node in graph.walk() if isinstance(node.op, hir.Route) for number in _router(inner, node)
    }
    for inner, node in graph.walk():
        for index, value in enumerate(node.inputs):
            weight = inner.nodes[value.node].op
            if not isinstance(weight, Param):
                continue
            axis = _contracted_axis(node, index)
            if axis is None or id(node) in routers:
                fixed.update(weight.programs)
                continue
            turned_groups += [weight.programs] if axis == 0 else []
            for layer, program in enumerate(weight.programs):
                path = bind_path(node.origin.path, layer)
                scheme = scheme_at(path) or ""
                if scheme and chosen.setdefault(program, scheme) != scheme:
                    raise ProfileError(
                        f"precision.weights: {quote(path_text(path))} is {quote(scheme)}, and another block that reads "
                        f"{printed_name(program)} is {quote(chosen[program])}; choose one for both"
                    )
                if scheme in SCHEMES and int(program.type.shape[axis]) % SCHEMES[scheme].elements == 0:
                    if schemes.setdefault(program, (scheme, axis == 0))[1] != (axis == 0):
                        fixed.add(program)
    # The layers of one product have one orientation.
    for group in turned_groups:
        fixed.update(group if any(program not in schemes for program in group) else ())
    return {program: choice for program, choice in schemes.items() if program not in fixed}


def _router(graph: Graph, route: Node) -> set[int]:
    """Return the products that compute the logits of a mixture, by `id`, whatever sums and casts follow them."""
    found: set[int] = set()
    pending = {route.inputs[0].node}
    while pending:
        node = graph.nodes[pending.pop()]
        operands = [graph.nodes[v.node].op for v in node.inputs]
        if any(isinstance(op, Param) and op.type.rank > 1 for op in operands):
            found.add(id(node))
        else:
            pending.update(v.node for v in node.inputs)
    return found


def _contracted_axis(node: Node, index: int) -> int | None:
    """Return the axis of a weight along which products contract it, or look-ups read it; None for other operands."""
    if isinstance(node.op, hir.Linear) and index == 1:
        return 0 if node.op.contract == 0 else -1
    if isinstance(node.op, hir.Embed) and index == 0:
        return -1
    return -1 if isinstance(node.op, hir.Experts) and node.op.contract == 1 and index in (1, 2, 3) else None
