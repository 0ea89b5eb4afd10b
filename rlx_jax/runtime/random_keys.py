"""Random keys from the seeds of a request."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import RequestError, shown
from rlx_jax.ir.types import short_name
from rlx_jax.runtime.arguments import refuse_consumed

# The implementation of every random key; one for all, so that seeds do not depend on `jax_default_prng_impl`.
KEY_IMPL = "threefry2x32"


def random_key(label: str, seed: Any) -> jax.Array:
    """Return a Threefry key from a seed of 64 bits, or from a key of `jax.random`.

    A Threefry key is returned unchanged. The words of a key of another implementation are folded into a Threefry key,
    so that every key has the same type and samples do not depend on `jax_default_prng_impl`.

    Args:
        label: the name of the argument, for messages.
        seed: the seed or the key.

    Raises:
        RequestError: neither one key nor an integer in `[0, 2**64)`.
    """
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool) and 0 <= seed < 2**64:
        low, high = int(seed) % 2**32, int(seed) // 2**32
        # The same key as `jax.random.key` creates, which drops the upper half and copies the lower one implicitly.
        key: jax.Array = jax.random.wrap_key_data(jax.device_put(np.array([0, low], np.uint32)), impl=KEY_IMPL)
        if high:
            key = jax.random.fold_in(key, jax.device_put(np.uint32(high)))
        return key
    if isinstance(seed, jax.Array):
        refuse_consumed({}, {label: seed})
        typed = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
        if typed and seed.ndim == 0 and str(jax.random.key_impl(seed)) == KEY_IMPL:
            return seed
        words = jax.random.key_data(seed) if typed else seed
        if words.dtype == np.uint32 and words.shape in ((2,), (4,)):
            key = jax.random.wrap_key_data(words[:2], impl=KEY_IMPL)
            for word in words[2:]:
                key = jax.random.fold_in(key, word)
            return key
    got = f"{short_name(seed.dtype)} {list(seed.shape)}" if isinstance(seed, jax.Array | np.ndarray) else shown(seed)
    raise RequestError(f"{label}: expected a seed, an integer from 0 to 2**64 - 1, or one key of jax.random, got {got}")


def key_words(label: str, seed: Any) -> Any:
    """Return the words of `random_key`, uint32 `[2]`: on the host, without a transfer, for a seed below 2**32."""
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool) and 0 <= seed < 2**32:
        return np.array([0, seed], np.uint32)
    return jax.random.key_data(random_key(label, seed))
