"""Find the family that is nearest to a config that no family reads, by the fields that each of them reads."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RlxError, listing, quote, shown
from rlx_jax.io.fields import NULLABLE
from rlx_jax.models.config import INERT, INERT_PREFIXES, NEUTRAL, Fields, ModelConfig

PAGE = "docs/adding-a-family.md"
# Weight of how similar the names of two model types are, compared with the share of fields that are read.
NAME_WEIGHT = 0.3
# Number of fields that a message has with their values.
MAX_FIELDS = 6
# The value of sizes that the config does not have, so that a family reads the fields after them.
ANY_SIZE = 8


@dataclass(frozen=True)
class Nearness:
    """How near a family is to a config.

    Attributes:
        name: the family's `model_type`.
        read: fields of the config that the family reads.
        unread: fields of the config that it does not read and that may change the computation.
        missing: sizes that the family needs and the config does not have.
    """

    name: str
    read: tuple[str, ...]
    unread: tuple[str, ...]
    missing: tuple[str, ...]

    def score(self, model_type: str) -> float:
        """Return the share of fields in common, plus a part for similar names."""
        fields = len(self.read) + len(self.unread) + len(self.missing)
        similarity = difflib.SequenceMatcher(None, model_type, self.name).ratio()
        return len(self.read) / max(fields, 1) + NAME_WEIGHT * similarity


def describe_nearest(
    config: Fields, model_type: str, architecture: str, families: Mapping[str, tuple[type[ModelConfig], Iterable[str]]]
) -> str:
    """Return a sentence about the nearest family: its name, the fields in which it differs, and the page on families.

    Args:
        config: the fields of a config.json.
        model_type, architecture: what the config names.
        families: the class of the config, and the architectures, by `model_type`.
    """
    task = architecture.rpartition("For")[2]
    same_task = {n for n, (_, names) in families.items() if any(a.rpartition("For")[2] == task for a in names)}
    candidates = [compare(config, n, families[n][0]) for n in families if n in same_task or not same_task]
    if not candidates:
        return f"{PAGE} shows how to add a family"
    nearest = max(candidates, key=lambda candidate: candidate.score(model_type))
    text = f"the nearest family is {quote(nearest.name)}, which reads {len(nearest.read)} of its fields"
    if not nearest.unread:
        text += "; only the weights or what the layers compute may differ"
    else:
        values = [f"{quote(name)} ({shown(config.values[name])})" for name in nearest.unread]
        more = len(values) - MAX_FIELDS
        text += f", and not {', '.join(values[:MAX_FIELDS])}{f' and {more} more' if more > 0 else ''}"
    if nearest.missing:
        text += f"; the config does not have {listing(nearest.missing, MAX_FIELDS)}"
    return f"{text}; {PAGE} shows how to add a family"


def compare(config: Fields, name: str, config_type: type[ModelConfig]) -> Nearness:
    """Return how near the family is that reads configs of this class."""
    config_class: Any = config_type  # a dataclass in every family
    fields = dataclasses.fields(config_class)
    sizes = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    required = [size for size in sizes if size not in NULLABLE]
    probe = Fields({**dict.fromkeys(required, ANY_SIZE), **config.values}, config.where)
    # A value that the family refuses ends the reading; the fields after it count as not read.
    with contextlib.suppress(RlxError):
        config_type.read(probe)
    prefixed = (field for field in config.values if field.startswith(INERT_PREFIXES))
    unread = probe.unread({*INERT, *config_type.inert, *prefixed}, {**NEUTRAL, **config_type.neutral})
    return Nearness(
        name,
        tuple(field for field in config.values if field in probe.consumed),
        tuple(field for field in unread if field in config.values),
        tuple(n for n in required if n in probe.consumed and n not in config.values),
    )
