"""The gated delta rule of a prompt, grouped with the convolution before it: its kernels against the ops one by one."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.ir.graph import BodyInput, Builder, Graph, TypeCache
from rlx_jax.ir.hir.recurrent import CausalConv, GatedDelta
from rlx_jax.ir.kernel_group import DeltaGroup
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.ops.shape import SplitLast
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir.delta_chunks import run_convolved
from rlx_jax.lowering.lir.delta_groups import group_deltas
from tests.divided import recipe, weights
from tests.interpreter import interpreted, needs_mosaic

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
