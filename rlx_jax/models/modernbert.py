"""Define the configs and recipes of ModernBERT (Warner et al. 2024) and its decoder: rotary positions, gated MLPs, and
windows in two of three layers."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from rlx_jax import blocks
from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.flow import ModelFlow
from rlx_jax.models.bert import BertConfig, BertLike
from rlx_jax.models.config import ACTIVATIONS, CausalConfig, Fields, text_fields
from rlx_jax.models.decoder import CausalFlow, decoder_flow
from rlx_jax.models.decoder_config import Windows, even_head_dim, frequencies_of, layer_windows, window_at
from rlx_jax.models.encoder import ANSWER, MASKED, SEQUENCE, TOKEN, HeadLayer, HeadLayers, TaskHead

# Name of the rope tables of the layers with a window.
LOCAL = "local"
KEYS = blocks.EncoderKeys(("attn.Wqkv",), "attn.Wo", "attn_norm", "mlp.Wi", "mlp.Wo", "mlp_norm", gate="mlp.Wi")


@dataclass(frozen=True)
class ModernBertConfig(BertConfig):
    """Sizes of a ModernBERT model.

    Attributes:
        inv_freq, local_inv_freq: inverse frequencies of the layers without and with a window.
        windows: keys at less than this distance are read, for each layer; None for all.
        norm_bias, attention_bias, mlp_bias: whether norms and projections have biases.
        classifier_bias, decoder_bias: whether the first layer of heads has one, and the projection to token ids.
        classifier_activation: activation of heads.
        classifier_mean: whether classifiers of texts read the mean of the tokens, in place of the first token.
    """

    type_vocab_size: int = 0
    local_inv_freq: blocks.Frequencies = field(default=(), repr=False)
    windows: Windows = ()
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    decoder_bias: bool = True
    classifier_activation: str = "gelu"
    classifier_mean: bool = False

    inert: ClassVar[tuple[str, ...]] = (
        "deterministic_flash_attn", "layer_norm_eps", "position_embedding_type", "reference_compile",
        "repad_logits_with_grad", "sparse_pred_ignore_index", "sparse_prediction", "tie_word_embeddings",
    )  # fmt: skip

    @classmethod
    def read(cls, c: Fields) -> Self:
        common = text_fields(c, 50368, 8192, 1152, layers=22)
        common["layer_norm_eps"] = c.real("norm_eps", 1e-5)
        common["activation"] = c.choice("hidden_activation", "gelu", ACTIVATIONS)
        every, head_dim = c.integer("global_attn_every_n_layers", 3), even_head_dim(c, common)
        window = cls.read_window(c)
        parameters = c.group("rope_parameters")
        ropes = [parameters.group(f"{kind}_attention") if parameters else None for kind in ("full", "sliding")]
        if parameters is not None:
            parameters.finish()
        return cls(
            **common,
            inv_freq=frequencies_of(c, ropes[0], None, head_dim, "global_rope_theta", 160000.0).inv_freq,
            local_inv_freq=frequencies_of(c, ropes[1], None, head_dim, "local_rope_theta", 10000.0).inv_freq,
            windows=layer_windows(c, common["num_hidden_layers"], window, lambda i: i % every > 0),
            classifier_activation=c.choice("classifier_activation", "gelu", ACTIVATIONS),
            classifier_mean=c.choice("classifier_pooling", "cls", {"cls": "", "mean": "mean"}) == "mean",
            **c.with_defaults(cls, "norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias"),
        )

    @classmethod
    def read_window(cls, c: Fields) -> int:
        """Return the distance from which on a layer with a window reads no keys."""
        return c.integer("local_attention", 128) // 2 + 1

    def dense_layer(self, name: str) -> HeadLayer:
        """Return the first layer of a head with this name."""
        norm, activation = f"{name}.norm", self.classifier_activation
        return HeadLayer(f"{name}.dense", activation, self.classifier_bias, norm=norm, norm_bias=self.norm_bias)


class ModernBertFlow(BertLike[ModernBertConfig]):
    """The recipe of ModernBERT: see `EncoderFlow`. Optional inputs are `attention_mask` and `position_ids`."""

    name = "modernbert"

    embedding = "embeddings.tok_embeddings.weight"
    head_prefixes = ("head.", "lm_head.", "decoder.", "classifier.")
    optional_inputs = (("attention_mask", None), ("position_ids", None))
    layer_keys = KEYS
    pre_norm = True
    embedding_norm = "embeddings.norm"
    layers = "layers.{}"
    final_norm = "final_norm"

    def task_heads(self) -> HeadLayers:
        c, dense = self.config, self.config.dense_layer("head")
        labels = {task: (dense, HeadLayer("classifier")) for task in (SEQUENCE, TOKEN, ANSWER)}
        return {**labels, MASKED: (dense, HeadLayer("decoder", bias=c.decoder_bias))}

    def head_stages(self, head: TaskHead) -> tuple[blocks.BlockStage, ...]:
        is_mean = head.task == SEQUENCE and self.config.classifier_mean
        return *([blocks.MeanOfTokens()] if is_mean else []), *super().head_stages(head)

    def norm(self, name: str) -> tuple[blocks.BlockStage, ...]:
        key, bias = self.key(name), self.config.norm_bias
        return (blocks.LayerNorm(f"{key}.weight", f"{key}.bias" if bias else None, self.config.layer_norm_eps),)

    def embedding_stages(self) -> tuple[blocks.BlockStage, ...]:
        return blocks.RopeTables(self.config.local_inv_freq, name=LOCAL), *super().embedding_stages()

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        c, window, keys = self.config, window_at(self.config.windows, index), self.layer_keys
        return replace(
            super().spec(index), keys=keys if index else replace(keys, attention_norm=""), window=window,
            rope="" if window is None else LOCAL, norm_bias=c.norm_bias, qkv_bias=c.attention_bias,
            out_bias=c.attention_bias, up_bias=c.mlp_bias, down_bias=c.mlp_bias,
        )  # fmt: skip


@dataclass(frozen=True)
class ModernBertDecoderConfig(ModernBertConfig, CausalConfig):
    """Sizes of a decoder of ModernBERT."""

    tie_word_embeddings: bool = field(default=True, kw_only=True)

    inert: ClassVar[tuple[str, ...]] = tuple(n for n in ModernBertConfig.inert if n != "tie_word_embeddings")

    @classmethod
    def read(cls, c: Fields) -> Self:
        return replace(super().read(c), tie_word_embeddings=c.flag("tie_word_embeddings", True))

    @classmethod
    def read_window(cls, c: Fields) -> int:
        return c.integer("sliding_window", c.integer("local_attention", 128) // 2)


class ModernBertDecoderFlow(ModernBertFlow):
    """The recipe of ModernBERT's decoder as an encoder: see `EncoderFlow`. Tokens read no later ones.

    Optional inputs are `attention_mask` and `position_ids`. A classifier reads the last token.
    """

    name = "modernbert-decoder"

    config_type = ModernBertDecoderConfig
    head_token = ("lasttoken", 50283)
    layer_keys = replace(KEYS, qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"))

    def task_heads(self) -> HeadLayers:
        dense, last = super().task_heads()[SEQUENCE]
        return {SEQUENCE: (dense, replace(last, bias=self.config.classifier_bias))}

    def spec(self, index: int) -> blocks.EncoderLayerSpec:
        return replace(super().spec(index), causal=True)


class ModernBertCausalFlow(CausalFlow[ModernBertDecoderConfig]):
    """The recipe of ModernBERT's decoder with its language-model head: see `CausalFlow`."""

    name = "modernbert-decoder"

    lm_head = "decoder.weight"
    heads: ClassVar[HeadLayers] = {}

    @property
    def encoder(self) -> ModernBertDecoderFlow:
        """The recipe of the layers, with the keys of the checkpoint."""
        return ModernBertDecoderFlow(self.config, prefix="model")

    @property
    def embedding(self) -> str:
        return self.encoder.key(ModernBertFlow.embedding)

    @property
    def lm_head_bias(self) -> str | None:
        return "decoder.bias" if self.config.decoder_bias else None

    def spec(self, index: int) -> Any:
        # A decoder has no input for padding: rows end where their tokens do.
        spec: Any = self.encoder.spec(index)
        return replace(spec, mask_input=None)

    def stage(self, index: int, spec: Any) -> blocks.BlockStage:
        return self.encoder.stage(index, spec)

    def assemble(self) -> ModelFlow:
        c, encoder = self.config, self.encoder
        local, rope, _, *embedded = encoder.embedding_stages()
        dense = c.dense_layer("lm_head").stages((c.hidden_size, c.hidden_size), str, c)
        norm = blocks.Sequence((*encoder.final_stages(), *(() if self.hidden_only else dense)))
        return decoder_flow(
            self, self.stage, norm=norm, tables=(local, rope), embedded=embedded,
            leave=("decoder.bias", "lm_head.") if self.hidden_only else (),
        )  # fmt: skip
