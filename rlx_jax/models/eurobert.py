"""Define the config and recipe of EuroBERT (Boizard et al. 2025): Llama's layers, in which tokens read all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from rlx_jax.blocks import BlockStage, Embed, EncoderKeys, EncoderLayer, EncoderLayerSpec, RmsNorm, RopeTables
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import DecoderConfig, plain_fields
from rlx_jax.models.encoder import EncoderFlow

KEYS = EncoderKeys(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", "input_layernorm", "mlp.up_proj",
    "mlp.down_proj", "post_attention_layernorm", gate="mlp.gate_proj",
)  # fmt: skip


@dataclass(frozen=True)
class EuroBertConfig(DecoderConfig):
    """Sizes of a EuroBERT model. `attention_bias` and `mlp_bias`: whether the projections have biases."""

    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = field(default="silu", init=False)

    inert: ClassVar[tuple[str, ...]] = ("classifier_pooling",)

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = plain_fields(c, max_positions=8192, eps=1e-5)
        return cls(**common, **c.with_defaults(cls, "attention_bias", "mlp_bias"))


@dataclass(frozen=True)
class EuroBertFlow(EncoderFlow[EuroBertConfig]):
    """The recipe of EuroBERT: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name: str = "eurobert"

    config_type = EuroBertConfig
    prefixes = ("model",)
    embedding = "embed_tokens.weight"
    head_prefixes = ("lm_head.", "dense.", "classifier.")
    optional_inputs = (("attention_mask", None), ("position_ids", None))

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        c = self.config
        embed = Embed(self.key(self.embedding), (c.vocab_size, c.hidden_size))
        return RopeTables(c.inv_freq, factor=c.rope_factor), embed

    def final_stages(self) -> tuple[BlockStage, ...]:
        return (RmsNorm(self.key("norm.weight"), self.config.rms_norm_eps),)

    def spec(self, index: int) -> EncoderLayerSpec:
        c = self.config
        return EncoderLayerSpec(
            prefix=self.key(f"layers.{index}"), keys=KEYS, hidden_size=c.hidden_size, num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads, head_dim=c.head_dim, intermediate_size=c.intermediate_size,
            eps=c.rms_norm_eps, pre_norm=True, rms=True, qkv_bias=c.attention_bias, out_bias=c.attention_bias,
            up_bias=c.mlp_bias, down_bias=c.mlp_bias, activation=c.activation, rope="",
        )  # fmt: skip

    def stage(self, index: int, spec: EncoderLayerSpec) -> BlockStage:
        return EncoderLayer(spec)
