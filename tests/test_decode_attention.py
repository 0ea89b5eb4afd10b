"""Groups of the attention of one new token: which attentions have one, that it computes the same, its kernel."""

import functools
import importlib
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx_jax.ir.graph import Builder, Graph, Node, TypeCache, Value
from rlx_jax.ir.kernel_group import AttentionGroup, KernelGroup
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.cache import CacheUpdate, RingStep
from rlx_jax.ir.ops.reduce import RmsNormOp, Standardize
from rlx_jax.ir.ops.shape import Reshape, SplitLast
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir.attention_groups import group_attention, is_head_op, run_attention
from rlx_jax.lowering.lir.attention_step import divide
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lir.matvec import MULTIPROCESSORS
from tests.interpreter import interpreted, needs_mosaic
from tests.test_product_groups import check_same_results, decode_step, plan_of

I32, F32, BF16 = (as_dtype(name) for name in ("i32", "f32", "bf16"))


@dataclass(frozen=True)
class Case:
    """An attention of one new token; the fields are those of `AttentionOp`, and the ops around it.

    Attributes:
        keys: slots of the cache.
        ring: whether it is a ring.
        norm: whether each head of query and key has a norm.
        n_rot: rotated columns.
    """

    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    keys: int = 112
    ring: bool = False
    norm: bool = False
    n_rot: int = 64
    style: str = "half"
    sinks: bool = False
    window: int | None = None
    softcap: float | None = None
    precision: str = "default"
    returns: str = "context"
    batch: int = 1
    dtype: Any = BF16


