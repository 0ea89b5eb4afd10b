"""Builders of images and of few bits, against NumPy, jax.image and (mark `oracle`) torch."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx_jax.ir.ops.index import Sample
from rlx_jax.ir.ops.pointwise import STE, FakeQuantize
from tests.op_cases import OpCase, check_all, evaluated
from tests.oracles import image_formulas as image

RNG = np.random.default_rng(8)
X = RNG.standard_normal((2, 4, 6, 5))
K = RNG.standard_normal((6, 2, 3, 2))
T = RNG.standard_normal((4, 3, 3, 2))
C, D = RNG.standard_normal((2, 4)) + 2
Q = RNG.integers(-7, 8, (3, 5)).astype(np.int8)
BLOCK_SCALE, BLOCK_ZERO = RNG.uniform(0.5, 1, (3, 3)), RNG.integers(-1, 2, (3, 3)).astype(np.int8)


def column(c: np.ndarray) -> np.ndarray:
    """`[C]` beside `[N, C, H, W]`."""
    return c[:, None, None]


def normed(x: np.ndarray, axes: Any, eps: float = 1e-5) -> np.ndarray:
    """(x − mean) / √(var + ε)."""
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


CASES: dict[str, OpCase] = {
    "conv": OpCase(
        lambda m, x, w, b: m.conv(x, w, b, window_strides=(2, 1), padding=(1, (0, 2)), feature_group_count=2),
        [X, K, RNG.standard_normal(6)],
        lambda x, w, b: image.conv(x, w, (2, 1), ((1, 1), (0, 2)), (1, 1), 2) + column(b),
    ),
    "conv of one axis": OpCase(
        lambda m, x, w: m.conv1d(x, w, padding="SAME", rhs_dilation=2),
        [X[..., 0], K[:, :, 0, :1].repeat(2, 1).reshape(6, 4, 1)], lambda x, w: image.conv(x, w, (1,), "SAME", (2,)),
    ),
    "avg_pool": OpCase(
        lambda m, x: m.avg_pool(x, 3, padding="SAME_LOWER", window_dilation=2),
        [X], lambda x: image.pool(x, "mean", (3, 3), (1, 1), "SAME_LOWER", (2, 2)),
    ),
    "resize_nearest_2x": OpCase(lambda m, x: m.resize_nearest_2x(x), [X], lambda x: x.repeat(2, 2).repeat(2, 3)),
    "group_norm": OpCase(
        lambda m, x, g, b: m.group_norm(x, 2, g, b, 0.1),
        [X, C, D],
        lambda x, g, b: normed(x.reshape(2, 2, 2, 6, 5), (2, 3, 4), 0.1).reshape(x.shape) * column(g) + column(b),
    ),
    "instance_norm": OpCase(
        lambda m, x, g, b: m.instance_norm(x, g, b),
        [X, C, D], lambda x, g, b: normed(x, (2, 3)) * column(g) + column(b),
    ),
    "batch_norm": OpCase(
        lambda m, x, u, v: m.batch_norm(x, mean=u, var=v, gamma=u, beta=v),
        [X, C, np.abs(D)], lambda x, u, v: (x - column(u)) / np.sqrt(column(v) + 1e-5) * column(u) + column(v),
    ),
    "layer_norm2d": OpCase(
        lambda m, x, g: m.layer_norm2d(x, g, g), [X, C], lambda x, g: normed(x, 1) * column(g) + column(g)
    ),
    "rms_norm without weights": OpCase(
        lambda m, x: m.rms_norm(x), [X], lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    ),
    # few bits
    "quantize": OpCase(
        lambda m, x: m.quantize(x, 0.02, 3), [X], lambda x: np.int8(np.clip(np.rint(x / 0.02) + 3, -128, 127)),
        symbolic=False,
    ),
    "quantize by channel": OpCase(
        lambda m, x, s, z: m.quantize(x, s, z, axis=1, dtype="u8"),
        [X, np.abs(C) / 9, np.array([100, 110, 120, 130], np.uint8)],
        lambda x, s, z: np.clip(np.rint(np.float32(x) / np.float32(column(s))) + column(z), 0, 255).astype(np.uint8),
    ),
    "dequantize by channel": OpCase(
        lambda m, q, s, z: m.dequantize(q, s, z, axis=-3),
        [np.int8(30 * X), C, np.array([1, 2, 3, 4], np.int8)],
        lambda q, s, z: (q.astype(int) - column(z)) * column(s),
    ),
    "fake_quantize": OpCase(
        lambda m, x: m.fake_quantize(x, bits=4, axis=1), [X], lambda x: image.fake_quantize(x, None, 4, 1),
        symbolic=False,
    ),
    "dequantize by block": OpCase(
        lambda m, q, s, z: m.dequantize(q, s, z, axis=1, block=2),
        [Q, BLOCK_SCALE, BLOCK_ZERO], lambda q, s, z: image.dequantize_blocks(q, s, z, 1, 2),
    ),
    "quantized_matmul": OpCase(
        lambda m, x, q, s, z: m.quantized_matmul(x, q, s, z, block=2),
        [X[0, 0, :, :5], Q.T, BLOCK_SCALE.T, BLOCK_ZERO.T],
        lambda x, q, s, z: x @ image.dequantize_blocks(q, s, z, 0, 2),
        symbolic=False,
    ),
    "unpack_nibbles": OpCase(
        lambda m, x: m.unpack_nibbles(x, (2, 3, 2)),
        [np.array([[0x21, 0x43, 0xF5], [0x0A, 0xB0, 0x7F]], np.uint8)],
        np.array([[[1, 2], [3, 4], [5, 15]], [[10, 0], [0, 11], [15, 7]]], np.uint8),
        symbolic=False,
    ),
    "moving_scale": OpCase(
        lambda m, x, s: m.moving_scale(x, s, decay=0.75, bits=4, axis=1),
        [X, np.array([0.0, 0.5, 1.0, 2.0])],
        lambda x, s: np.where(s == 0, 1, 0.25) * np.abs(x).max((0, 2, 3)) / 7 + 0.75 * s,
    ),
}  # fmt: skip


def test_numbers(subtests: pytest.Subtests) -> None:
    check_all(CASES, subtests)


@pytest.mark.parametrize("ste", STE)
def test_gradients_go_through_the_rounding(ste: str) -> None:
    """By the rule that was asked for; and the scale has none."""
    x, s = jnp.array([-9.0, -0.6, 0.0, 0.3, 2.9, 3.1, 40.0]), jnp.array(0.5)
    most, wide = 7, np.asarray(x, np.float64)
    want = {
        "identity": np.ones(7),
        "clipped": (np.abs(wide) <= 3.5) * 1.0,
        "tanh": 1 - np.tanh(wide / 0.5) ** 2,
        "hard_tanh": np.maximum(0, 1 - np.abs(wide) / (most * 0.5)),
    }[ste]
    op = FakeQuantize(4, ste=ste)
    dx, ds = jax.jit(jax.grad(lambda x, s: op.eval(x, s).sum(), (0, 1)))(x, s)
    np.testing.assert_allclose(dx, want, atol=1e-6)
    assert ds == 0


def test_gradient_of_a_learned_scale() -> None:
    """By the formula of LSQ, summed over what shares the scale."""
    x, s = np.array([[-9.0, -0.6, 0.3], [2.9, 3.1, 40.0]]), np.array([0.5, 2.0])

    def gap(x: np.ndarray, s: Any) -> np.ndarray:
        return np.where(np.abs(x / s) <= 7, np.rint(x / s) - x / s, np.sign(x) * 7)

    dy = np.array([[1.0, -2.0, 3.0], [0.5, 0.25, -1.0]])
    for op, scale, want in (
        (FakeQuantize(4, 0, learned=True), s, (gap(x, s[:, None]) * dy).sum(1)),
        (FakeQuantize(4, learned=True), s[0], (gap(x, s[0]) * dy).sum()),
    ):
        got = jax.jit(jax.grad(lambda s, op=op: (op.eval(jnp.float32(x), s) * jnp.float32(dy)).sum()))(
            jnp.float32(scale)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_is_drawn_follows_its_probabilities() -> None:
    """Of those that top_k and top_p leave, by count; another seed draws another row."""
    logits = np.log(np.array([0.4, 0.05, 0.3, 0.05, 0.2], np.float32))
    rows = jnp.tile(jnp.asarray(logits), (20000, 1))
    for op, left in (
        (Sample(), [0, 1, 2, 3, 4]),
        (Sample(top_k=3), [0, 2, 4]),
        (Sample(top_p=0.69), [0, 2]),
        (Sample(2.0, top_p=0.5), [0, 2]),
    ):
        drawn = np.bincount(np.asarray(op.eval(rows, jnp.int32(3))), minlength=5) / 20000
        p = np.exp(logits.astype(np.float64) / op.temperature) * np.isin(np.arange(5), left)
        np.testing.assert_allclose(drawn, p / p.sum(), atol=0.015)
    assert np.any(Sample().eval(rows, jnp.int32(1)) != Sample().eval(rows, jnp.int32(2)))


G = RNG.uniform(-1.5, 1.5, (2, 3, 4, 2))
TORCH: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {}


def torch_case(
    name: str, own: tuple[str, dict[str, Any]], theirs: dict[str, Any], *arrays: Any, args: Any = ()
) -> None:
    """A row of `TORCH`: a builder with its arguments, and the function of torch.nn.functional called `name` up to its
    first space with its own; what is no array in `args` both are given behind the first array."""
    method, options = own
    TORCH[name] = (
        lambda m, x, *more: getattr(m, method)(x, *args, *more, **options),
        lambda f, x, *more: getattr(f, name.split()[0])(x, *args, *more, **theirs),
        list(arrays),
    )


def geometry(stride: int, pad: int, dilation: int, **theirs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a convolution in two groups, as each side spells it."""
    ours = {"padding": pad, "rhs_dilation": dilation, "feature_group_count": 2}
    return ours, {"stride": stride, "padding": pad, "dilation": dilation, "groups": 2} | theirs


