"""Products of one or two rows and packed or 16-bit weights on a CPU, beside float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.ir.packed_values import decode_arrays
from rlx_jax.lowering.lir.lanes import can_sum_lanes, lanes, packed_lanes
from rlx_jax.weights.module_tensors import declare_scheme
from tests.oracles.packed import meaning, packed, random_arrays

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
def test_which_products(asked: str, dtype: str, rows: int, width: int, found: str) -> None:
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
def test_a_model(rows: int, name: str) -> None:
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
