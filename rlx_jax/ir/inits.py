"""How a weight that no checkpoint has is drawn, where its author says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.errors import GraphError, WeightShapeError, did_you_mean, listing, quote, shown
from rlx_jax.ir.types import TensorType

InitFunction = Callable[[jax.Array, tuple[int, ...], Any], Any]
"""`(key, shape, dtype) → array`, as the functions that `jax.nn.initializers` make."""

Init = str | InitFunction
"""A name in `INITS`, or a function."""

INITS: Mapping[str, InitFunction] = {
    "zeros": jax.nn.initializers.zeros,
    "ones": jax.nn.initializers.ones,
    "orthogonal": jax.nn.initializers.orthogonal(),
}
"""Zeros, ones, and rows or columns of length 1 that are orthogonal to each other (Saxe et al. 2013)."""


def check_init(init: Init, where: str) -> Init:
    """It, if it is one.

    Raises:
        GraphError: it is none of the names, and no function.
    """
    if isinstance(init, str) and init not in INITS:
        raise GraphError(
            f"{where}: init {quote(init)}: expected one of {listing(INITS)}, or a function (key, shape, dtype) → array "
            f"such as jax.nn.initializers.normal(0.02){did_you_mean(init, INITS)}"
        )
    if not isinstance(init, str) and not callable(init):
        raise GraphError(f"{where}: init is {shown(init)}; expected one of {listing(INITS)}, or a function")
    if not isinstance(init, str) and not _takes_three(init):
        raise GraphError(f"{where}: init {shown(init)} is called with (key, shape, dtype), which it does not take")
    return init


def _takes_three(init: InitFunction) -> bool:
    """Whether a function can be called with a key, a shape and a dtype, as far as Python knows."""
    try:
        inspect.signature(init).bind(None, (), None)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


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
