"""Windows that slide, other sizes, spectra, systems, and bodies of loops: what each means, and samples."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import rlx_jax as rlx
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph, Op
from rlx_jax.ir.ops.conv import POOLS
from tests.ops.evaluate import Feeds, Run, wide
from tests.ops.sample import Array, Meaning, Sample, o
from tests.oracles import image_formulas as image
from tests.oracles import op_formulas as formula


def body(graph: Graph, operands: Sequence[Array]) -> tuple[Array, ...]:
    """What the body of a loop or choice gives."""
    made = Run(Feeds()).graph(graph, None, [(wide(np.asarray(o)), False) for o in operands])
    return tuple(array for array, _ in made)


def pair_bias(op: Any, rows: Array, slots: Array, *given: Array) -> Array:
    """Row by row of the batch, of the positions of its queries and keys."""
    made = []
    for b in range(max(len(rows), len(slots))):
        (bias,) = body(op.body, (rows[b % len(rows)][:, None], slots[b % len(slots)][None], *given))
        made.append(bias.reshape((1,) * (3 - bias.ndim) + bias.shape))
    return np.stack(made)


def repeated(op: Any, *operands: Array) -> tuple[Array, ...]:
    """As often as the condition says."""
    carried, rest = operands[: op.carries], operands[op.carries :]
    while body(op.cond, (*carried, *rest))[0]:
        carried = body(op.body, (*carried, *rest))
    return carried


def scanned(op: Any, *operands: Array) -> tuple[Array, ...]:
    """Entry after entry, from the end where it is reversed."""
    carried, cut = operands[: op.carries], operands[op.carries : op.carries + op.slices]
    rest, stacks = operands[op.carries + op.slices :], []
    length = len(cut[0]) if cut else op.length or 0
    for i in range(length)[:: -1 if op.reverse else 1]:
        out = body(op.body, (*carried, *(x[i] for x in cut), *rest))
        carried = out[: op.carries]
        stacks.append(out[op.carries :])
    stacked = [np.stack(column) for column in zip(*stacks[:: -1 if op.reverse else 1], strict=True)]
    return (*carried, *stacked)


def standardized(op: Any, x: Array) -> Array:
    """A norm without weights."""
    centred = x - x.mean(op.axes, keepdims=True) if op.centre else x
    return np.asarray(centred / np.sqrt((centred**2).mean(op.axes, keepdims=True) + op.eps))


def likeliest(op: Any, logits: Array, seed: Array) -> Array:
    """What is drawn where nothing is left to chance."""
    assert op.temperature == 0 or op.top_k == 1, "a draw has no formula"
    return logits.argmax(-1)


MEANINGS: dict[type[Op], Meaning] = {
    o.Conv: lambda op, x, w: image.conv(x, w, op.strides, op.padding, op.dilation, op.groups),
    o.ConvTranspose: lambda op, x, w: image.conv_transpose(x, w, op.strides, op.padding, op.output_padding, op.dilation,
        op.groups),
    o.Pool: lambda op, x: image.pool(x, op.kind, op.window, op.strides, op.padding, op.dilation, op.ceil,
        op.count_include_pad),
    o.Resize: lambda op, x: image.resize(x, op),
    o.GridSample: lambda op, x, g: image.grid_sample(x, g, op.method, op.padding, op.align_corners),
    o.Standardize: standardized,
    o.Switch: lambda op, index, *given: body(op.branches[min(max(int(index), 0), len(op.branches) - 1)], given),
    o.While: repeated,
    o.Scan: scanned,
    o.CustomVjp: lambda op, *operands: body(op.forward, operands),
    o.PairBias: pair_bias,
    o.Patches: lambda op, x: formula.patches(x, *op.patch),
    o.GridPositions: lambda op, table, x: formula.grid_positions(table, x, grid=op.grid, patch=op.patch,
        antialias=op.antialias),
    o.GridAngles: lambda op, x: formula.grid_angles(x, op.patch, op.frequencies, op.tokens),
    o.FakeQuantize: lambda op, x, s=None: image.fake_quantize(x, s, op.bits, op.axis),
    o.Fft: lambda op, x: formula.spectrum(op.kind, x, op.n, op.axis, op.norm),
    o.Solve: lambda op, a, b: np.linalg.solve(a, b),
    o.Sample: likeliest,
}  # fmt: skip


def windows() -> Iterator[Sample]:
    """Patches, windows that slide, other sizes, norms without weights, few bits, spectra and systems."""
    x, y = "f32 batch 4 6 5", "f32 batch 4 7"
    yield Sample(o.Patches((2, 3)), "f32 batch 3 7 9")
    yield Sample(o.Patches((1, 2)), "bf16 2 1 seq keys")
    yield Sample(o.GridAngles((2, 3), (1.5, 0.2), 2), "f32 batch 3 7 9")
    yield Sample(o.GridAngles((1, 2), (0.7,)), "bf16 2 1 seq keys")
    for antialias in (False, True):  # of the grid's own size, of others, and of sizes that a call decides
        for images in ("f32 batch 3 6 8", "f32 batch 1 seq keys", "f32 1 1 31 13"):
            yield Sample(o.GridPositions((3, 4), (2, 2), antialias), f"f32 12 5; {images}")
    for op, operands in (
        (o.Conv((1, 1), "VALID", (1, 1)), f"{x}; f32 3 4 3 2"),
        (o.Conv((2, 1), ((1, 0), (0, 2)), (1, 2), 2), f"{x}; f32 6 2 3 2"),
        (o.Conv((1, 2), "SAME", (2, 1), 4, "highest"), f"{x}; f32 4 1 3 3"),
        (o.Conv((2,), "SAME_LOWER", (1,)), f"{y}; f32 2 4 4"),
        (o.Conv((1,), ((2, 0),), (1,)), "bf16 2 2 5; bf16 3 2 3"),
        (o.Conv((1,), "SAME", (1,)), "f32 batch 4 seq; f32 2 4 3"),
        (o.Conv((1, 1, 2), ((1, 1), (0, 0), (1, 0)), (1, 1, 1)), "f32 1 2 3 4 5; f32 2 2 2 2 2"),
        (o.ConvTranspose((1, 1), ((0, 0), (0, 0)), (0, 0), (1, 1)), f"{x}; f32 4 3 3 2"),
        (o.ConvTranspose((2, 3), ((1, 0), (2, 1)), (1, 2), (2, 1), 2), f"{x}; f32 4 3 2 3"),
        (o.ConvTranspose((2,), ((0, 1),), (0,), (1,)), "bf16 2 2 seq; bf16 2 3 2"),
        (o.Pool("max", (2, 2), (1, 1), ((1, 1), (0, 0)), (1, 1)), "i32 batch 2 3 3"),
        (o.Pool("mean", (3,), (2,), ((1, 1),), (1,)), "bf16 2 3 5"), (o.GridSample(), "f32 2 1 3 2 4; f32 2 2 1 3 3"),
        (o.Standardize((-1,), 1e-5), x), (o.Standardize((-1,), 0.5, False), "bf16 3 8"),
        (o.Standardize((1, 2), 0.1), "f32 batch seq 8"), (o.FakeQuantize(8, None), "f32 2 4 5"),
        (o.FakeQuantize(4, 1), "f32 2 4 5"), (o.FakeQuantize(2, -1), "f32 2 4 5"),
        (o.Sample(0.0), "f32 batch seq 8; i32"), (o.Sample(0.7, top_k=1), "f32 batch 8; u32"),
    ):  # fmt: skip
        yield Sample(op, operands)
    yield Sample(o.Sample(2.0, top_p=1e-4), "bf16 3 8; i32", lambda x, s: x.argmax(-1))  # one class is left to draw
    for kind in POOLS:
        for pads, steps, ceil in (("VALID", (1, 1), False), (((1, 0), (1, 1)), (1, 2), True), ("SAME", (1, 1), False)):
            yield Sample(o.Pool(kind, (3, 2), (2, 2), pads, steps, ceil, kind == "mean"), x)
        yield Sample(o.Pool(kind, (2,), (2,), ((1, 1),), (1,), True), "f32 2 3 5")
        yield Sample(o.Pool(kind, (3,), (1,), "SAME", (1,)), "f32 batch 2 seq")
    for size in (
        o.Resize((2, 3), (9, 3), "nearest"), o.Resize((2,), (4,), "nearest", rounding="ceil"),
        o.Resize((-1,), (8,), "nearest", "asymmetric", rounding="floor"), o.Resize((2, 3), (9, 8), "linear"),
        o.Resize((2, 3), (3, 2), "linear", antialias=True, exclude_outside=True),
        o.Resize((3,), (7,), "linear", "align_corners"), o.Resize((2, 3), (4, 7), "cubic", a=-0.75),
        o.Resize((2, 3), (2, 3), "cubic", "half_pixel", antialias=True),
        o.Resize((2,), (5,), "cubic", "asymmetric", (0.9,), exclude_outside=True),
        o.Resize((2,), (4,), "linear", "half_pixel_symmetric", (0.72,)),
        o.Resize((3,), (1,), "linear", "pytorch_half_pixel"),
        o.Resize((2, 3), (4, 3), "linear", "tf_crop_and_resize", roi=((0.2, 0.7), (-0.4, 1.3)), extrapolation=2.0),
        o.Resize((2,), (3,), "nearest", "tf_crop_and_resize", roi=((0.9, 0.1),), rounding="round_prefer_ceil"),
    ):  # fmt: skip
        yield Sample(size, x)
    yield Sample(o.Resize((1,), (3,), "nearest"), "u8 2 5", below=200)
    for method, padding, corners in (("nearest", "border", True), ("linear", "zeros", True),
                                     ("linear", "reflection", False), ("cubic", "reflection", True)):  # fmt: skip
        op = o.GridSample(method, padding, corners)
        yield Sample(op, "f32 batch 2 4 3; f32 batch 3 seq 2", tolerance=1e-5)
    for op, operands in ((o.FakeQuantize(3), "f32 batch 4; f32"), (o.FakeQuantize(4, 1), "f32 batch 4; f32 4"),
                         (o.FakeQuantize(3, 0, "tanh", True), "f32 4 5; f32 4")):  # fmt: skip
        yield Sample(op, operands, positive=True)
    for kind in ("fft", "rfft", "ifft", "irfft"):
        for n, axis, norm in ((None, -1, "backward"), (7, 1, "ortho"), (3, -2, "forward")):
            operands = "f32 batch 6 5" if kind in ("fft", "rfft") else "c64 batch 4 5"
            yield Sample(o.Fft(kind, n, axis, norm), operands)
    for op, operands in ((o.Fft("fft"), "c64 6"), (o.Fft("rfft"), "bf16 3 6"), (o.Fft("ifft", 6), "f32 batch 5")):
        yield Sample(op, operands)
    square = lambda a: a + 3 * np.eye(a.shape[-1]) if a.shape[-1:] == a.shape[-2:-1] else a  # noqa: E731
    for operands in ("f32 3 3; f32 3", "f32 4 4; f32 4 2", "f32 batch 3 3; f32 batch 3 5"):
        yield Sample(o.Solve(), operands, draw=square, tolerance=1e-5)


def bodies() -> Iterator[Sample]:
    """Bodies that run once, some times, or not at all, and a bias by positions."""
    m: Any = rlx.Graph.hir("m")
    x, p, i = m.input("x", ("batch", 5)), m.input("p", ()), m.input("i", (), "i32")
    m.switch(i, [m.sin, lambda v: m.mul(v, p), m.square], x)
    m.while_loop(lambda c: m.lt(c[0], 4), lambda c: (m.add(c[0], 1), m.tanh(m.mul(c[1], p))), (i, x))
    m.scan(lambda c, v: (m.add(m.mul(c, p), v), (c, m.argmax(v))), m.zeros(5), x, reverse=True)
    m.fori_loop(0, 3, lambda k, v: m.add(v, m.sin(v)), x)
    m.custom_vjp(m.round, lambda v, out, g: g, x)
    for node in m.builder.nodes:
        if isinstance(node.op, o.Switch | o.While | o.Scan | o.CustomVjp):
            types = "; ".join(str(m.builder.type(v)) for v in node.inputs)
            yield Sample(node.op, types.translate(str.maketrans("[,]", "   ")), tolerance=1e-5)
    m = rlx.Graph.hir("m")
    x, slopes = m.input("x", (1, "seq", 6)), m.input("slopes", (3, 1, 1))
    m.attention(x, x, x, heads=3, bias=lambda q, k: m.mul(slopes, m.cast(m.sub(k, q), "f32")))
    m.attention(x, x, x, heads=3, bias=lambda q, k: m.sin(m.cast(k, "f32")))
    made = [n.op.bias_of for n in m.builder.nodes if isinstance(n.op, hir.Attention)]
    for rows, keys in (("batch", "1"), ("1", "1"), ("batch", "batch")):
        yield Sample(o.PairBias(made[0]), f"i32 {rows} seq; i32 {keys} keys; f32 3 1 1", tolerance=1e-5)
    yield Sample(o.PairBias(made[1]), "i32 batch seq; i32 1 keys", tolerance=1e-5)


SAMPLES = (windows, bodies)
