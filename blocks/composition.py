"""Compositions describe the layers of a model by name and count, and build the stages of a flow from them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from rlx_jax.blocks.control import BlockStage, Repeat, Sequence
from rlx_jax.dataclasses import dataclass

__all__ = ["Homogeneous", "LayerComposition", "Pair", "Single"]

# Builds the stage of a layer from the layer's name and its index among the layers of that name.
Build = Callable[[str, int], BlockStage]


def hash_composition(composition: LayerComposition) -> int:
    """Return a 64-bit hash of a composition, the first bytes of the SHA-256 of its `repr`.

    It is the same in every process, unlike `hash`, which Python seeds per process for strings.
    """
    return int.from_bytes(hashlib.sha256(repr(composition).encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Single:
    """Composition of one layer."""

    name: str

    def depth_hint(self) -> int:
        """Return the number of layers."""
        return 1

    cache_key = hash_composition

    def to_flow_stage(self, build: Build) -> BlockStage:
        """Return `build(name, 0)`, which adds no segment to the block path."""
        return build(self.name, 0)


@dataclass(frozen=True)
class Homogeneous:
    """Composition of `count` layers of one kind, with block paths `{layer_name}.{i}`."""

    layer_name: str
    count: int

    def depth_hint(self) -> int:
        """Return the number of layers."""
        return self.count

    cache_key = hash_composition

    def to_flow_stage(self, build: Build) -> BlockStage:
        """Return a Repeat, so that layers that differ only in their parameters become one region."""
        return Repeat(self.count, partial(build, self.layer_name), self.layer_name)


@dataclass(frozen=True)
class Pair:
    """Composition of `head` followed by `tail`."""

    head: LayerComposition
    tail: LayerComposition

    def depth_hint(self) -> int:
        """Return the number of layers."""
        return self.head.depth_hint() + self.tail.depth_hint()

    cache_key = hash_composition

    def to_flow_stage(self, build: Build) -> BlockStage:
        """Return a Sequence of the stages of `head` and `tail`."""
        return Sequence([self.head.to_flow_stage(build), self.tail.to_flow_stage(build)])


LayerComposition = Single | Homogeneous | Pair
