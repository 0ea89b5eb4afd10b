"""The attention of one new token of each row: the shapes of its kernel, the numbers of a step, and blocks of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.lowering.lir.head_layouts import HeadLayouts
from rlx_jax.lowering.lir.head_tiles import WARP_KEYS, WIDTH, key_layout, value_layout
from rlx_jax.lowering.lir.kernel_trace import KernelTrace
from rlx_jax.lowering.lir.matvec import MULTIPROCESSORS
from rlx_jax.lowering.lir.mosaic import WARPS, load, pl
from rlx_jax.lowering.lir.row_products import MAX_ROWS

AnyArray = Any

# Slots of a cache of one row, at most, without tiles and with them: after 8,000 tokens of Llama 1B on an H200, XLA's
# form takes 4 µs a layer less than the kernel without tiles, and 5 more than the one with tiles.
MAX_KEYS, MAX_KEYS_OF_TILES = 4096, 12288

# Slots of a cache of several rows without tiles, at most, and of one row where heads have a program each.
MAX_KEYS_OF_ROWS = 2048

# Rows of a step, at most. Of more than 8, caches of at most 2,048 slots and 4 query heads of a key head were measured.
MAX_STEP_ROWS, HEADS_OF_MANY_ROWS = 64, 4

# Programs that share the keys of a head 256 wide, of a cache of 2,048 slots at most.
WIDE_SPLITS = 8

# Entries of the keys of a block in each warp, without tiles: 16 in each lane.
WARP_ENTRIES = 512


@dataclass(frozen=True)
class HeadRow:
    """Where the heads of the new query, key or value come from.

    Attributes:
        source: index of the row among the operands.
        offset: first entry of the first head.
        trace: ops on the entries of one head before the rotation, such as a norm; None for none.
        operands: indices of the other operands of `trace`.
        n_rot: columns of a head that are rotated, in halves; 0 for none.
        tables: indices of cos and sin, f32.
    """

    source: int
    offset: int
    trace: KernelTrace | None
    operands: tuple[int, ...]
    n_rot: int
    tables: tuple[int, ...]


@dataclass(frozen=True)
class AttentionKernel:
    """The shapes of one kernel.

    Attributes:
        rows: rows of the batch, each with a cache and a new token of its own.
        heads, kv_heads, width: query heads, key heads, and columns of a head.
        keys: slots of the cache.
        is_ring: whether position p is in slot p mod `keys`.
        window: a query reads this many keys, at most; None for all.
        scale: factor of the scores.
        softcap: as in `AttentionOp`.
        has_sinks: whether the last operand is sinks `[heads]`.
        query, key, value: the new token.
        heads_at_once: query heads of a program.
        splits: programs that share the keys of a head.
        groups: warpgroups of a program, which divide its keys.
    """

    rows: int
    heads: int
    kv_heads: int
    width: int
    keys: int
    is_ring: bool
    window: int | None
    scale: float
    softcap: float | None
    has_sinks: bool
    query: HeadRow
    key: HeadRow
    value: HeadRow
    heads_at_once: int
    splits: int
    groups: int

    @property
    def has_tiles(self) -> bool:
        """Return whether blocks are multiplied with all heads of a program at once."""
        return has_tiles(self.rows, self.width, self.keys)

    @property
    def warp_keys(self) -> int:
        """Return the keys of a block in each warp."""
        return warp_keys_of(self.rows, self.width, self.keys)

    @property
    def block(self) -> int:
        """Return the keys of a block."""
        return WARPS * self.warp_keys


def has_tiles(rows: int, width: int, keys: int) -> bool:
    """Return whether blocks of keys are multiplied with all heads of a program at once (`head_tiles.py`)."""
    is_divided = keys >= WARPS * WARP_KEYS and keys % WARP_KEYS == 0
    return width == WIDTH and is_divided and (rows > 1 or keys > MAX_KEYS_OF_ROWS)


def warp_keys_of(rows: int, width: int, keys: int) -> int:
    """Return the keys of a block in each warp."""
    return WARP_KEYS if has_tiles(rows, width, keys) else WARP_ENTRIES // width


def are_divided(rows: int, width: int, keys: int) -> bool:
    """Return whether warps can divide a cache of so many slots, and the kernel is faster than XLA's form."""
    most = MAX_KEYS if rows == 1 else MAX_KEYS_OF_ROWS
    if rows <= MAX_ROWS and has_tiles(rows, width, keys):
        most = MAX_KEYS_OF_TILES
    warp_keys = warp_keys_of(rows, width, keys)
    return WARPS * warp_keys <= keys <= most and keys % warp_keys == 0


