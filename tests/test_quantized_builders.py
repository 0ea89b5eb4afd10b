"""The vocabulary of quantization (IR 6.5 and 8) against formulas in float64, and its packed weights against gguf-py."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule
from rlx_jax.compiler.compat import DType
from rlx_jax.ir.ops.pointwise import FakeQuantize
from rlx_jax.ir.packed import SCHEMES, Codes, Scheme
from rlx_jax.lowering.lir.packed import PackedWeight, dequant_gather
from rlx_jax.quantization import QuantMap, QuantScheme, insert_q_dq, quant_map, quant_propagate
from tests.op_cases import OpCase, check_all
from tests.oracles.packed import meaning, packed

RNG = np.random.default_rng(11)
Call = Callable[..., Any]
K, N, E = 40, 6, 3
X = RNG.standard_normal((5, K))
BLOCKS = -(-K // 16)
SCALE, ZERO = np.abs(RNG.standard_normal((BLOCKS, N))) + 0.1, RNG.integers(0, 9, (BLOCKS, N)).astype("f4")
Q8 = RNG.integers(-128, 128, (K, N)).astype("i1")
NIBBLES = RNG.integers(0, 256, K * N // 2).astype("u1")
BYTES = RNG.integers(0, 120, (K, N)).astype("u1")  # finite in both float8
SCALE_BYTES = np.append(RNG.integers(1, 100, BLOCKS * N - 1), 0x7F).reshape(BLOCKS, N).astype("u1")
COLUMN = np.abs(RNG.standard_normal(N)) + 0.1
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def rows(values: np.ndarray) -> np.ndarray:
    """Numbers of blocks of 16, one for each of K rows."""
    return values.repeat(16, 0)[:K]


def codes(data: np.ndarray) -> np.ndarray:
    """IR 8.2: flat index p·n + j, the low nibble first."""
    data = data.astype(int)
    return np.stack([data & 15, data >> 4], -1).reshape(K, N)


def float8(data: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    """Floats of OCP without a sign, from their bits."""
    data, bias = data.astype(int), 2 ** (exponent - 1) - 1
    e, m = data >> mantissa, data & (2**mantissa - 1)
    return np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (2.0**mantissa + m) * 2.0 ** (e - bias - mantissa))


def nvfp4(x: np.ndarray, q: np.ndarray, s: np.ndarray, g: np.ndarray) -> np.ndarray:
    return x @ (E2M1[codes(q)] * rows(np.where(s == 0x7F, 0, float8(s, 4, 3))) * g)


INT_X, INT_W = (RNG.integers(-128, 128, s).astype("i1") for s in ((5, 70), (70, 4)))
BIAS = RNG.integers(-999, 999, 4).astype("i4")
IMAGE, KERNEL = (RNG.integers(-128, 128, s).astype("i1") for s in ((2, 4, 7, 6), (4, 2, 3, 2)))
ZEROS = {"x_zp": 3, "w_zp": -2, "out_zp": 5}


def requantized(acc: np.ndarray, mult: float) -> np.ndarray:
    return np.clip(np.round(acc * mult) + ZEROS["out_zp"], -128, 127).astype("i1")


def convolved(x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """IR 8.5 in whole numbers: strides 2 and 1, padding 1 and 0, dilation 1 and 2, 2 groups."""
    x = np.pad(x.astype(int) - ZEROS["x_zp"], [(0, 0), (0, 0), (1, 1), (0, 0)])
    w, acc = w.astype(int) - ZEROS["w_zp"], np.zeros((2, 4, 4, 4), int)
    for n, o, i, j in np.ndindex(acc.shape):
        part = x[n, 2 * (o // 2) : 2 * (o // 2) + 2, 2 * i : 2 * i + 3, j : j + 3 : 2]
        acc[n, o, i, j] = bias[o] + (part * w[o]).sum()
    return requantized(acc, 2e-4)


EXPERTS = RNG.standard_normal((E, K, N))
CASES: dict[str, OpCase] = {
    "int8": OpCase(lambda m, *v: m.dequant_matmul(*v, None, "int8/32"), [X, Q8, SCALE[::2]],
        lambda x, q, s: x @ (q * s.repeat(32, 0)[:K])),
    "int8a": OpCase(lambda m, *v: m.dequant_matmul(*v, "int8a/16"), [X, Q8, SCALE, ZERO],
        lambda x, q, s, z: x @ ((q - rows(z)) * rows(s))),
    "int4 with zero points": OpCase(lambda m, *v: m.dequant_matmul(*v, "int4/16"), [X, NIBBLES, SCALE, ZERO],
        lambda x, q, s, z: x @ ((codes(q) - rows(z)) * rows(s))),
    "int4, symmetric": OpCase(lambda m, *v: m.dequant_matmul(*v, scheme="int4/16"), [X, NIBBLES, SCALE],
        lambda x, q, s: x @ ((codes(q) - 8) * rows(s))),
    "fp8e4m3": OpCase(lambda m, *v: m.dequant_matmul(*v, scheme="fp8e4m3"), [X, BYTES, COLUMN],
        lambda x, q, s: x @ (float8(q, 4, 3) * s)),
    "fp8e5m2": OpCase(lambda m, *v: m.dequant_matmul(*v, scheme="fp8e5m2"), [X, BYTES, COLUMN],
        lambda x, q, s: x @ (float8(q, 5, 2) * s)),
    "floats of 8 bits": OpCase(lambda m, *v: m.dequant_matmul(*v, scheme="fp8e4m3"),
        [X, BYTES.view(ml_dtypes.float8_e4m3fn), COLUMN], lambda x, q, s: x @ (q.astype("f8") * s)),
    "nvfp4": OpCase(lambda m, *v: m.dequant_matmul_nvfp4(*v), [X, NIBBLES, SCALE_BYTES, np.float64(0.3)], nvfp4),
    "q_matmul": OpCase(lambda m, *v: m.q_matmul(*v, 3, -2, 5, 1e-4), [INT_X, INT_W, BIAS],
        lambda x, w, b: requantized((x.astype(int) - 3) @ (w.astype(int) + 2) + b, 1e-4)),
    "q_matmul that saturates": OpCase(lambda m, *v: m.q_matmul(*v, **ZEROS, mult=0.5), [INT_X, INT_W, BIAS],
        lambda x, w, b: requantized((x.astype(int) - 3) @ (w.astype(int) + 2) + b, 0.5)),
    "q_conv2d": OpCase(lambda m, *v: m.q_conv2d(*v, [3, 2], [2, 1], [1, 0], [1, 2], 2, 3, -2, 5, 2e-4),
        [IMAGE, KERNEL, BIAS], convolved),
    "grouped_matmul of few rows": OpCase(lambda m, *v: m.grouped_matmul(*v), [X[:3], EXPERTS, np.array([2, 0, 2])],
        lambda x, w, i: np.stack([x[r] @ w[e] for r, e in enumerate(i)]), symbolic=False),
    "grouped_matmul of many rows": OpCase(lambda m, *v: m.grouped_matmul(*v),
        [X, EXPERTS, np.array([2, 0, 2, 1, 1])],
        lambda x, w, i: np.stack([x[r] @ w[e] for r, e in enumerate(i)]), symbolic=False),
}  # fmt: skip


def test_formulas(subtests: pytest.Subtests) -> None:
    check_all(CASES, subtests)


def assert_close(found: Any, want: Any) -> None:
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-6 * np.abs(want).max())


def product_of(shape: tuple[int, ...], scheme: str, name: str = "dequant_matmul", *ids: int) -> GraphModule:
    """A module of one product with a packed parameter."""
    m: Any = Graph.hir("m")
    w = m.param("w", shape, packed=scheme)
    rest = [m.constant(np.array(ids, "i4"))] if ids else []
    m.set_outputs([getattr(m, name)(m.input("x", (len(ids) or 2, shape[-1])), w, *rest, scheme=scheme)])
    assert quant_map(m) == QuantMap({w: QuantScheme(scheme)})
    return m


@pytest.mark.parametrize(
    "scheme", ["gguf_q4k", "gguf_nvfp4", *(pytest.param(s, marks=pytest.mark.slow) for s in ("gguf_q6k", "gguf_q8_0"))]
)
def test_products_with_packed_weights(scheme: str) -> None:
    """At both levels, of an emit by key, and of experts with as few rows as matrices or more: none decodes on load."""
    value, x = packed(scheme, (128, 256)), RNG.standard_normal((6, 256)).astype("f4")
    flow = rlx.ModelFlow("f").input("x", (2, 256)).custom(lambda e, v: e.dequant_matmul(v, "w", scheme=scheme))
    m = product_of((128, 256), scheme)
    for program in (m, m.lower(), flow, product_of((128, 256), scheme, "dequant_matmul_packed")):
        model = rlx.compile(program, {"w": value})
        assert model.params is not None and sum(a.nbytes for a in model.params.values()) <= 1.03 * value.data.nbytes
        assert_close(model(x[:2]), x[:2].astype("f8") @ meaning(value).T)
    experts = packed(scheme, (E, 8, 256))
    for ids in ((2, 0), (0, 1, 2, 2, 1, 0)):
        model = rlx.compile(product_of((E, 8, 256), scheme, "dequant_grouped_matmul", *ids), {"w": experts})
        want = np.stack([row @ meaning(experts)[e].T for row, e in zip(x.astype("f8"), ids, strict=False)])
        assert_close(model(x[: len(ids)]), want)
    m = Graph.define("m", lambda m: m.dequant_moe_weights(m.param("w", (E, 8, 256), packed=scheme)))
    np.testing.assert_array_equal(rlx.compile(m, {"w": experts})(), meaning(experts).swapaxes(1, 2))


def test_matrices_of_a_packed_stack_with_scales_of_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up on the first axis of a stack takes matrices, whose rows share scales, and not rows."""
    scheme = Scheme("blocks", (Codes(8),), 4, "f32", signed=True, rows=2)
    monkeypatch.setitem(SCHEMES, "blocks", scheme)
    scales = RNG.standard_normal((E, 3, 2)).astype("f4")
    arrays = {"codes": RNG.integers(-128, 128, (E, 6, 8)).astype("i1"), "scales": scales.view("u4")}
    want = arrays["codes"] * scales.repeat(2, 1).repeat(4, 2)
    ids, f32 = np.array([2, 0]), np.dtype(np.float32)
    got = dequant_gather(rlx.ops.Gather(), PackedWeight(arrays, "blocks", f32, f32), jnp.asarray(ids))
    np.testing.assert_array_equal(got, want[ids])


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("scheme, kind", [("gguf_q4k", "Q4_K"), ("gguf_q6k", "Q6_K"), ("gguf_q8_0", "Q8_0")])
def test_live_product(scheme: str, kind: str) -> None:
    """Equals the decode of gguf-py and a product."""
    import gguf

    value, x = packed(scheme, (128, 256)), RNG.standard_normal((2, 256)).astype("f4")
    decoded = gguf.quants.dequantize(value.data, gguf.GGMLQuantizationType[kind])
    model = rlx.compile(product_of((128, 256), scheme), {"w": value})
    assert_close(model(x), x.astype("f8") @ decoded.astype("f8").T)


