"""Groups of the experts of one token with their selection: what joins them, and that the kernels compute the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from rlx_jax.ir.graph import BodyInput, Builder, Graph, Param, TypeCache
from rlx_jax.ir.hir import Route
from rlx_jax.ir.kernel_group import ExpertGroup
from rlx_jax.ir.ops.experts import ClampedGate, ExpertFfn
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.pointwise import Binary, CastTo
from rlx_jax.ir.param import Key
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir.expert_groups import find_expert, find_tilings, group_experts, run_experts
from rlx_jax.lowering.lir.expert_products import grouped, multiply_choices
from rlx_jax.lowering.lir.experts import blocked
from rlx_jax.lowering.lir.mosaic import run_kernel
from tests.interpreter import interpreted, needs_mosaic

EXPERTS, ROUTE = ExpertFfn(), Route(8)
BF16, F32 = as_dtype("bf16"), as_dtype("f32")


def mixture(
    op: ExpertFfn = EXPERTS, route: Route = ROUTE, experts: int = 128, inner: int = 128, rows: int = 1,
    hidden: int = 256, dtype: Any = BF16, residual: bool = True,
) -> Graph:  # fmt: skip
    """Return a router and the experts of a few tokens, with a residual sum."""
    b = Builder("mixture", TypeCache(), Origin(("block",)))
    logits = b.input("logits", TensorType((1, rows, experts), F32))
    x = b.input("x", TensorType((1, rows, hidden), dtype))
    bias = [b.input("bias", TensorType((experts,), F32))] if route.biased else []
    sizes = (inner, hidden) if op.contract else (hidden, inner)
    leaves = {"gate": sizes, "up": sizes, "down": sizes[::-1]}
    types = {name: TensorType((experts, *size), dtype) for name, size in leaves.items()}
    weights = [b.leaf(Param((Key(name, type=t),), type=t)) for name, t in types.items()]
    shares, ids = route.expand(b, logits, *bias)
    y = b(op, x, *weights, b(CastTo(dtype), shares), ids)
    return b.finish([b(Binary("add"), b.input("r", b.type(y)), y) if residual else y], ["y"])


def groups(graph: Graph) -> list[ExpertGroup]:
    types = TypeCache()
    grouped = verify(group_experts(graph, types), "mir", "group_experts", types)
    return [node.op for node in grouped.nodes if isinstance(node.op, ExpertGroup)]


def arrays(group: ExpertGroup) -> list[jax.Array]:
    rng, types = np.random.default_rng(0), [n.types[0] for n in group.body.nodes if isinstance(n.op, BodyInput)]
    drawn = [rng.normal(size=tuple(map(int, t.shape))) for t in types]
    drawn[0] = np.minimum(np.round(drawn[0] * 4) / 4, 0)  # with equal logits
    drawn[0][..., :2] = -0.0  # not selected, as there are enough +0
    return [jnp.asarray(a, t.dtype) for a, t in zip(drawn, types, strict=True)]


# Mixtures that are grouped.
CASES: dict[str, Any] = {
    "softmax over the chosen": {"route": Route(4)},
    "sigmoids, scaled": {"route": Route(2, "sigmoid", scale=2.5), "op": ExpertFfn("gelu_tanh"), "residual": False},
}  # fmt: skip


@needs_mosaic
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_the_ops(case: str) -> None:
    (group,) = groups(mixture(**CASES[case]))
    given = arrays(group)
    (found,), (want,) = interpreted(run_experts, group, *given), group.eval(*given)
    assert found.shape == want.shape and found.dtype == want.dtype
    got, right = (np.asarray(a, np.float32) for a in (found, want))
    assert np.abs(got - right).max() <= 0.02 * np.abs(right).max()


CLAMPED: dict[str, Any] = {"biased": True, "clamp": ClampedGate(1.3, 1.7, 0.6)}

# Tokens with 2 of 4 experts each, and the widths of experts, by rows of a block.
PRODUCTS: dict[str, tuple[int, tuple[int, int], ExpertFfn]] = {
    "16 rows, [in, out], biases": (16, (192, 64), ExpertFfn(contract=0, **CLAMPED)),
    "128 rows": (132, (128, 256), EXPERTS),
    "16 rows": (7, (64, 320), EXPERTS),
    "32 rows, biases": (30, (192, 128), ExpertFfn(**CLAMPED)),
    "64 rows": (80, (128, 128), ExpertFfn("gelu")),
    "64 rows, [in, out]": (63, (128, 192), ExpertFfn(contract=0)),
    "128 rows, [in, out], biases": (200, (64, 64), ExpertFfn("gelu_tanh", contract=0, **CLAMPED)),
    "128 rows, counted": (1030, (64, 64), EXPERTS),
}  # fmt: skip


def product_arrays(tokens: int, widths: tuple[int, int], op: ExpertFfn, dtype: Any = BF16) -> list[jax.Array]:
    """Return tokens of which expert 0 has all, expert 1 none, and experts 2 and 3 some, and 4 experts."""
    rng, (inner, hidden) = np.random.default_rng(0), widths
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    weights = [rng.normal(size=(4, *(size if op.contract else size[::-1]))) / size[1] ** 0.5 for size in sizes]
    x, *weights = (jnp.asarray(a, dtype) for a in (rng.normal(size=(tokens, hidden)), *weights))
    ids = np.stack([np.zeros(tokens, np.int32), np.where(np.arange(tokens) < 0.75 * tokens, 2, 3)], 1)
    biases = [jnp.asarray(rng.normal(size=(4, n)), F32) for n in (inner, inner, hidden)] if op.biased else []
    return [x, *weights, jnp.asarray(rng.uniform(0.1, 1, ids.shape), F32), jnp.asarray(ids, jnp.int32), *biases]


@needs_mosaic
@pytest.mark.parametrize(
    "case", [*list(PRODUCTS)[:2], *(pytest.param(c, marks=pytest.mark.slow) for c in list(PRODUCTS)[2:])]
)
def test_products_of_blocks_are_the_op(case: str) -> None:
    """Of experts with a full block, with less than half of one, and with none; their sums are not rounded."""
    tokens, widths, op = PRODUCTS[case]
    given = product_arrays(tokens, widths, op)
    found, want = (
        interpreted(multiply_choices, op, *given),
        op.eval(*(jnp.asarray(a, F32) if a.dtype == BF16 else a for a in given)),
    )
    got, right = (np.asarray(a, np.float32) for a in (found, want))
    assert found.dtype == BF16 and np.abs(got - right).max() <= 0.01 * np.abs(right).max()


def product_slopes(case: str, dtype: Any, run: Any) -> Any:
    tokens, widths, op = PRODUCTS[case]
    given = product_arrays(tokens, widths, op, dtype)
    floats = [i for i, a in enumerate(given) if jnp.issubdtype(a.dtype, jnp.floating)]
    return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.cos(run(op, *a).astype(F32))), floats))(*given)


def test_products_of_blocks_have_the_gradient_of_the_op() -> None:
    slopes = (product_slopes("16 rows, [in, out], biases", F32, run) for run in (blocked, ExpertFfn.eval))
    for got, want in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * float(jnp.abs(want).max()))


@needs_mosaic
def test_the_kernel_of_products_has_the_gradient_of_blocks() -> None:
    slopes = (product_slopes("16 rows, [in, out], biases", BF16, run) for run in (grouped, blocked))
    for got, want in zip(*slopes, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@needs_mosaic
@pytest.mark.parametrize("tokens", [1, 60, 1000])
def test_products_of_blocks_lower_for_a_gpu(tokens: int) -> None:
    """Of experts as gpt-oss has, of widths that tiles do not divide; the device's own instructions copy their rows."""
    op = ExpertFfn(contract=0, **CLAMPED)
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in product_arrays(tokens, (320, 448), op)]
    run: Any = jax.jit(lambda *a: multiply_choices(op, *a))
    with use_abstract_mesh(h200):
        assert run.trace(*given).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 2


