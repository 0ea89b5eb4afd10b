"""The recipe of a text encoder: what BERT, RoBERTa, MPNet and NomicBERT share.

A family is its config, the stages before its layers, and its layer; `families.py` has its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypedDict, TypeVar

import jax
import numpy as np

from rlx_jax.blocks import BlockStage
from rlx_jax.errors import ConfigError
from rlx_jax.flow import POSITIONS, ModelFlow
from rlx_jax.models.config import MAX_LAYERS, MAX_VOCABULARY, Fields
from rlx_jax.models.hooks import METHODS, Hooks
from rlx_jax.weights.source import WeightSource

EMBEDDING = "embeddings.word_embeddings.weight"

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Hugging Face's names of activations, and ours."""

OptionalInput = tuple[str, float | str | None]
"""An input `[batch, seq]` int32 that may be left out, and its default as `ModelFlow.input` takes it."""

StoredShapes = dict[str, tuple[int, ...]]


class EncoderConfig(Protocol):
    """What every encoder's config has, under the names of Hugging Face."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @classmethod
    def from_hf(cls, config: Fields | Mapping[str, Any]) -> Self: ...


E = TypeVar("E", bound=EncoderConfig)


@dataclass(frozen=True)
class EncoderFlow(Generic[E]):
    """The recipe of an encoder. Inputs: `input_ids` `[batch, seq]`, and optionally those in `optional`, such as
    `attention_mask` (1 keeps a key). Output: `hidden_states` `[batch, seq, hidden]`.

    A family's recipe is this class with a name, the class of its config, and `opening`, `spec`, `stage` and `stored`.

    Args:
        prefix: what keys of task checkpoints begin with, empty for bare encoders.
        batch, seq: sizes to compile for ahead of the first call.
        weights: the checkpoint that the flow is bound to; without it the flow knows shapes only.
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
    heads: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[OptionalInput, ...]] = (
        ("attention_mask", None),
        ("token_type_ids", 0),
        ("position_ids", POSITIONS),
    )

    layer, before_layers, after_layers, after, patch_flow, profile, profile_near = METHODS

    @classmethod
    def for_prefill(cls, config: E | Mapping[str, Any], batch: int | None = None, seq: int | None = None) -> Self:
        """The forward program of a bare encoder, bound to sizes where they are given; `config` may be the content of
        `config.json`."""
        known: Any = config
        read: Any = known if isinstance(known, cls.config_type) else cls.config_type.from_hf(known)
        return cls(read, batch=batch, seq=seq)

    def stored_in(self, source: WeightSource) -> Self:
        """The recipe under the prefix that a checkpoint's keys have."""
        found = (prefix for prefix in self.prefixes if source.has(f"{prefix}.{EMBEDDING}"))
        return replace(self, prefix=next(found, ""))

    @property
    def max_positions(self) -> int:
        """The longest row that the model knows, in tokens."""
        return self.config.max_position_embeddings

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

    def stored(self) -> StoredShapes:
        """The shape of every weight, by its whole key."""
        raise NotImplementedError

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every checkpoint key with its shape."""
        return {key: jax.ShapeDtypeStruct(shape, np.float32) for key, shape in self.stored().items()}

    def leave(self) -> tuple[str, ...]:
        """Keys that are left unread on purpose: position ids, the pooler and task heads."""
        return (self.key("embeddings.position_ids"), self.key("pooler."), "pooler.", *self.heads)

    def assemble(self) -> ModelFlow:
        """The flow, bound to its weights; without any, to their shapes."""
        weights = self.shapes() if self.weights is None else self.weights
        flow = ModelFlow(self.name, profile=self.hooks.profile).with_weights(weights, leave=self.leave())
        flow = flow.input("input_ids", ("batch", "seq"), dtype="int32")
        for name, default in self.optional:
            flow = flow.input(name, ("batch", "seq"), dtype="int32", default=default)
        return (
            flow.bind(batch=self.batch, seq=self.seq)
            .raw_stages(self.opening())
            .patch(self.hooks.stack(self.config.num_hidden_layers, self.spec, self.stage))
            .patch(self.hooks.edit)
            .output("hidden_states")
        )


# -- fields --------------------------------------------------------------------------------------


class EncoderFields(TypedDict):
    """The fields that encoders have in common."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    layer_norm_eps: float
    activation: str


def encoder_fields(c: Fields, vocab_size: int) -> EncoderFields:
    """The common fields; `vocab_size` is the family's default.

    Raises:
        ConfigError, LimitError: a value is absurd. UnsupportedError: an activation that there is not.
    """
    hidden, heads = c.whole("hidden_size", 768), c.whole("num_attention_heads", 12, high=2**16)
    if hidden % heads:
        raise ConfigError(f"{c.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return EncoderFields(
        vocab_size=c.whole("vocab_size", vocab_size, high=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=c.whole("intermediate_size", 3072),
        num_hidden_layers=c.whole("num_hidden_layers", 12, high=MAX_LAYERS),
        num_attention_heads=heads,
        max_position_embeddings=c.whole("max_position_embeddings", 512),
        layer_norm_eps=c.real("layer_norm_eps", 1e-12),
        activation=c.choice("hidden_act", "gelu", ACTIVATIONS),
    )
