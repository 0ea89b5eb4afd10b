"""The Layout: how a model's parameters are stored. One for all of its programs, chosen before any is lowered."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Graph, Param
from rlx_jax.ir.param import Program, Stack
from rlx_jax.ir.param_keys import leaf_name, stored_keys
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

    def repeated(self) -> list[str]:
        """Checkpoint keys that more than one leaf holds."""
        held = Counter(name for program in self.leaves.values() for name in {k.key for k in stored_keys(program)})
        return [name for name, count in held.items() if count > 1]

    def check(self, graph: Graph, scan: bool) -> None:
        """Refuse a program that reads a leaf the layout does not have."""
        for program in self._missing(graph, scan):
            raise GraphError(f"the program reads {program}, which is not in the model's layout")

    def has(self, graph: Graph, scan: bool) -> bool:
        """Whether it has every leaf that a program reads."""
        return next(self._missing(graph, scan), None) is None

    def _missing(self, graph: Graph, scan: bool) -> Iterator[Program]:
        known = self.by_program()
        for param in graph.params():
            reads = [param.programs] if scan and param.varies else [(p,) for p in param.programs]
            for p in reads:
                if (p[0] if len(p) == 1 else Stack(p)) not in known and not rows(known, p):
                    yield p[0]


def rows(leaves: Iterable[Program], programs: tuple[Program, ...]) -> tuple[Stack, tuple[int, ...]] | None:
    """The leaf that `programs` are rows of, and which rows."""
    for leaf in leaves:
        if isinstance(leaf, Stack) and set(programs) <= set(leaf.parts):
            return leaf, tuple(leaf.parts.index(p) for p in programs)
    return None


def tied(params: Iterable[Param]) -> list[tuple[Program, ...]]:
    """All programs in groups, both in order of first use: those of one parameter are of one group.

    Where layers share weights, two parameters have a program in common, and their groups are one.
    """
    group_of: dict[Program, dict[Program, None]] = {}
    for param in params:
        first = param.programs[0]
        group = group_of.setdefault(first, {first: None})
        for program in param.programs[1:]:
            other = group_of.get(program, {program: None})
            if other is not group:
                group.update(other)
                group_of.update(dict.fromkeys(other, group))
    return [tuple(group) for group in {id(group): group for group in group_of.values()}.values()]


def programs_of(graphs: Iterable[Graph], scan: bool) -> tuple[Program, ...]:
    """The leaves that graphs read, in order of first use. No program is in two of them.

    Of layers that are scanned, the programs of one parameter are the rows of one leaf, those that are tied to them too.
    """
    params = [param for graph in graphs for param in graph.params()]
    if not scan:
        return tuple(dict.fromkeys(p for param in params for p in param.programs))
    return tuple(Stack(group) if len(group) > 1 else group[0] for group in tied(params))


def layout_of(graphs: Iterable[Graph], scan: bool) -> Layout:
    """The layout that the forward programs of a model's flows ask for."""
    leaves: dict[str, Program] = {}
    for program in programs_of(graphs, scan):
        leaves[_free_name(program, leaves)] = program
    return Layout(leaves)


def _free_name(program: Program, taken: Collection[str]) -> str:
    """The name of a leaf; beside another of that name with its dtype, and with a number where that is no difference."""
    name = leaf_name(program)
    if name not in taken:
        return name
    typed = f"{name} ({short_name(program.type.dtype)})"
    numbered = (f"{name} ({n})" for n in itertools.count(2))
    return next(free for free in itertools.chain([typed], numbered) if free not in taken)
