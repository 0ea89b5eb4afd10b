"""Define the config and recipe of Alibaba's GTE encoders: BERT with rotary positions and gated MLPs."""

from __future__ import annotations

from typing import Self

from rlx_jax.blocks import EncoderKeys, EncoderLayerSpec, Frequencies, frequencies, linear_scaling
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.models.bert import ALL_INPUTS, BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import even_head_dim, frequencies_of
from rlx_jax.models.encoder import BERT_HEADS, MASKED, masked_head


@dataclass(frozen=True)
class GteConfig(BertConfig):
    """Sizes of a GTE encoder, from a config of `model_type` `gte`, or `new`, as the authors' checkpoints have it."""

    type_vocab_size: int = 1

    defaults = {"vocab": 250048, "positions": 8192}
    min_types = 0
    inert = ("tie_word_embeddings", "unpad_inputs", "logn_attention_clip1")
    neutral = {
        "layer_norm_type": ("layer_norm",), "logn_attention_scale": (False,), "pack_qkv": (True,),
        "position_embedding_type": ("rope",),
    }  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        return cls(**common, inv_freq=_rope(c, even_head_dim(c, common)))


def _rope(c: Fields, head_dim: int) -> Frequencies:
    """Return the inverse frequencies of the config's rope.

    The authors' type `ntk` scales the base by a factor f, and the frequencies by f^(−2/D) in addition.
    """
    scaling, default = c.group("rope_scaling"), 10000.0 if c.values.get("model_type") == "new" else 160000.0
    if scaling is None or scaling.text("type", "") != "ntk":
        return frequencies_of(c, c.group("rope_parameters"), scaling, head_dim, default=default).inv_freq
    base, factor = c.real("rope_theta", default), scaling.real("factor")
    scaling.finish()
    if factor <= 1:
        return frequencies(head_dim, base)
    return linear_scaling(frequencies(head_dim, base * factor), factor ** (2 / head_dim))


class GteFlow(BertLike[GteConfig]):
    """The recipe of GTE: see `EncoderFlow`. Optional inputs are as of `NomicFlow`."""

    name = "gte"

    heads = {**BERT_HEADS, MASKED: masked_head("lm_head.dense", "lm_head.norm", "lm_head.decoder", activation="gelu")}
    optional_inputs = ALL_INPUTS
    layer_keys = EncoderKeys(
        ("attention.qkv_proj",), "attention.o_proj", "attn_ln", "mlp.up_gate_proj", "mlp.down_proj", "mlp_ln",
        gate="mlp.up_gate_proj", up_first=True,
    )  # fmt: skip

    def spec(self, index: int) -> EncoderLayerSpec:
        return replace(super().spec(index), up_bias=False)
