"""Which texts stand together: rows that hold several, and the few sizes of programs that they run in.

Every size of a program is compiled, so there are at most eight of them for texts of up to 8192 tokens. A row is filled
with texts, the longest that fits first, and programs take rows of one width; what pads is the end of each row. Token by
token all rows cost the same; attention costs more in wider ones, and every call of a program something by itself. So
texts are laid out at each width, and the cheapest is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Widths of rows, for texts of up to 512 tokens and for longer ones.
FINE, COARSE = (64, 128, 256, 512), (128, 512, 1024, 2048, 8192)
# Programs for all texts, as long as there is one of each width.
MOST = 8


@dataclass(frozen=True)
class Costs:
    """What decides on a device. `tokens` are those of one call, `small` the blocks beside, rows and width, those that
    spare most first. In the time of one token that sees no other: a call costs `call`, and seeing one more token costs
    a token `seen`. A row holds a text for every `slot` tokens, and no more."""

    tokens: int
    small: tuple[tuple[int, int], ...]
    call: float
    seen: float
    slot: int


# The slots of rows that hold one text, however wide they are.
FULL = 2**31
COSTS = {
    "cpu": Costs(512, ((1, 64), (1, 256), (1, 16), (1, 128)), 16.0, 0.001, 4),
    "cuda": Costs(16384, ((1, 64), (16, 64), (4, 512)), 2500.0, 0.0015, 8),
}


def costs_on(kind: str) -> Costs:
    """Those of a platform; what is not known is taken for a GPU."""
    return COSTS.get(kind, COSTS["cuda"])


@dataclass(frozen=True)
class Block:
    """One call: `rows` rows of `width` tokens with room for `slots` texts each, and the texts in each by number; rows
    that are not listed are empty."""

    rows: int
    width: int
    slots: int
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BlockSizes:
    """The blocks that there are, rows and width. `tokens`: rows wider than that are only for texts that need them."""

    blocks: tuple[tuple[int, int], ...]
    tokens: int
    costs: Costs

    def cost(self, rows: int, width: int) -> float:
        """Of one call."""
        return self.costs.call + rows * width * (1 + self.costs.seen * width)

    def of(self, width: int) -> list[int]:
        """The rows of blocks of one width, the largest first."""
        return sorted((rows for rows, w in self.blocks if w == width), reverse=True)

    def cost_of_rows(self, rows: Mapping[int, Sequence[tuple[int, ...]]]) -> float:
        """Of rows by width, in calls that are full."""
        return sum(
            len(found) * self.cost(self.of(width)[0], width) / self.of(width)[0] for width, found in rows.items()
        )

    def slots(self, width: int) -> int:
        """Texts that a row of this width may hold."""
        return max(1, width // self.costs.slot)

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({width for _, width in self.blocks}))


def sizes_for(costs: Costs, longest: int, tokens: int | None = None, share: int = 1, most: int = MOST) -> BlockSizes:
    """The blocks for texts of up to `longest` tokens: of at most `tokens` (those of the device if None) and one row at
    least. Rows are a multiple of `share`, the devices that they are divided over. There are no more than `most`, as
    long as there is one of each width."""
    limit = costs.tokens if tokens is None else tokens
    widths = list(FINE if longest <= FINE[-1] else COARSE)
    while widths[-1] < longest:
        widths.append(4 * widths[-1])
    widths = widths[: 1 + next(i for i, width in enumerate(widths) if width >= longest)]
    full = {(max(1, limit // width), width) for width in widths}
    beside = [(r, w) for r, w in costs.small if r * w <= limit and w <= widths[-1] and (r, w) not in full]
    small = beside[: max(0, most - len(full))]
    return BlockSizes(
        tuple(sorted({(-(-rows // share) * share, width) for rows, width in (*full, *small)})), limit, costs
    )


def fill(lengths: Sequence[int], sizes: BlockSizes, narrowest: int = 0) -> dict[int, list[tuple[int, ...]]]:
    """Rows by width. The longest text left opens a row, of the first width from number `narrowest` on that holds it,
    and then the longest that still fits goes in, again and again."""
    widths = sizes.widths[narrowest:]
    waiting: dict[int, list[int]] = {}
    for text, length in enumerate(lengths):
        waiting.setdefault(length, []).append(text)
    present = sorted(waiting)
    rows: dict[int, list[tuple[int, ...]]] = {}
    while present:
        width = room = next(w for w in widths if w >= present[-1])
        texts: list[int] = []
        slots = sizes.slots(width)
        while len(texts) < slots and (at := bisect_right(present, room) - 1) >= 0:
            length = present[at]
            texts.append(waiting[length].pop())
            room -= length
            if not waiting[length]:
                del present[at]
        rows.setdefault(width, []).append(tuple(texts))
    return rows


def blocks_of(width: int, rows: Sequence[tuple[int, ...]], sizes: BlockSizes) -> list[Block]:
    """Calls for rows of one width: full ones, and for the rest the cheapest of one kind."""
    full = sizes.of(width)[0]
    whole = len(rows) // full * full
    made = [Block(full, width, sizes.slots(width), tuple(rows[at : at + full])) for at in range(0, whole, full)]
    rest = rows[whole:]
    if rest:
        size = min(sizes.of(width), key=lambda n: -(-len(rest) // n) * sizes.cost(n, width))
        made += [
            Block(size, width, sizes.slots(width), tuple(rest[at : at + size])) for at in range(0, len(rest), size)
        ]
    return made


# Texts that the narrowest width is chosen by, where there are more.
SAMPLE = 512


def plan(lengths: Sequence[int], sizes: BlockSizes) -> list[Block]:
    """The cheapest calls for texts of these lengths: laid out in rows of each width and wider ones where needed."""
    if not lengths:
        return []
    tried = [first for first, width in enumerate(sizes.widths) if not first or width <= sizes.tokens]
    if len(lengths) > SAMPLE and sum(lengths) > 4 * sizes.tokens:  # of many calls, what the last ones spare is little
        sample = lengths[:: -(-len(lengths) // SAMPLE)]
        tried = [min(tried, key=lambda first: sizes.cost_of_rows(fill(sample, sizes, first)))]
    plans = []
    for first in tried:
        rows = fill(lengths, sizes, first)
        blocks = [block for width, of_width in rows.items() for block in blocks_of(width, of_width, sizes)]
        plans.append((sum(sizes.cost(b.rows, b.width) for b in blocks), first, blocks))
    return min(plans)[2]


def apart(lengths: Sequence[int], sizes: BlockSizes) -> list[Block]:
    """Calls in which every text has a row of its own."""
    rows: dict[int, list[tuple[int, ...]]] = {}
    for text, length in enumerate(lengths):
        rows.setdefault(next(w for w in sizes.widths if w >= length), []).append((text,))
    return [block for width, of_width in rows.items() for block in blocks_of(width, of_width, sizes)]


def packed_rows(block: Block, texts: Sequence[Sequence[Any]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """What the program `packed` reads of a block, given the tokens of the texts in each of its rows: tokens, segments
    and positions `[3, rows, width]`."""
    made = np.zeros((3, block.rows, block.width), np.int32)
    for row, lists in enumerate(texts):
        at = 0
        for number, ids in enumerate(lists, 1):
            end = at + len(ids)
            made[0, row, at:end], made[1, row, at:end], made[2, row, at:end] = ids, number, np.arange(end - at)
            at = end
    return made
