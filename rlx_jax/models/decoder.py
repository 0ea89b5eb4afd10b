"""The recipe of a decoder-only model: from a config to its weights and its flow.

A family is its config (see `decoder_config.py`) and a row in `families.py`; the recipe is `DecoderFlow` under another
name. `CausalFlow` is what it shares with families that are not Llama's kin (`gpt2.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

from rlx_jax.blocks import BlockStage, Embed, LmHead, RopeTables, decoder_layer, llama_prefill_layer_fused
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import CausalConfig
from rlx_jax.models.decoder_config import DecoderConfig
from rlx_jax.models.recipe import Recipe
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

R = TypeVar("R", bound="CausalFlow[Any]")
C = TypeVar("C", bound=DecoderConfig)
A = TypeVar("A", bound="CausalConfig")


@dataclass(frozen=True)
class Decode:
    """A recipe's flow as explicit decode, behind cached keys and values that are inputs: see `ModelFlow.explicit`."""

    past: int | None = None
    custom_mask: bool = False


# -- the recipe --------------------------------------------------------------------------------


@dataclass(frozen=True)
class CausalFlow(Recipe[A]):
    """The recipe of a causal model. Inputs: `input_ids` `[batch, seq]`. Output: `logits` f32 `[batch, seq, vocab]`.

    A family's recipe is this class with a name and the class of its config, and `spec`, `stage`, `assemble`.

    Args:
        batch, seq: sizes to compile for ahead of the first call.
        hidden_only: no head. Output: `hidden`, the normalised `[batch, seq, hidden]`.
        last_token_logits: the head of each row's last token only: `[batch, 1, vocab]`.
        inputs_embeds: the input is `inputs_embeds` `[batch, seq, hidden]` float32 instead of ids.
        export_kv: side outputs `kv.{i}.k` and `kv.{i}.v` `[batch, seq, K·D]` of every layer, the keys rotated.
        decode: explicit decode; see `rlx_jax.models.decoder.as_decode`.
        Others: see `Recipe`.
    """

    name: str = "causal"
    seq: int | None = None
    hidden_only: bool = False
    last_token_logits: bool = False
    inputs_embeds: bool = False
    export_kv: bool = False
    decode: Decode | None = None

    outer: ClassVar[str] = ""  # what names of modules begin with in PEFT's files, where keys of checkpoints need not

    @classmethod
    def for_prefill(cls, config: A | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """The forward program, bound to sizes where they are given; `config` may be the content of `config.json`."""
        return replace(super().for_prefill(config, batch), seq=seq)

    @classmethod
    def for_decode(
        cls, config: A | Mapping[str, Any], batch: int | None = None, past: int | None = None, custom_mask: bool = False
    ) -> Self:
        """Explicit decode: see `rlx_jax.models.decoder.as_decode`."""
        return as_decode(cls.for_prefill(config, batch), past, custom_mask)

    @property
    def embedding(self) -> str:
        """The key of the embedding."""
        return EMBEDDING

    def stored_in(self, source: WeightSource) -> Self:
        """The recipe for how a checkpoint stores its weights, such as under a prefix. A head that is stored beside a
        tied embedding is the head: it may differ, and comparing would read data."""
        if not (self.config.tie_word_embeddings and source.has(HEAD)):
            return self
        config: Any = self.config
        return replace(self, config=replace(config, tie_word_embeddings=False))

    def reads(self, source: WeightSource) -> WeightSource:
        """Return a checkpoint's weights as the recipe reads them. Keys of the model without its head, as transformers
        saves an `AutoModel`, lack the first part of the causal model's, `model.`; a subclass may unpack weights."""
        prefix, _, bare = self.embedding.partition(".")
        if source.has(self.embedding) or not source.has(bare):
            return source
        return RenamedSource(source, {key if key == HEAD else f"{prefix}.{key}": key for key in source.keys()})

    def heads_in(self, source: WeightSource) -> tuple[str, ...]:
        return (HEAD,) if self.hidden_only and source.has(HEAD) else ()

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every checkpoint key with its shape."""
        plain = replace(self, decode=None, hidden_only=False, inputs_embeds=False, export_kv=False)
        return super(CausalFlow, plain).shapes()


@dataclass(frozen=True)
class DecoderFlow(CausalFlow[C]):
    """The recipe of Llama and its kin: see `CausalFlow`.

    A family's recipe is this class with its name and the class of its config. One whose layers `LayerSpec` cannot
    describe overrides `stage`. Layers of a `fused` family are one block where Llama's describes them, and
    with `composed` they are built from small stages; the numbers are the same.
    """

    composed: bool = False
    name: str = "decoder"

    config_type: ClassVar[type[DecoderConfig]] = DecoderConfig
    fused: ClassVar[bool] = False

    def spec(self, index: int = 0) -> Any:
        return self.config.layer_spec(index)

    def stage(self, index: int, spec: Any) -> BlockStage:
        return (llama_prefill_layer_fused if self.fused and not self.composed else decoder_layer)(index, spec)

    def assemble(self) -> ModelFlow:
        c, ends = self.config, self.config.ends()
        return decoder_flow(
            self,
            self.stage,
            tables=(RopeTables(c.inv_freq, factor=c.rope_factor), *ends.rope),
            embedded=() if self.inputs_embeds else ends.embedded,
            norm=c.layer_spec(0).norm("model.norm"),
            logits=ends.logits,
            leave=(*left_keys(c), *ends.left),
        )


# -- keys --------------------------------------------------------------------------------------


def weight_specs(config: DecoderConfig, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Every checkpoint key with its shape: compile or `init` without a checkpoint."""
    return declared_shapes(DecoderFlow(config).assemble(), dtype)


def left_keys(config: DecoderConfig) -> tuple[str, ...]:
    """Keys of old checkpoints that are left unread on purpose."""
    layers = range(config.num_hidden_layers)
    return tuple(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in layers)


# -- flow --------------------------------------------------------------------------------------


def as_decode(recipe: R, past: int | None = None, custom_mask: bool = False) -> R:
    """New tokens behind `past` cached ones, which are inputs and outputs: see `ModelFlow.explicit`.

    Inputs: `input_ids` `[batch, seq]`, with `custom_mask` `mask` `[batch, past + seq]`, then `past_k_{i}` and
    `past_v_{i}` `[batch, past, K·D]` of each layer, and optionally `position_ids` `[batch, seq]`. Outputs: `logits`,
    then `kv.0.k`, `kv.0.v`, `kv.1.k` … `[batch, past + seq, K·D]`. With sizes it is compiled ahead for one new token.
    """
    return replace(recipe, seq=1, decode=Decode(past, custom_mask))


def decoder_flow(
    recipe: CausalFlow[Any],
    layer: Callable[[int, Any], BlockStage],
    *,
    norm: BlockStage,
    tables: Iterable[BlockStage] = (),
    embedded: Iterable[BlockStage] = (),
    logits: Iterable[BlockStage] = (),
    leave: Iterable[str] = (),
) -> ModelFlow:
    """The flow of a recipe, bound to its weights if there are any.

    Args:
        layer: makes layer i as `layer(i, recipe.spec(i))`.
        norm: the final norm.
        tables: stages before the embedding, such as those of the rope.
        embedded: stages between the embedding and the layers, such as a scale; `inputs_embeds` passes them too.
        logits: stages behind the head, such as a softcap.
        leave: keys that are left unread on purpose.
    """
    c = recipe.config
    unread = [recipe.embedding] * recipe.inputs_embeds + [HEAD] * recipe.hidden_only
    return (
        ModelFlow(recipe.name, profile=recipe.hooks.profile, _max_positions=c.max_position_embeddings)
        .with_weights(recipe.weights, leave=(*leave, *unread))
        ._read_through(recipe.reads)
        .patch(partial(_opened, recipe, tables))
        .raw_stages(embedded)
        .bind(batch=recipe.batch, seq=recipe.seq)
        .when(recipe.export_kv and not recipe.decode, ModelFlow.export_kv)  # decode gives them anyway
        .patch(recipe.hooks.stack(c.num_hidden_layers, recipe.spec, layer))
        .when(recipe.last_token_logits, ModelFlow.gather_last_token_at)
        .stage(norm)
        .patch(recipe.hooks.edit)
        .patch(partial(_closed, recipe, logits))
    )


def _opened(recipe: CausalFlow[Any], tables: Iterable[BlockStage], flow: ModelFlow) -> ModelFlow:
    """A flow with the inputs, the tables and the embedding."""
    table = (recipe.config.vocab_size, recipe.config.hidden_size)
    if recipe.inputs_embeds:
        flow = flow.input("inputs_embeds", ("batch", "seq", recipe.config.hidden_size))
    else:
        flow = flow.input("input_ids", ("batch", "seq"), dtype="int32")
    if recipe.decode:
        flow = flow.explicit(recipe.decode.past, recipe.decode.custom_mask)
    flow = flow.raw_stages(tables)
    return flow if recipe.inputs_embeds else flow.stage(Embed(recipe.embedding, table))


def _closed(recipe: CausalFlow[Any], logits: Iterable[BlockStage], flow: ModelFlow) -> ModelFlow:
    """A flow with the head, and what follows it."""
    sizes = (recipe.config.vocab_size, recipe.config.hidden_size)
    if recipe.hidden_only:
        return flow.hidden_states()
    tied = recipe.config.tie_word_embeddings
    if tied and not recipe.inputs_embeds:
        head = LmHead.tied(*sizes)
    else:  # inputs_embeds: there is no Embed stage to be tied to
        head = LmHead.separate(recipe.embedding if tied else HEAD, *sizes)
    return flow.stage(head).output("logits").raw_stages(logits)
