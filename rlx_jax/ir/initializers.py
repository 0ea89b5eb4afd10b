"""Custom initializers of weights that no checkpoint contains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.errors import WeightShapeError
from rlx_jax.ir.types import TensorType

# `(key, shape, dtype) → array`, as the functions that `jax.nn.initializers` returns.
InitFunction = Callable[[jax.Array, tuple[int, ...], Any], Any]

# A name in `INITS`, or a function.
Init = str | InitFunction

# Zeros, ones, and rows or columns of length 1 that are orthogonal to each other (Saxe et al. 2013).
INITS: Mapping[str, InitFunction] = {
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
    "orthogonal": jax.nn.initializers.orthogonal(),
}


def init_weight(init: Init, key: jax.Array, stored: TensorType, where: str) -> jax.Array:
    """Return the initialized weight, in the dtype of `stored`, its type in a checkpoint.

    Raises:
        WeightShapeError: the function returned another shape, or a weight with fewer than 2 axes has the init
            "orthogonal". The message begins with `where`.
    """
    if init == "orthogonal" and len(stored.shape) < 2:
        raise WeightShapeError(f"{where}: init 'orthogonal' needs 2 axes or more; the weight is {list(stored.shape)}")
    # Initializers run in f32: some of them, such as the QR decomposition of "orthogonal", have no narrower dtype.
    weight = jnp.asarray((INITS[init] if isinstance(init, str) else init)(key, stored.shape, jnp.float32))
    if weight.shape != stored.shape:
        raise WeightShapeError(f"{where}: its init returned shape {list(weight.shape)}; expected {list(stored.shape)}")
    return weight.astype(jax.dtypes.canonicalize_dtype(stored.dtype))
