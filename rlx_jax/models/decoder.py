"""Define the recipes of causal models, which make a flow from a config and weights.

A family of decoders is its config (see `decoder_config.py`) and a row in `families.py`; its recipe is a subclass of
`DecoderFlow`. `CausalFlow` is what Llama-like families share with others, such as `gpt2.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

from rlx_jax.blocks import BlockStage, Embed, LmHead, RopeTables, decoder_layer, llama_prefill_layer_fused
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, UnsupportedError
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import CausalConfig
from rlx_jax.models.decoder_config import DecoderConfig
from rlx_jax.models.encoder import DECODER_HEADS, LABEL_LOGITS, SEQUENCE, HeadLayer, HeadLayers, TaskHead
from rlx_jax.models.hooks import Recipe
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHER_PREFIX = "transformer."

R = TypeVar("R", bound="CausalFlow[Any]")
C = TypeVar("C", bound=DecoderConfig)
A = TypeVar("A", bound="CausalConfig")


@dataclass(frozen=True)
class DecodeOptions:
    """Options of explicit decode, where cached keys and values are inputs of the flow: see `ModelFlow.explicit`.

    `past`: number of cached tokens, None for a dynamic one; `custom_mask`: the mask is an input.
    """

    past: int | None = None
    custom_mask: bool = False


# -- the recipe --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CausalFlow(Recipe[A]):
    """The recipe of a causal model. Inputs: `input_ids` `[batch, seq]`. Output: `logits` f32 `[batch, seq, vocab]`.

    A family's recipe is a subclass with a name and the class of its config, and `spec`, `stage`, `assemble`.

    Args:
        batch, seq: sizes to compile for ahead of the first call.
        hidden_only: no language-model head. Output: `hidden`, the normalised `[batch, seq, hidden]`.
        head: with `hidden_only`, the head of a task after it. Output: `label_logits` `[batch, seq, labels]`.
        last_token_logits: apply the head to the last token of each row only: `[batch, 1, vocab]`.
        inputs_embeds: the input is `inputs_embeds` `[batch, seq, hidden]` float32 instead of ids.
        export_kv: add side outputs `kv.{i}.k` and `kv.{i}.v` `[batch, seq, K·D]` of every layer, the keys rotated.
        decode: explicit decode; see `rlx_jax.models.decoder.as_decode`.
        Others: see `Recipe`.
    """

    name = "causal"
    seq: int | None = None
    hidden_only: bool = False
    head: TaskHead | None = None
    last_token_logits: bool = False
    inputs_embeds: bool = False
    export_kv: bool = False
    decode: DecodeOptions | None = None

    # Key of the weight of a separate language-model head.
    lm_head: ClassVar[str] = HEAD
    # Prefix of module names in PEFT's files that keys of checkpoints may leave out.
    peft_prefix: ClassVar[str] = ""
    heads: ClassVar[HeadLayers] = DECODER_HEADS
    # How a classifier pools, a name in `SentencePipeline.pooling`, and `pad_token_id` of a config that lacks the field.
    head_token: ClassVar[tuple[str, int | None]] = ("lasttoken", None)

    @classmethod
    def for_prefill(cls, config: A | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """Return the forward program, bound to sizes if given; `config` may be the content of `config.json`."""
        return replace(super().for_prefill(config, batch), seq=seq)

    @classmethod
    def for_decode(
        cls, config: A | Mapping[str, Any], batch: int | None = None, past: int | None = None, custom_mask: bool = False
    ) -> Self:
        """Return explicit decode: see `rlx_jax.models.decoder.as_decode`."""
        return as_decode(cls.for_prefill(config, batch), past, custom_mask)

    @property
    def embedding(self) -> str:
        """Checkpoint key of the embedding."""
        return EMBEDDING

    @property
    def lm_head_bias(self) -> str | None:
        """Checkpoint key of the bias of the language-model head; None without one."""
        return None

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe for how a checkpoint stores its weights, such as under a prefix.

        If the checkpoint has a separate head although the config ties it to the embedding, that head is used: it may
        differ from the embedding, and comparing the two would read data.
        """
        if not (self.config.tie_word_embeddings and source.has(self.lm_head)):
            return self
        config: Any = self.config
        return replace(self, config=replace(config, tie_word_embeddings=False))

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return a checkpoint's weights under the keys that the recipe reads.

        Keys of a model that transformers saved without its head (`AutoModel`) do not have the first part of the causal
        model's keys, `model.`. Some classes for questions have `transformer.` there. A subclass may unpack weights.
        """
        prefix, _, bare = self.embedding.partition(".")
        if source.has(self.embedding):
            return source
        if source.has(OTHER_PREFIX + bare):
            return RenamedSource(source, {re.sub(f"^{OTHER_PREFIX}", f"{prefix}.", key): key for key in source.keys()})
        if not source.has(bare):
            return source
        return RenamedSource(source, {key if key == self.lm_head else f"{prefix}.{key}": key for key in source.keys()})

    def with_token_score(self, token_ids: tuple[int, ...]) -> Self:
        """Return the recipe of a reranker: its one label is the difference of the logits of two token ids, or the logit
        of one, at the last token.

        Raises:
            UnsupportedError: stages follow the head, such as a softcap. ConfigError: an id is not in the vocabulary.
        """
        config: Any = self.config
        if wrong := [i for i in token_ids if i >= config.vocab_size]:
            raise ConfigError(f"{self.name}: the token ids {wrong} of the score are not in [0, {config.vocab_size})")
        if isinstance(config, DecoderConfig) and config.ends().logits:
            raise UnsupportedError(f"{self.name}: a score of the logits of tokens, which this model caps")
        key = self.embedding if config.tie_word_embeddings else self.lm_head
        layer = HeadLayer(key.removesuffix(".weight"), bias=False)
        head = TaskHead(SEQUENCE, (layer,), ("score",), pooling="lasttoken", token_ids=token_ids)
        return replace(self, hidden_only=True, head=head)

    def task_head_keys(self, source: WeightSource) -> tuple[str, ...]:
        return (self.lm_head,) if self.hidden_only and source.has(self.lm_head) else ()

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of every checkpoint key."""
        # These options drop or replace stages with weights; the checkpoint has the weights in any case.
        recipe = replace(self, decode=None, hidden_only=self.head is not None, inputs_embeds=False, export_kv=False)
        return super(CausalFlow, recipe).shapes()


