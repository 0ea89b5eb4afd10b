"""Hooks let a user change what a recipe assembles, without editing the family's file.

A recipe is a frozen dataclass that inherits `HookMethods` and has `Hooks`:

    hooks: Hooks = Hooks()

Its `assemble` applies them: `hooks.profile` and the weights at the start, so that edits may change them,
`hooks.stack(...)` in place of the layers, `hooks.edit` before the head. Every method returns a changed copy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NoReturn, Self, TypeVar, get_args

import jax
import jax.numpy as jnp

from rlx_jax.at import SelectedBlocks
from rlx_jax.blocks import BlockStage, Repeat
from rlx_jax.blocks.control import check_stages
from rlx_jax.dataclasses import dataclass, field, fields, replace
from rlx_jax.errors import ConfigError, GraphError, MissingWeightError, WeightError, WeightShapeError, listing, shown
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import ModelConfig, TokenConfig
from rlx_jax.profiles import CompileProfile, ProfileLike
from rlx_jax.trace.block_selection import BlockPattern
from rlx_jax.trace.editing import BlockEdit
from rlx_jax.trace.parameters import Init, Parameters, WeightDecl
from rlx_jax.weights.source import WeightSource, short_name
from rlx_jax.weights.views import can_init_missing, suggest_key

Spec = TypeVar("Spec")


class LayerNumber(int):
    """The number of a layer, from 0. `ctx.index` and `ctx.index()` are the same."""

    def __call__(self) -> int:
        return int(self)


@dataclass(frozen=True)
class LayerContext(Generic[Spec]):
    """The argument of a layer hook.

    Attributes:
        index: the layer's number.
        spec: the spec of the family's stage.
        stage_so_far: the stage so far: the family's stage, or the result of an earlier hook.
    """

    index: LayerNumber
    spec: Spec
    stage_so_far: BlockStage

    def default_stage(self) -> BlockStage:
        """Return `stage_so_far`, the stage to keep, wrap or leave out."""
        return self.stage_so_far


LayerHook = Callable[[LayerContext[Any]], BlockStage]
Edit = Callable[[ModelFlow], ModelFlow]


@dataclass(frozen=True)
class Hooks:
    """The changes to a recipe, each kind in the order in which it was added.

    Attributes:
        layers: functions from a `LayerContext` to the stage of a layer.
        before, after: stages before and after the layers.
        edits: edits of the flow before its head.
        profile: the compile options.
    """

    layers: tuple[LayerHook, ...] = ()
    before: tuple[BlockStage, ...] = ()
    after: tuple[BlockStage, ...] = ()
    edits: tuple[Edit, ...] = ()
    profile: CompileProfile | None = None

    def stack(self, count: int, spec: Callable[[int], Spec], default: Callable[[int, Spec], BlockStage]) -> Edit:
        """Return an edit that appends the layers, with the stages before and after them."""
        layers = Repeat(count, HookedLayers(self, spec, default))
        return lambda flow: flow.stage(*self.before, layers, *self.after)

    def edit(self, flow: ModelFlow) -> ModelFlow:
        """Return the flow after all edits of `patch_flow`."""
        for edit in self.edits:
            flow = edit(flow)
            if not isinstance(flow, ModelFlow):
                raise GraphError(f"patch_flow: the edit returned {type(flow).__name__}; expected the edited ModelFlow")
        return flow


@dataclass(frozen=True)
class HookedLayers:
    """Layer i: the family's, passed through every layer hook. It is a class, so that a flow with it can be pickled."""

    hooks: Hooks
    spec: Callable[[int], Any]
    default: Callable[[int, Any], BlockStage]

    def __call__(self, index: int) -> BlockStage:
        spec = self.spec(index)
        stage = self.default(index, spec)
        for hook in self.hooks.layers:
            stage = hook(LayerContext(LayerNumber(index), spec, stage))
        return stage


@dataclass(frozen=True)
class WithBlocks:
    """An edit of blocks, selected by their paths."""

    edit: BlockEdit

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        return replace(flow, _block_edits=(*flow._block_edits, self.edit))


@dataclass(frozen=True)
class WithIgnored:
    """An edit that records for the report which fields of the config the caller ignored."""

    names: tuple[str, ...]

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        return replace(flow, _ignored_fields=tuple(dict.fromkeys((*flow._ignored_fields, *self.names))))


@dataclass(frozen=True)
class WithParam:
    """An edit that declares the shape or init of weights that their stages do not declare."""

    decl: WeightDecl

    def __call__(self, flow: ModelFlow) -> ModelFlow:
        return replace(flow, _declared=(*flow._declared, self.decl))


