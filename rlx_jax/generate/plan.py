"""A request: what was asked for, and how it runs, every size chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rlx_jax.compiler.executable import StateArrays
from rlx_jax.compiler.settings import Loop
from rlx_jax.generate.request_inputs import NONE, RequestInputs
from rlx_jax.generate.sampler import Knobs, Method, Sampler
from rlx_jax.generate.speculative import DraftSource
from rlx_jax.runtime.programs import Programs

AnyArray = Any


class DraftPlan(Protocol):
    """Where the drafts of a request come from, on the host."""

    @property
    def hidden(self) -> bool:
        """Whether the source reads hidden states: what the model's head reads of each token."""

    @property
    def tokens(self) -> int:
        """Drafts a step, at least 1."""

    @property
    def positions(self) -> int | None:
        """The longest sequence that the source knows, in tokens."""

    def source(self, sizes: Mapping[str, int]) -> DraftSource:
        """What the loop is compiled with, for this `batch` and `context`."""

    def params(self) -> Any:
        """The parameters of the source."""

    def start(
        self, programs: Programs, plan: RequestPlan, prompts: Sequence[Sequence[int]], first: AnyArray,
        hidden: tuple[AnyArray, ...],
    ) -> tuple[Any, StateArrays]:  # fmt: skip
        """What the source keeps, and its state, where the prompts have been read and `first` `[B, 1]` is chosen;
        `hidden` are the prompts' hidden states `[B, S, H]`, part by part, if it reads them."""


@dataclass(frozen=True, eq=False)
class Before:
    """A state that holds the first tokens of prompts, which need not be read again.

    Attributes:
        arrays: the state's.
        rows: the row of the state that each prompt goes on from.
        lengths: the tokens of each prompt that it holds, fewer than the prompt has. Where the state's own length is
            another, tokens are taken back, which whoever says so knows to be right.
        slots: of its cache.
        consumed: whether the request may write into its arrays; else it copies them.
    """

    arrays: StateArrays
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: int
    consumed: bool = False


class PromptPart(NamedTuple):
    """Tokens that a program of `width` reads of each row, at most `tokens` of them."""

    width: int
    tokens: int


class Mark(NamedTuple):
    """A place in a prompt, `at` so many tokens, and the arrays of the state that are to be kept as they are there."""

    at: int
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """One call of `generate` or `stream`, checked.

    Attributes:
        rows: prompts as ids, each with at least one, those that a state holds among them.
        budget: new tokens for each.
        sampler: how to choose them.
        ends, words: ids and texts that end a row.
        inputs: what it brings beside tokens.
        answers: how many each prompt gets, whose rows stand together.
        top: the likeliest tokens to tell of at each step; None to tell nothing.
        before: the state that the prompts are read behind, if there is one.
        shared: first tokens that all prompts have, which are read once and repeated; 0 to read each prompt by itself.
        mark: what to keep a copy of where a place of the one prompt has been read (`Generation.marked`).
        room: slots that the cache is to have at least.
        ended: told of the `Generation` that has run, or was left.
        reread: why tokens are read that a state held; empty if none are.
    """

    rows: tuple[tuple[int, ...], ...]
    budget: int
    sampler: Sampler
    ends: tuple[int, ...]
    words: tuple[str, ...]
    seed: int
    inputs: RequestInputs = NONE
    drafts: DraftPlan | None = None
    answers: int = 1
    top: int | None = None
    before: Before | None = None
    shared: int = 0
    mark: Mark | None = None
    room: int = 0
    ended: Callable[[Any], None] | None = None
    reread: str = ""

    @property
    def drawn_from(self) -> int | None:
        """The seed of the draws; None where nothing is drawn, or from a key that the caller has."""
        return int(self.seed) if self.sampler.temperature and not isinstance(self.seed, jax.Array) else None

    @property
    def held(self) -> tuple[int, ...]:
        """The tokens of each prompt that are not read for it: a state has them, or another prompt."""
        if self.before is not None:
            return self.before.lengths
        return tuple(self.shared if i else 0 for i in range(len(self.rows)))


@dataclass(frozen=True)
class RequestPlan:
    """How a request runs, every size chosen.

    Attributes:
        method, knobs: how to choose tokens.
        ends: `[V]` bool, ids that end a row.
        batch: rows of the programs, at least those of the request; the others hold nothing.
        widths: tokens of the programs that would read whole prompts, one after the other.
        slots: of the cache.
        budget: new tokens of each row, at least 1.
        loop: see `DecodeLoop`.
        inputs: what the request brings beside tokens; the first program that reads prompts takes it.
        drafts: where drafts come from; None for plain decoding.
        answers, top, before, mark: as in `Request`.
        read: rows of the programs that read the prompts, where each has several answers.
        parts: what is read of the prompts, one after the other, of those tokens that no state holds.
        shared: the parts that are read of the first prompt alone, as all begin with them, by programs of `alone` rows.
    """

    method: Method
    knobs: Knobs
    ends: np.ndarray[Any, Any]
    seed: int
    batch: int
    widths: tuple[int, ...]
    slots: int
    budget: int
    loop: Loop
    inputs: RequestInputs = NONE
    drafts: DraftPlan | None = None
    answers: int = 1
    top: int | None = None
    read: int = 0
    before: Before | None = None
    mark: Mark | None = None
    parts: tuple[PromptPart, ...] = ()
    shared: tuple[PromptPart, ...] = ()
    alone: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Rows and slots."""
        return {"batch": self.batch, "context": self.slots}

    @property
    def reading(self) -> dict[str, int]:
        """Rows and slots of the programs that read the prompts."""
        return self.sizes if self.answers == 1 else {"batch": self.read, "context": self.slots}
