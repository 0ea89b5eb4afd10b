"""Define recipes with a text tower and an image tower that produce comparable vectors, and those of CLIP.

CLIP (Radford et al. 2021) and SigLIP are configs and tables of keys: two towers, or one of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import jax

from rlx_jax.blocks import BlockStage, ClsTokenPool, EndTokenPool, Linear, Named, Sequence, Similarity
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import Fields, ModelConfig, finish_model, text_fields
from rlx_jax.models.hooks import Hooks, Recipe, WithBlocks
from rlx_jax.models.vision import TOWER_INERT, PatchMean, TextConfig, TextFlow, VisionConfig, VisionFlow, VisionLayout
from rlx_jax.weights.source import WeightSource

# What a recipe assembles: everything, one tower, or the comparison of vectors.
TowerPart = Literal["both", "text", "vision", "similarity"]

SCALE, BIAS = "logit_scale", "logit_bias"

T = TypeVar("T", bound=TextConfig)
V = TypeVar("V", bound=VisionConfig)


# First segment of the block paths of each tower.
TOWERS = ("text", "vision")


def nest_stages(name: str, before: ModelFlow, flow: ModelFlow) -> ModelFlow:
    """Return a flow where the stages added since `before` have block paths that start with `name`."""
    new_stages = flow._stages[len(before._stages) :]
    return replace(flow, _stages=(*before._stages, Named(name, Sequence(new_stages))))


@dataclass(frozen=True)
class DualConfig(ModelConfig, Generic[T, V]):
    """The configs of both towers."""

    text: T
    vision: V

    inert = ("logit_scale_init_value", *TOWER_INERT)


def tower_group(c: Fields, name: str) -> Fields:
    """Return the fields of a tower.

    Old files of CLIP have them a second time under `…_dict`; the values that are set there take precedence.
    """
    group = c.group(name)
    duplicate = c.group(f"{name}_dict")
    if duplicate is None:
        return group or Fields({}, f"{c.where}, {name}")
    values = {k: v for k, v in duplicate.values.items() if v is not None}
    return replace(duplicate, values={**(group.values if group else {}), **values})


def finish_towers(*groups: Fields) -> None:
    """Refuse unread fields of the towers."""
    for group in groups:
        finish_model(group, TOWER_INERT)


C = TypeVar("C", bound=DualConfig[Any, Any])


@dataclass(frozen=True)
class DualFlow(Recipe[C]):
    """The recipe of both towers, or of one part of the model.

    Inputs: `pixel_values` `[batch, channels, height, width]`, `input_ids` `[texts, seq]`, and optionally
    `attention_mask` (1 keeps a key) and `position_ids`. Outputs: `logits_per_text` `[texts, batch]`, and `text_embeds`
    and `image_embeds`, vectors of unit length.

    With `part` it is one tower, with the outputs `hidden_states` and `pooled`, the vector before normalization (and
    `input_ids` are `[batch, seq]`); or `similarity`, with inputs `texts` `[texts, E]` and `images` `[batch, E]`.

    Args:
        hooks: see `rlx_jax.models.hooks`. Layer hooks apply to both towers and can tell them apart by `spec`; block
            paths start with the tower, `text.layers.0.mlp` or `vision.layers.0.mlp`. `patch_flow` edits each flow once.
        Others: see `Recipe`.
    """

    name = "dual"
    part: TowerPart = "both"

    config_type = DualConfig
    text_type: ClassVar[Callable[..., TextFlow[Any]]]
    vision_type: ClassVar[Callable[..., VisionFlow[Any]]]
    bias: ClassVar[bool] = False

    def vision(self) -> VisionFlow[Any]:
        """Return the recipe of the vision tower, with the keys of the joint checkpoint."""
        return self.vision_type(self.config.vision, batch=self.batch, weights=self.weights, hooks=self.tower_hooks)

    def text(self) -> TextFlow[Any]:
        """Return the recipe of the text tower, with the keys of the joint checkpoint."""
        return self.text_type(self.config.text, batch=self.batch, weights=self.weights, hooks=self.tower_hooks)

    @property
    def vocab_size(self) -> int:
        return self.text().vocab_size

    @property
    def max_positions(self) -> int | None:
        return self.text().max_positions

    @property
    def padding(self) -> tuple[int, int] | None:
        """(tokens, id) that texts are padded to; None if they may have any length and padding is not read."""
        return self.text().padding

    def of(self, part: TowerPart) -> Self:
        """Return the recipe of a part."""
        return replace(self, part=part)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of every checkpoint key of both towers."""
        return dict(_shapes(type(self)(self.config)))

    @property
    def tower_hooks(self) -> Hooks:
        """The hooks of each tower. For both towers together the edits belong to the joint flow instead."""
        return replace(self.hooks, edits=()) if self.part == "both" else self.hooks

    def assemble(self) -> ModelFlow:
        """Return the flow of the part, bound to its weights if there are any.

        The block paths of a tower always start with its name.
        """
        flow = ModelFlow(self.name if self.part == "both" else f"{self.name}_{self.part}", profile=self.hooks.profile)
        flow = flow.with_weights(self.weights, leave=self.unread_keys())
        text, vision = self.text(), self.vision()
        if self.part != "both":
            # Patterns of `at` for a tower that this flow does not have are valid: another flow has those blocks.
            parts = (*TOWERS, "*") if self.part == "similarity" else (name for name in TOWERS if name != self.part)
            flow = replace(flow, _other_parts=tuple(parts))
        if self.part in TOWERS:
            return nest_stages(self.part, flow, (text if self.part == "text" else vision).add_tower(flow))
        if self.part == "similarity":
            flow = self.add_similarity(flow)
            # Only edits of blocks apply to the comparison; other edits were applied to the towers.
            blocks = replace(self.hooks, edits=tuple(e for e in self.hooks.edits if isinstance(e, WithBlocks)))
            return blocks.edit(flow).output("logits_per_text")
        pool = vision.pool()
        if pool is None:
            raise ConfigError(f"{self.name}: the vision tower has no head, so there is no vector to compare")
        images = vision.add_layers(vision.add_inputs(flow).bind(batch=self.batch)).stage(pool)
        flow = text.add_inputs(nest_stages("vision", flow, images).store_stream("images"), "texts")
        flow = flow.custom_named("texts", lambda emit, x: emit.flow_input("input_ids"))
        flow = nest_stages("text", flow, text.add_layers(flow).stage(text.pool())).stage(self.similarity)
        return self.hooks.edit(flow).output("logits_per_text")

    @property
    def similarity(self) -> Similarity:
        """The stage that compares the vectors."""
        return Similarity(SCALE, BIAS if self.bias else None)

    def add_similarity(self, flow: ModelFlow) -> ModelFlow:
        """Return a flow that compares its inputs, vectors of texts and images."""
        width = self.config.text.width
        flow = flow.input("texts", ("texts", width)).input("images", ("batch", width))
        return flow.bind_inputs_to_streams([("images", "images")]).stage(self.similarity)

    def unread_keys(self) -> tuple[str, ...]:
        """Return keys that are left unread on purpose: position ids, and what other parts read."""
        ids = tuple(f"{tower}_model.embeddings.position_ids" for tower in TOWERS)
        return ids if self.part == "both" else (*ids, *self.shapes())


