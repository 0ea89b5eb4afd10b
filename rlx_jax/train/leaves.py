"""The leaves of a state by name: what is stored of each, and how it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, RequestError, ShapeError, UnsupportedError, WeightError, listing, quote, shown
from rlx_jax.io import limits
from rlx_jax.io.strict_json import is_text
from rlx_jax.ir.types import TensorType, as_dtype

Numbers = bool | int | float | complex
# The name of a state that is one leaf by itself.
WHOLE = "state"


@dataclass(frozen=True)
class StoredLeaf:
    """One leaf of a state: an array, a number of Python or NumPy, or a `jax.ShapeDtypeStruct`."""

    name: str
    value: Any
    type: TensorType

    def snapshot(self) -> Any:
        """What is to be stored: an array on devices as it is, anything else as a copy on the host.

        With several processes an array that lies in this one alone is taken for the same in all: process 0 stores it.

        Raises:
            RequestError: it is a shape without values.
        """
        if isinstance(self.value, jax.ShapeDtypeStruct):
            raise RequestError(f"leaf {quote(self.name)} has no values, it is {shown(self.value)}; save arrays")
        if isinstance(self.value, jax.Array) and (jax.process_count() == 1 or not self.value.is_fully_addressable):
            return self.value
        return np.array(self.value, self.type.dtype)

    @property
    def sharding(self) -> jax.sharding.Sharding | None:
        """Where the leaf lies, or is to lie; None on the host, and for an array that was put nowhere on purpose."""
        placed = isinstance(self.value, jax.ShapeDtypeStruct) or (
            isinstance(self.value, jax.Array) and self.value.committed
        )
        found: jax.sharding.Sharding | None = self.value.sharding if placed else None
        return found

    def restored(self, stored: Any) -> Any:
        """`stored` as the leaf of `like` is: on its devices, or of its class."""
        if self.sharding is not None:
            return stored
        if isinstance(self.value, jax.Array | jax.ShapeDtypeStruct):
            return jnp.asarray(stored)
        if isinstance(self.value, np.generic):
            return stored[()]
        return type(self.value)(stored.item()) if isinstance(self.value, Numbers) else stored


def named_leaves(tree: Any, what: str) -> tuple[StoredLeaf, ...]:
    """The leaves of a pytree, in its order. The name of one is its path, dotted: `params.embed.weight`, `opt.0.count`.

    Args:
        what: the tree, for messages.

    Raises:
        RequestError: no leaves; one that is no array; one that is traced or was donated; two of one name.
        UnsupportedError: a random key, an empty array, a dtype or a shape that cannot be stored.
    """
    found: dict[str, StoredLeaf] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or WHOLE
        where = f"{what}: leaf {quote(name)}"
        if name in found:
            raise RequestError(f"{where}: two leaves have this name when their paths are dotted; rename one")
        if not is_text(name) or len(name.encode()) > limits.MAX_NAME_BYTES:
            raise UnsupportedError(f"{where}: a name is text of at most {limits.MAX_NAME_BYTES} bytes in UTF-8")
        found[name] = StoredLeaf(name, value, _type(value, where))
    if not found:
        raise RequestError(f"{what}: a pytree without leaves: {shown(tree)}; expected arrays or numbers")
    limits.at_most(len(found), limits.MAX_TENSORS, "limits.MAX_TENSORS", f"{what}: the number of leaves")
    return tuple(found.values())


def _type(value: Any, where: str) -> TensorType:
    if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and value.is_deleted()):
        raise RequestError(f"{where} has no values: traced, or donated to a jitted call")
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise UnsupportedError(f"{where} is a random key; store jax.random.key_data(key), and wrap_key_data it again")
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | Numbers):
        model = "; rlx_jax.save keeps a model" if callable(getattr(value, "param_specs", None)) else ""
        raise RequestError(f"{where}: expected an array or a number, got {shown(value)}{model}")
    array = np.asarray(value) if isinstance(value, Numbers) else value
    try:
        found = TensorType(tuple(array.shape), as_dtype(array.dtype).newbyteorder("="))
    except (DTypeError, ShapeError) as cause:
        raise UnsupportedError(f"{where} cannot be stored: {cause}") from cause
    if 0 in found.shape:
        raise UnsupportedError(f"{where} has shape {list(found.shape)}, and orbax stores no empty arrays; leave it out")
    return found


def check_same(stored: Mapping[str, TensorType], like: tuple[StoredLeaf, ...], where: str) -> None:
    """Names, shapes and dtypes are the same on both sides.

    Raises:
        WeightError: lists every leaf that differs.
    """
    wanted = {leaf.name: leaf.type for leaf in like}
    wrong = [f"{name}: {found} in the step, not in `like`" for name, found in stored.items() if name not in wanted]
    wrong += [f"{name}: {asked} in `like`, not in the step" for name, asked in wanted.items() if name not in stored]
    differ = ((name, stored[name], asked) for name, asked in wanted.items() if stored.get(name, asked) != asked)
    wrong += [f"{name}: {found} in the step, {asked} in `like`" for name, found, asked in differ]
    if wrong:
        raise WeightError(f"{where}: {len(wrong)} leaves are not those of `like`: {listing(wrong)}")
