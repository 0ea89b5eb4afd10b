"""The kernel that decodes tiles of a packed weight in registers, interpreted, and the products that a plan gives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.lowering.lir import delta_chunks, expert_products, packed_tiles
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.packed import PackedWeight, dequant_matmul, has_tiles
from rlx_jax.lowering.lir.packed_tiles import COPYING, GROUPS, PROGRAMS, REGISTERS, SHARED, divide, multiply_tiles
from rlx_jax.lowering.lir.tile_decoder import STEP
from rlx_jax.weights.module_tensors import declare_scheme
from tests.interpreter import interpreted, needs_mosaic
from tests.oracles.packed import packed

BF16, OP = np.dtype(jnp.bfloat16), MatMul(contract=1, f32_result=True)
WITH_TILES = ["gguf_q4_0", "gguf_q4k", "gguf_q8_0", "gguf_q8k", "int4/128", "int4/32", "int8/128", "int8/32"]
FP8 = {
    rows: declare_scheme("fp8_e4m3", 8, block, "f32", table="e4m3", rows=rows).name
    for rows, block in ((1, None), (128, 128))
}
run = IMPLEMENTATIONS["packed_tiles"]


def weight(scheme: str, shape: tuple[int, int], dtype: Any = np.float32) -> PackedWeight:
    """A weight in bf16 with random codes, none of them NaN, and scales of at most 0.01 of both signs."""
    rng, arrays = np.random.default_rng(3), {}
    for name, t in SCHEMES[scheme].array_types(shape).items():
        raw = rng.integers(0, 126, (*map(int, t.shape), t.dtype.itemsize), np.uint8).view(t.dtype)[..., 0]
        if SCHEMES[scheme].six_bits and name == "scales":
            raw[:, ::4] = (
                rng.uniform(-0.01, 0.01, (len(raw), raw.shape[1] // 4, 2)).astype("f2").view(np.uint32)[..., 0]
            )
        elif name == "scales":
            raw = rng.uniform(-0.01, 0.01, raw.shape).astype(f"f{t.dtype.itemsize}").view(t.dtype)
        arrays[name] = jnp.asarray(raw)
    return PackedWeight(arrays, scheme, BF16, np.dtype(dtype))


def test_the_schemes_that_have_it() -> None:
    built_in = [s for s in sorted(SCHEMES) if s.startswith("gguf_") or "/" in s]
    assert [s for s in built_in if has_tiles(s, (128, 1024), 9)] == WITH_TILES
    assert all(has_tiles(s, (128, 1024), 9) for s in FP8.values())
    assert not has_tiles("gguf_q4k", (128, 384), 9)  # words of scales are of whole blocks
    others: list[tuple[tuple[int, int], int]] = [((96, 1024), 9), ((128, 192), 9), ((128, 1024), 8), ((128, 1024), 129)]
    assert not any(has_tiles("gguf_q8_0", shape, rows) for shape, rows in others)


@needs_mosaic
@pytest.mark.parametrize(("scheme", "rows", "shape", "dtype"), [
    ("gguf_q8_0", 9, (64, 2048), "float32"),  # two warpgroups sum halves of a step
    ("int8/32", 72, (320, 256), "bfloat16"),  # several tiles for a program
    ("int4/128", 16, (64, 4096), "float16"),  # slots are filled again
    ("gguf_q4k", 9, (64, 512), "float32"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("gguf_q8k", 33, (256, 256), "float32"), ("int8/128", 16, (192, 384), "float16"),
        (FP8[128], 24, (128, 512), "bfloat16"), (FP8[1], 12, (64, 256), "float32"),
        ("int4/32", 16, (192, 256), "float32"),
    ]),
])  # fmt: skip
def test_a_product(scheme: str, rows: int, shape: tuple[int, int], dtype: str) -> None:
    """Equals the product with the decoded weight, whatever it was rounded to before."""
    w, x = weight(scheme, shape, dtype), np.random.default_rng(rows).standard_normal((rows, shape[1])).astype(BF16)
    want = x.astype(np.float64) @ np.asarray(w.decode(), np.float64).T
    got = interpreted(multiply_tiles, jnp.asarray(x), w)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.parametrize(("rows", "height", "width", "bits"), [
    (64, 16384, 2048, 8), (128, 128256, 2048, 4), (9, 64, 128, 8), (16, 192, 8192, 4), (16, 576, 4096, 8),
])  # fmt: skip
def test_how_a_product_is_divided(rows: int, height: int, width: int, bits: int) -> None:
    """All of it, within the memory and the threads that a program has."""
    d = divide(rows, height, width, bits)
    assert d.tiles * d.features == height and d.steps * d.parts * STEP == width and rows <= d.rows < rows + 8
    assert d.wide * d.deep <= GROUPS and d.programs <= PROGRAMS and d.slots >= 2
    step = STEP * (d.features * bits // 8 + 2 * d.rows)
    assert_registers(d.wide * d.deep, COPYING, d.registers)
    assert d.slots * step + (d.deep - 1) * d.features * d.rows * 4 <= SHARED


def assert_registers(groups: int, copying: int, others: int) -> None:
    """A program waits forever for more registers than its warpgroups have at the start."""
    at_start = REGISTERS // (128 * (groups + 1)) // 8 * 8
    assert copying + groups * others <= at_start * (groups + 1) and copying <= at_start <= others


def test_the_registers_of_other_kernels() -> None:
    assert_registers(2, expert_products.COPYING, expert_products.MULTIPLYING)
    assert_registers(2, delta_chunks.COPYING, delta_chunks.RUNNING)


def test_gradients_and_weights_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer whose type is that of others: floats, and other schemes. A gradient has no number of the kernel."""
    monkeypatch.setattr(packed_tiles, "multiply_tiles", lambda x, w: jnp.full((len(x), w.shape[0]), jnp.nan))
    x = jnp.ones((9, 1024), BF16)
    for w in (jnp.ones((64, 1024), BF16), weight("gguf_q5_0", (64, 1024))):
        want = dequant_matmul("cuda", OP, x, w) if isinstance(w, PackedWeight) else OP.eval(x, w)
        np.testing.assert_array_equal(run(OP, x, w), want)
    w = weight("gguf_q8_0", (64, 1024))
    products = run, lambda op, x, w: op.eval(x, w.decode())
    got, want = (np.asarray(jax.grad(lambda x, f=f: (f(OP, x, w) ** 2).sum())(x), np.float32) for f in products)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-3)


