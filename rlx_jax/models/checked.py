"""The weights of a checkpoint held against what its config asks for, before any is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rlx_jax.errors import MissingWeightError, WeightError, WeightShapeError, listing, quote
from rlx_jax.flow import ModelRecipe
from rlx_jax.weights.beside import may_lack
from rlx_jax.weights.safetensors import close_names
from rlx_jax.weights.source import WeightSource, short_name

MAX_KEYS_BUILT = 4000
"""Weights of a flow that is built only to name a block in a message: a config with a thousand layers may be a lie."""


def checked(source: WeightSource, specs: Mapping[str, Any], recipe: ModelRecipe) -> WeightSource:
    """The source, after every weight that the config asks for was found, a float of the right shape; one that may lack
    some has those that it has so.

    Raises:
        MissingWeightError: lists what is missing, and names close to it.
        WeightShapeError, WeightError: block path, key, file, expected, got.
    """

    def block(key: str) -> str:
        if len(specs) > MAX_KEYS_BUILT:
            return recipe.name
        return recipe.assemble().build().readers().get(key, recipe.name)

    missing = [key for key in specs if not source.has(key)]
    if missing and not may_lack(source):
        close = close_names(missing[0], source.keys())
        raise MissingWeightError(
            f"{len(missing)} weights that config.json asks for are missing: {listing(missing)}; the first is read by "
            f"{block(missing[0])}{close}"
        )
    for key, spec in specs.items():
        if key in missing:
            continue
        found = source.spec(key)
        weight = f"weight {quote(key)} ({source.where(key)})"
        if found.shape != spec.shape:
            turned = "; it is stored the other way round: transpose it" if found.shape == spec.shape[::-1] else ""
            raise WeightShapeError(
                f"{block(key)}: {weight}: expected {list(spec.shape)} by config.json "
                f"({_sizes(recipe, spec.shape, found.shape)}), got {list(found.shape)}{turned}"
            )
        if not jnp.issubdtype(found.dtype, jnp.floating):
            raise WeightError(f"{block(key)}: {weight}: expected floats, got {short_name(found.dtype)}")
    return source


def _sizes(recipe: Any, expected: tuple[int, ...], got: tuple[int, ...]) -> str:
    """The fields of the config that a wrong shape may come from: those with the value of a size that differs."""
    sizes = {name: value for name, value in vars(recipe.config).items() if type(value) is int}
    wrong = (set(expected) - set(got)) or set(expected)
    names = [f"{name} {value}" for name, value in sizes.items() if value in wrong]
    return ", ".join(names or (f"{name} {value}" for name, value in sizes.items()))
