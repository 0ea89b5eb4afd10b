"""Products of few rows, with packed and 16-bit weights too, and rotations that are merged: the same as their `eval`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.packed_values import decode_arrays
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.lanes import can_sum_lanes, lanes, packed_lanes
from rlx_jax.models.llama import Llama32Flow
from rlx_jax.weights.module_tensors import declare_scheme
from tests import small
from tests.oracles.packed import meaning, packed, random_arrays

CONFIG = small.TIED_LLAMA | {"head_dim": 8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_one_row_as_a_sum(dtype: str, wide: bool) -> None:
    """Against NumPy in float64, with a bias and an activation too."""
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((1, 1, 40), (24, 40), (24,)))
    y = np.asarray(x, np.float64)[0] @ np.asarray(w, np.float64).T
    unit = 2.0**-22 if wide or dtype == "float32" else 2.0**-8
    plain = IMPLEMENTATIONS["row"](MatMul(1, f32_result=wide), x, w)
    assert plain.shape == (1, 1, 24) and plain.dtype == (jnp.float32 if wide else dtype)
    np.testing.assert_allclose(np.asarray(plain, np.float64)[0], y, atol=float(np.abs(y).max()) * unit)
    if not wide:
        biased = IMPLEMENTATIONS["row"](FusedMatMulBiasAct(1, "tanh"), x, w, b)
        np.testing.assert_allclose(
            np.asarray(biased, np.float64)[0], np.tanh(y + np.asarray(b, np.float64)), atol=8 * unit * np.abs(y).max()
        )


@pytest.mark.parametrize(("batch", "tokens", "target", "products"), [
    (1, 1, "cuda", 0), (2, 1, "cuda", 9), (1, 2, "cuda", 9), (1, 1, "cpu", 9),
])  # fmt: skip
def test_which_products(batch: int, tokens: int, target: str, products: int) -> None:
    """4 products in each of 2 layers, and the head; each attention has two more, between what is computed."""
    profile = rlx.CompileProfile().replace(
        fusion={"target": target}, backend={target: {"merge": True}}, attention={"implementation": "xla"}
    )
    model = rlx.compile(Llama32Flow.for_prefill(CONFIG), profile=profile, program="extend")
    state = jax.eval_shape(lambda: model.init_state(batch, 16))
    ids, lengths = jax.ShapeDtypeStruct((batch, tokens), jnp.int32), np.ones(batch, np.int32)
    traced = jax.jit(lambda p, i, s: model.apply(p, i, lengths, state=s)).trace(model.param_specs(), ids, state)
    text = str(traced.lower(lowering_platforms=(target,)).as_text())
    assert text.count("stablehlo.dot_general") - 2 * 2 == products


def test_rotations_of_one_product_are_one() -> None:
    """A program that extends turns q and k together where one product makes both; the numbers are the same."""
    weights = rlx.compile(Llama32Flow.for_prefill(CONFIG)).init(jax.random.key(0))
    keys = rlx.compile(Llama32Flow.for_prefill(CONFIG)).weights(weights)
    ids, lengths = np.array([[3, 1, 30], [7, 7, 2]], np.int32), np.array([3, 2], np.int32)
    profile = rlx.CompileProfile().replace(backend={"cpu": {"merge": True}})
    assert rlx.compile(Llama32Flow.for_prefill(CONFIG), keys, profile=profile).text("mir").count("= rope(") == 2
    found = []
    for policy in ("direct", "fusable"):
        merged = profile.replace(fusion={"policy": policy})
        model = rlx.compile(Llama32Flow.for_prefill(CONFIG), keys, profile=merged, program="extend")
        text = model.text("mir")
        assert text.count("= rope(") == 1 and "rope(d=8, n_rot=8)" in text and "f32[batch,seq,48]" in text
        found.append(model(ids, lengths=lengths, state=model.init_state(2, 8))[0])
    apart = rlx.compile(Llama32Flow.for_prefill(CONFIG), keys, program="extend")
    assert apart.text("mir").count("= rope(") == 2
    expected, _ = apart(ids, lengths=lengths, state=apart.init_state(2, 8))
    for logits in found:
        for row, valid in enumerate(lengths):
            np.testing.assert_allclose(logits[row, :valid], expected[row, :valid], atol=2e-6)


ROW = declare_scheme("int8", 8, None, "f16").name  # one scale for a row
NAMES = ("gguf_q4_0", "gguf_q4_1", "gguf_q8_0", "gguf_q2k", "gguf_q3k", "gguf_q4k", "gguf_q5k", "gguf_q6k", "gguf_q8k")
FLOATS = {"f32": jnp.float32, "bf16": jnp.bfloat16}


CASES: list[Any] = [
    (scheme, 2, 768, "f32", "f32") for scheme in (*NAMES, "int8/32", "int8/128", "int4/32", "int4/128", ROW)
]
CASES += [("gguf_q4k", 1, 256, "bf16", "f32"), ("gguf_q6k", 1, 2304, "f32", "bf16")]
CASES += [pytest.param(scheme, 1, 256, "bf16", "f32", marks=pytest.mark.slow) for scheme in ("int8/128", ROW)]
CASES += [pytest.param(scheme, 1, 2304, "f32", "bf16", marks=pytest.mark.slow) for scheme in ("int4/128", ROW)]


@pytest.mark.parametrize("scheme, rows, width, logical, compute", CASES)
def test_a_product(scheme: str, rows: int, width: int, logical: str, compute: str) -> None:
    """Values are rounded to the dtype of the checkpoint and to that of the program before the sum."""
    assert can_sum_lanes(scheme, width)
    arrays, dtypes = random_arrays(scheme, (5, width), np.random.default_rng(0)), (FLOATS[logical], FLOATS[compute])
    x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    y = jax.jit(lambda x, arrays: packed_lanes(x, arrays, scheme, dtypes))(x, arrays)
    values = jax.jit(lambda arrays: decode_arrays(arrays, scheme).astype(dtypes[0]).astype(dtypes[1]))(arrays)
    values = np.asarray(values, np.float64)
    assert np.abs(y - x @ values.T).max() <= 2e-6 * (np.abs(x) @ np.abs(values).T).max()


@pytest.mark.parametrize("rows, width, dtype", [(1, 576, "bfloat16"), (2, 2048, "bfloat16"), (2, 736, "float16")])
def test_a_product_with_16_bits(rows: int, width: int, dtype: str) -> None:
    """By one chunk, several, and as many as there are terms; with the gradients of a plain product."""
    random = np.random.default_rng(0)
    x, w = random.standard_normal((rows, width)).astype(np.float32), jnp.asarray(random.normal(size=(7, width)), dtype)
    values = np.asarray(w, np.float64)
    atol = 2e-6 * (np.abs(x) @ np.abs(values).T).max()
    np.testing.assert_allclose(jax.jit(lanes)(x, w), x @ values.T, rtol=0, atol=atol)
    gradient = jax.jit(jax.grad(lambda x: lanes(x, w).sum()))(x)
    np.testing.assert_allclose(gradient, np.broadcast_to(values.sum(0), x.shape), rtol=0, atol=atol)


@pytest.mark.parametrize("asked, dtype, rows, width, found", [
    ("auto", "bf16", 1, 256, "lanes"), ("auto", "bf16", 2, 256, "lanes"), ("auto", "bf16", 3, 256, "xla"),
    ("xla", "bf16", 1, 256, "xla"), ("auto", "f32", 1, 256, "xla"), ("row", "f32", 1, 256, "row"),
    ("row", "bf16", 1, 256, "lanes"), ("auto", "bf16", 1, 736, "xla"), ("row", "bf16", 1, 736, "row"),
])  # fmt: skip
def test_which_products_of_a_layer(asked: str, dtype: str, rows: int, width: int, found: str) -> None:
    """Few rows and a large weight of 16 bits that has chunks of many terms; `xla` is honoured."""
    profile = rlx.CompileProfile().replace(
        precision={"compute": dtype, "weights": dtype}, backend={"cpu": {"products": asked}}
    )
    weight = np.random.default_rng(0).standard_normal((256, width)).astype(np.float32)
    model = rlx.compile(rlx.ModelFlow("m").input("x", ("batch", width)).linear("w"), {"w": weight}, profile=profile)
    x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(model(x), np.float64), x @ weight.T.astype(np.float64), atol=1.0)
    assert model.report().products[0].startswith(f"1 by {found}")


def test_others_are_decoded_by_tiles() -> None:
    """Tables, scales of several rows, single bits that lie apart, and rows that end within a group."""
    blocks = declare_scheme("fp8_e4m3", 8, 128, "f32", table="e4m3", rows=128).name
    for scheme, width in (("gguf_iq4_nl", 256), ("gguf_q5_0", 256), (blocks, 256), ("int8/128", 320)):
        assert not can_sum_lanes(scheme, width)


@pytest.mark.parametrize("rows, name", [pytest.param(1, "fused", marks=pytest.mark.slow), (2, "fused"), (3, "tiles")])
def test_packed_rows_of_a_model(rows: int, name: str) -> None:
    """Rows of x decide; the report names the choice; gradients of x and rows by `vmap` are those of decoded weights."""
    weight = packed("gguf_q8_0", (64, 64), 3)
    flow = rlx.ModelFlow("m").input("x", ("batch", 64)).linear("w")
    model = rlx.compile(flow, {"w": weight})
    x = np.random.default_rng(2).standard_normal((rows, 64)).astype(np.float32)
    values = meaning(weight).astype(np.float64)
    atol = 1e-6 * (np.abs(x) @ np.abs(values).T).max()
    np.testing.assert_allclose(model(x), x @ values.T, rtol=0, atol=atol)
    assert model.report().products[0].startswith(f"1 by {name}")

    assert model.params is not None
    params = model.params

    def total(x: Any) -> Any:
        return model.apply(params, x).sum()

    gradient = jax.grad(total)(jnp.asarray(x))
    np.testing.assert_allclose(gradient, np.broadcast_to(values.sum(0), x.shape), rtol=0, atol=atol)
    mapped = jax.vmap(lambda row: model.apply(params, row[None])[0])(jnp.asarray(x))
    np.testing.assert_allclose(mapped, x @ values.T, rtol=0, atol=atol)
