"""`Template`: one program with symbolic sizes, which the passes made."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlx_jax.compiler.passes import Job, pass_named
from rlx_jax.compiler.settings import plain
from rlx_jax.errors import GraphError, RlxError, did_you_mean, listing, quote
from rlx_jax.ir.graph import Graph, Input, TypeCache
from rlx_jax.ir.types import TensorType, as_dim
from rlx_jax.lowering.fusion import FusionReport
from rlx_jax.lowering.inspect.bounds import Bounds
from rlx_jax.lowering.inspect.costs import Cost, cost
from rlx_jax.lowering.inspect.outline import Outline, outline
from rlx_jax.lowering.lir.plan import taken_back
from rlx_jax.lowering.mir.head import Head, find_head
from rlx_jax.program import Built


@dataclass(frozen=True)
class Template:
    """One program with symbolic sizes, at every level."""

    built: Built
    hir: Graph
    mir: Graph
    bounds: Bounds
    state: Mapping[str, TensorType]
    scan: bool
    rings: Mapping[str, int]
    optional: tuple[Input, ...]
    types: TypeCache
    seconds: Mapping[str, float]
    nodes: Mapping[str, int]
    fusion: FusionReport

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Names of the sizes that its state and inputs have."""
        types = (*self.state.values(), *(i.type for i in self.mir.inputs))
        return frozenset().union(*(t.symbols for t in types))

    @functools.cached_property
    def unread(self) -> tuple[str, ...]:
        """The inputs of the flow that this program does not have, in order."""
        read = {i.input for i in self.mir.inputs}
        return tuple(i.input for i in self.built.hir.inputs if i.input not in read)

    @functools.cached_property
    def taken_back(self) -> tuple[tuple[str, int], ...]:
        """See `taken_back` of the plan."""
        return taken_back(self.mir, self.scan)

    @functools.cached_property
    def head(self) -> Head:
        """The product with a weight that makes the first output; see `find_head` for what it raises."""
        return find_head(self.mir)

    def headless(self) -> Template:
        """The same up to its head, whose operands are the outputs."""
        job = Job(plain(), self.types, headless=True)
        return replace(self, mir=pass_named("up_to_head")(self.mir, job).graph)

    def cost(self, sizes: Mapping[str, int]) -> Cost:
        """FLOPs, bytes and scratch memory of the program for one choice of sizes. Nothing is compiled.

        Raises:
            GraphError: a size is missing, or is none of the program.
        """
        for name, size in sizes.items():
            if name not in self.symbols:
                raise GraphError(
                    f"{self.built.name}: the program has no size {quote(name)}; it has {listing(sorted(self.symbols))}"
                    f"{did_you_mean(name, self.symbols)}"
                )
            as_dim(size, f"{self.built.name}: {name}")
        if missing := sorted(self.symbols.difference(sizes)):
            whole = ", ".join(f"{name}={sizes.get(name, '…')}" for name in sorted(self.symbols))
            raise GraphError(f"{self.built.name}: no size of {listing(missing)}; give all of them: {whole}")
        return cost(pass_named("specialise")(self.mir, Job(plain(), self.types, sizes=sizes)).graph)

    def outline(self, known: Mapping[str, int]) -> Outline:
        """The table of its blocks; FLOPs and bytes are those of the sizes that are `known`, and of 1 for others."""
        sizes = {name: known.get(name, 1) for name in self.symbols}
        try:
            mir = pass_named("specialise")(self.mir, Job(plain(), TypeCache(), sizes=sizes)).graph
        except RlxError:  # it has no such sizes, as where a window is wider than 1
            mir = None
        return outline(self.built.name, self.hir, mir, sizes, self.mir.inputs)
