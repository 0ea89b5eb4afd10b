"""How the next token is chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlx_jax.errors import SamplingParamError, UnsupportedError


@dataclass(frozen=True)
class Sampler:
    """Sampling parameters. Temperature 0 is greedy: the largest logit, the smaller id on a tie.

    Raises:
        SamplingParamError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        if self.top_p is not None:
            _number("top_p", self.top_p, 0.0, 1.0, above=True)
        if self.min_p is not None:
            _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise SamplingParamError(f"top_k is {self.top_k!r}; expected an integer of at least 1")

    def require_greedy(self) -> None:
        """Refuse what is not built yet."""
        if self.temperature != 0 or self.repetition_penalty != 1.0 or self.logit_bias:
            raise UnsupportedError(f"{self}: only greedy sampling is built; use Sampler(temperature=0.0)")


def _number(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SamplingParamError(f"{name} is {value!r}; expected a finite number")
    if value < low or value > high or (above and value == low):
        raise SamplingParamError(f"{name} is {value}; expected {'over' if above else 'from'} {low:g} to {high:g}")
