"""Define `Recipe`, the base class of all recipes.

A recipe has a config, the weights that its flow is bound to, and hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax

from rlx_jax.blocks import BlockStage
from rlx_jax.errors import ConfigError, GraphError, shown
from rlx_jax.flow import ModelFlow, declared_shapes
from rlx_jax.models.config import ModelConfig, TokenConfig
from rlx_jax.models.hooks import HookMethods, Hooks
from rlx_jax.weights.source import WeightSource

C = TypeVar("C", bound=ModelConfig)


@dataclass(frozen=True)
class Recipe(HookMethods, Generic[C]):
    """A config, and how it becomes a flow.

    Args:
        config: the family's config.
        batch: rows to compile for ahead of the first call.
        weights: the checkpoint that the flow is bound to; None: the flow is not bound.
        hooks: see `rlx_jax.models.hooks`.

    Raises:
        ConfigError: the config is not of the family's class. GraphError: an option is no bool.
    """

    config: C
    batch: int | None = None
    name: str = "recipe"
    weights: WeightSource | None = field(default=None, repr=False)
    hooks: Hooks = Hooks()

    config_type: ClassVar[type[ModelConfig]]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.config, self.config_type):
            raise ConfigError(
                f"{name}: config is {shown(self.config)}; expected a {self.config_type.__name__}: "
                f"rlx_jax.recipe_for(path) reads it from a checkpoint, {name}.for_prefill(mapping) from the content of "
                "a config.json"
            )
        # Dataclasses do not check types, and a string such as "false" would be true.
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise GraphError(f"{name}: {option.name} is {shown(value)}; expected True or False")

    @classmethod
    def for_prefill(cls, config: C | Mapping[str, Any], batch: int | None = None) -> Self:
        """Return the forward program, bound to a number of rows if given.

        `config` may be the content of `config.json`.
        """
        family_config: Any = cls.config_type.of(config)
        return cls(family_config, batch)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; 0 if the model does not read tokens."""
        return self.config.vocab_size if isinstance(self.config, TokenConfig) else 0

    @property
    def max_positions(self) -> int | None:
        """The longest sequence in tokens; None if the model does not read tokens."""
        return self.config.max_position_embeddings if isinstance(self.config, TokenConfig) else None

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe for how a checkpoint stores its weights, such as under a prefix."""
        return self

    def adapt_weights(self, source: WeightSource) -> WeightSource:
        """Return a checkpoint's weights under the keys that the recipe reads."""
        return source

    def spec(self, index: int) -> Any:
        """Return the spec of layer `index`, which layer hooks see."""
        raise NotImplementedError

    def stage(self, index: int, spec: Any) -> BlockStage:
        """Return the family's layer."""
        raise NotImplementedError

    def task_head_keys(self, source: WeightSource) -> tuple[str, ...]:
        """Return the keys of a task's head in a checkpoint, which the recipe does not read."""
        return ()

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of every checkpoint key."""
        return declared_shapes(replace(self, weights=None, hooks=Hooks()).assemble())

    def assemble(self) -> ModelFlow:
        """Return the flow, bound to its weights if there are any."""
        raise NotImplementedError
