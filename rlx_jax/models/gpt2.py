"""Define the config and recipe of GPT-2 (`GPT2LMHeadModel`)."""

from __future__ import annotations

from typing import Self

from rlx_jax.blocks import BlockStage, Gpt2Layer, Gpt2LayerSpec, LayerNorm, LearnedPositions
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.flow import ModelFlow
from rlx_jax.models.config import ACTIVATIONS, MAX_LAYERS, MAX_VOCABULARY, CausalConfig, Fields, width_and_heads
from rlx_jax.models.decoder import CausalFlow, decoder_flow
from rlx_jax.models.encoder import DECODER_HEADS, token_heads
from rlx_jax.weights.source import WeightSource

# Buffers of the causal mask, which old checkpoints have in every layer.
MASK_BUFFERS = ("attn.bias", "attn.masked_bias")


@dataclass(frozen=True)
class Gpt2Config(CausalConfig):
    """Sizes of a GPT-2 model. Its config.json has them as `n_embd`, `n_layer`, `n_head`, `n_positions`, `n_inner`.

    `scale_attn_weights` scales scores by D^(−1/2); `scale_attn_by_inverse_layer_idx` additionally scales the scores of
    layer i by 1 / (i + 1).
    """

    vocab_size: int = 50257
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 1024
    layer_norm_epsilon: float = 1e-5
    activation: str = "gelu_tanh"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True

    inert = ("n_ctx",)  # an older name of `n_positions`

    @classmethod
    def read(cls, c: Fields) -> Self:
        hidden, heads = width_and_heads(c, cls.hidden_size, cls.num_attention_heads, ("n_embd", "n_head"))
        # The field requests float32 scores, which the reference may round before its softmax. Here they always are.
        c.flag("reorder_and_upcast_attn", False)
        return cls(
            vocab_size=c.integer("vocab_size", cls.vocab_size, high=MAX_VOCABULARY),
            hidden_size=hidden,
            intermediate_size=c.integer_or_null("n_inner", None) or 4 * hidden,
            num_hidden_layers=c.integer("n_layer", cls.num_hidden_layers, high=MAX_LAYERS),
            num_attention_heads=heads,
            max_position_embeddings=c.integer("n_positions", cls.max_position_embeddings, high=2**31 - 1),
            activation=c.choice("activation_function", "gelu_new", ACTIVATIONS),
            **c.with_defaults(cls, "layer_norm_epsilon", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
            tie_word_embeddings=c.flag("tie_word_embeddings", True),
        )

    def score_scale(self, index: int) -> float | None:
        """Return the factor of the scores of layer `index`; None is D^(−1/2)."""
        if self.scale_attn_weights and not self.scale_attn_by_inverse_layer_idx:
            return None
        scale = (self.hidden_size // self.num_attention_heads) ** -0.5 if self.scale_attn_weights else 1.0
        return scale / (index + 1) if self.scale_attn_by_inverse_layer_idx else scale


@dataclass(frozen=True)
class Gpt2Flow(CausalFlow[Gpt2Config]):
    """The recipe of GPT-2: see `CausalFlow`. All keys except the head's start with `prefix`, which may be empty.

    Learned positions are added to `inputs_embeds` too, as in the reference.
    """

    name = "gpt2"
    prefix: str = "transformer"

    peft_prefix = "transformer."
    heads = {**DECODER_HEADS, **token_heads()}

    @property
    def embedding(self) -> str:
        return self._key("wte.weight")

    def adapt_to(self, source: WeightSource) -> Self:
        base = super().adapt_to(source)
        candidates = (replace(base, prefix=prefix) for prefix in ("transformer", ""))
        return next((recipe for recipe in candidates if source.has(recipe.embedding)), base)

    def spec(self, index: int = 0) -> Gpt2LayerSpec:
        c = self.config
        return Gpt2LayerSpec(
            self._key(f"h.{index}"), c.hidden_size, c.num_attention_heads, c.layer_norm_epsilon, c.activation,
            c.score_scale(index), c.intermediate_size,
        )  # fmt: skip

    def stage(self, index: int, spec: Gpt2LayerSpec) -> BlockStage:
        return Gpt2Layer(spec)

    def assemble(self) -> ModelFlow:
        c, layers = self.config, range(self.config.num_hidden_layers)
        positions = LearnedPositions(self._key("wpe.weight"), (c.max_position_embeddings, c.hidden_size))
        return decoder_flow(
            self,
            self.stage,
            embedded=[positions],
            norm=LayerNorm(self._key("ln_f.weight"), self._key("ln_f.bias"), c.layer_norm_epsilon),
            leave=[self._key(f"h.{i}.{buffer}") for i in layers for buffer in MASK_BUFFERS],
        )

    def _key(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name
