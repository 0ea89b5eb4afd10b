"""The Layout: how a model's parameters are stored. One for all of its programs, chosen before any is lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Graph
from rlx_jax.ir.param import Program, Stack, leaf_name
from rlx_jax.ir.types import TensorType, short_name


@dataclass(frozen=True)
class Layout:
    """The leaves by name. A leaf's identity is its program; names are for people."""

    leaves: Mapping[str, Program]

    def types(self) -> dict[str, TensorType]:
        """The type of every leaf."""
        return {name: program.type for name, program in self.leaves.items()}

    def by_program(self) -> dict[Program, str]:
        return {program: name for name, program in self.leaves.items()}

    def check(self, graph: Graph, scan: bool) -> None:
        """Refuse a program that reads a leaf the layout does not have."""
        known = self.by_program()
        missing = [p for p in programs_of(graph, scan) if p not in known]
        if missing:
            raise GraphError(f"the program reads {missing[0]}, which is not in the model's layout")


def programs_of(graph: Graph, scan: bool) -> tuple[Program, ...]:
    """The leaves a graph reads, in order of first use: stacked over layers if they are scanned."""
    found: dict[Program, None] = {}
    for param in graph.params():
        programs = (Stack(param.programs),) if scan and len(param.programs) > 1 else param.programs
        found.update(dict.fromkeys(programs))
    return tuple(found)


def layout_of(graph: Graph, scan: bool) -> Layout:
    """The layout that the forward program asks for."""
    leaves: dict[str, Program] = {}
    for program in programs_of(graph, scan):
        name = leaf_name(program)
        if name in leaves:
            name = f"{name} ({short_name(program.type.dtype)})"
        leaves[name] = program
    return Layout(leaves)
