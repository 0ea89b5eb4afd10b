"""The rotation of the heads of a prompt, grouped with their norm: the kernel against the ops one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.pipeline import make_lir
from rlx_jax.ir.graph import BodyInput, Builder, Graph, TypeCache, Value
from rlx_jax.ir.kernel_group import HeadGroup
from rlx_jax.ir.ops.attention import RopeOp
from rlx_jax.ir.ops.control import run_body
from rlx_jax.ir.ops.reduce import RmsNormOp
from rlx_jax.ir.ops.shape import Reshape, SplitLast
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir import head_groups
from rlx_jax.lowering.lir.head_groups import group_heads, run_heads
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.runtime.program_key import ProgramKey
from tests.divided import recipe, weights
from tests.interpreter import interpreted, needs_mosaic

# Rows, tokens, query heads, key heads, their width; rows of the tables.
SIZES = {"wide": (2, 8, 4, 4, 128, 1), "narrow": (2, 8, 16, 8, 64, 2), "widest": (1, 8, 2, 1, 256, 1)}


def builder(types: list[tuple[Any, str]]) -> tuple[Builder, list[Value]]:
    """Return a builder with inputs of some shapes and dtypes."""
    b = Builder("heads", TypeCache())
    return b, [b(BodyInput(i, type=TensorType(s, as_dtype(d)))) for i, (s, d) in enumerate(types)]


def heads(
    sizes: tuple[int, ...], dtype: str = "bf16", norm: bool = True, style: str = "half", offset: float = 0.0,
    unread: int = 0,
) -> Graph:  # fmt: skip
    """Return the norm and the rotation of query and key, by tables with columns that are not read."""
    batch, tokens, queries, keys, width, table_rows = sizes
    widths = queries * width, keys * width, keys * width
    table = (table_rows, tokens, width // 2 + unread), "f32"
    types = [((batch, tokens, sum(widths)), dtype), ((width,), dtype), table, table]
    b, (x, gamma, *tables) = builder(types)
    results = []
    for part, size in zip(b.add(SplitLast(widths), x), widths[:2], strict=False):
        if norm:
            split = b(Reshape((batch, tokens, -1, width)), part)
            part = b(Reshape((batch, tokens, size)), b(RmsNormOp(1e-6, offset), split, gamma))
        results.append(b(RopeOp(width, width, style), part, *tables))
    return b.finish(results, ["query", "key"])


def normed(shape: tuple[int, ...], sizes: tuple[int, ...], again: tuple[int, ...] = ()) -> Graph:
    """Return the rotation of 2 x 8 tokens, normed as heads `[…, 128]` of the second part of an array, or its second."""
    table = (1, 8, 64), "f32"
    b, (x, gamma, *tables) = builder([(shape, "bf16"), ((128,), "bf16"), table, table])
    y = b(RmsNormOp(1e-6), b(Reshape((2, 8, -1, 128)), b.add(SplitLast(sizes), x)[1]), gamma)
    y = b(Reshape((2, 8, b.type(y).size // 16)), y)
    return b.finish([b(RopeOp(128, 128), b.add(SplitLast(again), y)[1] if again else y, *tables)], ["query"])


def grouped(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> Graph:
    monkeypatch.setattr(head_groups, "MIN_TOKENS", 8)
    monkeypatch.setattr(head_groups, "HALVES", (32, 64, 128))
    types = TypeCache()
    return verify(group_heads(graph, types), "mir", "group_heads", types)


def groups(graph: Graph) -> list[HeadGroup]:
    return [node.op for node in graph.nodes if isinstance(node.op, HeadGroup)]


def arrays(graph: Graph) -> list[jax.Array]:
    rng, types = np.random.default_rng(0), [n.types[0] for n in graph.nodes if isinstance(n.op, BodyInput)]
    return [jnp.asarray(rng.normal(size=tuple(map(int, t.shape))), t.dtype) for t in types]


@needs_mosaic
@pytest.mark.parametrize(("case", "offset"), [("wide", 0.0), ("narrow", 0.0), ("widest", 1.0)])
def test_the_kernel_is_the_ops(monkeypatch: pytest.MonkeyPatch, case: str, offset: float) -> None:
    graph = heads(SIZES[case], offset=offset)
    joined = grouped(monkeypatch, graph)
    assert len(groups(joined)) == (1 if case == "widest" else 2)  # one key head 256 wide is half of what a warp reads
    jax.tree.map(np.testing.assert_array_equal, *(run_body(g, arrays(graph)) for g in (graph, joined)))
    for group in groups(joined):
        assert arrays(group.body)[0].shape == arrays(graph)[0].shape  # heads are read where the product wrote them
        check(group)


def check(group: HeadGroup) -> None:
    """Check that the kernel has the results of the ops."""
    given = arrays(group.body)
    (got,), (want,) = interpreted(functools.partial(run_heads, group), *given), jax.jit(group.eval)(*given)
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


@needs_mosaic
@pytest.mark.parametrize("shape", [(16, 1024), (2, 8, 4, 256), (2, 32, 256)])
def test_an_array_of_any_shape_has_the_heads(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Of a split of all heads the kernel reads the whole array, of a split of each head the result."""
    (group,) = groups(grouped(monkeypatch, normed(shape, (shape[-1] // 2,) * 2)))
    assert arrays(group.body)[0].size == 2 * 8 * 4 * (256 if len(shape) == 2 else 128)
    check(group)


def test_heads_that_are_normed_elsewhere_than_they_are_split_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert groups(grouped(monkeypatch, normed((2, 8, 1024), (128, 768, 128), (128, 512, 128))))
    assert not groups(grouped(monkeypatch, normed((2, 8, 768), (64, 640, 64), (64, 512, 64))))


@needs_mosaic
def test_gradients_and_batches_are_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no number of the kernel."""
    group = groups(grouped(monkeypatch, heads(SIZES["wide"])))[1]
    x, *others = arrays(group.body)

    def no_numbers(row: Any, tokens: int, num_heads: int, *_: Any) -> jax.Array:
        return jnp.full((tokens, num_heads, row.n_rot), jnp.nan, jnp.bfloat16)

    monkeypatch.setattr(head_groups, "rotate_heads", no_numbers)
    for transform in (lambda run: jax.grad(lambda x: run(x).sum()), lambda run: lambda x: jax.vmap(run)(x[None])):
        got, want = (
            transform(lambda x, run=run: run(x, *others)[0].astype(jnp.float32))(x)
            for run in (functools.partial(IMPLEMENTATIONS["rotated"], group), group.eval)
        )
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "f32"}, {"norm": False}, {"style": "interleaved"}, {"sizes": (2, 6, 4, 4, 128, 1)}, {"unread": 1}],
)
def test_what_the_kernel_lacks_stays_apart(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert len(groups(grouped(monkeypatch, heads(SIZES["wide"])))) == 2
    assert not groups(grouped(monkeypatch, heads(**{"sizes": SIZES["wide"], **changes})))


@pytest.mark.usefixtures("with_kernels")
def test_the_report_of_a_prompt_names_the_kernel() -> None:
    """For query and key of each layer, but not for the last token's query alone."""
    changes = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    options = {"precision": {"compute": "bf16"}, "fusion": {"target": "h200"}}
    given = recipe("qwen3", **changes), weights("qwen3", *changes.items())
    with pytest.warns(rlx.errors.RlxWarning, match="the plan is for another device"):
        programs = rlx.CausalLM(*given, profile=rlx.CompileProfile().replace(**options)).model.programs
    template = programs.template(ProgramKey(given[0].assemble().name, "prefill", last_only=True))
    lines = make_lir(template, {s: 4 if s == "batch" else 256 for s in template.symbols}, programs.settings).attention()
    assert [line.partition(" (")[0].rpartition(": ")[2] for line in lines].count("rotated") == 3
