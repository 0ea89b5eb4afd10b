"""Which texts to score stand in which calls: packed in rows, of few sizes, at most eight for all texts. A row holds one
text where the flow has no program for several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx_jax.compiler.settings import Buckets
from rlx_jax.encode.packing import FULL, MOST, Block, BlockSizes, apart, costs_on, packed_rows, plan, sizes_for
from rlx_jax.errors import RequestError
from rlx_jax.generate.score_program import AIM, OTHERS, PLACES, score_program
from rlx_jax.generate.scored_texts import ScoredTokens
from rlx_jax.lowering.hir.rows import POSITIONS, SEGMENTS
from rlx_jax.runtime.model import BoundProgram, CompiledModel

# Tokens that may stand behind those that a text reads, beside the first one.
MOST_OTHERS = 16
# The widest row that texts share: which pairs of tokens see each other is an array, of the square of that.
SHARED = 2048
# Widths of rows of one text, for models of up to 8192 positions and for others.
SHORT, LONG = (64, 128, 256, 512, 1024, 2048, 8192), (64, 128, 512, 2048, 8192, 32768, 131072)
# Widths of programs of one row, beside those of full calls: for what is left over, and for a text alone.
ALONE = (64, 512)


# -- what texts share --------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedTokens:
    """Tokens that are read once, and those that stand behind them: the first one and others. Of each text its number,
    and the place of its last token among the others; None for the first."""

    read: tuple[int, ...]
    ends: list[int]
    texts: list[tuple[int, int | None]]


def shared_tokens(items: Sequence[ScoredTokens]) -> list[SharedTokens]:
    """One for all texts that differ in their last token alone, with up to `MOST_OTHERS` beside the first."""
    last: dict[tuple[int, ...], SharedTokens] = {}
    found: list[SharedTokens] = []
    for text, item in enumerate(items):
        read, end = item.ids[:-1], item.ids[-1]
        one = last.get(read)
        if one is None or (end not in one.ends and len(one.ends) > MOST_OTHERS):
            one = last[read] = SharedTokens(read, [], [])
            found.append(one)
        if end not in one.ends:
            one.ends.append(end)
        place = one.ends.index(end)
        one.texts.append((text, place - 1 if place else None))
    return found


# -- sizes -------------------------------------------------------------------------------------


def score_sizes(target: str, buckets: Buckets, max_positions: int | None, longest: int, above: int = 0) -> BlockSizes:
    """Of rows of one text, for texts of more than `above` and up to `longest` tokens: at most eight programs, of full
    calls of each width and of one row; with buckets those of their sizes. A text over all widths, which is one over all
    buckets or over 131072 tokens of a model without a limit, has a width of its own.

    Raises:
        RequestError: a text is over the largest bucket, and `on_recompile` is `error`.
    """
    costs = costs_on(target)
    closed = buckets.on_recompile == "error"
    if buckets.prompt and closed and longest > buckets.prompt[-1]:
        raise RequestError(
            f"score: a text of {longest} tokens, and buckets.prompt = {list(buckets.prompt)}; score less at once, or "
            "add a bucket to the profile"
        )
    is_long = max_positions is None or max_positions > SHORT[-1]
    widths = list(buckets.prompt or (LONG if is_long else SHORT))
    if max_positions is not None and not buckets.prompt:
        widths = [w for w in widths if w < max_positions]
        widths = [*widths[: 6 if max_positions > LONG[-1] else None], max_positions]
    while widths[-1] < longest:
        widths.append(min(4 * widths[-1], max_positions or 4 * longest))
    widths = [width for width in widths if width > above]
    if buckets.batch:
        blocks = {(rows, width) for rows in buckets.batch for width in widths}
    else:
        full = {(max(1, costs.tokens // width), width) for width in widths}
        alone = {(1, width) for width in ALONE[: MOST - len(widths)] if width in widths and not buckets.prompt}
        blocks = {(buckets.rows(rows), width) for rows, width in full | alone}
    return BlockSizes(tuple(sorted(blocks)), costs.tokens, replace(costs, slot=FULL))


# -- forms -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreForm:
    """How texts are laid out and run: by the program `packed` of a model, several in a row, or by `forward`."""

    model: CompiledModel
    sizes: BlockSizes

    @property
    def shared(self) -> bool:
        """Whether a row holds several texts."""
        return self.model.program == "packed"

    def plan(self, texts: Sequence[SharedTokens]) -> list[Block]:
        """The cheapest calls."""
        return plan([self._room(text) for text in texts], self.sizes)

    def apart(self, texts: Sequence[SharedTokens]) -> list[Block]:
        """Calls of a shared form in which no text is in the row of another."""
        return apart([self._room(text) for text in texts], self.sizes)

    def _room(self, text: SharedTokens) -> int:
        """Tokens of a row that a text takes: a row has one of the other ends for each slot."""
        return max(len(text.read), self.sizes.costs.slot * (len(text.ends) - 1) if self.shared else 0)

    def program(self, rows: int, width: int) -> BoundProgram:
        """See `score_program`."""
        more = (SEGMENTS.input, POSITIONS.input) if self.shared else ()
        return score_program(self.model, (self.model.first_input, *more), rows, width)

    def inputs(self, block: Block, texts: Sequence[SharedTokens]) -> Mapping[str, Any]:
        """What the program of a block reads."""
        rows = [[texts[number] for number in numbers] for numbers in block.texts]
        tokens, segments, positions = packed_rows(block, [[text.read for text in row] for row in rows])
        aim, *_ = packed_rows(block, [[(*text.read[1:], text.ends[0]) for text in row] for row in rows])
        slots = self.sizes.slots(block.width) if self.shared else MOST_OTHERS
        others, places = np.zeros((2, block.rows, slots), np.int32)
        for place in places_in(block, texts):
            text = texts[place.text]
            more = slice(place.other, place.other + len(text.ends) - 1)
            others[place.row, more], places[place.row, more] = text.ends[1:], place.first + len(text.read) - 1
        known = {self.model.first_input: tokens, AIM: aim, OTHERS: others, PLACES: places}
        return known | {SEGMENTS.input: segments, POSITIONS.input: positions} if self.shared else known


@dataclass(frozen=True)
class TextPlace:
    """Where a text stands in a block: its row, and its first token and the first of its other ends there."""

    text: int
    row: int
    first: int
    other: int


def places_in(block: Block, texts: Sequence[SharedTokens]) -> Iterator[TextPlace]:
    """Those of all texts of a block, one behind the other in each row."""
    for row, numbers in enumerate(block.texts):
        first = other = 0
        for text in numbers:
            yield TextPlace(text, row, first, other)
            first, other = first + len(texts[text].read), other + len(texts[text].ends) - 1


def forms_for(
    model: CompiledModel, buckets: Buckets, max_positions: int | None, longest: int
) -> tuple[ScoreForm | None, ScoreForm | None]:
    """The form in which texts of up to `SHARED` tokens share rows, if there is one, and that of all others, if the
    first one does not do for all of up to `longest` tokens.

    Raises:
        RequestError: as `score_sizes`.
    """
    target = model.settings.target
    if buckets.batch or buckets.prompt or model.programs.why_not(model.name, "packed"):
        return None, ScoreForm(model, score_sizes(target, buckets, max_positions, longest))
    wide, shared = shared_sizes(target, buckets.share, max_positions, longest)
    return ScoreForm(model.as_program("packed"), shared), None if wide is None else ScoreForm(model, wide)


def shared_sizes(
    target: str, share: int, max_positions: int | None, longest: int
) -> tuple[BlockSizes | None, BlockSizes]:
    """Of rows of one text, for those of over `SHARED` tokens where the model reads such, and of rows of several."""
    wide, most, costs = None, MOST, costs_on(target)
    if max_positions is None or max_positions > SHARED:
        wide = score_sizes(target, Buckets(share=share), max_positions, longest, above=SHARED)
        most = MOST - len(wide.blocks)
    # However few positions there are, a row has room for all other ends of a text.
    widest = min(max(max_positions or SHARED, MOST_OTHERS * costs.slot), SHARED)
    return wide, sizes_for(costs, widest, share=share, most=most)