THROUGH: dict[str, tuple[Call, dict[str, Any], bool, int]] = {
    "reshape": (lambda m, x: m.reshape(x, (2, -1)), {}, False, 1),
    "transpose": (lambda m, x: m.transpose(x, (0, 1, 3, 2)), {"bits": 4, "ste": "clipped"}, False, 1),
    "relu": (m_relu := lambda m, x: m.relu(x), {}, False, 0),
    "relu of a scale": (m_relu, {}, True, 1),
    "narrow of a scale": (lambda m, x: m.narrow(x, 1, 0, 1), {}, True, 1),
    "narrow": (lambda m, x: m.narrow(x, 1, 0, 1), {}, False, 0),
    "concat of a scale": (lambda m, x: m.concat([x, m.relu(x)], 1), {}, True, 1),
    "concat with another": (lambda m, x: m.concat([x, m.mul(x, 0.7)], 1), {}, True, 0),
    "pool by channel": (lambda m, x: m.max_pool(x, 2), {"axis": 1}, True, 1),
    "transpose by channel": (lambda m, x: m.transpose(x, (0, 1, 3, 2)), {"axis": 1}, True, 0),
    "another function": (lambda m, x: m.tanh(x), {}, True, 0),
    "another gradient": (lambda m, x: m.reshape(x, (2, -1)), {"ste": "tanh"}, False, 0),
    "a learned scale": (m_relu, {"learned": True}, True, 0),
}