@lru_cache(maxsize=8)
def _shapes(recipe: DualFlow[Any]) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the weights of both towers and of the comparison.

    It is cached, because each part needs it to leave the other parts' weights unread.
    """
    compare = recipe.add_similarity(ModelFlow(recipe.name))
    return declared_shapes(compare) | recipe.text().shapes() | recipe.vision().shapes()


VISUAL, TEXTUAL = "visual_projection.weight", "text_projection.weight"
# Wrong end-of-text id in old configs. No text ends with it; for these, the largest id of a row marks the end.
WRONG_END = 2
R = TypeVar("R", bound=Recipe[Any])

LAYOUT = VisionLayout(
    patch="embeddings.patch_embedding",
    position="embeddings.position_embedding.weight",
    layers="encoder.layers.{}",
    keys=CLIP_KEYS,
    cls="embeddings.class_embedding",
    before="pre_layrnorm",
    patch_bias=False,
    flat=True,
    unread_keys=("embeddings.position_ids", "post_layernorm."),
    head_prefixes=("classifier.",),
)


def _with_projection(recipe: R, key: str, source: WeightSource) -> R:
    """Return a recipe of a tower, without a projection if the checkpoint has no weight of this key."""
    config: Any = recipe.config
    return recipe if source.has(key) else replace(recipe, config=replace(config, width=0))


@dataclass(frozen=True)
class ClipVisionConfig(VisionConfig):
    """Sizes of CLIP's vision tower. `width` is the width of its vectors; 0 without a projection."""

    width: int = 512

    defaults = {"activation": "quick_gelu", "eps": 1e-5}
    patch = 32
    fields = {"width": "projection_dim"}
    inert = TOWER_INERT