def divide(rows: int, heads: int, kv_heads: int, width: int, keys: int) -> tuple[int, int, int]:
    """Return the query heads of a program, the programs that share the keys of a head, and a program's warpgroups.

    Heads of a program share a key head. Programs of one query head read the keys of a key head several times, but from
    the L2 cache and in parallel, which limits a long cache. If there are more programs than multiprocessors, they have
    fewer warpgroups, so that several run on each.
    """
    most = MAX_ROWS if has_tiles(rows, width, keys) else 2
    sizes = [n for n in range(1, most + 1) if heads // kv_heads % n == 0]
    if keys <= 2048 and width < 256:  # one program on each multiprocessor
        at_once = next((n for n in sizes if rows * heads // n <= MULTIPROCESSORS), sizes[-1])
        splits = 1
    else:
        at_once = 1 if most == 2 else sizes[-1]
        most_splits = 16 if keys > 2048 else WIDE_SPLITS
        splits = min(most_splits, max(1, MULTIPROCESSORS // (rows * heads // at_once)))
    programs, groups = rows * heads // at_once * splits, 2 if width == 256 else 4
    while groups > 1 and programs * groups > 4 * MULTIPROCESSORS:
        groups //= 2
    return at_once, splits, groups


@dataclass(frozen=True)
class NewToken:
    """The numbers of one step, each a scalar.

    Attributes:
        start: tokens in the cache before it.
        position: position of the query.
        slot: slot of the new token.
        is_written: whether there is a new token and a slot for it.
        first, end: the slots that the query may read.
        last: position of the last token, for a ring.
    """

    start: AnyArray
    position: AnyArray
    slot: AnyArray
    is_written: AnyArray
    first: AnyArray
    end: AnyArray
    last: AnyArray

    @staticmethod
    def of(spec: AttentionKernel, start: AnyArray, length: AnyArray, position: AnyArray) -> NewToken:
        """Return the numbers for the operands of the cache update and the query's position."""
        slot = lax.rem(start, spec.keys) if spec.is_ring else start
        first = 0 if spec.is_ring or spec.window is None else lax.max(position - spec.window + 1, 0)
        end = lax.min(start + length if spec.is_ring else position + 1, spec.keys)
        is_written = jnp.logical_and(length > 0, slot < spec.keys)
        return NewToken(start, position, slot, is_written, jnp.int32(first), end, start + length - 1)

    def allowed(self, spec: AttentionKernel, slots: AnyArray, first: AnyArray) -> AnyArray:
        """Return which slots of the cache the query reads, other than the new token's.

        Args:
            spec: the shapes.
            slots: numbers of slots, i32.
            first: slots before it are another block's.
        """
        is_allowed = (slots >= lax.max(first, self.first)) & (slots < self.end)
        is_allowed &= (slots != self.slot) | jnp.logical_not(self.is_written)
        if spec.is_ring:
            back = lax.rem(self.last, spec.keys) - slots
            back = jnp.where(back < 0, back + spec.keys, back)  # tokens after the one in a slot
            is_allowed &= back <= self.last
            is_allowed &= self.reads(spec, self.last - back)
        return is_allowed

    def reads(self, spec: AttentionKernel, position: AnyArray) -> AnyArray:
        """Return whether the query reads the key of a position: not after its own, and in its window."""
        distance = self.position - position
        return (distance >= 0) & (distance < (spec.window or 2**31 - 1))


@dataclass(frozen=True)
class Blocks:
    """The blocks of keys and values that a warpgroup reads: every `stride`-th.

    Attributes:
        spec: the shapes.
        caches: keys and values of the row `[keys / warp_keys, warp_keys, kv_heads * width]`.
        column: first column of the key head.
        first: number of the first block.
        stride: blocks from one to the next.
    """

    spec: AttentionKernel
    caches: Sequence[Any]
    column: AnyArray
    first: AnyArray
    stride: int

    def row(self, index: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the first slot of a block, and the first slot that is read for it, which the last block repeats."""
        first = (self.first + index * self.stride) * self.spec.block
        return first, lax.min(first, self.spec.keys - self.spec.block)

    def read(self, index: AnyArray) -> tuple[AnyArray, ...]:
        """Return the keys and values of a block `[WARPS, warp_keys, width]`."""
        tile = HeadLayouts.of(self.spec.width).tile
        layouts = (key_layout(), value_layout()) if self.spec.has_tiles else (tile, tile)
        number = self.row(index)[1] // self.spec.warp_keys
        place = pl.ds(number, WARPS), slice(None), pl.ds(self.column, self.spec.width)
        refs = zip(self.caches, layouts, strict=True)
        return tuple(load(ref.at[place], layout) for ref, layout in refs)

    def count(self, end: AnyArray) -> AnyArray:
        """Return the number of blocks of the warpgroup before slot `end`."""
        block = self.spec.block
        return lax.max((end + block - 1) // block - self.first + self.stride - 1, 0) // self.stride
