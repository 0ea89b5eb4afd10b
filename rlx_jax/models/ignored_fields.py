"""Define `IgnoredFields`, the fields of a config that the caller wants ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx_jax.errors import ConfigError, did_you_mean, quote

# Name of the option of `rlx_jax.load`, `recipe_for` and `from_pretrained`, for messages.
IGNORE_OPTION = "ignore_fields"


@dataclass
class IgnoredFields:
    """The fields of a config that the caller wants ignored, such as `sliding_window` or
    `text_config.rope_scaling.beta`.

    Attributes:
        names: the names that the caller passed.
        applied: the names among them that would otherwise be refused, collected while the config is read.
    """

    names: tuple[str, ...] = ()
    applied: list[str] = field(default_factory=list)

    def check_present(self, values: Mapping[str, Any], where: str) -> None:
        """Refuse a name that is not a field of `values`.

        Raises:
            ConfigError: the message has the name, and a similar one.
        """
        for name in self.names:
            (*groups, leaf), inner = name.split("."), values
            for group in groups:
                nested = inner.get(group)
                inner = nested if isinstance(nested, Mapping) else {}
            # A field's name may contain a dot, such as `transformers.js_config`, so the full name counts too.
            if leaf not in inner and name not in values:
                suggestion = did_you_mean(leaf, list(map(str, inner)), cutoff=0.7)
                raise ConfigError(f"{where}: {IGNORE_OPTION}: there is no field {quote(name)}{suggestion}")

    def check_applied(self, where: str) -> None:
        """Refuse a name that ignores nothing, after the config was read.

        Raises:
            ConfigError: the field is handled anyway.
        """
        if unused := [name for name in self.names if name not in self.applied]:
            raise ConfigError(
                f"{where}: {IGNORE_OPTION}: field {quote(unused[0])} is handled: it is read, or it does not affect the "
                "forward pass; leave it out"
            )
