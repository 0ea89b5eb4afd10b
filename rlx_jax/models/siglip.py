"""Define the configs and recipes of SigLIP (Zhai et al. 2023): two towers, or one of them alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from rlx_jax import blocks
from rlx_jax.blocks.linear import module_keys
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError
from rlx_jax.flow import ModelFlow
from rlx_jax.models.config import Fields, text_fields, tower_fields
from rlx_jax.models.dual import LAYOUT as CLIP_LAYOUT
from rlx_jax.models.dual import DualConfig, DualFlow, finish_towers, tower_group
from rlx_jax.models.vision import TOWER_INERT, PatchMean, TextConfig, TextFlow, VisionConfig, VisionFlow, VisionLayout

GELU, EPS = "gelu_pytorch_tanh", 1e-6
# CLIP's without a class token and the norm before the layers.
LAYOUT = replace(
    CLIP_LAYOUT, cls="", before="", after="post_layernorm", patch_bias=True,
    unread_keys=("embeddings.position_ids", "head."),
)  # fmt: skip


@dataclass(frozen=True)
class SiglipVisionConfig(VisionConfig):
    """Sizes of SigLIP's vision tower, and whether it has a pooling head."""

    head: bool = True

    defaults: ClassVar[Mapping[str, Any]] = {"activation": GELU}
    fields: ClassVar[Mapping[str, str]] = {"head": "vision_use_head"}
    inert: ClassVar[tuple[str, ...]] = TOWER_INERT


@dataclass(frozen=True)
class SiglipVisionFlow(VisionFlow[SiglipVisionConfig]):
    """The recipe of SigLIP's vision tower: see `VisionFlow`.

    `pooled` is the output of its attention head over all patches; without a head there is no `pooled`. A classifier
    reads the mean of the patches.
    """

    layout: VisionLayout = LAYOUT
    prefix: str = "vision_model"
    name = "siglip_vision"

    prefixes = ("vision_model", "")
    head_pool = PatchMean()

    def pool(self) -> blocks.BlockStage | None:
        c, key = self.config, self.key("head")
        if not c.head:
            return None
        return blocks.AttentionPool(key, c.num_attention_heads, c.layer_norm_eps, c.activation, c.intermediate_size)


@dataclass(frozen=True)
class SiglipTextConfig(TextConfig):
    """Sizes of SigLIP's text tower. `pad_id` is the id that rows are padded with."""

    pad_id: int = 1

    inert: ClassVar[tuple[str, ...]] = TOWER_INERT

    @classmethod
    def read(cls, c: Fields) -> Self:
        sizes = text_fields(c, 32000, 64, eps=EPS, activation=GELU)
        width = c.integer_or_null("projection_size", None) or sizes["hidden_size"]
        return cls(**sizes, width=width, pad_id=c.integer("pad_token_id", 1, low=0))


class SiglipTextFlow(TextFlow[SiglipTextConfig]):
    """The recipe of SigLIP's text tower: see `TextFlow`.

    `pooled` is the last token, padding or not, after a linear layer. So texts are padded to `max_position_embeddings`,
    as in training.
    """

    name = "siglip_text"

    @property
    def padding(self) -> tuple[int, int]:
        return self.config.max_position_embeddings, self.config.pad_id

    def pool(self) -> blocks.BlockStage:
        c, (weight, bias) = self.config, module_keys(self.key("head"))
        linear = blocks.Linear(weight, bias_key=bias, shape=(c.width, c.hidden_size), roles=(None, "hidden"))
        # The gathered row has one token; ClsTokenPool removes that axis.
        return blocks.Sequence((blocks.GatherLastToken(), blocks.ClsTokenPool(), linear))


class SiglipConfig(DualConfig[SiglipTextConfig, SiglipVisionConfig]):
    """The configs of both towers of SigLIP."""

    vision_type: ClassVar[type[SiglipVisionConfig]] = SiglipVisionConfig

    @classmethod
    def read(cls, c: Fields) -> Self:
        text, vision = tower_group(c, "text_config"), tower_group(c, "vision_config")
        result = cls(SiglipTextConfig.read(text), cls.vision_type.read(vision))
        if result.text.width != result.vision.hidden_size:
            raise ConfigError(
                f"{c.where}: vectors of texts are {result.text.width} wide (projection_size), and vectors of images "
                f"{result.vision.hidden_size} (hidden_size of vision_config)"
            )
        finish_towers(text, vision)
        return result


class SiglipFlow(DualFlow[SiglipConfig]):
    """The recipe of SigLIP: see `DualFlow` and `SiglipTextFlow`.

    The sigmoid of a logit is the probability that a text and an image belong together.
    """

    name = "siglip"

    text_type = SiglipTextFlow
    vision_type = SiglipVisionFlow
    bias = True


MASK, SHAPES = "pixel_attention_mask", "spatial_shapes"


class Siglip2VisionConfig(SiglipVisionConfig):
    """Sizes of the vision tower of SigLIP 2, with positions of a square of `num_patches` patches."""

    @classmethod
    def read(cls, c: Fields) -> Self:
        patches, patch = c.integer("num_patches", 256, high=2**20), c.integer("patch_size", 16, high=2**10)
        side = math.isqrt(patches)
        if side * side != patches:
            raise ConfigError(f"{c.where}: num_patches is {patches}; expected a square number")
        return cls(
            **tower_fields(c, activation=GELU), intermediate_size=c.integer("intermediate_size", 3072),
            image_size=(side * patch, side * patch), patch_size=(patch, patch),
            num_channels=c.integer("num_channels", 3, high=2**10), head=c.flag("vision_use_head", True),
        )  # fmt: skip


class Siglip2VisionFlow(SiglipVisionFlow):
    """The recipe of SigLIP 2's vision tower for images of any proportions (NaFlex): see `SiglipVisionFlow`.

    Inputs, as the checkpoint's image processor makes them: `pixel_values` `[batch, patches, P·P·channels]`,
    `pixel_attention_mask` `[batch, patches]`, 1 for patches of the image, and `spatial_shapes` `[batch, 2]`, the
    rows and columns of patches.
    """

    name = "siglip2_vision"

    config_type = Siglip2VisionConfig
    head_pool = PatchMean(mask_input=MASK)

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        c = self.config
        flow = flow.input("pixel_values", (rows, "patches", c.patch_size[0] ** 2 * c.num_channels))
        flow = flow.input(MASK, (rows, "patches"), dtype="int32")
        return flow.input(SHAPES, (rows, 2), dtype="int32")

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        c, patch_keys = self.config, module_keys(self.key(self.layout.patch))
        return (blocks.NaflexEmbed(*patch_keys, self.key(self.layout.position), c.hidden_size, c.grid[0], SHAPES),)

    def spec(self, index: int) -> blocks.PreNormLayerSpec:
        return replace(super().spec(index), mask_input=MASK)

    def pool(self) -> blocks.BlockStage | None:
        pool: Any = super().pool()
        return None if pool is None else replace(pool, mask_input=MASK)


class Siglip2Config(SiglipConfig):
    """The configs of both towers of SigLIP 2."""

    vision_type: ClassVar[type[SiglipVisionConfig]] = Siglip2VisionConfig


class Siglip2Flow(SiglipFlow):
    """The recipe of SigLIP 2 for images of any proportions: see `SiglipFlow` and `Siglip2VisionFlow`."""

    name = "siglip2"

    config_type = Siglip2Config
    vision_type = Siglip2VisionFlow