class HookMethods:
    """The methods of every recipe with a field `hooks`. The recipe is a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: str
    hooks: Hooks

    def _with_hooks(self, **changes: Any) -> Self:
        """Return a copy with some fields of its hooks replaced."""
        return replace(self, hooks=replace(self.hooks, **changes))

    def layer(self, fn: LayerHook) -> Self:
        """Return a copy with every layer made by `fn(ctx)`; `ctx` has `index`, `spec` and `default_stage()`.

        Hooks chain: the default stage of a second hook is the result of the first.
        """
        if not callable(fn):
            raise GraphError(f"layer: expected a function of a LayerContext, got {type(fn).__name__}")
        return self._with_hooks(layers=(*self.hooks.layers, fn))

    def before_layers(self, stages: Iterable[BlockStage]) -> Self:
        """Return a copy with stages between the embedding and the layers, after the stages of earlier calls."""
        return self._with_hooks(before=(*self.hooks.before, *check_stages(stages, "before_layers")))

    def after_layers(self, stages: Iterable[BlockStage]) -> Self:
        """Return a copy with stages between the layers and what follows them (last-token gather, final norm)."""
        return self._with_hooks(after=(*self.hooks.after, *check_stages(stages, "after_layers")))

    after = after_layers

    def patch_flow(self, edit: Edit) -> Self:
        """Return a copy that runs `edit(flow) → flow` on the assembled flow, before its head is appended."""
        if not callable(edit):
            raise GraphError(f"patch_flow: expected a function ModelFlow → ModelFlow, got {type(edit).__name__}")
        return self._with_hooks(edits=(*self.hooks.edits, edit))

    def profile(self, profile: ProfileLike) -> Self:
        """Return a copy that compiles with `profile`, unless `compile` or `load` gets another one.

        `profile`: a profile, the name of a preset, or a path.
        """
        return self._with_hooks(profile=CompileProfile.of(profile))

    def profile_near(self, weights: str | os.PathLike[str], family: str | None = None) -> Self:
        """Return a copy that compiles with the `<family>.rlx.toml` in the directory of the weights.

        Without that file it uses `tuned.rlx.toml` there, which `rlx-jax tune` writes, the profile set before, or
        `auto`.

        Args:
            weights: the checkpoint.
            family: prefix of the file name; the recipe's name by default.

        Raises:
            As `CompileProfile.near`.
        """
        default = CompileProfile.near(weights, "tuned", self.hooks.profile or "auto")
        return self.profile(CompileProfile.near(weights, family or self.name, default))

    def at(self, pattern: str) -> SelectedBlocks[Self]:
        """Return the blocks with paths that match a glob, such as `layers.*.self_attn.{q,v}_proj`, including blocks of
        the head.

        They can be wrapped, replaced, captured or scaled: see `SelectedBlocks`.
        """
        return SelectedBlocks(BlockPattern(pattern), lambda edit: self.patch_flow(WithBlocks(edit)))

    def param(self, pattern: str, *, shape: Sequence[int] | None = None, init: Init | None = None) -> Self:
        """Return a copy that declares the shape, the init, or both, of weights with checkpoint keys that match a glob.

        See `ModelFlow.param`.
        """
        return self.patch_flow(WithParam(WeightDecl.of(pattern, shape, init)))


C = TypeVar("C", bound=ModelConfig)


@dataclass(frozen=True)
class Recipe(HookMethods, Generic[C]):
    """A config, and how it becomes a flow.

    Args:
        config: the family's config.
        batch: rows to compile for ahead of the first call.
        weights: the checkpoint that the flow is bound to; None: the flow is not bound.
        hooks: see `rlx_jax.models.hooks`.

    Raises:
        ConfigError: the config is not of the family's class. GraphError: an option is no bool.
    """

    config: C
    batch: int | None = None
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    name = "recipe"
    # The class of the config: the argument of the generic base, as in `DecoderFlow[LlamaConfig]`.
    config_type: ClassVar[type[ModelConfig]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        arguments = (c for base in vars(cls).get("__orig_bases__", ()) for c in get_args(base))
        config = next((c for c in arguments if isinstance(c, type) and issubclass(c, ModelConfig)), None)
        if config is not None and "config_type" not in vars(cls):
            cls.config_type = config

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.config, self.config_type):
            raise ConfigError(
                f"{name}: config is {shown(self.config)}; expected a {self.config_type.__name__}: "
                f"rlx_jax.recipe_for(path) reads it from a checkpoint, {name}.for_prefill(mapping) from the content of "
                "a config.json"
            )
        # Dataclasses do not check types, and a string such as "false" would be true.
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise GraphError(f"{name}: {option.name} is {shown(value)}; expected True or False")

    @classmethod
    def for_prefill(cls, config: C | Mapping[str, Any], batch: int | None = None) -> Self:
        """Return the forward program, bound to a number of rows if given.

        `config` may be the content of `config.json`.
        """
        family_config: Any = cls.config_type.of(config)
        return cls(family_config, batch)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; 0 if the model does not read tokens."""
        return self.config.vocab_size if isinstance(self.config, TokenConfig) else 0

    @property
    def max_positions(self) -> int | None:
        """The longest sequence in tokens; None if the model does not read tokens."""
        return self.config.max_position_embeddings if isinstance(self.config, TokenConfig) else None

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe for how a checkpoint stores its weights, such as under a prefix."""
        return self

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return a checkpoint's weights under the keys that the recipe reads."""
        return source

    def spec(self, index: int) -> Any:
        """Return the spec of layer `index`, which layer hooks see."""
        raise NotImplementedError

    def stage(self, index: int, spec: Any) -> BlockStage:
        """Return the family's layer."""
        raise NotImplementedError

    def task_head_keys(self, source: WeightSource) -> tuple[str, ...]:
        """Return the keys of a task's head in a checkpoint, which the recipe does not read."""
        return ()

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of every checkpoint key."""
        return declared_shapes(replace(self, weights=None, hooks=Hooks()).assemble())

    def assemble(self) -> ModelFlow:
        """Return the flow, bound to its weights if there are any."""
        raise NotImplementedError


# Check the names, shapes and dtypes of a checkpoint's weights against its config, before any data is read.


# Number of missing weights at which the check stops; a wrong config may have a thousand layers.
MAX_MISSING = 300


def check_recipe_weights(flow: ModelFlow, recipe: Any) -> ModelFlow:
    """Return the flow of a recipe after checking that its source has every weight, as a float of the right shape.

    A source that is marked as allowed to miss weights (`missing="init"`) is checked for the weights that it has.

    Raises:
        MissingWeightError: lists what is missing, and similar names.
        WeightShapeError, WeightError: block path, key, file, expected, got.
    """
    assert flow._weights is not None
    check = _WeightCheck(flow._weights, recipe)
    flow._check_weights(check)
    if check.missing_paths:
        check.refuse()
    return flow


def with_other_weights(flow: ModelFlow, weights: WeightSource | None) -> ModelFlow:
    """Return a checked flow bound to other weights with the same keys and types, with the graph that it has."""
    bound, built = replace(flow, _weights=weights), flow._checked
    if built is not None:
        built = replace(built, source=weights, flow=bound, seconds=0.0, since=time.perf_counter())
        object.__setattr__(bound, "_checked", built)
    return bound


class _WeightCheck(Parameters):
    """The weights of a source, recording the ones that a recipe's stages read but the source does not have.

    `missing_paths`: the path of the block that reads each missing weight.
    """

    def __init__(self, source: WeightSource, recipe: Any) -> None:
        super().__init__(source)
        # With `initializes_missing` a missing weight does not stop the build, so that the check can list all of them.
        self.initializes_missing, self.can_init_missing = True, can_init_missing(source)
        self.recipe, self.missing_paths, self.checkpoint = recipe, dict[str, str](), source

    def refuse(self, at_least: str = "") -> NoReturn:
        """Raise the error about the missing weights."""
        first_key = next(iter(self.missing_paths))
        reader = self.missing_paths[first_key] or self.recipe.name
        raise MissingWeightError(
            f"{at_least}{len(self.missing_paths)} weights that config.json requires are missing: "
            f"{listing(self.missing_paths)}; the first is read by "
            f"{reader}{self._head_advice() or suggest_key(first_key, self.checkpoint.keys())}"
        )

    def _head_advice(self) -> str:
        """Return how to load the model without its head, if all missing weights are the head's."""
        head = getattr(self.recipe, "head", None)
        keys = set() if head is None else head.weight_keys(getattr(self.recipe, "key", str))
        is_head = self.missing_paths.keys() <= keys
        return "; these are weights of its head, and rlx_jax.load(…, head=False) loads the rest" if is_head else ""

    def _new_weight(self, key: str, shape: tuple[int, ...], path: str) -> Any:
        """Record a missing weight, and go on as if it were initialized."""
        if not self.can_init_missing:
            self.missing_paths.setdefault(key, path)
            if len(self.missing_paths) > MAX_MISSING:
                self.refuse("at least ")
        return super()._new_weight(key, shape, path)

    def _weight_from_source(self, key: str, sizes: Sequence[int | None] | None, path: str) -> Any:
        """Return the declared weight of the source, after checking its shape and that it is a float."""
        try:
            weight = super()._weight_from_source(key, sizes, path)
        except WeightShapeError as error:
            fields = {name: value for name, value in vars(self.recipe.config).items() if type(value) is int}
            if labels := getattr(getattr(self.recipe, "head", None), "labels", ()):
                fields["id2label (num_labels)"] = len(labels)
            # Fields of the config that equal an unexpected size are the probable cause; without any, all are listed.
            unexpected = set(sizes or ()) - set(self.checkpoint.spec(key).shape)
            fields = {name: value for name, value in fields.items() if value in unexpected} or fields
            fields_text = ", ".join(f"{name} {value}" for name, value in fields.items())
            raise WeightShapeError(f"{error}; by config.json: {fields_text}") from None
        if not jnp.issubdtype(weight.type.dtype, jnp.floating):
            raise WeightError(f"{path}: {self.describe(key)}: expected floats, got {short_name(weight.type.dtype)}")
        return weight
