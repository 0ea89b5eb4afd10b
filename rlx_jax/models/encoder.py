"""Define the recipe of a text encoder, which BERT, RoBERTa, MPNet, NomicBERT and the text towers of CLIP and SigLIP
share.

A family is its config, the stages before its layers, and its layer; `families.py` has its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from rlx_jax.blocks import BlockStage, SideOutput
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import LayeredConfig, TokenConfig
from rlx_jax.models.heads import LABEL_LOGITS, HeadLayers, TaskHead
from rlx_jax.models.hooks import Recipe
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource

EMBEDDING = "embeddings.word_embeddings.weight"

# Prefixes of keys of the heads that transformers defines for BERT-like encoders.
HEAD_PREFIXES = (
    "classifier.", "cls.", "discriminator_predictions.", "generator_lm_head.", "generator_predictions.", "linear.",
    "lm_head.", "lm_predictions.", "mask_predictions.", "pre_classifier.", "predictions.", "qa_classifier.",
    "qa_outputs.", "sequence_summary.", "sop_classifier.", "vocab_",
)  # fmt: skip

# Name of the side output with one vector for each row.
POOLED = "pooled"

# Name of an optional input `[batch, seq]` int32, and its default as in `ModelFlow.input`.
OptionalInput = tuple[str, float | str | None]


L = TypeVar("L", bound=LayeredConfig)
E = TypeVar("E", bound=TokenConfig)


@dataclass(frozen=True)
class TowerFlow(Recipe[L]):
    """The recipe of a stack of layers over texts or images.

    Output: `hidden_states` `[batch, tokens, hidden]`; if the family pools, also `pooled`, one vector for each row. With
    a head the output is `label_logits`: `[batch, tokens, labels]` for texts, `[batch, labels]` for images.

    Args:
        prefix: prefix of the checkpoint keys; may be empty.
        head: the head of a task.
        Others: see `Recipe`.
    """

    name: str = "tower"
    prefix: str = ""
    head: TaskHead | None = None

    heads: ClassVar[HeadLayers] = {}  # the layers of the family's heads by task
    # The token of a text that a classifier reads, and `pad_token_id` of a config that lacks the field: see `read_head`.
    head_token: ClassVar[tuple[str, int | None]] = ("cls", None)

    def key(self, name: str) -> str:
        """Return the checkpoint's key for a key of the tower."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        """Return the flow with the inputs added; `rows` is the name of their first axis."""
        raise NotImplementedError

    def embedding_stages(self) -> tuple[BlockStage, ...]:
        """Return the stages before the layers; the first one takes the first input."""
        raise NotImplementedError

    def final_stages(self) -> tuple[BlockStage, ...]:
        """Return the stages after the layers."""
        return ()

    opening, closing = embedding_stages, final_stages

    def pool(self) -> BlockStage | None:
        """Return the stage that pools the hidden states to one vector; None if the family does not pool."""
        return None

    def task_heads(self) -> HeadLayers:
        """Return the layers of the heads by task."""
        return self.heads

    def head_stages(self, head: TaskHead) -> tuple[BlockStage, ...]:
        """Return the stages from the hidden states to the logits of a head."""
        return head.stages(self.config.hidden_size, self.key, self.config)

    def unread_keys(self) -> tuple[str, ...]:
        """Return keys that are left unread on purpose."""
        raise NotImplementedError

    def assemble(self) -> ModelFlow:
        """Return the flow, bound to its weights if there are any."""
        flow = ModelFlow(self.name, profile=self.hooks.profile, _max_positions=self.max_positions)
        return self.add_tower(flow.with_weights(self.weights, leave=self.unread_keys()))

    def add_tower(self, flow: ModelFlow) -> ModelFlow:
        """Return the flow with the tower's inputs, stages and outputs added."""
        flow, pool = self.add_layers(self.add_inputs(flow).bind(batch=self.batch)), self.pool()
        if self.head is not None:
            stages = self.head_stages(self.head)
            return flow.stage(*stages)._with_outputs(primary=LABEL_LOGITS, label_head=self.head)
        return (flow if pool is None else flow.stage(SideOutput(POOLED, pool))).output("hidden_states")

    def add_layers(self, flow: ModelFlow) -> ModelFlow:
        """Return the flow with the stages from the inputs to the hidden states added."""
        return (
            flow.stage(*self.embedding_stages())
            .patch(self.hooks.stack(self.config.num_hidden_layers, self.spec, self.stage))
            .stage(*self.final_stages())
            .patch(self.hooks.edit)
        )


