"""`FlowExtensionPlan`: which rewrites of HIR that plugins give run at the end of a flow's `build`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlx_jax.errors import PluginError, did_you_mean, listing, quote, shown
from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.ir.plugins import known
from rlx_jax.ir.types import as_names
from rlx_jax.ir.verify import verify


def registered_hir_extensions() -> tuple[str, ...]:
    """The names of all extensions that plugins give, in the order in which `FlowExtensionPlan.all()` runs them."""
    return tuple(known().extensions)


@dataclass(frozen=True)
class FlowExtensionPlan:
    """The extensions of a flow: those of `enabled`, in that order, or with `apply_all` every one; by default none."""

    enabled: tuple[str, ...] = ()
    apply_all: bool = False

    @staticmethod
    def all() -> FlowExtensionPlan:
        """Every extension of every plugin, whatever is installed where the flow is built."""
        return FlowExtensionPlan(apply_all=True)

    @staticmethod
    def only(names: Iterable[str]) -> FlowExtensionPlan:
        """These, in this order."""
        return FlowExtensionPlan(as_names((names,) if isinstance(names, str) else names, "FlowExtensionPlan.only"))

    def names(self) -> tuple[str, ...]:
        """What runs.

        Raises:
            PluginError: no plugin gives one of them.
        """
        if not (self.apply_all or self.enabled):
            return ()
        there = registered_hir_extensions()
        for name in self.enabled:
            if name not in there:
                raise PluginError(
                    f"no plugin gives an extension {quote(name)}; known are {listing(there) or 'none'}"
                    f"{did_you_mean(name, there)}"
                )
        return there if self.apply_all else self.enabled

    def apply(self, graph: Graph, types: TypeCache) -> Graph:
        """The HIR after all of them, verified after each.

        Raises:
            PluginError: no plugin gives one of them, or one returns no graph.
            GraphError: one leaves a graph that is wrong; the message names it.
        """
        for name in self.names():
            made = known().extensions[name](graph, types)
            if not isinstance(made, Graph):
                raise PluginError(f"extension {quote(name)} returns a Graph, got {shown(made)}")
            graph = verify(made, "hir", f"extension {name}", types)
        return graph