@dataclass(frozen=True)
class ClipVisionFlow(VisionFlow[ClipVisionConfig]):
    """The recipe of CLIP's vision tower: see `VisionFlow`.

    `hidden_states` are the ones before the last norm. `pooled` is the class token after it, projected if the checkpoint
    has a projection. A classifier reads the mean of the patches before the last norm.
    """

    layout: VisionLayout = LAYOUT
    prefix: str = "vision_model"
    name = "clip_vision"

    prefixes = ("vision_model", "")
    head_pool = PatchMean(1)

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe as the base class does, without a projection if the checkpoint has none."""
        return _with_projection(super().adapt_to(source), VISUAL, source)

    def pool(self) -> BlockStage:
        c = self.config
        projection = Linear(VISUAL, shape=(c.width, c.hidden_size), roles=(None, "hidden"))
        return Sequence((ClsTokenPool(), *self.norm("post_layernorm"), *([projection] if c.width else [])))


@dataclass(frozen=True)
class ClipTextConfig(TextConfig):
    """Sizes of CLIP's text tower.

    Attributes:
        width: width of its vectors; 0 without a projection.
        end_id: the token that is pooled; None for the largest id of a row.
    """

    end_id: int | None = None

    inert = TOWER_INERT

    @classmethod
    def read(cls, c: Fields) -> Self:
        end = c.integer("eos_token_id", 49407, low=0)
        return cls(
            **text_fields(c, 49408, 77, 2048, 1e-5, hidden=512, heads=8, activation="quick_gelu"),
            width=c.integer("projection_dim", 512),
            end_id=None if end == WRONG_END else end,
        )


class ClipTextFlow(TextFlow[ClipTextConfig]):
    """The recipe of CLIP's text tower: see `TextFlow`.

    `pooled` is the end token after the last norm, projected if the checkpoint has a projection.
    """

    name = "clip_text"

    causal = True

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe as the base class does, without a projection if the checkpoint has none."""
        return _with_projection(super().adapt_to(source), TEXTUAL, source)

    def pool(self) -> BlockStage:
        c, end = self.config, EndTokenPool(self.config.end_id)
        shape = (c.width, c.hidden_size)
        return Sequence((end, Linear(TEXTUAL, shape=shape, roles=(None, "hidden")))) if c.width else end


class ClipConfig(DualConfig[ClipTextConfig, ClipVisionConfig]):
    """The configs of both towers of CLIP."""

    @classmethod
    def read(cls, c: Fields) -> Self:
        text, vision = tower_group(c, "text_config"), tower_group(c, "vision_config")
        width = c.integer("projection_dim", 512)  # applies to both towers, whatever their own fields are
        towers = ClipTextConfig.read(text), ClipVisionConfig.read(vision)
        finish_towers(text, vision)
        return cls(replace(towers[0], width=width), replace(towers[1], width=width))


class ClipFlow(DualFlow[ClipConfig]):
    """The recipe of CLIP: see `DualFlow`. A text's vector is its projected end token."""

    name = "clip"

    text_type = ClipTextFlow
    vision_type = ClipVisionFlow
