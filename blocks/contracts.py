"""What stages promise beyond `emit`: protocols, so that code which sizes caches or buffers can ask any stage.

A stage keeps a promise by having the method; nothing is inherited. Shapes are those of `TensorType.shape`: ints and
symbolic dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlx_jax.blocks.control import BlockStage
from rlx_jax.emit import Emit, FlowValue
from rlx_jax.ir.hir import MaskKind, cache_slots, mask_kind

Shape = tuple[Any, ...]


@dataclass(frozen=True)
class StageArtifacts:
    """What a layer leaves behind: the shape of its active value, and its side outputs by name."""

    hidden: Shape
    side_outputs: tuple[tuple[str, Shape], ...] = ()

    @staticmethod
    def hidden_only(shape: Shape) -> StageArtifacts:
        """No side outputs."""
        return StageArtifacts(shape)

    def with_side(self, name: str, shape: Shape) -> StageArtifacts:
        """One side output more."""
        return replace(self, side_outputs=(*self.side_outputs, (name, shape)))


@dataclass(frozen=True)
class KvCacheContract:
    """Shapes of the keys and values that a cached program keeps for one attention: `[B, T, K·D]` each.

    T is the dimension `context`, or under a sliding window that of its ring.
    """

    k: Shape
    v: Shape


class LayerStage(Protocol):
    """A named layer that reports what it leaves behind."""

    @property
    def name(self) -> str: ...

    def emit_layer(self, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]: ...


class AttentionStage(BlockStage, Protocol):
    """A stage with keys and values to cache."""

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """What a cache holds for an input `[B, S, H]`."""
        ...


class FfnStage(BlockStage, Protocol):
    """A stage that widens tokens and narrows them again."""

    def intermediate_shape(self, emit: Emit, hidden: Shape) -> Shape:
        """`[B, S, F]` for an input `[B, S, H]`."""
        ...


class NormStage(BlockStage, Protocol):
    """A stage that divides by a root of ε and something."""

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True)
class BlockAsLayer:
    """Any stage as a `LayerStage`. One that returns nothing leaves its input active."""

    block: BlockStage
    name: str = "block"

    def emit_layer(self, emit: Emit, value: FlowValue) -> tuple[FlowValue, StageArtifacts]:
        """Emit the stage; the side outputs are those it gave to `emit.output`."""
        before = set(emit.state.outputs)
        with emit.scope(self.name):
            out = self.block.emit(emit, value)
        out = value if out is None else out
        artifacts = StageArtifacts.hidden_only(out.type.shape)
        for name, side in emit.state.outputs.items():
            if name not in before:
                artifacts = artifacts.with_side(name, side.type.shape)
        return out, artifacts


def kv_cache(hidden: Shape, kv_heads: int, head_dim: int, mask: MaskKind | str) -> KvCacheContract:
    """The contract of an attention with `kv_heads` heads of `head_dim` whose input is `[B, S, H]`."""
    shape = (hidden[0], cache_slots(mask_kind(mask).window), kv_heads * head_dim)
    return KvCacheContract(shape, shape)
