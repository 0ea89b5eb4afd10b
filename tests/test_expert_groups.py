"""Groups of the experts of one token with their selection: what joins them, and that the kernels compute the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx_jax.ir.graph import BodyInput, Builder, Graph, Param, TypeCache
from rlx_jax.ir.hir import Route
from rlx_jax.ir.kernel_group import ExpertGroup
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.pointwise import CastTo
from rlx_jax.ir.param import Key
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir.expert_groups import group_experts, run_experts
from rlx_jax.lowering.lir.implementations import has_mosaic

needs_mosaic = pytest.mark.skipif(not has_mosaic(), reason="the kernel needs jax 0.11")

EXPERTS, ROUTE = ExpertFfn(), Route(8)
BF16, F32 = as_dtype("bf16"), as_dtype("f32")


def mixture(
    op: ExpertFfn = EXPERTS, route: Route = ROUTE, experts: int = 128, inner: int = 128, rows: int = 1
) -> Graph:
    """Return a router and the experts of a few tokens."""
    b, hidden = Builder("mixture", TypeCache(), Origin(("block",))), 256
    logits, x = (
        b.input("logits", TensorType((1, rows, experts), F32)),
        b.input("x", TensorType((1, rows, hidden), BF16)),
    )
    wide, narrow = (TensorType((experts, *sizes), BF16) for sizes in ((inner, hidden), (hidden, inner)))
    leaves = {"gate": wide, "up": wide, "down": narrow}
    gate, up, down = (b.leaf(Param((Key(n, type=t),), type=t)) for n, t in leaves.items())
    shares, ids = route.expand(b, logits)
    return b.finish([b(op, x, gate, up, down, b(CastTo(BF16), shares), ids)], ["y"])


def groups(graph: Graph) -> list[ExpertGroup]:
    types = TypeCache()
    grouped = verify(group_experts(graph, types), "mir", "group_experts", types)
    return [node.op for node in grouped.nodes if isinstance(node.op, ExpertGroup)]


def arrays(group: ExpertGroup) -> list[jax.Array]:
    rng, types = np.random.default_rng(0), [n.types[0] for n in group.body.nodes if isinstance(n.op, BodyInput)]
    drawn = [rng.normal(size=tuple(map(int, t.shape))) for t in types]
    drawn[0] = np.round(drawn[0] * 4) / 4  # with equal logits
    return [jnp.asarray(a, t.dtype) for a, t in zip(drawn, types, strict=True)]


CASES: dict[str, Any] = {
    "softmax over the chosen": {},
    "sigmoids, scaled": {"route": Route(2, "sigmoid", scale=2.5), "op": ExpertFfn("gelu_tanh")},
}  # fmt: skip


@needs_mosaic
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_are_the_ops(case: str) -> None:
    from jax.experimental.pallas import mosaic_gpu

    pallas: Any = mosaic_gpu  # jax 0.10 has no such parameters
    (group,) = groups(mixture(**CASES[case]))
    given = arrays(group)
    (found,), (want,) = run_experts(group, *given, interpret=pallas.InterpretGPUParams()), group.eval(*given)
    assert found.shape == want.shape and found.dtype == want.dtype
    got, right = (np.asarray(a, np.float32) for a in (found, want))
    assert np.abs(got - right).max() <= 0.02 * np.abs(right).max()
