"""Blocks that number tokens by what is in the row, and pairs of tokens by their distance."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.ops.index import Gather, RelativeBuckets
from rlx_jax.ir.ops.pointwise import Binary, CastTo, Compare
from rlx_jax.ir.ops.reduce import Cumsum
from rlx_jax.ir.ops.shape import AxisOf, Reshape, Transpose
from rlx_jax.ir.traits import TABLES
from rlx_jax.ir.types import TensorType, is_static


@dataclass(frozen=True)
class CountedPositions(Hir):
    """Positions counted over the ids `[B, S]` that are not `padding`, from `padding` + 1 on: int32 `[B, S]`.

    Padding itself stands at `padding` (RoBERTa, Liu et al. 2019, after fairseq).
    """

    traits = TABLES

    padding: int

    def check(self, *operands: TensorType) -> None:
        check_arity("counted_positions", len(operands), 1)
        (ids,) = operands
        if ids.rank != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ShapeError(f"counted_positions: ids are integers [B, S], got {ids}")
        if self.padding < 0:
            raise GraphError(f"counted_positions: padding is an id, at least 0; got {self.padding}")

    def expand(self, b: Builder, *operands: Value) -> Value:
        (ids,) = operands
        counts = b(CastTo(np.dtype(np.int32)), b(Compare("ne"), ids, b.scalar(self.padding, ids)))
        place = b(Binary("mul"), b(Cumsum(1), counts), counts)
        return b(Binary("add"), place, b.scalar(self.padding, place))


@dataclass(frozen=True)
class RelativeBias(Hir):
    """What each head adds to the scores by the distance of query and key: table `[R, N]` and x `[B, S, …]` →
    `[1, N, S, S]`, for the `buckets` ≤ R of `RelativeBuckets`."""

    traits = TABLES

    buckets: int = 32
    max_distance: int = 128

    def check(self, *operands: TensorType) -> None:
        check_arity("relative_bias", len(operands), 2)
        table, x = operands
        if table.rank != 2 or not is_static(table.shape[0]) or int(table.shape[0]) < self.buckets or x.rank < 2:
            raise ShapeError(
                f"relative_bias: a table of {self.buckets} rows or more, one for each bucket, and [B, S, …]; got "
                f"{table} and {x}"
            )

    def expand(self, b: Builder, *operands: Value) -> Value:
        table, x = operands
        rows = b(Gather(), table, b(RelativeBuckets(1, self.buckets, self.max_distance), x))
        heads = b(Transpose((2, 0, 1)), rows)
        return b(Reshape((1, *(AxisOf(axis) for axis in range(3)))), heads)
