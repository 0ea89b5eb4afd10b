"""Ops that move elements, and reading and writing by index: what each means, and samples."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlx_jax.ir.graph import Op
from rlx_jax.ir.ops.index import SCATTER_KINDS
from rlx_jax.ir.ops.shape import END, AxisOf, Bound, SizeOf
from tests.ops.sample import I32, Array, Meaning, Sample, o
from tests.oracles import op_formulas as formula


def reshape(op: Any, x: Array) -> Array:
    """`AxisOf` entries are sizes of x."""
    return x.reshape([x.shape[t.axis] if isinstance(t, AxisOf) else t for t in op.target])


def sliced(op: Any, x: Array) -> Array:
    """`x[key]`"""
    return x[tuple(slice(*k) if isinstance(k, tuple) else k for k in op.key)]


def narrow(op: Any, x: Array) -> Array:
    """`length` entries from `start`."""
    start = op.start % x.shape[op.axis]
    return np.take(x, range(start, start + op.length), axis=op.axis)


def take_row(op: Any, x: Array, index: Array) -> Array:
    """One row of each batch entry."""
    return np.stack([x[b % len(x), index[b]] for b in range(len(index))])[:, None]


def cut(op: Any, *arrays: Array) -> Array:
    """From one bound of an axis to the other."""
    size = arrays[0].shape[op.axis]
    ends = []
    for bound in (op.start, op.stop):
        distance = bound.offset + sum(sizes(s, arrays) for s in bound.sizes)
        ends.append(size - distance if bound.from_end else distance)
    return np.take(arrays[0], range(*ends), axis=op.axis)


def sizes(target: int | SizeOf, arrays: Sequence[Array]) -> int:
    """One size of an `Expand`."""
    return int(arrays[target.operand].shape[target.axis]) if isinstance(target, SizeOf) else target


def repeat_heads(op: Any, x: Array) -> Array:
    """Each head `times` times in a row."""
    heads = np.split(x, op.heads, axis=-1)
    return np.concatenate([head for head in heads for _ in range(op.times)], axis=-1)


def split(op: Any, x: Array) -> tuple[Array, ...]:
    """Consecutive pieces of the last axis."""
    return tuple(np.split(x, np.cumsum(op.sizes)[:-1], axis=-1))


MEANINGS: dict[type[Op], Meaning] = {
    o.Reshape: reshape,
    o.Transpose: lambda op, x: np.transpose(x, op.perm),
    o.Narrow: narrow,
    o.SplitLast: lambda op, x: split(op, x),
    o.Shard: lambda op, x: x,
    o.AllReduce: lambda op, x: x,
    o.AllGather: lambda op, x: x,
    o.ShardIndex: lambda op, x: np.int32(0),
    o.Slice: sliced,
    o.CutAxis: cut,
    o.Concat: lambda op, *arrays: np.concatenate(arrays, axis=op.axis),
    o.Gather: lambda op, table, ids: table[np.clip(ids, 0, len(table) - 1)],
    o.TakeRow: take_row,
    o.Expand: lambda op, *arrays: np.broadcast_to(arrays[0], [sizes(t, arrays) for t in op.target]),
    o.Iota: lambda op, x: np.arange(x.shape[op.axis]),
    o.RelativeBuckets: lambda op, x: formula.relative_buckets(x.shape[op.axis], op.buckets, op.max_distance),
    o.Pad: lambda op, x: formula.pad(x, op.widths, op.mode, op.value),
    o.Tile: lambda op, x: np.tile(x, op.reps),
    o.Take: lambda op, x, i: formula.take(x, i, op.axis, op.mode),
    o.TakeAlongAxis: lambda op, x, i: np.take_along_axis(x, i, op.axis),
    o.GatherNd: lambda op, x, i: formula.gather_nd(x, i, op.batch_dims),
    o.Scatter: lambda op, x, i, u: formula.scatter(x, i, u, op.axis, op.kind),
    o.ScatterNd: lambda op, x, i, u: formula.scatter_nd(x, i, u, op.kind),
    o.RepeatHeads: repeat_heads,
    o.After: lambda op, x, *others: x,
    o.Overwrite: lambda op, old, new: new,
}  # fmt: skip


def shaping() -> Iterator[Sample]:
    """Ops that move elements."""
    x = "f32 batch seq 8"
    for op in (
        o.Reshape((AxisOf(0), AxisOf(1), 2, 4)), o.Reshape((-1, 8)), o.Reshape((AxisOf(1), AxisOf(0), -1)),
        o.Transpose((2, 0, 1)), o.Shard(("batch", None, "heads")), o.Narrow(2, 3, 4), o.Narrow(1, -1, 1),
        o.Narrow(-1, -3, 2), o.SplitLast((3, 4, 1)), o.Slice((Ellipsis, -1)), o.Slice((None, 0)), o.Iota(1), o.Iota(2),
        o.RepeatHeads(2, 3), o.Slice(((None, None, None), (None, None, -1), (7, 1, -2))), o.RelativeBuckets(1, 8, 4),
        o.RelativeBuckets(2, 4, 3), o.RepeatHeads(4, 1), o.Tile((1, 3, 2)), o.Pad(((0, 0), (2, 1), (1, 3)), value=1.5),
    ):  # fmt: skip
        yield Sample(op, x)
    for op, operands in (
        (o.Reshape((2, -1)), "i32 4 3"), (o.Reshape(()), "f32 1 1"), (o.Transpose(()), "f32"),
        (o.RelativeBuckets(0), "bf16 200"), (o.Slice(((None, None, None), (1, None, None))), "i32 batch 6"),
        (o.Pad(((1, -2), (0, 1))), "i32 4 3"), (o.Pad(((0, 0), (-1, 2)), "edge"), "bf16 2 4"),
        *((o.Pad(((0, 0), (2, 4)), mode), "f32 batch 4") for mode in ("edge", "reflect", "symmetric", "wrap")),
        (o.CutAxis(1, stop=Bound((SizeOf(1, 1),))), "f32 batch seq+keys 8; i32 batch seq"),
        (o.CutAxis(1, Bound((SizeOf(1, 1),))), "f32 batch seq+keys 8; f32 1 seq 2"),
        (o.CutAxis(-2, Bound((SizeOf(1, 0),)), Bound((), 1, True)), "f32 batch seq+keys 8; f32 seq"),
        (o.CutAxis(1, Bound((SizeOf(1, 0),), from_end=True), END), "f32 batch seq+keys 8; f32 keys"),
        (o.CutAxis(0, stop=Bound((SizeOf(0, 1), SizeOf(1, 0)))), "bf16 9 2; f32 4"), (o.Expand((3, 5, 2)), "f32 5 1"),
        (o.Expand((SizeOf(1, 0), SizeOf(0, 0), 2)), "i32 seq 1; bool batch"),
        (o.Concat(2), f"{x}; {x}; f32 batch seq 1"), (o.Concat(1), "bf16 batch 3; bf16 batch 2"),
    ):  # fmt: skip
        yield Sample(op, operands)


def indexing() -> Iterator[Sample]:
    """Reading and writing by index, products by named axes."""
    x = "f32 batch seq 8"
    for of_one_device in (o.AllReduce(), o.AllGather(1), o.ShardIndex()):
        yield Sample(of_one_device, x)
    for table in ("f32 9 4; i32 batch seq", "bf16 9 4 2; u8 seq", "f32 9; i32"):
        yield Sample(o.Gather(), table, below=9)
    for rows in (x, "f32 batch seq"):
        yield Sample(o.TakeRow(), f"{rows}; i32 batch", below=5)
    yield Sample(o.Take(2), f"{x}; i32 3 2")
    yield Sample(o.Take(0, "clip"), "i32 4 2; i32")
    yield Sample(o.Take(1, "wrap"), "bf16 2 3; u8 4", below=9)
    yield Sample(o.TakeAlongAxis(-1), f"{x}; i32 batch seq 3")
    yield Sample(o.TakeAlongAxis(2, "clip"), f"{x}; i32 1 1 3")
    yield Sample(o.GatherNd(), f"{x}; i32 4 2", below=2)
    yield Sample(o.GatherNd(1), f"{x}; i32 batch 3 1")
    for kind in SCATTER_KINDS:
        length, below, count = (1, 5, 1) if kind == "set" else (3, 3, 4)  # which of two writes stays is not said
        yield Sample(o.Scatter(1, kind), f"f32 2 5 4; i32 2 {length} 3; f32 2 {length} 3", below=below)
        yield Sample(o.ScatterNd(kind), f"{x}; i32 {count} 2; f32 {count} 8", below=2)
    yield Sample(o.Einsum("bsh,hk->bks"), f"{x}; f32 8 3")
    yield Sample(o.Einsum("...ij,...ji->...", "highest"), "f32 batch 3 4; f32 4 3")
    yield Sample(o.Einsum("ij,kj->ik", result=I32), "i8 2 3; i8 4 3", lambda a, b: a.astype(int) @ b.T.astype(int))
    yield Sample(o.Einsum("ii->i"), "f32 4 4")


SAMPLES = (shaping, indexing)
