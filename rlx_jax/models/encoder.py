"""The recipe of a text encoder: what BERT, RoBERTa, MPNet, NomicBERT and the text towers of CLIP and SigLIP share.

A family is its config, the stages before its layers, and its layer; `families.py` has its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import jax

from rlx_jax.blocks import BlockStage, SideOutput
from rlx_jax.flow import POSITIONS, ModelFlow, declared_shapes
from rlx_jax.models.config import Fields, check_recipe
from rlx_jax.models.hooks import HookMethods, Hooks
from rlx_jax.weights.source import WeightSource

EMBEDDING = "embeddings.word_embeddings.weight"

POOLED = "pooled"
"""The side output that holds one vector for each row."""

OptionalInput = tuple[str, float | str | None]
"""An input `[batch, seq]` int32 that may be left out, and its default as `ModelFlow.input` takes it."""


class EncoderConfig(Protocol):
    """What every encoder's config has, under the names of Hugging Face."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @classmethod
    def of(cls, config: Any) -> Self: ...

    @classmethod
    def from_hf(cls, config: Fields | Mapping[str, Any]) -> Self: ...


E = TypeVar("E", bound=EncoderConfig)


@dataclass(frozen=True)
class EncoderFlow(HookMethods, Generic[E]):
    """The recipe of an encoder. Inputs: `input_ids` `[batch, seq]`, and optionally those in `optional`, such as
    `attention_mask` (1 keeps a key). Output: `hidden_states` `[batch, seq, hidden]`; of a family that pools, `pooled`
    besides, one vector for each row.

    A family's recipe is this class with a name, the class of its config, and `opening`, `spec`, `stage` and `stored`.

    Args:
        prefix: what keys of task checkpoints begin with, empty for bare encoders.
        batch, seq: sizes to compile for ahead of the first call.
        weights: the checkpoint that the flow is bound to; without it the flow is bound to none.
        hooks: see `rlx_jax.models.hooks`.
    """

    config: E
    prefix: str = ""
    name: str = "encoder"
    batch: int | None = None
    seq: int | None = None
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    config_type: ClassVar[type[EncoderConfig]]
    prefixes: ClassVar[tuple[str, ...]] = ()
    embedding: ClassVar[str] = EMBEDDING
    heads: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[OptionalInput, ...]] = (
        ("attention_mask", None),
        ("token_type_ids", 0),
        ("position_ids", POSITIONS),
    )

    def __post_init__(self) -> None:
        check_recipe(self)

    @classmethod
    def for_prefill(cls, config: E | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """The forward program of a bare encoder, bound to sizes where they are given; `config` may be the content of
        `config.json`."""
        read: Any = cls.config_type.of(config)
        return cls(read, batch=batch, seq=seq)

    def stored_in(self, source: WeightSource) -> Self:
        """The recipe under the prefix that a checkpoint's keys have."""
        prefixes = (*self.prefixes, "")
        found = (prefix for prefix in prefixes if source.has(replace(self, prefix=prefix).key(self.embedding)))
        return replace(self, prefix=next(found, self.prefix))

    @property
    def max_positions(self) -> int:
        """The longest row that the model knows, in tokens."""
        return self.config.max_position_embeddings

    @property
    def padding(self) -> tuple[int, int] | None:
        """To how many tokens texts are padded, and with what; None: to any number, and padding is not read."""
        return None

    def key(self, name: str) -> str:
        """A key of the encoder as its checkpoint has it."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def opening(self) -> tuple[BlockStage, ...]:
        """The stages before the layers, the first of which takes the ids."""
        raise NotImplementedError

    def spec(self, index: int) -> Any:
        """The spec of layer `index`, which holds the layer's keys."""
        raise NotImplementedError

    def stage(self, index: int, spec: Any) -> BlockStage:
        """The family's own layer."""
        raise NotImplementedError

    def closing(self) -> tuple[BlockStage, ...]:
        """The stages behind the layers."""
        return ()

    def pool(self) -> BlockStage | None:
        """What makes one vector of the hidden states. None: nothing does."""
        return None

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every checkpoint key with its shape."""
        return declared_shapes(replace(self, weights=None, hooks=Hooks()).assemble())

    def leave(self) -> tuple[str, ...]:
        """Keys that are left unread on purpose: position ids, the pooler and task heads."""
        return (self.key("embeddings.position_ids"), self.key("pooler."), "pooler.", *self.heads)

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights if there are any."""
        flow = ModelFlow(self.name, profile=self.hooks.profile, _max_positions=self.max_positions)
        return self.tower(flow.with_weights(self.weights, leave=self.leave()))

    def tower(self, flow: ModelFlow) -> ModelFlow:
        """The encoder as a flow's own: its inputs, its stages and its outputs."""
        flow, pool = self.body(self.inputs(flow).bind(batch=self.batch, seq=self.seq)), self.pool()
        return (flow if pool is None else flow.stage(SideOutput(POOLED, pool))).output("hidden_states")

    def inputs(self, flow: ModelFlow, rows: str = "batch") -> ModelFlow:
        """The inputs; `rows` is the name of their first axis."""
        flow = flow.input("input_ids", (rows, "seq"), dtype="int32")
        for name, default in self.optional:
            flow = flow.input(name, (rows, "seq"), dtype="int32", default=default)
        return flow

    def body(self, flow: ModelFlow) -> ModelFlow:
        """The stages from ids to hidden states."""
        return (
            flow.raw_stages(self.opening())
            .patch(self.hooks.stack(self.config.num_hidden_layers, self.spec, self.stage))
            .stage(*self.closing())
            .patch(self.hooks.edit)
        )
