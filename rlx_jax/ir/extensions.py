"""HIR extensions: rewrites from plugins or registered here, and the `FlowExtensionPlan` that selects them for a flow.

The selected extensions run at the end of a flow's `build`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rlx_jax.errors import GraphError, PluginError, check_names, listing, quote, shown
from rlx_jax.ir.graph import Graph, TypeCache
from rlx_jax.ir.plugins import HirExtension, active_plugin
from rlx_jax.ir.types import as_name, as_names
from rlx_jax.ir.verify import verify

_registered: dict[str, HirExtension] = {}  # by `register_hir_extension`; plugins bring their own tables


def register_hir_extension(name: str, extension: HirExtension | Callable[[Graph], Graph]) -> None:
    """Register a rewrite `graph → graph`, or `(graph, types) → graph`, and replace an earlier one with the same name.

    A flow runs it only if its `FlowExtensionPlan` selects it.

    Raises:
        PluginError: it is not a function of these arguments.
        GraphError: a plugin has an extension of that name.
    """
    as_name(name, "register_hir_extension")
    arities = [n for n in (2, 1) if callable(extension) and _accepts(extension, n)]
    if not arities:
        raise PluginError(
            f"register_hir_extension: {quote(name)} is {shown(extension)}; expected a function of a graph, or of "
            "a graph and its types"
        )
    if name in active_plugin().extensions:
        raise GraphError(f"register_hir_extension: a plugin has an extension {quote(name)}; use another name")
    _registered.pop(name, None)  # extensions run in the order of the dict, and a new registration runs last
    rewrite: Any = extension
    _registered[name] = rewrite if arities[0] == 2 else lambda graph, types: rewrite(graph)


def _accepts(fn: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(count))
    except (TypeError, ValueError):  # a function in C may have no signature
        return False
    return True


def registered_hir_extensions() -> tuple[str, ...]:
    """Return the names of all extensions in the order in which `FlowExtensionPlan.all()` runs them.

    Plugins come first, then `register_hir_extension`.
    """
    return tuple(_extensions())


def _extensions() -> dict[str, HirExtension]:
    extensions = dict(active_plugin().extensions)
    if duplicates := extensions.keys() & _registered.keys():
        raise GraphError(f"a plugin and register_hir_extension both provide extension {listing(sorted(duplicates))}")
    return extensions | _registered


def apply_hir_extensions(graph: Graph) -> Graph:
    """Return the HIR after every extension, as `FlowExtensionPlan.all().apply`."""
    return FlowExtensionPlan.all().apply(graph, TypeCache())


def apply_hir_extensions_named(graph: Graph, names: Iterable[str]) -> Graph:
    """Return the HIR after the extensions of these names, in the order of `registered_hir_extensions`.

    Raises:
        PluginError: a name has no extension.
    """
    selected_names = FlowExtensionPlan.only(names).names()
    return FlowExtensionPlan.only(n for n in registered_hir_extensions() if n in selected_names).apply(
        graph, TypeCache()
    )


@dataclass(frozen=True)
class FlowExtensionPlan:
    """The extensions of a flow: the names in `enabled`, in that order, or with `apply_all` all; by default none."""

    enabled: tuple[str, ...] = ()
    apply_all: bool = False

    @staticmethod
    def all() -> FlowExtensionPlan:
        """Return a plan with every extension that is installed or registered where the flow is built."""
        return FlowExtensionPlan(apply_all=True)

    @staticmethod
    def only(names: Iterable[str]) -> FlowExtensionPlan:
        """Return a plan with these extensions, in this order."""
        return FlowExtensionPlan(as_names((names,) if isinstance(names, str) else names, "FlowExtensionPlan.only"))

    def names(self) -> tuple[str, ...]:
        """Return the names of the extensions that run, in order.

        Raises:
            PluginError: an enabled name has no extension.
        """
        if not (self.apply_all or self.enabled):  # plugins are not imported for a flow without extensions
            return ()
        available = registered_hir_extensions()
        check_names(self.enabled, available, "no plugin provides an extension", "; known are", PluginError)
        return available if self.apply_all else self.enabled

    def apply(self, graph: Graph, types: TypeCache) -> Graph:
        """Return the HIR after all extensions of the plan, verified after each.

        Raises:
            PluginError: an enabled name has no extension, or an extension does not return a graph.
            GraphError: the graph is invalid after an extension; the message names it.
        """
        for name in self.names():
            rewritten = _extensions()[name](graph, types)
            if not isinstance(rewritten, Graph):
                raise PluginError(f"extension {quote(name)} returns a Graph, got {shown(rewritten)}")
            graph = verify(rewritten, "hir", f"extension {name}", types)
        return graph
