"""The kernels of the gated delta rule of a prompt, in Mosaic's interpreter: alone, and grouped with its convolution."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import rlx_jax as rlx
from rlx_jax.device import DEVICES
from rlx_jax.ir.graph import BodyInput, Builder, Graph, TypeCache
from rlx_jax.ir.hir.recurrent import CausalConv, GatedDelta
from rlx_jax.ir.kernel_group import DeltaGroup
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir.delta_chunks import run_chunks, run_convolved, states_in_one
from rlx_jax.lowering.lir.delta_groups import group_deltas
from rlx_jax.lowering.lir.recurrent import choose, chunks_at_once
from tests.divided import recipe, weights
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


@needs_mosaic
def test_the_kernel_has_the_gradient_of_the_form_without_it() -> None:
    arrays = case_arrays("three chunks")

    def slopes(run: Any) -> Any:
        return jax.jit(
            jax.grad(lambda *a: sum(jnp.sum(jnp.cos(r.astype(jnp.float32))) for r in run(RULE, *a)), range(6))
        )(*arrays)

    for got, want in zip(slopes(states_in_one), slopes(chunks_at_once), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# Rows, tokens, key heads and their width, value heads and their width.
SIZES = {"three chunks": (1, 131, 1, 128, 2, 64), "fewer tokens than a chunk": (1, 20, 1, 64, 2, 128)}


def mixer(
    sizes: tuple[int, ...], dtype: str = "bf16", activation: str = "silu", unit: float | None = 1e-6, rest: int = 24
) -> Graph:
    """Return the ops of a mixer after its projection, which has `rest` more columns."""
    batch, tokens, key_heads, keys, heads, values = sizes
    widths = (key_heads * keys, key_heads * keys, heads * values)
    shapes = ((batch, tokens, sum(widths) + rest), (sum(widths), 4), *((batch, tokens, heads),) * 2)
    b = Builder("mixer", TypeCache())
    projected, window, g, beta = (
        b(BodyInput(i, type=TensorType(shape, as_dtype(of))))
        for i, (shape, of) in enumerate(zip(shapes, (dtype, dtype, "f32", dtype), strict=True))
    )
    mixed = b.add(SplitLast((sum(widths), rest)), projected)[0] if rest else projected
    (convolved,) = CausalConv().expand_from(b, (mixed, window)).results
    q, k, v = b.add(SplitLast(widths), b(Unary(activation), convolved))
    run = GatedDelta(key_heads, heads, unit=unit).expand_from(b, (q, k, v, g, beta))
    return b.finish([*run.results, *run.final_state], ["y", "state"])


def groups(graph: Graph) -> list[DeltaGroup]:
    types = TypeCache()
    grouped = verify(group_deltas(graph, types), "mir", "group_deltas", types)
    return [node.op for node in grouped.nodes if isinstance(node.op, DeltaGroup)]


def arrays(sizes: tuple[int, ...], group: DeltaGroup) -> list[jax.Array]:
    rng, types = np.random.default_rng(0), [n.types[0] for n in group.body.nodes if isinstance(n.op, BodyInput)]
    drawn = [rng.normal(size=tuple(map(int, t.shape))) for t in types]
    drawn[2:] = -0.3 * np.abs(drawn[2]), np.clip(np.abs(drawn[3]), 0, 1)
    return [jnp.asarray(a, t.dtype) for a, t in zip(drawn, types, strict=True)]


OTHERS = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("three chunks", 0), ("fewer tokens than a chunk", 24), ("fewer tokens than a chunk", 0))
]


@needs_mosaic
@pytest.mark.parametrize(("case", "rest"), [("three chunks", 24), *OTHERS])
def test_the_kernels_are_the_ops(case: str, rest: int) -> None:
    (group,) = groups(mixer(SIZES[case], rest=rest))
    given = arrays(SIZES[case], group)
    got = interpreted(functools.partial(run_convolved, group), *given)
    for one, other in zip(got, jax.jit(group.eval)(*given), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.abs(one - other).max() <= 0.02 * np.abs(other).max()


@pytest.mark.usefixtures("with_kernels")
def test_switching_the_pass_off_has_an_effect() -> None:
    fusion = {"target": "h200", "disable": ["group_deltas"]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rlx.CausalLM(recipe("qwen35"), weights("qwen35"), profile=rlx.CompileProfile().replace(fusion=fusion))
    assert not [w for w in caught if "no effect" in str(w.message)]


@pytest.mark.parametrize("changes", [{"dtype": "f32"}, {"activation": "gelu"}, {"unit": None}, {"rest": 20}])
def test_what_the_kernels_lack_stays_apart(changes: dict[str, Any]) -> None:
    assert not groups(mixer(SIZES["three chunks"], **changes))
