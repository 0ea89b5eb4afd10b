"""Decide which texts share a row, and the few block sizes that programs are compiled for.

Every block size is a compilation, so there are at most eight for texts of up to 8192 tokens. Rows are filled with the
longest text that fits first. A call has rows of one width; only the end of each row is padding. The cost per token is
the same in all rows, but attention costs more in wider rows, and every call has a fixed cost. So texts are laid out for
each minimum width, and the cheapest layout is taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.dataclasses import dataclass

# Widths of rows in tokens, for models with texts of up to 512 tokens and for longer ones.
SHORT_WIDTHS, LONG_WIDTHS = (64, 128, 256, 512), (128, 512, 1024, 2048, 8192)
# Maximum number of programs, unless there are more widths than that.
MAX_BLOCK_SIZES = 8


@dataclass(frozen=True)
class Costs:
    """Measured costs on a platform, in units of the time of one token that attends to no other.

    Attributes:
        tokens: rows × width of a full call.
        small_blocks: (rows, width) of smaller blocks, in the order of how much they save.
        call: fixed cost of a call.
        attention: cost for a token of attending to one more token.
        tokens_per_slot: a row holds at most one text per `tokens_per_slot` tokens of its width.
        short_widths: the widths of full calls, for models with texts of up to 512 tokens.
        program: cost of running a program that the request has not run, which may have to be loaded.
    """

    tokens: int
    small_blocks: tuple[tuple[int, int], ...]
    call: float
    attention: float
    tokens_per_slot: int
    short_widths: tuple[int, ...] = SHORT_WIDTHS
    program: float = 0.0


# `tokens_per_slot` of rows that hold a single text, whatever their width.
ONE_TEXT_PER_ROW = 2**31
COSTS = {
    "cpu": Costs(512, ((1, 64), (1, 256), (1, 16), (1, 128)), 16.0, 0.001, 4),
    # A full call of rows of 64 tokens saves less than its program takes to load.
    "cuda": Costs(16384, ((1, 64), (16, 64), (4, 512)), 2500.0, 0.0015, 8, (128, 256, 512), 100_000.0),
}


def costs_on(kind: str) -> Costs:
    """Return the costs on a platform; an unknown platform counts as a GPU."""
    return COSTS.get(kind, COSTS["cuda"])


@dataclass(frozen=True)
class Block:
    """One call: `rows` rows of `width` tokens, with up to `slots` texts each.

    `texts[i]` has the numbers of the texts in row i; rows that are not listed are empty.
    """

    rows: int
    width: int
    slots: int
    texts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BlockSizes:
    """The (rows, width) of all blocks that programs are compiled for.

    `tokens`: texts are put into rows that are wider than this only if they do not fit into narrower ones.
    """

    blocks: tuple[tuple[int, int], ...]
    tokens: int
    costs: Costs

    def cost(self, rows: int, width: int) -> float:
        """Return the cost of one call."""
        return self.costs.call + rows * width * (1 + self.costs.attention * width)

    def row_counts(self, width: int) -> list[int]:
        """Return the row counts of the blocks of a width, largest first."""
        return sorted((rows for rows, w in self.blocks if w == width), reverse=True)

    def cost_of_rows(self, rows: Mapping[int, Sequence[tuple[int, ...]]]) -> float:
        """Return the cost of `rows`, given by width, as fractions of full calls."""
        full_rows = {width: self.row_counts(width)[0] for width in rows}
        return sum(len(group) * self.cost(full_rows[w], w) / full_rows[w] for w, group in rows.items())

    def slots(self, width: int) -> int:
        """Return the maximum number of texts in a row of this width."""
        return max(1, width // self.costs.tokens_per_slot)

    @property
    def widths(self) -> tuple[int, ...]:
        """The different widths, in ascending order."""
        return tuple(sorted({width for _, width in self.blocks}))


def sizes_for(
    costs: Costs, longest: int, tokens: int | None = None, share: int = 1, max_block_sizes: int = MAX_BLOCK_SIZES
) -> BlockSizes:
    """Return the blocks for texts of up to `longest` tokens.

    Args:
        costs: the costs on the device.
        longest: maximum length of a text, in tokens.
        tokens: maximum rows × width of a block, which has at least one row; None: the default of the device.
        share: number of devices that rows are sharded over; the number of rows is a multiple of it.
        max_block_sizes: maximum number of blocks, unless there are more widths.
    """
    limit = costs.tokens if tokens is None else tokens
    widths = list(costs.short_widths if longest <= SHORT_WIDTHS[-1] else LONG_WIDTHS)
    # Beyond the largest standard width each is four times the previous one, which keeps the number of programs small.
    while widths[-1] < longest:
        widths.append(4 * widths[-1])
    widths = widths[: 1 + next(i for i, width in enumerate(widths) if width >= longest)]
    full = {(max(1, limit // width), width) for width in widths}
    candidates = [(r, w) for r, w in costs.small_blocks if r * w <= limit and w <= widths[-1] and (r, w) not in full]
    small_blocks = candidates[: max(0, max_block_sizes - len(full))]
    blocks = {(-(-rows // share) * share, width) for rows, width in (*full, *small_blocks)}
    return BlockSizes(tuple(sorted(blocks)), limit, costs)


def fill_rows(lengths: Sequence[int], sizes: BlockSizes, min_width_index: int = 0) -> dict[int, list[tuple[int, ...]]]:
    """Return rows, as tuples of text numbers, by width.

    The longest remaining text opens a row of the narrowest width that holds it, from width number
    `min_width_index` on. Then the longest text that still fits is added, until none fits or the row has all its slots.
    """
    widths = sizes.widths[min_width_index:]
    waiting: dict[int, list[int]] = {}
    for text, length in enumerate(lengths):
        waiting.setdefault(length, []).append(text)
    lengths_left = sorted(waiting)
    rows: dict[int, list[tuple[int, ...]]] = {}
    while lengths_left:
        width = num_free = next(w for w in widths if w >= lengths_left[-1])
        texts: list[int] = []
        slots = sizes.slots(width)
        while len(texts) < slots and (index := bisect_right(lengths_left, num_free) - 1) >= 0:
            length = lengths_left[index]
            texts.append(waiting[length].pop())
            num_free -= length
            if not waiting[length]:
                del lengths_left[index]
        rows.setdefault(width, []).append(tuple(texts))
    return rows


def make_blocks(width: int, rows: Sequence[tuple[int, ...]], sizes: BlockSizes) -> list[Block]:
    """Return calls for rows of one width: full ones, and for the remaining rows the cheapest single block size."""
    full = sizes.row_counts(width)[0]
    full_rows = len(rows) // full * full
    blocks = [Block(full, width, sizes.slots(width), tuple(rows[at : at + full])) for at in range(0, full_rows, full)]
    rest = rows[full_rows:]
    if rest:

        def cost(size: int) -> float:
            is_loaded = size == full and full_rows > 0
            return -(-len(rest) // size) * sizes.cost(size, width) + (0.0 if is_loaded else sizes.costs.program)

        size = min(sizes.row_counts(width), key=cost)
        starts = range(0, len(rest), size)
        blocks += [Block(size, width, sizes.slots(width), tuple(rest[at : at + size])) for at in starts]
    return blocks


# Number of texts in the sample that decides on the narrowest width of a large request.
SAMPLE = 256


def plan_blocks(lengths: Sequence[int], sizes: BlockSizes) -> list[Block]:
    """Return the cheapest calls for texts of these lengths, over all choices of the narrowest width."""
    if not lengths:
        return []
    candidates = [i for i, width in enumerate(sizes.widths) if not i or width <= sizes.tokens]
    # With many calls the last, partly filled ones hardly matter, so a sample of the lengths decides.
    if len(lengths) > SAMPLE and sum(lengths) > 4 * sizes.tokens:
        sample = lengths[:: -(-len(lengths) // SAMPLE)]
        candidates = [min(candidates, key=lambda i: sizes.cost_of_rows(fill_rows(sample, sizes, i)))]
    plans = []
    for min_width_index in candidates:
        rows = fill_rows(lengths, sizes, min_width_index)
        blocks = [block for width, width_rows in rows.items() for block in make_blocks(width, width_rows, sizes)]
        plans.append((sum(sizes.cost(b.rows, b.width) for b in blocks), min_width_index, blocks))
    return min(plans)[2]


def plan_one_per_row(lengths: Sequence[int], sizes: BlockSizes) -> list[Block]:
    """Return calls in which every text has a row of its own."""
    rows: dict[int, list[tuple[int, ...]]] = {}
    for text, length in enumerate(lengths):
        rows.setdefault(next(w for w in sizes.widths if w >= length), []).append((text,))
    return [block for width, width_rows in rows.items() for block in make_blocks(width, width_rows, sizes)]


def pack_rows(block: Block, texts: Sequence[Sequence[Any]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the inputs of the program `packed` for a block: tokens, segments and positions, int32 `[3, rows, width]`.

    `texts`: for each row of the block the token ids of its texts. Segments number the texts of a row from 1; 0 is
    padding.
    """
    out = np.zeros((3, block.rows, block.width), np.int32)
    pieces, numbers, padding = [], list[int](), np.zeros(block.width, np.int32)
    for row in [*texts, *[()] * (block.rows - len(texts))]:
        pieces += [*row, padding[sum(map(len, row)) :]]
        numbers += [*range(1, len(row) + 1), 0]
    # Whole arrays, because a loop over the texts takes the host as long as a GPU takes for them.
    tokens, segments, positions = out.reshape(3, -1)
    lengths = np.array([*map(len, pieces)])
    np.concatenate(pieces, out=tokens)
    segments[:] = np.repeat(numbers, lengths)
    positions[:] = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions *= segments > 0
    return out
