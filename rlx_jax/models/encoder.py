"""The recipe of a text encoder: what BERT, RoBERTa, MPNet, NomicBERT and the text towers of CLIP and SigLIP share.

A family is its config, the stages before its layers, and its layer; `families.py` has its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

from rlx_jax.blocks import BlockStage, SideOutput
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import LayeredConfig, TokenConfig
from rlx_jax.models.recipe import Recipe
from rlx_jax.weights.source import WeightSource

EMBEDDING = "embeddings.word_embeddings.weight"

# The side output that holds one vector for each row.
POOLED = "pooled"

# An input `[batch, seq]` int32 that may be left out, and its default as `ModelFlow.input` takes it.
OptionalInput = tuple[str, float | str | None]


L = TypeVar("L", bound=LayeredConfig)
E = TypeVar("E", bound=TokenConfig)


@dataclass(frozen=True)
class TowerFlow(Recipe[L]):
    """The recipe of a stack of layers over texts or images. Output: `hidden_states` `[batch, tokens, hidden]`; of a
    family that pools, `pooled` besides, one vector for each row.

    Args:
        prefix: what keys begin with, empty where they have no prefix.
        Others: see `Recipe`.
    """

    name: str = "tower"
    prefix: str = ""

    def inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        """The inputs; `rows` is the name of their first axis."""
        raise NotImplementedError

    def opening(self) -> tuple[BlockStage, ...]:
        """The stages before the layers, the first of which takes the first input."""
        raise NotImplementedError

    def closing(self) -> tuple[BlockStage, ...]:
        """The stages behind the layers."""
        return ()

    def pool(self) -> BlockStage | None:
        """What makes one vector of the hidden states. None: nothing does."""
        return None

    def leave(self) -> tuple[str, ...]:
        """Keys that are left unread on purpose."""
        raise NotImplementedError

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights if there are any."""
        flow = ModelFlow(self.name, profile=self.hooks.profile, _max_positions=self.max_positions)
        return self.tower(flow.with_weights(self.weights, leave=self.leave()))

    def tower(self, flow: ModelFlow) -> ModelFlow:
        """The tower as a flow's own: its inputs, its stages and its outputs."""
        flow, pool = self.body(self.inputs(flow).bind(batch=self.batch)), self.pool()
        return (flow if pool is None else flow.stage(SideOutput(POOLED, pool))).output("hidden_states")

    def body(self, flow: ModelFlow) -> ModelFlow:
        """The stages from the inputs to hidden states."""
        return (
            flow.stage(*self.opening())
            .patch(self.hooks.stack(self.config.num_hidden_layers, self.spec, self.stage))
            .stage(*self.closing())
            .patch(self.hooks.edit)
        )


@dataclass(frozen=True)
class EncoderFlow(TowerFlow[E]):
    """The recipe of an encoder. Inputs: `input_ids` `[batch, seq]`, and optionally those in `optional`, such as
    `attention_mask` (1 keeps a key). Outputs: as `TowerFlow`.

    A family's recipe is this class with a name, the class of its config, and `opening`, `spec` and `stage`.

    Args:
        prefix: what keys of task checkpoints begin with, empty for bare encoders.
        batch, seq: sizes to compile for ahead of the first call.
        Others: see `Recipe`.
    """

    name: str = "encoder"
    seq: int | None = None

    prefixes: ClassVar[tuple[str, ...]] = ()
    embedding: ClassVar[str] = EMBEDDING
    heads: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[OptionalInput, ...]] = (
        ("attention_mask", None),
        ("token_type_ids", 0),
        ("position_ids", POSITIONS),
    )

    @classmethod
    def for_prefill(cls, config: E | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """The forward program of a bare encoder, bound to sizes where they are given; `config` may be the content of
        `config.json`."""
        return replace(super().for_prefill(config, batch), seq=seq)

    def stored_in(self, source: WeightSource) -> Self:
        """The recipe under the prefix that a checkpoint's keys have."""
        prefixes = (*self.prefixes, "")
        found = (prefix for prefix in prefixes if source.has(replace(self, prefix=prefix).key(self.embedding)))
        return replace(self, prefix=next(found, self.prefix))

    @property
    def padding(self) -> tuple[int, int] | None:
        """To how many tokens texts are padded, and with what; None: to any number, and padding is not read."""
        return None

    def key(self, name: str) -> str:
        """A key of the encoder as its checkpoint has it."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def heads_in(self, source: WeightSource) -> tuple[str, ...]:
        return head_keys(self.heads, source)

    def leave(self) -> tuple[str, ...]:
        """Keys that are left unread on purpose: position ids, the pooler and task heads."""
        return (self.key("embeddings.position_ids"), self.key("pooler."), "pooler.", *self.heads)

    def inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        flow = flow.input("input_ids", (rows, "seq"), dtype="int32")
        for name, default in self.optional:
            flow = flow.input(name, (rows, "seq"), dtype="int32", default=default)
        return flow.bind(seq=self.seq)


def head_keys(heads: tuple[str, ...], source: WeightSource) -> tuple[str, ...]:
    """Return the keys of a task's head in a checkpoint, which begin with one of `heads`, and of its pooler."""
    if not any(key.startswith(heads) for key in source.keys()):
        return ()
    return tuple(key for key in source.keys() if key.startswith((*heads, "pooler.")) or ".pooler." in key)
