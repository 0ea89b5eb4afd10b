"""Define the configs and recipes of CLIP (Radford et al. 2021): two towers, or one of them alone."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from rlx_jax.blocks import BlockStage, ClsTokenPool, EndTokenPool, Linear, Sequence
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.dual import DualConfig, DualFlow, finish_towers, tower_group
from rlx_jax.models.hooks import Recipe
from rlx_jax.models.vision import TOWER_INERT, PatchMean, TextConfig, TextFlow, VisionConfig, VisionFlow, VisionLayout
from rlx_jax.weights.source import WeightSource

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
