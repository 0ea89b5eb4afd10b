"""The kernel that decodes tiles of a packed weight in registers, interpreted, and the products that a plan gives it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import rlx_jax as rlx
from rlx_jax.device import DEVICES
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed import SCHEMES
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS, without_triton_warning
from rlx_jax.lowering.lir.packed import PackedWeight, dequant_matmul, has_tiles
from rlx_jax.lowering.lir.plan import Choice
from tests.oracles.packed import packed

BF16, OP = np.dtype(jnp.bfloat16), MatMul(contract=1, f32_result=True)
WITH_TILES = ["gguf_q8_0", "gguf_q8k", "int8/128", "int8/32"]
run = IMPLEMENTATIONS["packed_tiles"]


def weight(scheme: str, shape: tuple[int, int], dtype: Any = np.float32) -> PackedWeight:
    """A weight in bf16 with random codes, and scales of at most 0.01 of both signs."""
    rng, arrays = np.random.default_rng(3), {}
    for name, t in SCHEMES[scheme].array_types(shape).items():
        raw = rng.integers(0, 256, (*map(int, t.shape), t.dtype.itemsize), np.uint8).view(t.dtype)[..., 0]
        if name == "scales":
            raw = rng.uniform(-0.01, 0.01, raw.shape).astype(f"f{t.dtype.itemsize}").view(t.dtype)
        arrays[name] = jnp.asarray(raw)
    return PackedWeight(arrays, scheme, BF16, np.dtype(dtype))


def test_the_schemes_that_have_it() -> None:
    assert [s for s in sorted(SCHEMES) if has_tiles(s, (128, 1024), 9)] == WITH_TILES
    others: list[tuple[tuple[int, int], int]] = [((96, 1024), 9), ((128, 192), 9), ((128, 1024), 8), ((128, 1024), 129)]
    assert not any(has_tiles("gguf_q8_0", shape, rows) for shape, rows in others)


@pytest.mark.parametrize("scheme", WITH_TILES)
def test_a_product(scheme: str) -> None:
    """Equals the product with the decoded weight, whatever it was rounded to before."""
    for rows, shape, dtype in ((9, (64, 2048), np.float32), (33, (192, 1024), np.float16)):
        w, x = weight(scheme, shape, dtype), np.random.default_rng(rows).standard_normal((rows, shape[1])).astype(BF16)
        want = x.astype(np.float64) @ np.asarray(w.decode(), np.float64).T
        np.testing.assert_allclose(run(OP, jnp.asarray(x), w), want, rtol=0, atol=3e-6 * np.abs(want).max())


def test_gradients_and_weights_without_it() -> None:
    """Of a layer whose type is that of others: floats, and other schemes."""
    x = jnp.ones((9, 1024), BF16)
    for w in (jnp.ones((64, 1024), BF16), weight("gguf_q5_0", (64, 1024))):
        want = dequant_matmul("cuda", OP, x, w) if isinstance(w, PackedWeight) else OP.eval(x, w)
        np.testing.assert_array_equal(run(OP, x, w), want)
    w = weight("gguf_q8_0", (64, 1024))
    products = run, lambda op, x, w: op.eval(x, w.decode())
    got, want = (np.asarray(jax.grad(lambda x, f=f: (f(OP, x, w) ** 2).sum())(x), np.float32) for f in products)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-3)


def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx_jax.lowering.lir.kernels.running_device", lambda: DEVICES["h200"])
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    with without_triton_warning({(OP, ()): Choice("packed_tiles", "")}), use_abstract_mesh(h200):
        traced = jax.jit(lambda x, w: run(OP, x, w)).trace(jnp.ones((64, 2048), BF16), weight("gguf_q8_0", (128, 2048)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 1


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
