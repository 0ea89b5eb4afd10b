"""Drafts from a row's own text: where its last tokens stood before, what came after them there.

Saxena 2023, "Prompt Lookup Decoding". It costs nothing and needs no second model; it helps where a text repeats what it
was given, as in edits, summaries and code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.generate.decode import Array, Sizes
from rlx_jax.generate.speculative import Drafts, Judged, Own, Turn
from rlx_jax.runtime.programs import Programs

# Tokens of an end of the text that are compared at most.
LONGEST = 8


@dataclass(frozen=True)
class PromptLookup:
    """See `Drafter`. It keeps the tokens of each row, `[B, T]` int32, of as many as the request has slots."""

    asked: ClassVar[str] = "'prompt'"
    hidden: ClassVar[bool] = False
    positions: ClassVar[int | None] = None

    tokens: int
    slots: int = 0  # where it is bound: they are in no size of a program whose layers all have windows or states

    def bound(self, sizes: Mapping[str, int]) -> PromptLookup:
        """For a cache of this size."""
        return replace(self, slots=sizes["context"])

    def params(self) -> None:
        """It has none."""

    def start(
        self, programs: Programs, sizes: Sizes, prompts: Sequence[Sequence[int]], first: Any, hidden: tuple[Any, ...]
    ) -> tuple[Any, StateArrays]:
        """The tokens of prompts `[batch, slots]`, with the first new one of each."""
        tokens, lengths = np.zeros((sizes.batch, sizes.slots), np.int32), np.zeros(sizes.batch, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return programs.call(written, tokens, lengths, first, at=programs.whole), {}

    def lir(self) -> None:
        """It runs no program of its own."""

    def shardings(self) -> None:
        """So there is nothing to divide."""

    def propose(self, own: Own, turn: Turn) -> tuple[Drafts, Own]:
        """What came after the place that `find_place` finds; see `Drafter`."""
        tokens, last = own.kept, turn.held
        place, found = find_place(tokens, last)
        # Behind the end of the text come the drafts themselves: what repeats goes on repeating.
        steps = jnp.arange(self.tokens, dtype=jnp.int32)[None] % jnp.maximum(last - place, 1)[:, None]
        ids = jnp.take_along_axis(tokens, place[:, None] + 1 + steps, axis=1, mode="clip")
        return Drafts(ids, jnp.where(found, self.tokens, 0)), own

    def accept(self, own: Own, turn: Turn, judged: Judged) -> Own:
        """Put the new tokens behind the others."""
        tokens = own.kept
        behind = turn.held[:, None] + 1 + jnp.arange(judged.now.shape[1], dtype=jnp.int32)[None]
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        at = jnp.where(judged.now, behind, tokens.shape[1])
        return replace(own, kept=tokens.at[rows, at].set(judged.chosen, mode="drop"))


def find_place(tokens: Array, last: Array) -> tuple[Array, Array]:
    """Where the end of a text stood before: tokens `[B, T]`, the index of the last one `[B]` → (index of the last token
    there `[B]` int32, whether there is one `[B]` bool).

    Of all earlier places that end with the same token the one with most tokens in common, `LONGEST` at most, and of
    several the latest.
    """
    width = tokens.shape[1]
    at = jnp.arange(width, dtype=jnp.int32)[None]
    alike = jnp.zeros(tokens.shape, jnp.int32)
    same = at < last[:, None]
    for back in range(min(LONGEST, width)):
        end = jnp.take_along_axis(tokens, (last - back)[:, None], axis=1, mode="clip")
        earlier = jnp.pad(tokens[:, : width - back], ((0, 0), (back, 0)), constant_values=-1)
        same = same & (earlier == end)
        alike = alike + same.astype(jnp.int32)
    most = alike.max(axis=1)
    place = jnp.where((alike == most[:, None]) & (alike > 0), at, 0).max(axis=1)
    return place, most > 0


def written(tokens: Array, at: Array, first: Array) -> Array:
    """`tokens` `[B, T]` with `first` `[B, 1]` at index `at` `[B]` of its row; what is no token changes nothing."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return tokens.at[rows, jnp.where(first[:, 0] >= 0, at, tokens.shape[1])].set(first[:, 0], mode="drop")
