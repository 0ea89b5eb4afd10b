"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT's layers behind positions that are counted over what is no padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rlx_jax.blocks import (
    BertEncoderLayer,
    BertEncoderLayerSpec,
    BlockStage,
    Embed,
    GatherAdd,
    LayerNorm,
    LearnedPositions,
)
from rlx_jax.errors import ConfigError
from rlx_jax.models.bert import BertConfig, layer_spec, stored_shapes
from rlx_jax.models.config import Fields, text_fields
from rlx_jax.models.encoder import EncoderFlow, StoredShapes


@dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """Sizes of a RoBERTa model. Positions begin behind `pad_token_id`: there are as many fewer of them."""

    pad_token_id: int = 1

    @classmethod
    def read(cls, c: Fields) -> Self:
        common, padding = text_fields(c, 50265), c.whole("pad_token_id", cls.pad_token_id, low=0)
        positions = common["max_position_embeddings"]
        if padding >= min(positions - 1, common["vocab_size"]):
            raise ConfigError(
                f"{c.where}: field 'pad_token_id' is {padding}; expected an id of the vocabulary, with positions "
                f"behind it among the {positions}"
            )
        return cls(**common, type_vocab_size=c.whole("type_vocab_size", 2), pad_token_id=padding)


@dataclass(frozen=True)
class RobertaFlow(EncoderFlow[RobertaConfig]):
    """The recipe of RoBERTa: see `EncoderFlow`. Optional are `attention_mask`, `token_type_ids` (default 0) and
    `position_ids`; by default they are counted over the ids that are no padding, from `pad_token_id` + 1 on."""

    name: str = "roberta"

    config_type = RobertaConfig
    prefixes = ("roberta",)
    heads = ("lm_head.", "classifier.", "qa_outputs.")
    optional = (("attention_mask", None), ("token_type_ids", 0), ("position_ids", None))

    @property
    def max_positions(self) -> int:
        return self.config.max_position_embeddings - self.config.pad_token_id - 1

    def opening(self) -> tuple[BlockStage, ...]:
        c, p = self.config, self.key("embeddings")
        positions = (c.max_position_embeddings, c.hidden_size)
        return (
            Embed(f"{p}.word_embeddings.weight", (c.vocab_size, c.hidden_size)),
            GatherAdd("token_type_ids", f"{p}.token_type_embeddings.weight", (c.type_vocab_size, c.hidden_size)),
            LearnedPositions(f"{p}.position_embeddings.weight", positions, c.pad_token_id),
            LayerNorm(f"{p}.LayerNorm.weight", f"{p}.LayerNorm.bias", c.layer_norm_eps),
        )

    def spec(self, index: int) -> BertEncoderLayerSpec:
        return layer_spec(self.config, self.prefix, index)

    def stage(self, index: int, spec: BertEncoderLayerSpec) -> BlockStage:
        return BertEncoderLayer(spec)

    def stored(self) -> StoredShapes:
        return stored_shapes(self.config, self.prefix)
