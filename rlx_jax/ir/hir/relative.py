"""Blocks that compute scores of attention from the distances between tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value, constant
from rlx_jax.ir.operands import BLOCK, TABLES
from rlx_jax.ir.ops.index import Gather, Iota, RelativeBuckets, TakeAlongAxis
from rlx_jax.ir.ops.linalg import Einsum
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.ops.shape import AxisOf, Reshape, Transpose, split_axis
from rlx_jax.ir.types import TensorType

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)


@dataclass(frozen=True)
class RelativeBias(Hir):
    """The bias that each head adds to the scores, by the bucketed distance of query and key (T5).

    table `[R, N]` and x `[B, S, …]` → `[1, N, S, S]`, for the `buckets` ≤ R of `RelativeBuckets`.
    """

    traits = TABLES
    operands = "table[R!,N] x[_,_,…]"

    buckets: int = 32
    max_distance: int = 128

    def check(self, *operands: TensorType) -> None:
        table, x = operands
        if int(table.shape[0]) < self.buckets:
            raise ShapeError(
                f"relative_bias: a table of {self.buckets} rows or more, one for each bucket, and [B, S, …]; got "
                f"{table} and {x}"
            )

    def expand(self, b: Builder, *operands: Value) -> Value:
        table, x = operands
        rows = b(Gather(), table, b(RelativeBuckets(1, self.buckets, self.max_distance), x))
        heads = b(Transpose((2, 0, 1)), rows)
        return b(Reshape((1, *(AxisOf(axis) for axis in range(3)))), heads)


TERMS = ("keys", "queries")


@dataclass(frozen=True)
class RelativeScores(Hir):
    """Scores of queries and keys with embeddings of their distance (DeBERTa, He et al. 2021): f32 `[B,N,S,S]`.

        scale · (q_s · K[row(s − t)] + k_t · Q[row(s − t)])

    Operands: q and k `[B,S,N·D]`; then for each of `terms`, `keys` (K) and `queries` (Q), its rows `[R, N·D]`.
    With `buckets` distances are grouped as in `rows_of_distances`. R is twice `buckets`, or twice `max_distance`.
    """

    traits = BLOCK

    heads: int
    scale: float
    buckets: int
    max_distance: int
    terms: tuple[str, ...] = TERMS

    def check(self, *operands: TensorType) -> None:
        if not self.terms or len(operands) != 2 + len(self.terms) or not {*self.terms} <= {*TERMS}:
            raise GraphError(f"relative_scores: expected q, k and an operand for each of the terms {self.terms}")
        rows = 2 * (self.buckets or self.max_distance)
        if rows < 2 or any(table.shape[0] != rows for table in operands[2:]):
            raise ShapeError(f"relative_scores: expected {rows} rows, got {', '.join(map(str, operands[2:]))}")

    def expand(self, b: Builder, *operands: Value) -> Value:
        q, k, *tables = operands
        rows, split = self._rows(b, q), split_axis(3, 2, (self.heads, -1))
        scores = []
        for term, table in zip(self.terms, tables, strict=True):
            heads, embeddings = b(split, q if term == "keys" else k), b(split_axis(2, 1, (self.heads, -1)), table)
            products = b(Einsum("bsnd,rnd->bnsr", result=F32), heads, embeddings)
            # Row s has the rows of its distances to each t as a query, and transposed as a key.
            index = rows if term == "keys" else b(Transpose((0, 1, 3, 2)), rows)
            taken = b(TakeAlongAxis(3, "clip"), products, index)
            scores.append(taken if term == "keys" else b(Transpose((0, 1, 3, 2)), taken))
        total = scores[0] if len(scores) == 1 else b(Binary("add"), *scores)
        return b(Binary("mul"), total, b.scalar(self.scale, total))

    def _rows(self, b: Builder, x: Value) -> Value:
        """Return the row of the distance of each query s and key t, int32 `[1,1,S,S]`."""
        row_of = rows_of_distances(self.buckets, self.max_distance)
        farthest = len(row_of) // 2
        position = b(Iota(1), x)
        distance = b(Binary("sub"), b(Reshape((1, 1, -1, 1)), position), b(Reshape((1, 1, 1, -1)), position))
        index = b(Binary("add"), distance, b.scalar(farthest, distance))
        clipped = b(Binary("min"), b(Binary("max"), index, b.scalar(0, index)), b.scalar(2 * farthest, index))
        return b(Gather(), b.leaf(constant(row_of, np.int32)), clipped)

    def text(self) -> str:
        return f"relative_scores(heads={self.heads}, rows={2 * (self.buckets or self.max_distance)})"


@lru_cache
def rows_of_distances(buckets: int, max_distance: int) -> npt.NDArray[np.int32]:
    """Return the row of each distance −L … L from query to key; farther ones have the rows of ±L.

    The row is the distance, plus half the number of rows, limited to the rows. With `buckets` b > 0, distances from b/2
    on are grouped: their logarithms grow to b at `max_distance`. The logarithms are f32, as in the reference
    implementation, and computed on the host: a device could round one to the other side of a bucket's border.
    """
    half = buckets or max_distance
    distance = np.arange(-max_distance, max_distance + 1)
    if buckets:
        middle = buckets // 2
        size = np.where(np.abs(distance) < middle, middle - 1, np.abs(distance))
        with np.errstate(divide="ignore"):
            ratio = np.log((size / middle).astype(np.float32)) / np.log(np.float32((max_distance - 1) / middle))
        grouped = (np.ceil(ratio * np.float32(middle - 1)) + middle) * np.sign(distance)
        distance = np.where(size <= middle, distance, grouped)
    return np.clip(distance.astype(np.int64) + half, 0, 2 * half - 1).astype(np.int32)
