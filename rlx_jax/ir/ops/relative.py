"""Numbers of the distance between two tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.shape import check_axis
from rlx_jax.ir.traits import TOKENS, results_written
from rlx_jax.ir.types import TensorType

Array = jax.Array


@dataclass(frozen=True)
class RelativeBuckets(Mir):
    """The bucket of key t seen from query s: x with S tokens along `axis` → int32 `[S, S]`.

    Half of the `buckets` are for keys up to the query's own, half for those behind it. Of each half, one half is for
    the distances 0, 1, 2 …, one each; the rest for those up to `max_distance`, wider by a constant factor, and all
    that are further away (Raffel et al. 2020, section 2.1; T5, MPNet).
    """

    traits = replace(TOKENS, bytes=results_written)

    axis: int
    buckets: int = 32
    max_distance: int = 128

    def check(self, *operands: TensorType) -> None:
        check_axis("relative_buckets", self.axis, operands[0])
        if self.buckets < 4 or self.buckets % 4:
            raise GraphError(f"relative_buckets: buckets is {self.buckets}; expected a multiple of 4")
        if self.max_distance <= self.buckets // 4:
            raise GraphError(
                f"relative_buckets: max_distance is {self.max_distance}; {self.buckets // 4} distances have a bucket "
                "each, expected more"
            )

    def eval(self, x: Array) -> Array:
        at = jnp.arange(x.shape[self.axis], dtype=jnp.int32)
        behind = at[:, None] - at[None, :]
        near = jnp.minimum(jnp.abs(behind), jnp.int32(self.max_distance))
        later = jnp.where(behind < 0, jnp.int32(self.buckets // 2), jnp.int32(0))
        return jnp.take(jnp.asarray(self.of_distance()), near, mode="clip") + later

    def of_distance(self) -> npt.NDArray[np.int32]:
        """The bucket of each distance up to `max_distance`, in f32 as the reference computes it: on the host, so that
        no device rounds a logarithm to the other side of a border."""
        half = self.buckets // 2
        exact = half // 2
        distance = np.arange(self.max_distance + 1)
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
        wide = exact + ratio / np.float32(math.log(self.max_distance / exact)) * np.float32(half - exact)
        return np.where(distance < exact, distance, np.minimum(wide.astype(np.int64), half - 1)).astype(np.int32)
