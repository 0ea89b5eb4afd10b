"""Define the config and recipe of EuroBERT (Boizard et al. 2025): Llama's layers, in which tokens read all others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from rlx_jax.blocks import (
    BlockStage,
    Embed,
    EncoderKeys,
    EncoderLayer,
    EncoderLayerSpec,
    MeanOfTokens,
    RmsNorm,
    RopeTables,
)
from rlx_jax.errors import UnsupportedError
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import DecoderConfig, plain_fields
from rlx_jax.models.encoder import EncoderFlow
from rlx_jax.models.heads import MASKED, SEQUENCE, TOKEN, HeadLayer, HeadLayers, TaskHead

KEYS = EncoderKeys(
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj", "input_layernorm", "mlp.up_proj",
    "mlp.down_proj", "post_attention_layernorm", gate="mlp.gate_proj",
)  # fmt: skip


@dataclass(frozen=True)
class EuroBertConfig(DecoderConfig):
    """Sizes of a EuroBERT model.

    Attributes:
        attention_bias, mlp_bias: whether the projections have biases; `mlp_bias` is also the one of token ids.
        classifier_pooling: classifiers of texts read the first token (`bos`), the mean of the tokens (`mean`), or give
            the mean of the logits (`late`).
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = field(default="silu", init=False)
    classifier_pooling: str = "late"

    inert = ("bos_token", "eos_token", "mask_token", "pad_token")

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = plain_fields(c, max_positions=8192, eps=1e-5)
        if c.flag("is_causal", False):
            raise UnsupportedError(f"{c.where}: field 'is_causal' is true; supported is false: tokens read all others")
        name = "clf_pooling" if "clf_pooling" in c.values else "classifier_pooling"  # the authors' code has the first
        pooling = c.choice(name, "late", {pooling: pooling for pooling in ("bos", "mean", "late")})
        return cls(**common, **c.with_defaults(cls, "attention_bias", "mlp_bias"), classifier_pooling=pooling)


@dataclass(frozen=True)
class EuroBertFlow(EncoderFlow[EuroBertConfig]):
    """The recipe of EuroBERT: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name: str = "eurobert"

    config_type = EuroBertConfig
    embedding = "embed_tokens.weight"
    head_prefixes = ("lm_head.", "dense.", "classifier.")
    optional_inputs = (("attention_mask", None), ("position_ids", None))

    def task_heads(self) -> HeadLayers:
        classifier = HeadLayer("classifier")
        return {
            SEQUENCE: (HeadLayer("dense", "gelu"), classifier),
            TOKEN: (classifier,),
            MASKED: (HeadLayer("lm_head", bias=self.config.mlp_bias),),
        }

    def head_stages(self, head: TaskHead) -> tuple[BlockStage, ...]:
        stages, pooling = super().head_stages(head), self.config.classifier_pooling
        if head.task != SEQUENCE or pooling == "bos":
            return stages
        return (MeanOfTokens(), *stages) if pooling == "mean" else (*stages, MeanOfTokens())

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
