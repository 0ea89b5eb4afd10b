"""What tests of small flows share: weights, a profile, and `compile` with the types of a user's script."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx_jax as rlx


def w(*shape: int, seed: int = 0) -> np.ndarray:
    """A weight that keeps the size of what it multiplies."""
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


def compiled(flow: Any, weights: Any = None, **options: Any) -> Any:
    """`rlx.compile`, untyped: `params` may be None to a type checker."""
    return rlx.compile(flow, weights, **options)


def profile(**tables: Any) -> rlx.CompileProfile:
    """The default profile with other settings."""
    return rlx.CompileProfile().replace(**tables)
