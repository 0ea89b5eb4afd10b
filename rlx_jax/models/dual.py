"""Two towers whose vectors meet: texts and images. CLIP and SigLIP are configs and tables of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import jax

from rlx_jax.blocks import (
    BlockStage,
    Embed,
    GatherAdd,
    LayerNorm,
    PreNormLayerSpec,
    SideOutput,
    Similarity,
    pre_norm_layer,
)
from rlx_jax.blocks.vision import CLIP_KEYS
from rlx_jax.errors import ConfigError
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import MAX_VOCABULARY, Fields
from rlx_jax.models.hooks import METHODS, Hooks
from rlx_jax.models.vision import (
    POOLED,
    TowerConfig,
    VisionConfig,
    VisionFlow,
    WeightShapes,
    norm_shapes,
    specs_of,
    tower_fields,
)
from rlx_jax.weights.source import WeightSource

TowerPart = Literal["both", "text", "vision", "similarity"]
"""What a recipe assembles: all of it, one tower, or what compares two vectors."""

TEXT, SCALE, BIAS = "text_model.", "logit_scale", "logit_bias"


@dataclass(frozen=True)
class TextConfig(TowerConfig):
    """Sizes of a text tower. `width` is that of its vectors; `end_id` is the token that CLIP pools, None for the
    largest id of a row; `pad_id` fills the rows of SigLIP."""

    vocab_size: int
    max_position_embeddings: int
    width: int
    end_id: int | None = None
    pad_id: int = 0


def text_fields(
    c: Fields, positions: int, activation: str, eps: float, hidden: int = 512, heads: int = 8, vocab: int = 49408
) -> dict[str, Any]:
    """The sizes of a text tower but its vectors' width. The keywords are the family's defaults."""
    return {
        **tower_fields(c, hidden, heads, activation, eps),
        "vocab_size": c.whole("vocab_size", vocab, high=MAX_VOCABULARY),
        "max_position_embeddings": c.whole("max_position_embeddings", positions),
    }


V = TypeVar("V", bound=VisionConfig)


@dataclass(frozen=True)
class DualConfig(Generic[V]):
    """Both towers."""

    text: TextConfig
    vision: V

    @classmethod
    def read(cls, c: Fields) -> Self:
        """From the fields that the family has."""
        raise NotImplementedError

    @classmethod
    def from_hf(cls, config: Fields | Mapping[str, Any]) -> Self:
        """From `config.json`.

        Raises:
            ConfigError, LimitError: a value is absurd. UnsupportedError: a field that is not handled.
        """
        c = config if isinstance(config, Fields) else Fields(config, "config")
        made = cls.read(c)
        c.finish(inert=("logit_scale_init_value", "initializer_factor", "tie_word_embeddings"))
        return made


def tower_group(c: Fields, name: str) -> Fields:
    """The fields of a tower. Old files of CLIP hold them a second time, under `…_dict`, where what they say counts."""
    group = c.group(name)
    again = c.group(f"{name}_dict")
    if again is None:
        return group or Fields({}, f"{c.where}, {name}")
    values = {k: v for k, v in again.values.items() if v is not None}
    return Fields({**(group.values if group else {}), **values}, f"{c.where}, {name}_dict")


GENERATION = """
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample dropout early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature tf_legacy_loss top_k top_p typical_p
""".split()
"""Fields of text generation, which old files write for every tower."""


def finish_towers(*groups: Fields) -> None:
    """Refuse what was not read of the towers' fields."""
    for group in groups:
        group.finish(inert=(*GENERATION, "initializer_factor", "tie_word_embeddings"))


C = TypeVar("C", bound=DualConfig[Any])


