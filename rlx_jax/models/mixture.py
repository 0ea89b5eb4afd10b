"""Define the recipe of decoders with experts, and read the fields that their configs share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from rlx_jax.blocks import STACKED_KEYS, ExpertKeys
from rlx_jax.errors import ConfigError
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder import DecoderFlow
from rlx_jax.models.decoder_config import DecoderConfig
from rlx_jax.weights.source import WeightSource

C = TypeVar("C", bound=DecoderConfig)


@dataclass(frozen=True)
class MixtureFlow(DecoderFlow[C]):
    """The recipe of a decoder with experts: see `DecoderFlow`.

    `layout`: keys of the experts, if a checkpoint stores them differently from the family's default.
    """

    layout: ExpertKeys | None = None

    def adapt_to(self, source: WeightSource) -> Self:
        """Return the recipe for stacked experts if the checkpoint stores them as transformers 5 has them in memory."""
        layers, source = range(self.config.num_hidden_layers), self.adapt_weights(source)
        stacked = any(source.has(f"model.layers.{i}.{STACKED_KEYS.gate}") for i in layers)
        return replace(self, layout=STACKED_KEYS) if stacked else self

    def spec(self, index: int = 0) -> Any:
        spec = self.config.layer_spec(index)
        if spec.moe is None or self.layout is None:
            return spec
        return replace(spec, moe=replace(spec.moe, keys=self.layout))


def experts_of(c: Fields, *, experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of experts, and the number that each token is routed to.

    The keywords are the family's defaults.

    Raises:
        ConfigError: the numbers contradict each other, or two names of one field differ.
    """
    names = [name for name in ("num_local_experts", "num_experts") if name in c.values]
    counts = {c.integer(name, high=2**16) for name in names} or {experts}
    num_routed = c.integer("num_experts_per_tok", top_k, high=2**16)
    if len(counts) > 1:
        raise ConfigError(f"{c.where}: num_local_experts and num_experts are both given and differ")
    count = counts.pop()
    if num_routed > count:
        raise ConfigError(f"{c.where}: num_experts_per_tok is {num_routed}, and there are {count} experts")
    return count, num_routed
