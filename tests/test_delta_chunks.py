"""The kernel of the gated delta rule of a prompt, in Mosaic's interpreter against the recurrence in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from rlx_jax.device import DEVICES
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.lowering.lir.delta_chunks import run_chunks, states_in_one
from rlx_jax.lowering.lir.recurrent import choose, chunks_at_once
from tests.interpreter import interpreted, needs_mosaic
from tests.test_recurrences import delta_case, distance, transcript

RULE = GatedDeltaOp(from_state=True)
CASES: dict[str, tuple[GatedDeltaOp, tuple[int, ...], dict[str, Any]]] = {
    "three chunks": (RULE, (1, 131, 1, 64, 2, 128), {}),
    "keys that are nearly one": (RULE, (2, 150, 2, 128, 2, 64), {"alike": 0.95}),
    "fewer tokens than a chunk, from zeros": (GatedDeltaOp(0.7), (1, 20, 1, 64, 1, 64), {}),
    "tokens that erase the state": (RULE, (1, 70, 1, 64, 1, 64), {"erases": True}),
    "five chunks": (RULE, (1, 320, 1, 128, 3, 128), {"seed": 1}),
}


def case_arrays(case: str, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    op, sizes, options = CASES[case]
    made = delta_case(sizes, **options)[: 5 + op.from_state]
    return [jnp.asarray(a, dtype if n < 3 else jnp.float32) for n, a in enumerate(made)]


def wide(arrays: list[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(a.astype(jnp.float32), np.float64) for a in arrays]


@needs_mosaic
@pytest.mark.parametrize("case", [c if c == "three chunks" else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_kernel_is_the_recurrence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest error is at most a little more than the form's without kernels, of the same numbers in bf16."""
    if case == "three chunks":  # as with many states
        monkeypatch.setattr("rlx_jax.lowering.lir.delta_chunks.MULTIPROCESSORS", 1)
    op, arrays = CASES[case][0], case_arrays(case)
    found, others = interpreted(run_chunks, op, *arrays), jax.jit(lambda *a: chunks_at_once(op, *a))(*arrays)
    for one, other, want in zip(found, others, transcript(op, wide(arrays)), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        errors = [distance(a.astype(jnp.float32), want) for a in (one, other)]
        assert errors[0] <= 1.5 * errors[1] <= 0.03, errors


@needs_mosaic
@pytest.mark.slow
def test_the_kernel_in_float16() -> None:
    arrays = case_arrays("three chunks", jnp.float16)
    found = interpreted(run_chunks, RULE, *arrays)
    for one, want in zip(found, transcript(RULE, wide(arrays)), strict=True):
        assert distance(one.astype(jnp.float32), want) <= 2e-3


@pytest.mark.parametrize(
    ("width", "dtype", "want"), [(32, "bf16", "heads are 32 wide"), (64, "f32", "values are f32"), (64, "f16", "")]
)
def test_a_rule_without_the_kernel_says_why(width: int, dtype: str, want: str) -> None:
    types = [TensorType(a.shape, as_dtype(dtype)) for a in delta_case((1, 70, 1, width, 1, width))]
    choice = choose((RULE, tuple(types)), DEVICES["h200"], kernels=True)
    assert choice is not None and choice.implementation == ("chunks_at_once" if want else "states_in_one")
    assert want in choice.reason and ("no kernel" in choice.reason) == bool(want)


@needs_mosaic
def test_the_kernel_lowers_for_a_gpu() -> None:
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    with use_abstract_mesh(h200):
        traced = jax.jit(lambda *a: states_in_one(RULE, *a)).trace(*case_arrays("three chunks"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


def test_the_kernel_has_the_gradient_of_the_form_without_it() -> None:
    arrays = case_arrays("three chunks")

    def slopes(run: Any) -> Any:
        return jax.jit(
            jax.grad(lambda *a: sum(jnp.sum(jnp.cos(r.astype(jnp.float32))) for r in run(RULE, *a)), range(6))
        )(*arrays)

    for got, want in zip(slopes(states_in_one), slopes(chunks_at_once), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