def graph_of(case: Case) -> Graph:
    """Return the ops between the product of query, key and value and the attention, with inputs for their operands."""
    c, b = case, Builder("attention", TypeCache(), Origin(("attention",)))
    sizes = (c.heads * c.width, c.kv_heads * c.width, c.kv_heads * c.width)
    cache = TensorType((c.batch, c.keys, c.kv_heads, c.width), c.dtype)
    row = b.input("row", TensorType((c.batch, 1, sum(sizes)), c.dtype))
    keys, values = (b.input(name, cache) for name in ("keys", "values"))
    start, lengths = (b.input(name, TensorType((c.batch,), I32)) for name in ("start", "lengths"))
    positions = b.input("positions", TensorType((c.batch, 1), I32))
    tables = [b.input(name, TensorType((c.batch, 1, c.n_rot // 2), F32)) for name in ("cos", "sin")]
    gamma = b.input("gamma", TensorType((c.width,), c.dtype))
    sinks = b.input("sinks", TensorType((c.heads,), c.dtype))
    q, k, v = b.add(SplitLast(sizes), row)

    def heads(x: Value, size: int) -> Value:
        if c.norm:
            split = b(Reshape((c.batch, 1, -1, c.width)), x)
            x = b(Reshape((c.batch, 1, size)), b(RmsNormOp(1e-6), split, gamma))
        return b(RopeOp(c.width, c.n_rot, c.style), x, *tables) if c.n_rot else x

    q, k = heads(q, sizes[0]), heads(k, sizes[1])
    update = RingStep(c.window) if c.ring else CacheUpdate()
    rows = [b(Reshape((c.batch, 1, c.kv_heads, c.width)), x) for x in (k, v)]
    written = [b.add(update, x, new, start, lengths) for x, new in zip((keys, values), rows, strict=True)]
    flat = [b(Reshape((c.batch, c.keys, -1)), w[0]) for w in written]
    extra = {"sinks": sinks} if c.sinks else {}
    extra |= {"positions": positions} | ({"key_positions": written[0][1]} if c.ring else {})
    op = AttentionOp(
        c.heads, c.kv_heads, True, c.window, softcap=c.softcap, extra=tuple(extra), precision=c.precision,
        returns=c.returns,
    )  # fmt: skip
    out = b(op, q, *flat, *extra.values())
    return b.finish([out, *(w[-1] for w in written)], ["context", "keys", "values"])


def group_of(graph: Graph) -> Node | None:
    """Return the group of a graph after the pass, if it has one."""
    types = TypeCache()
    grouped = verify(group_attention(graph, types), "mir", "group_attention", types)
    return next((node for node in grouped.nodes if isinstance(node.op, AttentionGroup)), None)


def operands_of(graph: Graph, group: Node, start: int, length: int) -> list[Any]:
    """Return random operands of a group, for a step after `start` tokens."""
    rng = np.random.default_rng(start)
    inputs = {i.input: i.type for i in graph.inputs}
    starts, lengths = (np.full(inputs[name].shape, n, np.int32) for name, n in (("start", start), ("lengths", length)))
    starts[1:] //= 3  # rows differ
    lengths[2:] = 1 - length
    numbers = {"start": starts, "lengths": lengths, "positions": (starts + np.maximum(lengths, 1) - 1)[:, None]}
    types = TypeCache()
    grouped = group_attention(graph, types)
    names = [grouped.nodes[v.node].op.input for v in group.inputs]  # type: ignore[attr-defined]
    shapes = [tuple(map(int, inputs[name].shape)) for name in names]
    return [
        jnp.asarray(numbers[name]) if name in numbers else jnp.asarray(rng.normal(size=shape), inputs[name].dtype)
        for name, shape in zip(names, shapes, strict=True)
    ]


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_groups_of_a_decode_step(name: str) -> None:
    """Every attention is in a group, of repeated layers too, and the grouped program computes the same."""
    lir, model = decode_step(name, 80, 4)
    types = TypeCache()
    grouped = verify(group_attention(lir.graph, types), "mir", "group_attention", types)
    groups = [node for _, node in grouped.walk() if isinstance(node.op, AttentionGroup)]
    assert len(groups) == sum(isinstance(node.op, AttentionOp) for _, node in lir.graph.walk())
    assert not any(isinstance(node.op, CacheUpdate | RingStep) for node in grouped.nodes)
    check_same_results(lir, grouped, model)


WITHOUT: dict[str, Case] = {
    "heads 96 wide": Case(width=96), "fewer keys than a block": Case(keys=24),
    "keys that warps do not divide": Case(keys=100), "a long cache": Case(width=256, keys=4128),
    "65 rows": Case(batch=65), "a long cache of 2 rows": Case(width=256, batch=2, keys=2056),
    "many rows of a long cache": Case(batch=9, keys=2112), "many rows, 8 heads of a key head": Case(8, 1, batch=9),
    "f32": Case(dtype=F32), "pinned products": Case(precision="highest"), "weights returned": Case(returns="probs"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*WITHOUT, "a group"])
def test_attentions_without_a_group(case: str) -> None:
    """Each for one reason; without it there is a group."""
    assert (group_of(graph_of(WITHOUT.get(case, Case()))) is None) == (case in WITHOUT)


def test_ops_that_the_kernel_lacks_stay_before_it() -> None:
    """A rotation of neighbouring columns runs before the group, which begins with its result."""
    group = group_of(graph_of(Case(style="interleaved")))
    assert group is not None and isinstance(group.op, AttentionGroup)
    assert "rope" not in group.op.text() and "attention" in group.op.text()
    b = Builder("norms", TypeCache(), Origin(("attention",)))
    x = b.input("x", TensorType((1, 1, 4, 64), BF16))
    norms = [b(Standardize(axes, 1e-6), x) for axes in ((3,), (2, 3))]  # the second one is of all heads together
    graph = b.finish(norms, ["one", "all"])
    assert [is_head_op(graph, graph.nodes[v.node], 64) for v in norms] == [True, False]


@pytest.mark.filterwarnings("ignore:.*the plan is for another device", "ignore:.*has no effect")
def test_a_profile_that_chooses_attention_or_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named implementation of attention is used; products by XLA leave attention grouped; 8 rows group both.

    64 rows group attention alone.
    """
    kinds: list[set[type[Any]]] = []
    cases: list[dict[str, Any]] = [
        {"attention": {"implementation": "xla"}}, {"backend": {"cuda": {"products": "xla"}}}, {}, {"batch": 8},
        {"batch": 64},
    ]  # fmt: skip
    for fields in cases:
        lir = plan_of(monkeypatch, context=64, **fields)
        kinds.append({type(node.op) for node in lir.graph.nodes} & {AttentionGroup, KernelGroup})
        assert any("decode_attention" in line for line in lir.attention()) == (AttentionGroup in kinds[-1])
    assert kinds == [
        {KernelGroup},
        {AttentionGroup},
        {AttentionGroup, KernelGroup},
        {AttentionGroup, KernelGroup},
        {AttentionGroup},
    ]


CASES: dict[str, Case] = {
    "ring": Case(keys=64, ring=True, window=50, norm=True, n_rot=32, sinks=True, softcap=3.0),
    "two rows": Case(batch=2, n_rot=32, norm=True), "32 wide": Case(2, 1, 32, batch=3, n_rot=32, norm=True),
    "eight heads": Case(8, 1, keys=144, batch=2, window=70, n_rot=0), "six heads": Case(6, 1, keys=208, batch=2),
    "rings": Case(keys=80, batch=3, ring=True, window=50, sinks=True, softcap=3.0),
    "cache": Case(), "window": Case(window=9, norm=True), "128 wide": Case(width=128, n_rot=128, heads=8),
    "256 wide": Case(width=256, n_rot=64, heads=2, kv_heads=1, window=20), "long": Case(2, 1, keys=2112, sinks=True),
    "long rows": Case(8, 2, keys=2112, batch=2),
    "ring without a new token": Case(keys=64, ring=True, window=50),
}  # fmt: skip


SHORT = {"ring": 1, "two rows": 1}  # cases of the short suite: how many steps of each
STEPS = {"cache": 4, "window": 4} | SHORT


@needs_mosaic
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.slow) for n in CASES])
def test_the_kernel_computes_the_same(name: str) -> None:
    """In the interpreter: for a full cache, a ring that wrapped, a row without a new token, and an empty cache."""
    check_kernel(CASES[name], STEPS.get(name, 2))


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3, 4])
def test_programs_that_share_a_long_cache(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of over 2,048 slots, with as many multiprocessors as programs."""
    monkeypatch.setattr("rlx_jax.lowering.lir.attention_step.MULTIPROCESSORS", splits)
    assert divide(1, 2, 1, 64, CASES["long"].keys) == (2, splits, 4)
    check_kernel(CASES["long"], 2)


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "two rows", "128 wide", "eight heads"])
@pytest.mark.parametrize("groups", [1, 2])
def test_programs_of_fewer_warpgroups(name: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for many rows, where several programs run on a multiprocessor."""
    case = CASES[name]
    programs = case.batch * case.kv_heads * (2 if name == "128 wide" else 1)
    monkeypatch.setattr("rlx_jax.lowering.lir.attention_step.MULTIPROCESSORS", programs * groups // 4)
    assert divide(case.batch, case.heads, case.kv_heads, case.width, case.keys)[2] == groups
    check_kernel(case, 2)


def check_kernel(case: Case, num_steps: int) -> None:
    """Compare the kernel in the interpreter with the ops of its group."""
    graph = graph_of(case)
    group = group_of(graph)
    assert group is not None and isinstance(group.op, AttentionGroup)
    kernel = jax.jit(functools.partial(run_attention, group.op), static_argnames="interpret")
    last = 3 * case.keys + 5 if case.ring else case.keys - 1
    for start, length in ((last, 1), (9, 0), (0, 1), (33, 1))[:num_steps]:
        operands = operands_of(graph, group, start, length)
        want, got = group.op.eval(*operands), interpreted(kernel, *operands)
        np.testing.assert_allclose(got[0].astype(np.float32), want[0].astype(np.float32), atol=0.02)
        jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])


def test_each_head_has_a_program() -> None:
    """The heads of a program share a key head, of which 135M has three query heads each.

    Each multiprocessor runs one program at a time, or registers suffice for several with fewer warpgroups.
    """
    sizes = itertools.product((1, 2, 8, 64), (4, 8, 9, 12), (1, 2, 3, 4), (64, 256), (64, 9000))
    for rows, heads, kv_heads, width, keys in sizes:
        at_once, splits, groups = divide(rows, heads, kv_heads, width, keys)
        assert splits and (heads % kv_heads or heads // kv_heads % at_once == 0)
        programs = rows * heads // at_once * splits
        assert programs <= MULTIPROCESSORS or (rows == 64 and splits == 1)
        assert groups == 1 or programs * groups <= 4 * MULTIPROCESSORS


PUBLISHED = {
    "Llama 1B": Case(32, 8, 64, 1152), "Qwen3-0.6B": Case(16, 8, 128, 1152, norm=True, n_rot=128),
    "Gemma 3 1B": Case(4, 1, 256, 512, ring=True, window=512, norm=True, n_rot=256),
    "135M, a long cache": Case(9, 3, 64, 4000), "8 rows of Llama 1B": Case(32, 8, 64, 1152, batch=8),
    "Llama 1B, a long cache": Case(32, 8, 64, 9216),
    "8 rows of Llama 1B, a long cache": Case(32, 8, 64, 9216, batch=8),
    "64 rows of Qwen3-0.6B": Case(16, 8, 128, 256, norm=True, n_rot=128, batch=64),
}  # fmt: skip


@needs_mosaic
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("Llama 1B", "Gemma 3 1B") else pytest.mark.slow) for n in PUBLISHED]
)
def test_the_kernel_lowers_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of published models, as programs run it: every layout is found, both caches are updated in place.

    Mosaic chooses no swizzle: the writes of a warpgroup to the sums are no whole units of one.
    """
    graph = graph_of(PUBLISHED[name])
    group = group_of(graph)
    assert group is not None and isinstance(group.op, AttentionGroup)
    operands = operands_of(graph, group, 5, 1)
    run = functools.partial(IMPLEMENTATIONS["decode_attention"], group.op)
    layouts = importlib.import_module("jax.experimental.mosaic.gpu.layout_inference")
    modules: list[str] = []
    infer = layouts.infer_layout

    def infer_and_print(module: Any, **options: Any) -> None:
        infer(module, **options)
        modules.append(str(module))

    monkeypatch.setattr(layouts, "infer_layout", infer_and_print)
    text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert modules and not any("swizzle" in module for module in modules)
    assert "mosaic_gpu" in text and text.count("output_operand_alias<") == 2
