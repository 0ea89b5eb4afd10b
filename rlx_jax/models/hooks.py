"""Hooks: how a user changes what a recipe assembles, without touching the family's file.

A recipe is a frozen dataclass that inherits `HookMethods` and holds `Hooks`:

    hooks: Hooks = Hooks()

Its `assemble` applies them: `hooks.profile` and the weights at the start, so that edits may change them,
`hooks.stack(...)` where the layers stand, `hooks.edit` before the head. Every method returns a changed copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rlx_jax.at import SelectedBlocks
from rlx_jax.blocks import BlockStage, Repeat
from rlx_jax.blocks.control import check_stages
from rlx_jax.errors import GraphError
from rlx_jax.flow import ModelFlow
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.trace.declared import Init, WeightDecl
from rlx_jax.trace.editing import BlockEdit
from rlx_jax.trace.selecting import BlockPattern

Spec = TypeVar("Spec")
R = TypeVar("R", bound="Hooked")


class LayerNumber(int):
    """The number of a layer, from 0. `ctx.index` and `ctx.index()` are the same."""

    def __call__(self) -> int:
        return int(self)


@dataclass(frozen=True)
class LayerContext(Generic[Spec]):
    """What a layer hook is told: the layer's number, the spec of its stock stage, and that stage.

    `default_stage()` is the family's own stage; after an earlier hook, that hook's.
    """

    index: LayerNumber
    spec: Spec
    stock: BlockStage

    def default_stage(self) -> BlockStage:
        """The stage to keep, wrap or leave out."""
        return self.stock


LayerHook = Callable[[LayerContext[Any]], BlockStage]
Edit = Callable[[ModelFlow], ModelFlow]


@dataclass(frozen=True)
class Hooks:
    """The changes to a recipe, in the order in which they were made."""

    layers: tuple[LayerHook, ...] = ()
    before: tuple[BlockStage, ...] = ()
    after: tuple[BlockStage, ...] = ()
    edits: tuple[Edit, ...] = ()
    profile: CompileProfile | None = None

    def stage(self, index: int, spec: Spec, default: Callable[[int, Spec], BlockStage]) -> BlockStage:
        """The stage of one layer: the family's, through every layer hook."""
        stage = default(index, spec)
        for hook in self.layers:
            stage = hook(LayerContext(LayerNumber(index), spec, stage))
        return stage

    def stack(self, count: int, spec: Callable[[int], Spec], default: Callable[[int, Spec], BlockStage]) -> Edit:
        """An edit that appends the layers, with what stands before and after them."""
        layers = Repeat(count, HookedLayers(self, spec, default))
        return lambda flow: flow.stage(*self.before, layers, *self.after)

    def edit(self, flow: ModelFlow) -> ModelFlow:
        """The edits of `patch_flow`."""
        for edit in self.edits:
            flow = edit(flow)
            if not isinstance(flow, ModelFlow):
                raise GraphError(f"patch_flow: the edit returned {type(flow).__name__}; expected the edited ModelFlow")
        return flow


@dataclass(frozen=True)
class HookedLayers:
    """Layer i as `Hooks.stage` makes it. A class, so that a flow with it can be pickled and copied."""

    hooks: Hooks
    spec: Callable[[int], Any]
    default: Callable[[int, Any], BlockStage]

    def __call__(self, index: int) -> BlockStage:
        return self.hooks.stage(index, self.spec(index), self.default)


class Hooked(Protocol):
    """A recipe that holds hooks: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...

    @property
    def hooks(self) -> Hooks: ...


# -- the methods of every recipe ---------------------------------------------------------------


def on_layer(recipe: R, fn: LayerHook) -> R:
    """Make every layer by `fn(ctx)`; `ctx` has `index`, `spec` and `default_stage()`, the family's own stage.

    Hooks chain: the default stage of a second one is what the first returned.
    """
    if not callable(fn):
        raise GraphError(f"layer: expected a function of a LayerContext, got {type(fn).__name__}")
    return replace(recipe, hooks=replace(recipe.hooks, layers=(*recipe.hooks.layers, fn)))


def add_before(recipe: R, stages: Iterable[BlockStage]) -> R:
    """Put stages between the embedding and the layers, behind those of earlier calls."""
    before = check_stages(stages, "before_layers")
    return replace(recipe, hooks=replace(recipe.hooks, before=(*recipe.hooks.before, *before)))


def add_after(recipe: R, stages: Iterable[BlockStage]) -> R:
    """Put stages between the layers and what follows them (last-token gather, final norm)."""
    after = check_stages(stages, "after_layers")
    return replace(recipe, hooks=replace(recipe.hooks, after=(*recipe.hooks.after, *after)))


def add_patch(recipe: R, edit: Edit) -> R:
    """Run `edit(flow) → flow` on the assembled flow, before its head is appended."""
    if not callable(edit):
        raise GraphError(f"patch_flow: expected a function ModelFlow → ModelFlow, got {type(edit).__name__}")
    return replace(recipe, hooks=replace(recipe.hooks, edits=(*recipe.hooks.edits, edit)))


def set_profile(recipe: R, profile: ProfileLike) -> R:
    """Compile with `profile` (one, the name of a preset, or a path) unless `compile` or `load` gets another."""
    return replace(recipe, hooks=replace(recipe.hooks, profile=CompileProfile.of(profile)))


def set_profile_near(recipe: R, weights: str | os.PathLike[str], family: str | None = None) -> R:
    """Compile with `<family>.rlx.toml` beside the weights; without that file, with the profile set before, or `auto`.

    `family` is the recipe's name unless given. Raises as `CompileProfile.near`.
    """
    near = CompileProfile.near(weights, family or recipe.name, recipe.hooks.profile or "auto")
    return set_profile(recipe, near)


@dataclass(frozen=True)
class WithBlocks:
    """The edit of a flow that changes blocks by their paths. A class, so that a recipe with it can be pickled."""

    edit: BlockEdit

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        return replace(flow, _block_edits=(*flow._block_edits, self.edit))


def select_blocks(recipe: R, pattern: str) -> SelectedBlocks[R]:
    """The blocks whose paths match a glob, `layers.*.self_attn.{q,v}_proj`, those of the head too, to be wrapped,
    replaced, captured or scaled: see `SelectedBlocks`."""
    return SelectedBlocks(BlockPattern(pattern), lambda edit: add_patch(recipe, WithBlocks(edit)))


@dataclass(frozen=True)
class WithIgnored:
    """The edit of a flow that records for its report which fields of the config the caller ignored."""

    names: tuple[str, ...]

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        return replace(flow, _ignored_fields=tuple(dict.fromkeys((*flow._ignored_fields, *self.names))))


@dataclass(frozen=True)
class WithParam:
    """The edit of a flow that says of weights what their stages do not. A class, so that a recipe with it can be
    pickled."""

    decl: WeightDecl

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        return replace(flow, _declared=(*flow._declared, self.decl))


def declare_param(recipe: R, pattern: str, *, shape: Sequence[int] | None = None, init: Init | None = None) -> R:
    """Say of the weights whose checkpoint keys match a glob their shape, how they are drawn, or both: see
    `ModelFlow.param`."""
    return add_patch(recipe, WithParam(WeightDecl.of(pattern, shape, init)))


class HookMethods:
    """The methods of every recipe that holds `hooks`. One more hook is one more row here; recipes stay as they are."""

    layer = on_layer
    before_layers = add_before
    after_layers = add_after
    after = add_after
    patch_flow = add_patch
    profile = set_profile
    profile_near = set_profile_near
    at = select_blocks
    param = declare_param
