"""`LayerComposition`: how a model's layers are put together, as a value that can be hashed, sized and built."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rlx_jax.blocks.control import BlockStage, Repeat, Sequence

# The stage of a layer, from its name and its number among the layers of that name.
Build = Callable[[str, int], BlockStage]


def structural_hash(composition: LayerComposition) -> int:
    """64 bits, equal for equal compositions in every process: of the SHA-256 of how the composition is written."""
    return int.from_bytes(hashlib.sha256(repr(composition).encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Single:
    """One layer."""

    name: str

    def depth_hint(self) -> int:
        """How many layers there are."""
        return 1

    cache_key = structural_hash

    def to_flow_stage(self, build: Build) -> BlockStage:
        """`build(name, 0)`, without a segment of its own in the block path."""
        return build(self.name, 0)


@dataclass(frozen=True)
class Homogeneous:
    """`count` layers of one kind; block paths `{layer_name}.{i}`."""

    layer_name: str
    count: int

    def depth_hint(self) -> int:
        """How many layers there are."""
        return self.count

    cache_key = structural_hash

    def to_flow_stage(self, build: Build) -> BlockStage:
        """A Repeat, so that layers which differ in their parameters only become one region."""
        return Repeat(self.count, partial(build, self.layer_name), self.layer_name)


@dataclass(frozen=True)
class Pair:
    """One composition after another."""

    head: LayerComposition
    tail: LayerComposition

    def depth_hint(self) -> int:
        """How many layers there are."""
        return self.head.depth_hint() + self.tail.depth_hint()

    cache_key = structural_hash

    def to_flow_stage(self, build: Build) -> BlockStage:
        """A Sequence of both."""
        return Sequence([self.head.to_flow_stage(build), self.tail.to_flow_stage(build)])


LayerComposition = Single | Homogeneous | Pair