@needs_mosaic
def test_it_lowers_for_a_gpu() -> None:
    for scheme in ("gguf_q8_0", FP8[128]):
        traced = jax.jit(lambda x, w: run(OP, x, w)).trace(jnp.ones((64, 2048), BF16), weight(scheme, (128, 2048)))
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(("rows", "compute", "kernels", "want"), [
    (9, "bf16", "auto", True), (128, "bf16", "auto", True), (129, "bf16", "auto", False), (64, "f32", "auto", False),
    (64, "bf16", "off", False), (64, "bf16", "xla", False),
])  # fmt: skip
def test_what_a_plan_gives_it(rows: int, compute: str, kernels: str, want: bool) -> None:
    """Products of some rows in bf16 on an H200; the report says so."""
    weights = {"a": packed("gguf_q8_0", (128, 256), 1), "b": packed("gguf_q5_0", (64, 128), 2)}
    flow = rlx.ModelFlow("m").input("x", ("batch", 256)).linear("a").linear("b")
    backend = {"products": kernels} if kernels == "xla" else {"kernels": kernels}
    tables: Any = {"precision": {"compute": compute}, "backend": {"cuda": backend}}
    with pytest.warns(rlx.errors.RlxWarning, match="the plan is for another device"):
        model = rlx.compile(flow, weights, profile=rlx.CompileProfile().replace(fusion={"target": "h200"}, **tables))
    x = np.ones((rows, 256), np.float32)
    assert ("packed_tiles" in model.text("lir", x)) == want
    if want:
        with pytest.warns(rlx.errors.RlxWarning, match="planned for cuda with packed_tiles"):
            model(x)
        assert "1 by packed_tiles" in " ".join(model.report().products)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(("weights", "count"), [("keep", 1), ("bf16", 0)])
def test_no_product_with_floats_is_reported(weights: str, count: int) -> None:
    """One of the type of a packed one runs without the kernel, and so do all if they are decoded."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 256)).linear("a").linear("b")
    tables: Any = {"precision": {"compute": "bf16", "weights": weights}, "fusion": {"target": "h200"}}
    values = {"a": packed("gguf_q8_0", (256, 256), 1), "b": np.ones((256, 256), np.float32)}
    with pytest.warns(rlx.errors.RlxWarning, match="the plan is for another device"):
        model = rlx.compile(flow, values, profile=rlx.CompileProfile().replace(**tables))
    lines = [line for line in model.text("lir", np.ones((16, 256), np.float32)).splitlines() if "packed_tiles" in line]
    assert [line.split()[1] for line in lines] == [str(count)] * count