@dataclass(frozen=True)
class DualFlow(Generic[C]):
    """The recipe. Inputs: `pixel_values` `[batch, channels, height, width]`, `input_ids` `[texts, seq]`, and optionally
    `attention_mask` (1 keeps a key) and `position_ids`. Outputs: `logits_per_text` `[texts, batch]`, and `text_embeds`
    and `image_embeds`, vectors of unit length.

    With `part` it is one tower, with the outputs `hidden_states` and `pooled`, the vector before it is divided by its
    length (and `input_ids` are `[batch, seq]`); or `similarity`, of vectors `[texts, E]` and `images` `[batch, E]`.

    Args:
        batch: rows to compile for ahead of the first call.
        weights: the checkpoint that the flow is bound to; without it the flow knows shapes only.
        hooks: see `rlx_jax.models.hooks`; they are for the layers of both towers, whose specs tell them apart.
    """

    config: C
    part: TowerPart = "both"
    batch: int | None = None
    name: str = "dual"
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    config_type: ClassVar[type[DualConfig[Any]]] = DualConfig
    causal: ClassVar[bool] = False
    bias: ClassVar[bool] = False

    layer, before_layers, after_layers, after, patch_flow, profile, profile_near = METHODS

    @classmethod
    def for_prefill(cls, config: C | Mapping[str, Any], batch: int | None = None) -> Self:
        """The forward program of both towers, bound to a number of images if one is given; `config` may be the content
        of `config.json`."""
        known: Any = config
        read: Any = known if isinstance(known, cls.config_type) else cls.config_type.from_hf(known)
        return cls(read, batch=batch)

    # -- what families say -------------------------------------------------------------------

    def vision(self) -> VisionFlow[Any]:
        """The vision tower, as it is stored beside the other."""
        raise NotImplementedError

    def pool(self) -> BlockStage:
        """What makes one vector of the hidden states of a text."""
        raise NotImplementedError

    def pool_shapes(self) -> WeightShapes:
        """The checkpoint keys that `pool` reads."""
        raise NotImplementedError

    @property
    def padding(self) -> tuple[int, int] | None:
        """To how many tokens texts are padded, and with what; None: to any number, and padding is not read."""
        return None

    # -- the recipe --------------------------------------------------------------------------

    def of(self, part: TowerPart) -> Self:
        """The recipe of a part."""
        return replace(self, part=part)

    def spec(self, index: int) -> PreNormLayerSpec:
        """The spec of a layer of the text tower."""
        c = self.config.text
        return PreNormLayerSpec(
            f"{TEXT}encoder.layers.{index}", CLIP_KEYS, c.hidden_size, c.num_attention_heads, c.intermediate_size,
            c.layer_norm_eps, c.activation, causal=self.causal, mask_input="attention_mask",
        )  # fmt: skip

    def stage(self, index: int, spec: Any) -> BlockStage:
        """The family's own layer."""
        return pre_norm_layer(spec)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every checkpoint key of both towers with its shape."""
        c, p, one = self.config.text, f"{TEXT}embeddings", (1,) if self.bias else ()
        found: WeightShapes = {
            f"{p}.token_embedding.weight": (c.vocab_size, c.hidden_size),
            f"{p}.position_embedding.weight": (c.max_position_embeddings, c.hidden_size),
            **norm_shapes(f"{TEXT}final_layer_norm", c.hidden_size),
            **dict.fromkeys((SCALE, BIAS) if self.bias else (SCALE,), one),
        }
        for i in range(c.num_hidden_layers):
            found |= self.spec(i).shapes()
        return specs_of(found | self.pool_shapes()) | self.vision().shapes()

    def assemble(self) -> ModelFlow:
        """The flow of the part, bound to its weights; without any, to their shapes."""
        flow = ModelFlow(self.name if self.part == "both" else f"{self.name}_{self.part}", profile=self.hooks.profile)
        flow = flow.with_weights(self.shapes() if self.weights is None else self.weights, leave=self.left())
        vision = self.vision()
        if self.part == "vision":
            return vision.tower(flow)
        if self.part == "text":
            flow = self._body(self._texts(flow, "batch").bind(batch=self.batch))
            return flow.stage(SideOutput(POOLED, self.pool())).output("hidden_states")
        compare = Similarity(SCALE, BIAS if self.bias else None)
        if self.part == "similarity":
            wide = self.config.text.width
            flow = flow.input("texts", ("texts", wide)).input("images", ("batch", wide))
            return flow.bind_inputs_to_streams([("images", "images")]).stage(compare).output("logits_per_text")
        pool = vision.pool()
        if pool is None:
            raise ConfigError(f"{self.name}: the vision tower has no head, so there is no vector to compare")
        flow = self._texts(vision.body(flow).stage(pool).store_stream("images"), "texts")
        flow = self._body(flow.custom_named("texts", lambda emit, x: emit.flow_input("input_ids")))
        return flow.stage(self.pool(), compare).output("logits_per_text")

    def _texts(self, flow: ModelFlow, rows: str) -> ModelFlow:
        """The inputs of the text tower."""
        ids = (rows, "seq")
        flow = flow.input("input_ids", ids, dtype="int32").input("attention_mask", ids, dtype="int32", default=None)
        return flow.input("position_ids", ids, dtype="int32", default=POSITIONS)

    def _body(self, flow: ModelFlow) -> ModelFlow:
        """The stages of the text tower, from ids to hidden states."""
        c, p, norm = self.config.text, f"{TEXT}embeddings", f"{TEXT}final_layer_norm"
        return (
            flow.stage(
                Embed(f"{p}.token_embedding.weight", (c.vocab_size, c.hidden_size)),
                GatherAdd("position_ids", f"{p}.position_embedding.weight", (c.max_position_embeddings, c.hidden_size)),
            )
            .patch(self.hooks.stack(c.num_hidden_layers, self.spec, self.stage))
            .stage(LayerNorm(f"{norm}.weight", f"{norm}.bias", c.layer_norm_eps))
            .patch(self.hooks.edit)
        )

    def left(self) -> tuple[str, ...]:
        """Keys that are left unread on purpose: position ids, and what other parts read."""
        ids = tuple(f"{tower}_model.embeddings.position_ids" for tower in ("text", "vision"))
        return ids if self.part == "both" else (*ids, *self.shapes())