@dataclass(frozen=True)
class DecoderFlow(CausalFlow[C]):
    """The recipe of Llama-like families: see `CausalFlow`.

    A family's recipe is a subclass with its name and the class of its config. A family that needs layers which
    `LayerSpec` cannot describe overrides `stage`. In a `fused` family a layer is one fused block if it is a Llama
    layer; with `composed` it is built from small stages. The numbers are the same.
    """

    composed: bool = False
    name = "decoder"

    config_type: ClassVar[type[DecoderConfig]] = DecoderConfig
    fused: ClassVar[bool] = False

    def spec(self, index: int = 0) -> Any:
        return self.config.layer_spec(index)

    def stage(self, index: int, spec: Any) -> BlockStage:
        return (llama_prefill_layer_fused if self.fused and not self.composed else decoder_layer)(index, spec)

    def assemble(self) -> ModelFlow:
        c, ends = self.config, self.config.ends()
        # Old checkpoints have the frequencies of the rope in each layer.
        unread = (f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(c.num_hidden_layers))
        return decoder_flow(
            self,
            self.stage,
            tables=(RopeTables(c.inv_freq, factor=c.rope_factor), *ends.rope),
            embedded=() if self.inputs_embeds else ends.embedded,
            norm=c.layer_spec(0).norm("model.norm"),
            logits=ends.logits,
            leave=(*unread, *ends.unread_keys),
        )


# -- keys --------------------------------------------------------------------------------------


