"""CLIP (Radford et al. 2021): two towers, or the vision tower alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from rlx_jax.blocks import BlockStage, ClsTokenPool, EndTokenPool, LayerNorm, Linear, Sequence
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.models.config import Fields
from rlx_jax.models.dual import DualConfig, DualFlow, TextConfig, finish_towers, text_fields, tower_group
from rlx_jax.models.vision import (
    VisionConfig,
    VisionFlow,
    VisionLayout,
    WeightShapes,
    image_fields,
    norm_shapes,
    tower_fields,
)
from rlx_jax.weights.source import WeightSource

VISUAL, TEXTUAL = "visual_projection.weight", "text_projection.weight"
WRONG_END = 2
"""What old configs say that ends a text, and nothing does: there the largest id is the end."""

LAYOUT = VisionLayout(
    patch="embeddings.patch_embedding",
    position="embeddings.position_embedding.weight",
    layers="encoder.layers.{}",
    keys=CLIP_KEYS,
    cls="embeddings.class_embedding",
    before="pre_layrnorm",
    patch_bias=False,
    flat=True,
    left=("embeddings.position_ids",),
)


@dataclass(frozen=True)
class ClipVisionConfig(VisionConfig):
    """Sizes of CLIP's vision tower. `width` is that of its vectors, 0 for one without a projection."""

    width: int = 512

    inert: ClassVar[tuple[str, ...]] = ("initializer_factor", "tie_word_embeddings")

    @classmethod
    def read(cls, c: Fields) -> Self:
        return cls(
            **tower_fields(c, activation="quick_gelu", eps=1e-5),
            **image_fields(c, patch=32),
            intermediate_size=c.whole("intermediate_size", 3072),
            width=c.whole("projection_dim", 512),
        )


@dataclass(frozen=True)
class ClipVisionFlow(VisionFlow[ClipVisionConfig]):
    """The recipe of CLIP's vision tower: see `VisionFlow`. `hidden_states` are those before the last norm, and `pooled`
    is the class token behind it, projected if the checkpoint has a projection."""

    layout: VisionLayout = LAYOUT
    prefix: str = "vision_model."
    name: str = "clip_vision"

    config_type = ClipVisionConfig
    prefixes = ("vision_model.", "")
    layouts = (LAYOUT,)

    def stored_in(self, source: WeightSource) -> Self:
        """As the base, and without the projection that a checkpoint does not have."""
        made = super().stored_in(source)
        return made if source.has(VISUAL) else replace(made, config=replace(made.config, width=0))

    def pool(self) -> BlockStage:
        norm, c = f"{self.prefix}post_layernorm", self.config
        stages: list[BlockStage] = [ClsTokenPool(), LayerNorm(f"{norm}.weight", f"{norm}.bias", c.layer_norm_eps)]
        if c.width:
            stages.append(Linear(VISUAL, shape=(c.width, c.hidden_size), roles=(None, "hidden")))
        return Sequence(stages)

    def pool_shapes(self) -> WeightShapes:
        c, found = self.config, norm_shapes(f"{self.prefix}post_layernorm", self.config.hidden_size)
        return found | ({VISUAL: (c.width, c.hidden_size)} if c.width else {})


@dataclass(frozen=True)
class ClipConfig(DualConfig[ClipVisionConfig]):
    """Both towers of CLIP."""

    @classmethod
    def read(cls, c: Fields) -> Self:
        text, vision = tower_group(c, "text_config"), tower_group(c, "vision_config")
        width = c.whole("projection_dim", 512)
        for group in (text, vision):  # the one outside is both towers'
            group.seen.add("projection_dim")
        end = text.whole("eos_token_id", 49407, low=0)
        made = cls(
            TextConfig(
                **text_fields(text, 77, "quick_gelu", 1e-5),
                intermediate_size=text.whole("intermediate_size", 2048),
                width=width,
                end_id=None if end == WRONG_END else end,
            ),
            ClipVisionConfig(
                **tower_fields(vision, activation="quick_gelu", eps=1e-5),
                **image_fields(vision, patch=32),
                intermediate_size=vision.whole("intermediate_size", 3072),
                width=width,
            ),
        )
        finish_towers(text, vision)
        return made


@dataclass(frozen=True)
class ClipFlow(DualFlow[ClipConfig]):
    """The recipe of CLIP: see `DualFlow`. A text's vector is that of its end token, projected."""

    name: str = "clip"

    config_type = ClipConfig
    causal = True

    def vision(self) -> VisionFlow[Any]:
        return ClipVisionFlow(self.config.vision, batch=self.batch, weights=self.weights, hooks=self.hooks)

    def pool(self) -> BlockStage:
        c = self.config.text
        projection = Linear(TEXTUAL, shape=(c.width, c.hidden_size), roles=(None, "hidden"))
        return Sequence((EndTokenPool(c.end_id), projection))

    def pool_shapes(self) -> WeightShapes:
        return {TEXTUAL: (self.config.text.width, self.config.text.hidden_size)}
