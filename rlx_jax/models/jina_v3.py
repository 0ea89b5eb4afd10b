"""Define the config and recipe of Jina Embeddings v3 (Sturua et al. 2024): XLM-RoBERTa with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rlx_jax.blocks import EncoderKeys
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import even_head_dim, frequencies_of
from rlx_jax.models.heads import ROBERTA_HEADS


@dataclass(frozen=True)
class JinaV3Config(BertConfig):
    """Sizes of a Jina Embeddings v3 model, in the layout that transformers saves."""

    type_vocab_size: int = 1

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab": 250002, "hidden": 1024, "layers": 24, "heads": 16, "inner": 4096, "positions": 8194, "eps": 1e-5
    }  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = cls.common_fields(c)
        rope = frequencies_of(c, c.group("rope_parameters"), None, even_head_dim(c, common), default=20000.0)
        return cls(**common, inv_freq=rope.inv_freq)


@dataclass(frozen=True)
class JinaV3Flow(BertLike[JinaV3Config]):
    """The recipe of Jina Embeddings v3: see `EncoderFlow`. Optional inputs are as of `NomicFlow`."""

    name: str = "jina-v3"

    config_type = JinaV3Config
    heads = ROBERTA_HEADS
    optional_inputs = (("attention_mask", None), ("token_type_ids", 0), ("position_ids", None))
    layer_keys: ClassVar[EncoderKeys | None] = EncoderKeys(
        ("mixer.Wqkv",), "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2", "norm2"
    )
    embedding_norm = "emb_ln"

    def layer_prefix(self, index: int) -> str:
        return self.key(f"encoder.layers.{index}")
