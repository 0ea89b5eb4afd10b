"""Products that do not run as their `eval`, and rotations that are merged, mean the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.ir.ops.fused import FusedMatMulBiasAct
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.models.llama import Llama32Flow
from tests import small

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