def test_rounding_that_is_there_already(subtests: pytest.Subtests) -> None:
    """The number of those dropped; what is left gives the same numbers and gradients."""
    x = RNG.standard_normal((2, 2, 4, 4)).astype("f4")
    for name, (through, options, has_scale, count) in THROUGH.items():
        with subtests.test(name):
            m: Any = Graph.hir("m")
            v = m.input("x", x.shape)
            scale = [m.constant(np.full((2,) if "axis" in options else (), 0.02, "f4"))] if has_scale else []
            first = m.fake_quantize(v, *scale, **options)
            m.set_outputs([m.fake_quantize(through(m, first), *scale, **options)])
            out, dropped = quant_propagate(m)
            assert dropped == count
            assert sum(isinstance(n.op, FakeQuantize) for n in out.builder.nodes) == 2 - count
            if count:
                models = [rlx.compile(g) for g in (m, out)]
                got, want = (g(x) for g in models)
                np.testing.assert_allclose(got, want, rtol=2e-7)
                got, want = (jax.jit(jax.grad(lambda x, g=g: (g.apply({}, x) ** 2).sum()))(x) for g in models)
                np.testing.assert_allclose(got, want, rtol=1e-6)


def test_names() -> None:
    m = Graph.hir("m")
    names = "bool uint8 int8 int16 bfloat16 float16 uint32 int32 int32 float32 float32 complex64"  # 32 of 64 bits
    assert [str(m.type_of(m.input(f"x_{t}", (2,), t)).dtype) for t in DType] == names.split()
    assert rlx.quantization.insert_q_dq is insert_q_dq
    queries = [(s.kind, s.block, s.is_gguf, s.has_scale, s.has_zero_point, s.scale_is_fp8) for s in
               map(QuantScheme, ("int8a/32", "int4/32", "nvfp4/16", "fp8e4m3", "gguf_q4k"))]  # fmt: skip
    assert queries == [("int8a", 32, False, True, True, False), ("int4", 32, False, True, False, False),
                       ("nvfp4", 16, False, True, False, True), ("fp8e4m3", None, False, True, False, False),
                       ("gguf_q4k", 256, True, False, False, False)]  # fmt: skip
