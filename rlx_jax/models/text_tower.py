"""Define the recipe of a pre-norm text tower, next to an image tower or alone: CLIP's and SigLIP's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from rlx_jax.blocks import BlockStage, Embed, GatherAdd, PreNormLayerSpec, pre_norm_layer
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, RlxWarning, UnsupportedError, quote
from rlx_jax.flow import POSITIONS
from rlx_jax.models.config import Fields, TokenConfig, finish_model
from rlx_jax.models.encoder import EncoderFlow
from rlx_jax.models.vision import TowerConfig
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource

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
    name = "text"

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
        return self.norm("final_layer_norm")

    def pool(self) -> BlockStage:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """How a family's multimodal checkpoint contains its text model.

    Args:
        outer_type, text_type: `model_type` of the full model and of its text model.
        keys: prefixes of the text model's keys in the checkpoint, mapped to the prefixes of the standalone model.
        defaults: values for fields that a `text_config` leaves out, as in the reference.
        unread_fields: fields of the full config that the text model does not read.
        default_tied: whether the head is the embedding if the full config does not define it.
    """

    outer_type: str
    text_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    unread_fields: tuple[str, ...]
    default_tied: bool

    def extract(self, config: Fields, source: WeightSource) -> tuple[Fields, WeightSource]:
        """Return the config and the weights of the text model, and warn that the vision tower is left out.

        Raises:
            ConfigError: there is no `text_config`. UnsupportedError: a field that is not handled.
        """
        text = config.group("text_config")
        if text is None:
            raise ConfigError(f"{config.where}: field 'text_config' is missing; expected an object")
        kind = text.text("model_type", self.text_type)
        if kind != self.text_type:
            raise UnsupportedError(
                f"{text.where}: model_type {quote(kind)}; the text model of a {self.outer_type} is a {self.text_type}"
            )
        # The outer model has the head.
        head = {"tie_word_embeddings": config.flag("tie_word_embeddings", self.default_tied)}
        finish_model(config, self.unread_fields)
        names = {
            prefix + key.removeprefix(stored_prefix): key
            for key in source.keys() for stored_prefix, prefix in self.keys.items() if key.startswith(stored_prefix)
        }  # fmt: skip
        warnings.warn(
            f"{config.where}: model_type {quote(self.outer_type)} reads images too; only the text model is built, and "
            f"{len(source.keys()) - len(names)} weights of other parts are not read",
            RlxWarning,
            stacklevel=2,
        )
        values = {**self.defaults, "model_type": self.text_type, **dict(text.values), **head}
        return replace(text, values=values, consumed=set()), RenamedSource(source, names)
