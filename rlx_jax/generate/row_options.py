"""`RowOptions`: how the tokens of a row are chosen, and what ends it; and arguments with a value for each prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import RequestError, shown
from rlx_jax.generate.sampler import Sampler

# Arguments that are one value, or one for each prompt.
Budgets = int | Sequence[int]
Samplers = Sampler | Sequence[Sampler] | None
StopLike = str | int | Iterable[str | int | Sequence[str | int]]


@dataclass(frozen=True, eq=False)
class RowOptions:
    """The options of one row of a request.

    Attributes:
        budget: number of new tokens, at most.
        sampler: how tokens are chosen.
        stop_ids, stop_strings: ids and strings that end the row.
        seed: seed or key of the random draws.
        draw: the number that is folded into the key: the index of the row among all rows with this seed.
    """

    budget: int
    sampler: Sampler
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    seed: Any
    draw: int


@dataclass(frozen=True)
class BatchProgress:
    """The progress of many prompts, as `progress=` of `generate` gets it.

    Attributes:
        done: number of answers that ended.
        total: number of answers of the call; None for an iterator, which has no length.
        new_tokens: tokens of the answers that ended.
        seconds: time since the call.
    """

    done: int
    total: int | None
    new_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Return the new tokens per second so far."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Return an estimate of the remaining time, which takes the other answers for as long; None without one."""
        return None if self.total is None or not self.done else self.seconds / self.done * (self.total - self.done)

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {self.total:,}"
        left = "" if self.seconds_left is None else f", about {self.seconds_left:,.0f} s left"
        return f"{self.done:,}{total} answers, {self.tokens_per_second:,.0f} tokens/s{left}"


def is_by_prompt(name: str, value: Any) -> bool:
    """Return whether an argument has a value for each prompt. A `stop` for each prompt is a list of lists."""
    if name == "stop":
        return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, list | tuple) for item in value)
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)


def split_by_prompt(count: int, arguments: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the arguments of each prompt; None if none of them has values for each prompt.

    Args:
        count: number of prompts.
        arguments: the values by name.

    Raises:
        RequestError: there are more or fewer values than prompts.
    """
    lists: dict[str, Sequence[Any]] = {name: value for name, value in arguments.items() if is_by_prompt(name, value)}
    for name, values in lists.items():
        lists[name] = values = values.tolist() if isinstance(values, np.ndarray) else values
        if len(values) != count:
            raise RequestError(
                f"{name} has {len(values)} values, and there are {count} prompts: {shown(values)}; pass one value for "
                "all of them, or one for each"
            )
    if not lists:
        return None
    return [{name: lists[name][i] if name in lists else arguments[name] for name in arguments} for i in range(count)]