# Logits of each kind; NaN has both signs.
LOGITS = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, np.inf, -np.inf, np.nan, -np.nan]


@needs_mosaic
@pytest.mark.parametrize("size", [128, 256])
def test_experts_are_in_the_order_of_the_op(size: int) -> None:
    logits = np.random.default_rng(0).choice(np.asarray(LOGITS, np.float32), size)

    def run(row: Any, interpret: Any = None) -> Any:
        def body(refs: Any) -> None:
            refs.ids[refs.choice] = find_expert(refs.logits, refs.choice)

        ids = {"ids": jax.ShapeDtypeStruct((size,), jnp.int32)}
        return run_kernel(body, {"logits": [row, row]}, ids, {}, {"choice": size}, interpret=interpret)[0]

    _, want = TopK(size).eval(jnp.asarray(logits))
    np.testing.assert_array_equal(interpreted(run, jnp.asarray(logits)), want)


@needs_mosaic
def test_a_logit_that_is_nan_is_selected() -> None:
    """As `TopK` does: otherwise results would be finite."""
    (group,) = groups(mixture(**CASES["softmax over the chosen"]))
    logits, *others = arrays(group)
    (found,) = interpreted(run_experts, group, logits.at[0, 0, 5].set(jnp.nan), *others)
    assert np.isnan(np.asarray(found, np.float32)).all()


@needs_mosaic
def test_the_kernels_lower_for_a_gpu() -> None:
    """Of the widths of a published model, whose layouts Mosaic has to find."""
    h200 = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "cuda"))
    (group,) = groups(mixture(inner=768, hidden=2048))
    given = [
        jax.ShapeDtypeStruct(n.types[0].shape, n.types[0].dtype)
        for n in group.body.nodes
        if isinstance(n.op, BodyInput)
    ]
    run: Any = jax.jit(lambda *a: run_experts(group, *a))
    with use_abstract_mesh(h200):
        assert run.trace(*given).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 2


# Mixtures that are not.
OTHERS: dict[str, Any] = {
    "two tokens": {"rows": 2}, "few experts": {"experts": 64}, "narrow experts": {"inner": 64},
    "weights [in, out]": {"op": ExpertFfn(contract=0)}, "biases of the router": {"route": Route(8, biased=True)},
    "float32": {"dtype": F32},
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_the_kernels_lack_stays_apart(case: str) -> None:
    assert not groups(mixture(**OTHERS[case]))


def test_tiles_are_of_one_expert() -> None:
    """Each program of the first kernel has rows of one expert, and each tile of the second one columns of one."""
    for count, inner, hidden in ((8, 768, 2048), (2, 14336, 4096), (6, 1408, 2048), (1, 128, 256)):
        tilings = find_tilings(count, inner, hidden)
        assert tilings is not None
        up, down = tilings
        assert up.programs % count == 0 and (up.rows // up.tile_rows) % up.programs == 0
        assert up.rows == count * inner and down.lines * down.width == count * inner
        assert (inner // down.width) % down.tile_lines == 0 and down.rows == hidden
