"""Define the configs and recipes of SigLIP (Zhai et al. 2023): two towers, or one of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rlx_jax.blocks import AttentionPool, BlockStage, ClsTokenPool, GatherLastToken, Linear, Sequence
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.errors import ConfigError
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.dual import DualConfig, DualFlow, finish_towers, tower_group
from rlx_jax.models.text_tower import TextConfig, TextFlow
from rlx_jax.models.vision import TOWER_INERT, PatchMean, VisionConfig, VisionFlow, VisionLayout

GELU, EPS = "gelu_pytorch_tanh", 1e-6
LAYOUT = VisionLayout(
    patch="embeddings.patch_embedding",
    position="embeddings.position_embedding.weight",
    layers="encoder.layers.{}",
    keys=CLIP_KEYS,
    after="post_layernorm",
    flat=True,
    unread_keys=("embeddings.position_ids", "head."),
    head_prefixes=("classifier.",),
)


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
    prefix: str = "vision_model."
    name: str = "siglip_vision"

    config_type = SiglipVisionConfig
    prefixes = ("vision_model.", "")
    layouts = (LAYOUT,)

    def head_input(self) -> tuple[BlockStage, int]:
        return PatchMean(), self.config.hidden_size

    def pool(self) -> BlockStage | None:
        c = self.config
        if not c.head:
            return None
        return AttentionPool(
            f"{self.prefix}head", c.num_attention_heads, c.layer_norm_eps, c.activation, c.intermediate_size
        )


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


@dataclass(frozen=True)
class SiglipTextFlow(TextFlow[SiglipTextConfig]):
    """The recipe of SigLIP's text tower: see `TextFlow`.

    `pooled` is the last token, padding or not, after a linear layer. So texts are padded to `max_position_embeddings`,
    as in training.
    """

    name: str = "siglip_text"

    config_type = SiglipTextConfig

    @property
    def padding(self) -> tuple[int, int]:
        return self.config.max_position_embeddings, self.config.pad_id

    def pool(self) -> BlockStage:
        c, head = self.config, self.key("head")
        linear = Linear(
            f"{head}.weight", bias_key=f"{head}.bias", shape=(c.width, c.hidden_size), roles=(None, "hidden")
        )
        # The gathered row has one token; ClsTokenPool removes that axis.
        return Sequence((GatherLastToken(), ClsTokenPool(), linear))


@dataclass(frozen=True)
class SiglipConfig(DualConfig[SiglipTextConfig, SiglipVisionConfig]):
    """The configs of both towers of SigLIP."""

    @classmethod
    def read(cls, c: Fields) -> Self:
        text, vision = tower_group(c, "text_config"), tower_group(c, "vision_config")
        result = cls(SiglipTextConfig.read(text), SiglipVisionConfig.read(vision))
        if result.text.width != result.vision.hidden_size:
            raise ConfigError(
                f"{c.where}: vectors of texts are {result.text.width} wide (projection_size), and vectors of images "
                f"{result.vision.hidden_size} (hidden_size of vision_config)"
            )
        finish_towers(text, vision)
        return result


@dataclass(frozen=True)
class SiglipFlow(DualFlow[SiglipConfig]):
    """The recipe of SigLIP: see `DualFlow` and `SiglipTextFlow`.

    The sigmoid of a logit is the probability that a text and an image belong together.
    """

    name: str = "siglip"

    config_type = SiglipConfig
    text_type = SiglipTextFlow
    vision_type = SiglipVisionFlow
    bias = True
