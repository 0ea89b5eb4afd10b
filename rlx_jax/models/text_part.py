"""Define `TextPart`, the text model inside a checkpoint that also reads images.

It extracts the text model's config, and its weights under the keys of the standalone model.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx_jax.errors import ConfigError, RlxWarning, UnsupportedError, quote
from rlx_jax.models.config import Fields
from rlx_jax.weights.source import WeightSource
from rlx_jax.weights.views import RenamedSource


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """How a family's multimodal checkpoint contains its text model.

    Args:
        outer_type, text_type: `model_type` of the full model and of its text model.
        keys: prefixes of the text model's keys in the checkpoint, mapped to the prefixes of the standalone model.
        defaults: values for fields that a `text_config` leaves out, as in the reference.
        unread_fields: fields of the full config that the text model does not read.
        default_tied: whether the head is the embedding if the full config does not define it.
    """

    outer_type: str
    text_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    unread_fields: tuple[str, ...]
    default_tied: bool

    def extract(self, config: Fields, source: WeightSource) -> tuple[Fields, WeightSource]:
        """Return the config and the weights of the text model, and warn that the vision tower is left out.

        Raises:
            ConfigError: there is no `text_config`. UnsupportedError: a field that is not handled.
        """
        text = config.group("text_config")
        if text is None:
            raise ConfigError(f"{config.where}: field 'text_config' is missing; expected an object")
        kind = text.text("model_type", self.text_type)
        if kind != self.text_type:
            raise UnsupportedError(
                f"{text.where}: model_type {quote(kind)}; the text model of a {self.outer_type} is a {self.text_type}"
            )
        head = {
            "tie_word_embeddings": config.flag("tie_word_embeddings", self.default_tied)
        }  # the outer model has the head
        config.finish_model(self.unread_fields)
        names = {
            prefix + key.removeprefix(stored_prefix): key
            for key in source.keys() for stored_prefix, prefix in self.keys.items() if key.startswith(stored_prefix)
        }  # fmt: skip
        warnings.warn(
            f"{config.where}: model_type {quote(self.outer_type)} reads images too; only the text model is built, and "
            f"{len(source.keys()) - len(names)} weights of other parts are not read",
            RlxWarning,
            stacklevel=2,
        )
        values = {**self.defaults, "model_type": self.text_type, **dict(text.values), **head}
        return replace(text, values=values, consumed=set()), RenamedSource(source, names)
