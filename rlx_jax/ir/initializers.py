"""How a weight that no checkpoint has is drawn, where its author says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.errors import WeightShapeError
from rlx_jax.ir.types import TensorType

# `(key, shape, dtype) → array`, as the functions that `jax.nn.initializers` make.
InitFunction = Callable[[jax.Array, tuple[int, ...], Any], Any]

# A name in `INITS`, or a function.
Init = str | InitFunction

# Zeros, ones, and rows or columns of length 1 that are orthogonal to each other (Saxe et al. 2013).
INITS: Mapping[str, InitFunction] = {
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
    "orthogonal": jax.nn.initializers.orthogonal(),
}


def drawn(init: Init, key: jax.Array, stored: TensorType, where: str) -> jax.Array:
    """The weight, in the dtype that it is stored in.

    Raises:
        WeightShapeError: the function made another shape, or the weight has one axis and is to be orthogonal.
    """
    if init == "orthogonal" and len(stored.shape) < 2:
        raise WeightShapeError(f"{where}: init 'orthogonal' is of 2 axes or more; the weight is {list(stored.shape)}")
    made = jnp.asarray((INITS[init] if isinstance(init, str) else init)(key, stored.shape, jnp.float32))
    if made.shape != stored.shape:
        raise WeightShapeError(f"{where}: its init made {list(made.shape)}; expected {list(stored.shape)}")
    return made.astype(jax.dtypes.canonicalize_dtype(stored.dtype))