@dataclass(frozen=True)
class EncoderFlow(TowerFlow[E]):
    """The recipe of an encoder. Inputs: `input_ids` `[batch, seq]`, and optionally the ones in `optional_inputs`, such
    as `attention_mask` (1 keeps a key). Outputs: as `TowerFlow`.

    A family's recipe is a subclass with a name, the class of its config, and `embedding_stages`, `spec` and `stage`;
    `heads` has the layers of its heads by task; if they depend on the config, the method `task_heads` returns them.

    Args:
        prefix: prefix of the keys in task checkpoints; empty for bare encoders.
        batch, seq: sizes to compile for ahead of the first call.
        Others: see `Recipe`.
    """

    name: str = "encoder"
    seq: int | None = None

    embedding: ClassVar[str] = EMBEDDING
    head_prefixes: ClassVar[tuple[str, ...]] = HEAD_PREFIXES
    optional_inputs: ClassVar[tuple[OptionalInput, ...]] = (
        ("attention_mask", None),
        ("token_type_ids", 0),
        ("position_ids", POSITIONS),
    )

    @classmethod
    def for_prefill(cls, config: E | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """Return the forward program of a bare encoder, bound to sizes if given.

        `config` may be the content of `config.json`.
        """
        return replace(super().for_prefill(config, batch), seq=seq)

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe with the prefix of a checkpoint's keys."""
        name = f".{self.embedding}"
        matches = [key[: -len(name)] for key in source.keys() if f".{key}".endswith(name)]
        prefix = matches[0] if len(matches) == 1 else self.prefix
        return replace(self, prefix=prefix, head=None if self.head is None else self.head.adapt_to(source))

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return a checkpoint's weights under the keys that the recipe reads.

        Old checkpoints name the parameters of a LayerNorm `gamma` and `beta`, as TensorFlow does.
        """
        keys = source.keys()
        names = {".gamma": ".weight", ".beta": ".bias"}
        renamed = {k: k.removesuffix(old) + new for k in keys for old, new in names.items() if k.endswith(f"Norm{old}")}
        return RenamedSource(source, {renamed.get(k, k): k for k in keys}) if renamed else source

    @property
    def padding(self) -> tuple[int, int] | None:
        """(tokens, id) that texts are padded to; None if they may have any length and padding is not read."""
        return None

    def task_head_keys(self, source: WeightSource) -> tuple[str, ...]:
        return () if self.head else head_keys(self.head_prefixes, source)

    def unread_keys(self) -> tuple[str, ...]:
        """Return keys that are left unread on purpose: position ids, the pooler and task heads."""
        return (self.key("embeddings.position_ids"), self.key("pooler."), "pooler.", *self.head_prefixes)

    def add_inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        flow = flow.input("input_ids", (rows, "seq"), dtype="int32")
        for name, default in self.optional_inputs:
            flow = flow.input(name, (rows, "seq"), dtype="int32", default=default)
        return flow.bind(seq=self.seq)


def head_keys(heads: tuple[str, ...], source: WeightSource) -> tuple[str, ...]:
    """Return the keys of a task's head in a checkpoint, which begin with one of `heads`, and of its pooler."""
    if not any(key.startswith(heads) for key in source.keys()):
        return ()
    return tuple(key for key in source.keys() if key.startswith((*heads, "pooler.")) or ".pooler." in key)
