"""Plugins: extensions of the compiler by installed packages or tests, such as stages, families, ops and rules.

A package registers a `Plugin` by an entry point of the group `rlx_jax.plugins`:

    [project.entry-points."rlx_jax.plugins"]
    acme = "acme_blocks:PLUGIN"

Plugins are imported when a lookup needs a name or a block that rlx_jax does not have, never by `import rlx_jax`.
`using` adds plugins for the duration of a `with` block. `active_plugin` merges all plugins into one table, which is
never edited.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import GraphError, check_names, did_you_mean, listing, quote, shown
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Builder, Graph, Hir, Mir, Node, Op, TypeCache, Value
from rlx_jax.ir.ops import OPS
from rlx_jax.ir.queries import is_builtin
from rlx_jax.ir.serial import OTHER_OPS
from rlx_jax.ir.types import as_name, as_names
from rlx_jax.ir.verify import verify

GROUP = "rlx_jax.plugins"
# The fields of a `Plugin` that are mappings.
TABLES = ("stages", "families", "derive", "direct", "extensions")


class FamilyHandler(Protocol):
    """The protocol of the handler of a `model_type`: a `rlx_jax.models.families.Family`."""

    @property
    def open(self) -> Callable[[Any, Any], Any]: ...

    @property
    def architectures(self) -> tuple[str, ...]: ...


# A stage class, or a function that returns a stage.
MakeStage = Callable[..., Any]
# A rule as in `rlx_jax.lowering.hir.rules.RULES`, from the Derivation, the builder, a node and its new operands.
DeriveRule = Callable[[Any, Builder, Node, tuple[Value, ...]], tuple[Value, ...] | None]
# A rule as in `rlx_jax.lowering.lower.DIRECT`, from the block, the builder and its operands.
DirectRule = Callable[[Any, Builder, tuple[Value, ...]], tuple[Value, ...] | None]
# A rewrite of the HIR at the end of `build`; see `rlx_jax.ir.region`.
HirExtension = Callable[[Graph, TypeCache], Graph]


@dataclass(frozen=True, eq=False)
class Plugin:
    """The extensions that one package provides. Keys are names that users write, or op classes of the plugin.

    Args:
        name: the name in messages.
        stages: stage classes or factories, by the name that `flow.plugin_stage` takes.
        families: model families, by the `model_type` of a config.json.
        ops: blocks and tensor ops that graphs decoded from JSON may contain, if they have no rule below.
        derive: rules for the prefill, extend and explicit programs of a block that mixes positions.
        direct: lowerings that are better than a block's `expand` and numerically equal to it.
        extensions: rewrites of HIR, by their name in a `FlowExtensionPlan`.
    """

    name: str
    stages: Mapping[str, MakeStage] = field(default_factory=dict)
    families: Mapping[str, FamilyHandler] = field(default_factory=dict)
    ops: tuple[type[Op], ...] = ()
    derive: Mapping[type[Op], DeriveRule] = field(default_factory=dict)
    direct: Mapping[type[Hir], DirectRule] = field(default_factory=dict)
    extensions: Mapping[str, HirExtension] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise GraphError(f"a plugin has a name, got {shown(self.name)}")
        for table in TABLES:
            if not isinstance(entries := getattr(self, table), Mapping):
                raise GraphError(f"plugin {quote(self.name)}: {table} is a mapping, got {shown(entries)}")
        for kind in ("stages", "families", "extensions"):
            for key, value in getattr(self, kind).items():
                is_valid = isinstance(key, str) and key and (kind == "families" or callable(value))
                if not is_valid or (kind == "families" and not callable(getattr(value, "open", None))):
                    expected = {"families": "a Family", "extensions": "a rewrite", "stages": "a stage class"}[kind]
                    raise GraphError(
                        f"plugin {quote(self.name)}: {kind} maps a name to {expected}, got {shown(key)}: {shown(value)}"
                    )
        for cls in (*self.ops, *self.derive, *self.direct):
            _check_op_class(self.name, cls, Hir if cls in self.direct else Op)

    def op_classes(self) -> dict[str, type[Op]]:
        """Return the blocks and tensor ops of the plugin, by class name."""
        return {cls.__name__: cls for cls in (*self.ops, *self.derive, *self.direct)}


def _check_op_class(plugin: str, cls: Any, kind: type[Op]) -> None:
    """Check that `cls` is an op class of the plugin itself, below `kind`, with a name that JSON can distinguish."""
    if not (isinstance(cls, type) and issubclass(cls, kind) and issubclass(cls, Mir | Hir)):
        raise GraphError(f"plugin {quote(plugin)}: expected a class below {kind.__name__}, got {shown(cls)}")
    if is_builtin(cls):
        raise GraphError(
            f"plugin {quote(plugin)}: {cls.__name__} is a class of rlx_jax: a plugin has rules only for its own ops"
        )
    if cls.__name__ in {c.__name__ for c in (*hir.BLOCKS, *OPS)}:
        raise GraphError(
            f"plugin {quote(plugin)}: {cls.__module__}.{cls.__name__}: rlx_jax has an op of that name; JSON identifies "
            "ops by name, so rename it"
        )


# The plugins that `using` has added.
context_plugins: ContextVar[tuple[Plugin, ...]] = ContextVar("rlx_jax_plugins", default=())


@functools.cache
def installed() -> tuple[Plugin, ...]:
    """Return the plugins of installed packages, imported by the first call. `installed.cache_clear()` resets the cache.

    Raises:
        GraphError: a plugin cannot be imported or is no `Plugin`; the message names the package.
    """
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
    return tuple(dict.fromkeys(_load(point) for point in points))  # an entry point may occur twice on the path


def _load(point: EntryPoint) -> Plugin:
    """Import the plugin of an entry point and return it."""
    package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
    where = f"plugin {quote(point.name)}{package} ({GROUP}: {point.value})"
    try:
        plugin = point.load()
    except Exception as error:  # an import runs the package's code, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise GraphError(f"{where} does not import: {reason}; fix the package or uninstall it") from error
    if not isinstance(plugin, Plugin):
        raise GraphError(f"{where} is {shown(plugin)}; expected a rlx_jax.Plugin")
    return plugin


@contextlib.contextmanager
def using(*others: Plugin) -> Iterator[None]:
    """Add plugins inside a `with` block, in this thread: models loaded, built and compiled there use them.

    A program that is first compiled after the block, for another size or another use of the model, does not use them.

    Raises:
        GraphError: two plugins provide something under the same name, an argument is no `Plugin`, or an installed
            plugin cannot be used.
    """
    for plugin in others:
        if not isinstance(plugin, Plugin):
            raise GraphError(f"using: expected plugins, such as Plugin(name, …), got {shown(plugin)}")
    token = context_plugins.set((*context_plugins.get(), *others))
    try:
        active_plugin()  # raises now rather than at the first lookup if plugins conflict
        yield
    finally:
        context_plugins.reset(token)


def active_plugin() -> Plugin:
    """Return all plugins merged into one.

    Raises:
        GraphError: two plugins provide something under the same name, or an installed plugin cannot be used.
    """
    return _merge((*installed(), *context_plugins.get()))


@functools.lru_cache(maxsize=8)
def _merge(plugins: tuple[Plugin, ...]) -> Plugin:
    """Return `plugins` as one. The cache is small: the argument only changes with `using`."""
    tables: dict[str, dict[Any, Any]] = {name: {} for name in (*TABLES, "ops")}
    providers: dict[tuple[str, Any], Plugin] = {}
    distinct = dict.fromkeys(plugins)  # `using` may add an installed plugin again
    for plugin in distinct:
        for name, table in tables.items():
            for key, value in (plugin.op_classes() if name == "ops" else getattr(plugin, name)).items():
                other = providers.setdefault((name, key), plugin)
                if other is not plugin:
                    raise GraphError(
                        f"plugins {quote(other.name)} and {quote(plugin.name)} both provide {name} {shown(key)}: "
                        "uninstall one of them"
                    )
                table[key] = value
    ops = tuple(tables.pop("ops").values())
    return Plugin(", ".join(plugin.name for plugin in distinct) or "no plugins", ops=ops, **tables)


def stage(name: str, *fields: Any, **options: Any) -> Any:
    """Return the stage that an installed plugin provides under `name`, constructed from these fields.

    Raises:
        GraphError: no plugin provides a stage of that name.
    """
    stages = active_plugin().stages
    if name not in stages:
        raise GraphError(
            f"no plugin provides a stage {shown(name)}; known are {listing(stages) or 'none'}"
            f"{did_you_mean(name, stages) or '; a plugin is a package that is installed, see docs/plugins.md'}"
        )
    return stages[name](*fields, **options)


def derive_rule(cls: type[Op]) -> DeriveRule | None:
    """Return the derive rule of a plugin for one of its ops; None if there is none."""
    return None if is_builtin(cls) else active_plugin().derive.get(cls)


def direct_rule(cls: type[Hir]) -> DirectRule | None:
    """Return the direct lowering of a plugin for a block that is not built in; None if there is none."""
    return active_plugin().direct.get(cls)


# HIR extensions: rewrites from plugins or registered here, and the `FlowExtensionPlan` that selects them for a
# flow.


_registered: dict[str, HirExtension] = {}  # by `register_hir_extension`; plugins bring their own tables


def register_hir_extension(name: str, extension: HirExtension | Callable[[Graph], Graph]) -> None:
    """Register a rewrite `graph → graph`, or `(graph, types) → graph`, and replace an earlier one with the same name.

    A flow runs it only if its `FlowExtensionPlan` selects it.

    Raises:
        GraphError: it is not a function of these arguments.
        GraphError: a plugin has an extension of that name.
    """
    as_name(name, "register_hir_extension")
    arities = [n for n in (2, 1) if callable(extension) and _accepts(extension, n)]
    if not arities:
        raise GraphError(
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
        GraphError: a name has no extension.
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
            GraphError: an enabled name has no extension.
        """
        if not (self.apply_all or self.enabled):  # plugins are not imported for a flow without extensions
            return ()
        available = registered_hir_extensions()
        check_names(self.enabled, available, "no plugin provides an extension", "; known are", GraphError)
        return available if self.apply_all else self.enabled

    def apply(self, graph: Graph, types: TypeCache) -> Graph:
        """Return the HIR after all extensions of the plan, verified after each.

        Raises:
            GraphError: an enabled name has no extension, an extension does not return a graph, or the graph is invalid
                after one; the message names it.
        """
        for name in self.names():
            rewritten = _extensions()[name](graph, types)
            if not isinstance(rewritten, Graph):
                raise GraphError(f"extension {quote(name)} returns a Graph, got {shown(rewritten)}")
            graph = verify(rewritten, "hir", f"extension {name}", types)
        return graph


OTHER_OPS.append(lambda: active_plugin().op_classes())