def weight_specs(config: DecoderConfig, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every checkpoint key, to compile or `init` without a checkpoint."""
    return declared_shapes(DecoderFlow(config).assemble(), dtype)


# -- flow --------------------------------------------------------------------------------------


def as_decode(recipe: R, past: int | None = None, custom_mask: bool = False) -> R:
    """Return the recipe of new tokens after `past` cached ones, which are inputs and outputs: see `ModelFlow.explicit`.

    Inputs: `input_ids` `[batch, seq]`, with `custom_mask` `mask` `[batch, past + seq]`, then `past_k_{i}` and
    `past_v_{i}` `[batch, past, K·D]` of each layer, and optionally `position_ids` `[batch, seq]`. Outputs: `logits`,
    then `kv.0.k`, `kv.0.v`, `kv.1.k` … `[batch, past + seq, K·D]`. With sizes it is compiled ahead for one new token.
    """
    return replace(recipe, seq=1, decode=DecodeOptions(past, custom_mask))


def decoder_flow(
    recipe: CausalFlow[Any], layer: Callable[[int, Any], BlockStage], *, norm: BlockStage,
    tables: Iterable[BlockStage] = (), embedded: Iterable[BlockStage] = (), logits: Iterable[BlockStage] = (),
    leave: Iterable[str] = (),
) -> ModelFlow:  # fmt: skip
    """Return the flow of a recipe, bound to its weights if there are any.

    Args:
        recipe: the recipe.
        layer: makes layer i as `layer(i, recipe.spec(i))`.
        norm: the final norm.
        tables: stages before the embedding, such as rope tables.
        embedded: stages between the embedding and the layers, such as a scale; `inputs_embeds` pass through them too.
        logits: stages after the head, such as a softcap.
        leave: keys that are left unread on purpose.
    """
    c = recipe.config
    unread = [recipe.embedding] * recipe.inputs_embeds + [recipe.lm_head] * recipe.hidden_only
    if recipe.head is None:
        unread += [f"{layer.key}." for layers in recipe.heads.values() for layer in layers]
    return (
        ModelFlow(
            recipe.name,
            profile=recipe.hooks.profile,
            _max_positions=c.max_position_embeddings,
            _adapt_weights=recipe.adapt_weights,
        )
        .with_weights(recipe.weights, leave=(*leave, *unread))
        .patch(partial(_append_embedding, recipe, tables))
        .raw_stages(embedded)
        .bind(batch=recipe.batch, seq=recipe.seq)
        .when(recipe.export_kv and not recipe.decode, ModelFlow.export_kv)  # decode has these outputs anyway
        .patch(recipe.hooks.stack(c.num_hidden_layers, recipe.spec, layer))
        .when(recipe.last_token_logits, ModelFlow.gather_last_token_at)
        .stage(norm)
        .patch(recipe.hooks.edit)
        .patch(partial(_append_head, recipe, logits))
    )


def _append_embedding(recipe: CausalFlow[Any], tables: Iterable[BlockStage], flow: ModelFlow) -> ModelFlow:
    """Return the flow with the inputs, the tables and the embedding appended."""
    shape = (recipe.config.vocab_size, recipe.config.hidden_size)
    if recipe.inputs_embeds:
        flow = flow.input("inputs_embeds", ("batch", "seq", recipe.config.hidden_size))
    else:
        flow = flow.input("input_ids", ("batch", "seq"), dtype="int32")
    if recipe.decode:
        flow = flow.explicit(recipe.decode.past, recipe.decode.custom_mask)
    flow = flow.raw_stages(tables)
    return flow if recipe.inputs_embeds else flow.stage(Embed(recipe.embedding, shape))


def _append_head(recipe: CausalFlow[Any], logits: Iterable[BlockStage], flow: ModelFlow) -> ModelFlow:
    """Return the flow with the head and the stages after it appended."""
    sizes = (recipe.config.vocab_size, recipe.config.hidden_size)
    if recipe.hidden_only and recipe.head:
        stages = recipe.head.stages(recipe.config.hidden_size, str, recipe.config)
        return flow.stage(*stages)._with_outputs(primary=LABEL_LOGITS, label_head=recipe.head)
    if recipe.hidden_only:
        return flow.hidden_states()
    tied = recipe.config.tie_word_embeddings
    if tied and not recipe.inputs_embeds:
        head = LmHead.tied(*sizes)
    else:  # inputs_embeds: there is no Embed stage to be tied to
        head = LmHead.separate(recipe.embedding if tied else recipe.lm_head, *sizes)
    return flow.stage(replace(head, bias_key=recipe.lm_head_bias)).output("logits").raw_stages(logits)