for stride, pad in itertools.product((1, 2, 3), (0, 1)):
    for dil in (1, 2):
        ours, theirs = geometry(stride, pad, dil)
        torch_case(f"conv2d {stride} {pad} {dil}", ("conv", ours | {"window_strides": stride}), theirs, X, K)
        more = {"output_padding": (stride - 1, 0)}
        name = f"conv_transpose2d {stride} {pad} {dil}"
        torch_case(name, ("conv_transpose", ours | more | {"strides": stride}), theirs | more, X, T)
    for ceil in (False, True):
        ours = {"window_strides": stride, "padding": pad, "ceil_mode": ceil}
        theirs = {"stride": stride, "padding": pad, "ceil_mode": ceil}
        torch_case(f"max_pool2d {stride} {pad} {ceil}", ("max_pool", ours), theirs, X, args=[(3, 2)])
        for count in ({"count_include_pad": c} for c in (False, True)):
            name = f"avg_pool2d {stride} {pad} {ceil} {count}"
            torch_case(name, ("avg_pool", ours | count), theirs | count, X, args=[(3, 2)])
for size in ((9, 3), (3, 8), (12, 10)):
    shape: dict[str, Any] = {"shape": ("n2", 4, *size)}
    floor = {"method": "nearest", "coordinates": "asymmetric", "rounding": "floor"}
    for mode, ours, theirs in (
        ("nearest", floor, {}), ("nearest-exact", {"method": "nearest"}, {}),
        ("bilinear", {}, {"antialias": True}), ("bicubic", {"method": "cubic"}, {"antialias": True}),
    ):  # fmt: skip
        torch_case(f"interpolate {size} {mode}", ("resize", shape | ours), {"size": size, "mode": mode} | theirs, X)
    for corners, how in ((False, "half_pixel"), (True, "align_corners")):
        bare = {"antialias": False, "coordinates": how}
        cubic = bare | {"method": "cubic", "a": -0.75, "exclude_outside": False}
        for mode, ours in (("bilinear", bare), ("bicubic", cubic)):
            theirs = {"size": size, "mode": mode, "align_corners": corners}
            torch_case(f"interpolate {size} {mode} {corners}", ("resize", shape | ours), theirs, X)
