"""Define the recipe of a pre-norm text tower, next to an image tower or alone: CLIP's and SigLIP's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from rlx_jax.blocks import BlockStage, Embed, GatherAdd, LayerNorm, PreNormLayerSpec, pre_norm_layer
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.flow import POSITIONS
from rlx_jax.models.config import TokenConfig
from rlx_jax.models.encoder import EncoderFlow
from rlx_jax.models.vision import TowerConfig

TOKEN_TABLE, POSITION_TABLE = "embeddings.token_embedding.weight", "embeddings.position_embedding.weight"


@dataclass(frozen=True)
class TextConfig(TowerConfig, TokenConfig):
    """Sizes of a text tower. `width` is the width of its vectors."""

    vocab_size: int
    max_position_embeddings: int
    width: int


T = TypeVar("T", bound=TextConfig)


@dataclass(frozen=True)
class TextFlow(EncoderFlow[T]):
    """The recipe of a text tower: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`.

    Its side output `pooled` is one vector for each text, not normalised.
    """

    prefix: str = "text_model"
    name: str = "text"

    embedding = TOKEN_TABLE
    optional_inputs = (("attention_mask", None), ("position_ids", POSITIONS))
    causal: ClassVar[bool] = False

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        return (
            Embed(self.key(TOKEN_TABLE), (c.vocab_size, c.hidden_size)),
            GatherAdd("position_ids", self.key(POSITION_TABLE), (c.max_position_embeddings, c.hidden_size)),
        )

    def spec(self, index: int) -> PreNormLayerSpec:
        c = self.config
        return PreNormLayerSpec(
            self.key(f"encoder.layers.{index}"), CLIP_KEYS, c.hidden_size, c.num_attention_heads, c.intermediate_size,
            c.layer_norm_eps, c.activation, causal=self.causal, mask_input="attention_mask",
        )  # fmt: skip

    def stage(self, index: int, spec: PreNormLayerSpec) -> BlockStage:
        return pre_norm_layer(spec)

    def final_stages(self) -> tuple[BlockStage, ...]:
        norm = self.key("final_layer_norm")
        return (LayerNorm(f"{norm}.weight", f"{norm}.bias", self.config.layer_norm_eps),)

    def pool(self) -> BlockStage:
        raise NotImplementedError
