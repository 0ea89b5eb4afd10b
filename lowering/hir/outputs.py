"""Which outputs of a flow a program has."""

from __future__ import annotations

from dataclasses import replace

from rlx_jax.errors import GraphError, did_you_mean, listing, quote
from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.lowering.mir.dce import dce


def with_outputs(graph: Graph, names: tuple[str, ...], types: TypeCache) -> Graph:
    """The program with these outputs, in this order.

    Raises:
        GraphError: it has no output of a name.
    """
    known = dict(zip(graph.output_names, graph.outputs, strict=True))
    for name in names:
        if name not in known:
            raise GraphError(
                f"{graph.name}: no output {quote(name)}; it has {listing(known)}{did_you_mean(name, list(known))}"
            )
    return dce(replace(graph, outputs=tuple(known[name] for name in names), output_names=names), types)