for mode, padding, corners in itertools.product(("nearest", "bilinear", "bicubic"), ("zeros", "border", "reflection"),
                                                (False, True)):  # fmt: skip
    method = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    ours = {"method": method, "padding": padding, "align_corners": corners}
    theirs = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    torch_case(f"grid_sample {mode} {padding} {corners}", ("grid_sample", ours), theirs, X, G)
torch_case("group_norm", ("group_norm", {}), {}, X, C, D, args=[2])
TORCH |= {
    "instance_norm": (
        lambda m, x, g, b: m.instance_norm(x, g, b), lambda f, x, g, b: f.instance_norm(x, weight=g, bias=b), [X, C, D],
    ),
    "batch_norm": (
        lambda m, x, u, v: m.batch_norm(x, mean=u, var=v, gamma=v, beta=u),
        lambda f, x, u, v: f.batch_norm(x, u, v, v, u), [X, C, np.abs(D)],
    ),
    "prelu": (lambda m, x, c: m.prelu(x, m.expand_dims(c, (1, 2))), lambda f, x, c: f.prelu(x, c), [X, C]),
}  # fmt: skip
SPELLED = {
    **{name: name for name in ("elu", "selu", "mish", "relu6", "leaky_relu", "softplus", "gelu", "silu")},
    "softsign": "soft_sign", "hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid", "logsigmoid": "log_sigmoid",
}  # fmt: skip
for name, own in SPELLED.items():
    torch_case(name, (own, {}), {}, 3 * X)


@pytest.mark.oracle(warnings="error")
def test_as_torch_has_it(subtests: pytest.Subtests) -> None:
    """Every row, in f32 on both sides."""
    import torch

    found = evaluated({name: OpCase(ours, arrays, None) for name, (ours, _, arrays) in TORCH.items()}, subtests)
    wrong = {}
    for name, (_, theirs, arrays) in TORCH.items():
        tensors = [torch.from_numpy(np.asarray(a, np.float32)) for a in arrays]
        want = theirs(torch.nn.functional, *tensors).numpy()
        (got,) = found[name]
        if got.shape != want.shape or not np.abs(got - want).max() <= 3e-5 * max(1.0, np.abs(want).max()):
            wrong[name] = (got.shape, want.shape, np.abs(got - want).max() if got.shape == want.shape else None)
    assert not wrong and len(TORCH) > 100
