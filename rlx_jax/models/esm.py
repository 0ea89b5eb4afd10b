"""Define the config and recipe of ESM (Rives et al. 2021; ESM-2: Lin et al. 2023), encoders of proteins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from rlx_jax.blocks import BlockStage, MeanOfTokens, frequencies
from rlx_jax.blocks.encoder import STYLES
from rlx_jax.models.bert import RobertaConfig, RobertaFlow
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.decoder_config import even_head_dim
from rlx_jax.trace.emit import Emit, FlowValue

# Share of tokens that training masked with the mask token; the reference hard-codes it.
MASKED_IN_TRAINING = 0.15 * 0.8


@dataclass(frozen=True)
class EsmConfig(RobertaConfig):
    """Sizes of an ESM model.

    Attributes:
        mask_token_id: the mask token, if its embedding is replaced by zeros and the others are scaled; else None.
        norm_before: whether the embeddings have a norm.
    """

    type_vocab_size: int = 0
    mask_token_id: int | None = None
    norm_before: bool = False

    inert = ("tie_word_embeddings", "vocab_list", "esmfold_config")
    # Checkpoints also store the rope's frequencies, which the reference prefers to another base in the config.
    neutral = {"is_folding_model": (False,), "rope_theta": (10000, 10000.0)}

    @classmethod
    def common_fields(cls, c: Fields) -> dict[str, Any]:
        c.choice("hidden_act", "gelu", {"gelu": "gelu"})  # the reference computes gelu whatever the config says
        return text_fields(c, None, 1026)

    @classmethod
    def read(cls, c: Fields) -> Self:
        config = super().read(c)
        kind = c.choice("position_embedding_type", "absolute", {"absolute": "", "rotary": "rotary"})
        drops = c.raw("token_dropout") is not None and c.flag("token_dropout", False)
        head_dim = even_head_dim(c, vars(config)) if kind else 0
        return replace(
            config, inv_freq=frequencies(head_dim, 10000.0) if kind else (),
            mask_token_id=c.integer("mask_token_id", low=0) if drops else None,
            norm_before=c.raw("emb_layer_norm_before") is not None and c.flag("emb_layer_norm_before", False),
        )  # fmt: skip


@dataclass(frozen=True)
class TokenDropout:
    """Replace the embeddings of mask tokens by zeros, and scale the others for their share of the text's tokens."""

    mask_token_id: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "TokenDropout")
        with emit.scope("token_dropout"):
            is_mask = emit.compare("eq", emit.flow_input("input_ids"), self.mask_token_id)[..., None]
            share = MeanOfTokens().emit(emit, emit.where(is_mask, emit.ones_like(x[..., :1]), 0.0))
            return emit.where(is_mask, 0.0, x * (1 - MASKED_IN_TRAINING) / (1.0 - share))


@dataclass(frozen=True)
class EsmFlow(RobertaFlow):
    """The recipe of ESM: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`.

    By default the positions of models without a rope count the ids that are not padding, from `pad_token_id` + 1 on.
    """

    name: str = "esm"

    config_type = EsmConfig
    config: EsmConfig
    optional_inputs = (("attention_mask", None), ("position_ids", None))
    layer_keys = replace(STYLES["bert"], attention_norm="attention.LayerNorm", mlp_norm="LayerNorm")
    pre_norm = True
    embedding_norm = "embeddings.layer_norm"
    final_norm = "encoder.emb_layer_norm_after"

    def unread_keys(self) -> tuple[str, ...]:
        rope = "attention.self.rotary_embeddings.inv_freq"
        layers = (*range(self.config.num_hidden_layers), "*")  # transformers 5 saves one buffer for all, as layer *
        table = ["embeddings.position_embeddings.weight"] if self.config.inv_freq else []
        unread = (*table, "contact_head.", "rotary_embeddings.", *(f"encoder.layer.{i}.{rope}" for i in layers))
        return (*super().unread_keys(), *map(self.key, unread))

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        *stages, norm = super().embedding_stages()
        mask = self.config.mask_token_id
        at = 1 + bool(self.config.inv_freq)  # after the embedding, which follows the rope tables
        return (
            *stages[:at], *([] if mask is None else [TokenDropout(mask)]), *stages[at:],
            *([norm] if self.config.norm_before else []),
        )  # fmt: skip
