"""`FlowExtensionPlan`: which rewrites of HIR, of plugins or registered, run at the end of a flow's `build`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlx_jax.errors import GraphError, PluginError, check_known, listing, quote, shown
from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.ir.plugins import HirExtension, known
from rlx_jax.ir.types import as_name, as_names
from rlx_jax.ir.verify import verify

_registered: dict[str, HirExtension] = {}  # of this process; plugins have theirs


def register_hir_extension(name: str, extension: HirExtension | Callable[[Graph], Graph]) -> None:
    """Add a rewrite `graph → graph`, or `(graph, types) → graph`, under a name; an earlier one of that name goes.

    No flow runs it unless its `FlowExtensionPlan` says so.

    Raises:
        PluginError: it is no function of these arguments. GraphError: a plugin has an extension of that name.
    """
    as_name(name, "register_hir_extension")
    counts = [n for n in (2, 1) if callable(extension) and _takes(extension, n)]
    if not counts:
        raise PluginError(
            f"register_hir_extension: {quote(name)} is {shown(extension)}; expected a function of a graph, or of "
            "a graph and its types"
        )
    if name in known().extensions:
        raise GraphError(f"register_hir_extension: a plugin has an extension {quote(name)}; use another name")
    _registered.pop(name, None)  # one that is registered again runs last
    rewrite: Any = extension
    _registered[name] = rewrite if counts[0] == 2 else lambda graph, types: rewrite(graph)


def _takes(fn: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(count))
    except (TypeError, ValueError):  # a function in C may have no signature
        return False
    return True


def registered_hir_extensions() -> tuple[str, ...]:
    """Return the names of all extensions, in the order in which `FlowExtensionPlan.all()` runs them: those of plugins,
    then those of `register_hir_extension`."""
    return tuple(_extensions())


def _extensions() -> dict[str, HirExtension]:
    extensions = dict(known().extensions)
    if shared := extensions.keys() & _registered.keys():
        raise GraphError(f"a plugin and register_hir_extension both give extension {listing(sorted(shared))}")
    return extensions | _registered


def apply_hir_extensions(graph: Graph) -> Graph:
    """Return HIR after every extension, as `FlowExtensionPlan.all().apply`."""
    return FlowExtensionPlan.all().apply(graph, TypeCache())


def apply_hir_extensions_named(graph: Graph, names: Iterable[str]) -> Graph:
    """Return HIR after the extensions of these names, in the order in which they were registered.

    Raises:
        PluginError: there is no extension of one of the names.
    """
    chosen = FlowExtensionPlan.only(names).names()
    return FlowExtensionPlan.only(n for n in registered_hir_extensions() if n in chosen).apply(graph, TypeCache())


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
        check_known(self.enabled, there, "no plugin gives an extension", "; known are", PluginError)
        return there if self.apply_all else self.enabled

    def apply(self, graph: Graph, types: TypeCache) -> Graph:
        """The HIR after all of them, verified after each.

        Raises:
            PluginError: no plugin gives one of them, or one returns no graph.
            GraphError: one leaves a graph that is wrong; the message names it.
        """
        for name in self.names():
            made = _extensions()[name](graph, types)
            if not isinstance(made, Graph):
                raise PluginError(f"extension {quote(name)} returns a Graph, got {shown(made)}")
            graph = verify(made, "hir", f"extension {name}", types)
        return graph
