"""Check the names, shapes and dtypes of a checkpoint's weights against its config, before any data is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax.numpy as jnp

from rlx_jax.errors import MissingWeightError, WeightError, WeightShapeError, listing
from rlx_jax.flow import ModelRecipe, read_weights
from rlx_jax.trace.parameters import Parameters
from rlx_jax.weights.named import suggest_key
from rlx_jax.weights.overlay import can_init_missing
from rlx_jax.weights.source import WeightSource, short_name

# Number of missing weights at which the check stops; a wrong config may have a thousand layers.
MAX_MISSING = 300


def check_recipe_weights(recipe: ModelRecipe, source: WeightSource) -> WeightSource:
    """Return the source, after checking that it has every weight that a recipe reads, as a float of the right shape.

    A source that is marked as allowed to miss weights (`missing="init"`) is checked for the weights that it has.
    `recipe` is not bound to weights.

    Raises:
        MissingWeightError: lists what is missing, and similar names.
        WeightShapeError, WeightError: block path, key, file, expected, got.
    """
    check = _WeightCheck(source, recipe)
    read_weights(recipe.assemble(), check)
    if check.missing_paths:
        check.refuse()
    return source


class _WeightCheck(Parameters):
    """The weights of a source, recording the ones that a recipe's stages read but the source does not have.

    `missing_paths`: the path of the block that reads each missing weight.
    """

    def __init__(self, source: WeightSource, recipe: Any) -> None:
        super().__init__(source)
        # With `initializes_missing` a missing weight does not stop the build, so that the check can list all of them.
        self.initializes_missing, self.can_init_missing = True, can_init_missing(source)
        self.recipe, self.missing_paths, self.checkpoint = recipe, dict[str, str](), source

    def refuse(self, at_least: str = "") -> NoReturn:
        """Raise the error about the missing weights."""
        first_key = next(iter(self.missing_paths))
        reader = self.missing_paths[first_key] or self.recipe.name
        raise MissingWeightError(
            f"{at_least}{len(self.missing_paths)} weights that config.json requires are missing: "
            f"{listing(self.missing_paths)}; the first is read by "
            f"{reader}{self._head_advice() or suggest_key(first_key, self.checkpoint.keys())}"
        )

    def _head_advice(self) -> str:
        """Return how to load the model without its head, if all missing weights are the head's."""
        head = getattr(self.recipe, "head", None)
        keys = set() if head is None else head.weight_keys(getattr(self.recipe, "key", str))
        is_head = self.missing_paths.keys() <= keys
        return "; these are weights of its head, and rlx_jax.load(…, head=False) loads the rest" if is_head else ""

    def _new_weight(self, key: str, shape: tuple[int, ...], path: str) -> Any:
        """Record a missing weight, and go on as if it were initialized."""
        if not self.can_init_missing:
            self.missing_paths.setdefault(key, path)
            if len(self.missing_paths) > MAX_MISSING:
                self.refuse("at least ")
        return super()._new_weight(key, shape, path)

    def _weight_from_source(self, key: str, sizes: Sequence[int | None] | None, path: str) -> Any:
        """Return the declared weight of the source, after checking its shape and that it is a float."""
        try:
            weight = super()._weight_from_source(key, sizes, path)
        except WeightShapeError as error:
            fields = {name: value for name, value in vars(self.recipe.config).items() if type(value) is int}
            if labels := getattr(getattr(self.recipe, "head", None), "labels", ()):
                fields["id2label (num_labels)"] = len(labels)
            # Fields of the config that equal an unexpected size are the probable cause; without any, all are listed.
            unexpected = set(sizes or ()) - set(self.checkpoint.spec(key).shape)
            fields = {name: value for name, value in fields.items() if value in unexpected} or fields
            fields_text = ", ".join(f"{name} {value}" for name, value in fields.items())
            raise WeightShapeError(f"{error}; by config.json: {fields_text}") from None
        if not jnp.issubdtype(weight.type.dtype, jnp.floating):
            raise WeightError(f"{path}: {self.describe(key)}: expected floats, got {short_name(weight.type.dtype)}")
        return weight
