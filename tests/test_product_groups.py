"""Groups of a product of one row and the ops around it: what joins them, that they compute the same, their kernel."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.pipeline import make_function, make_lir
from rlx_jax.ir.graph import BodyInput, Builder, Graph, Mir, Param, TypeCache, Value, constant
from rlx_jax.ir.kernel_group import AttentionGroup, KernelGroup, op_name
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.pointwise import Binary, Unary
from rlx_jax.ir.ops.reduce import RmsNormOp, Softmax, Standardize
from rlx_jax.ir.ops.shape import Slice, SplitLast
from rlx_jax.ir.packed_values import decode_arrays
from rlx_jax.ir.param import Key, Program, Quantized
from rlx_jax.ir.paths import Origin
from rlx_jax.ir.text import block_rows
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.ir.verify import verify
from rlx_jax.lowering.lir import implementations
from rlx_jax.lowering.lir.attention_groups import group_attention
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS, with_reference
from rlx_jax.lowering.lir.kernel_trace import KernelTrace
from rlx_jax.lowering.lir.matvec import find_tiling
from rlx_jax.lowering.lir.packed import PackedWeight
from rlx_jax.lowering.lir.packed_matvec import find_packed_tiling
from rlx_jax.lowering.lir.plan import Lir, state_types
from rlx_jax.lowering.lir.product_groups import NOT_BY_ROWS, GroupKey, group_products, kernel_of, run_group, struct
from rlx_jax.lowering.lir.row_products import least_groups, multiply_rows
from rlx_jax.runtime.program_key import ProgramKey
from tests.interpreter import interpreted, needs_mosaic
from tests.oracles.packed import random_arrays
from tests.small import w

BF16 = as_dtype("bf16")

SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
NORMED, GATED = "rms_norm, mat_mul", "rms_norm, mat_mul, split_last, unary, binary"
# Recipe, fields of the config, and the groups of a layer, each by its ops.
MODELS: dict[str, tuple[Any, dict[str, Any], set[str]]] = {
    "llama": (rlx.Llama32Flow, {"model_type": "llama"}, {NORMED, "mat_mul, binary", GATED}),
    # A norm after a product joins the next one, with the residual sum, which other ops read too.
    "gemma3": (
        rlx.GemmaFlow, {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 32},
        {"mat_mul", f"rms_norm, binary, {GATED}", f"rms_norm, binary, {NORMED}", f"binary, {NORMED}"},
    ),
}  # fmt: skip


@functools.cache
def decode_step(name: str, context: int = 16, layers: int = 2) -> tuple[Lir, Any]:
    """Return a decode step of one row, planned for this device, and the model."""
    recipe, fields, _ = MODELS[name]
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16", "weights": "bf16"})
    flow = recipe.for_prefill({"rms_norm_eps": 1e-6, **SIZES, **fields, "num_hidden_layers": layers})
    weights = {key: w(*spec.shape) for key, spec in flow.shapes().items()}
    model = rlx.CausalLM(flow, weights, profile=profile, max_positions=2 * context).model
    programs, sizes = model.programs, {"batch": 1, "seq": 1, "window": 8}
    template = programs.template(ProgramKey(model.name, "extend", last_only=True))
    binding = {symbol: sizes.get(symbol, context) for symbol in template.symbols}
    return make_lir(template, binding, programs.settings), model


def check_same_results(lir: Lir, grouped: Graph, model: Any) -> None:
    """Check that a decode step and its grouped form have the same results and states, bit for bit."""
    inputs = {i.input: np.ones([int(n) for n in i.type.shape], np.int32) for i in grouped.inputs}
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {
        key: jnp.asarray(rng.normal(size=[int(n) for n in t.shape]), t.dtype)
        for key, t in state_types(lir.graph, lir.plan.scan).items()
    }
    state["length"] = np.full(1, 5, np.int32)
    results = [
        make_function(replace(lir, graph=graph), model.programs.layout)(model.params, state, inputs)
        for graph in (lir.graph, grouped)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def groups_of(graph: Graph) -> list[KernelGroup]:
    """Return the groups of a graph in order."""
    return [node.op for node in graph.nodes if isinstance(node.op, KernelGroup)]


def op_names(group: KernelGroup) -> str:
    """Return the ops of a group by name."""
    return ", ".join(node.op.name() for node in group.body.nodes if isinstance(node.op, Mir))


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_groups_of_a_decode_step(name: str) -> None:
    """Every product is in a group with the ops that can join it, and the grouped program computes the same."""
    lir, model = decode_step(name)
    types = TypeCache()
    grouped = verify(group_products(lir.graph, types), "mir", "group_products", types)
    assert not any(isinstance(node.op, MatMul) for node in grouped.nodes)
    assert {op_names(group) for group in groups_of(grouped)} == MODELS[name][2]
    check_same_results(lir, grouped, model)


def test_blocks_of_groups_have_their_layers_and_weights() -> None:
    """An op in a group of a repeated layer runs in every layer, and reads the weight that is the group's operand."""
    lir, _ = decode_step("llama", layers=4)
    grouped = replace(lir, graph=group_products(lir.graph, TypeCache()))
    rows = block_rows(grouped.graph, grouped.param_of)
    for path, row in block_rows(lir.graph).items():
        assert (rows[path].iterations, rows[path].count) == (row.iterations, row.count), path


def test_a_group_in_a_cycle_keeps_its_product() -> None:
    """If a value of the ops before a product leaves the group and comes back, they do not join it."""
    types, row = TypeCache(), TensorType((1, 1, 128), BF16)
    b = Builder("cycle", types, Origin(("block",)))
    x = b.input("x", row)
    weight = b.leaf(Param((Key("w", type=TensorType((128, 128), BF16)),), type=TensorType((128, 128), BF16)))
    doubled = b(Binary("add"), x, x)
    turned = b(Slice((..., (None, None, -1))), doubled)  # no kernel reverses a row
    b_sum = b(Binary("add"), doubled, turned)
    graph = b.finish([b(MatMul(1), b_sum, weight)], ["y"])
    (group,) = groups_of(verify(group_products(graph, types), "mir", "group_products", types))
    assert group.reason() == "one kernel of matmul; not add before it: ops between read it"


# What groups must not do: the row x and weights [128, 128] → a result, and what the report says of each group.
def parallel(b: Builder, x: Value, first: Value, second: Value) -> Value:
    """Return the sum of two products of one row, as parallel attention and MLP: it joins one group."""
    return b(Binary("add"), b(MatMul(1), x, first), b(MatMul(1), x, second))


def residual(b: Builder, x: Value, first: Value, second: Value) -> Value:
    """Return a sum with the input, which ops before and after the product read, as they do a sum before it."""
    total = b(Binary("add"), x, b(MatMul(1), x, first))
    total = b(Binary("mul"), total, total)
    return b(Binary("add"), total, b(MatMul(1), b(Unary("silu"), total), second))


def scaled(b: Builder, x: Value, first: Value, _: Value) -> Value:
    """Return a product times a constant."""
    return b(Binary("mul"), b(MatMul(1), x, first), b.leaf(constant(0.5, BF16)))


def pooled(b: Builder, x: Value, first: Value, _: Value) -> Value:
    """Return the product of a sum over an axis of 1, no reduction of a row."""
    return b(MatMul(1), b(JaxFn(lambda x: x.sum(1, keepdims=True)), x), first)


def exact_gelu(b: Builder, x: Value, first: Value, _: Value) -> Value:
    """Return the exact GELU of a product, whose erf the kernel computes itself."""
    return b(Unary("gelu"), b(MatMul(1), x, first))


def halves(b: Builder, x: Value, first: Value, _: Value) -> Value:
    """Return gate times up, where the kernel has no op of the gate."""
    gate, up = b.add(SplitLast((64, 64)), b(MatMul(1), x, first))
    return b(Binary("mul"), b(JaxFn(lambda x: jnp.cumsum(x, -1)), gate), up)


OTHERS = "it: in the group of another product"
GRAPHS: dict[Any, list[str]] = {
    parallel: ["matmul, add", f"matmul; not add after {OTHERS}"],
    residual: [
        "matmul, add, mul; not silu after it: other ops read its operands",
        f"silu, matmul, add; not mul before {OTHERS}",
    ],
    scaled: ["matmul, mul"],
    pooled: ["matmul; not jax before it: the kernel has no reduce_sum"],
    exact_gelu: ["matmul, gelu"],
    halves: ["matmul; not split_last after it: one result needs jax: the kernel has no cumsum"],
}


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_groups_of_a_graph(make: Any) -> None:
    """Each op joins one group, which names the first that does not, and each group has a kernel."""
    types = TypeCache()
    b, weight = Builder("graph", types, Origin(("block",))), TensorType((128, 128), BF16)
    x = b.input("x", TensorType((1, 1, 128), BF16))
    first, second = (b.leaf(Param((Key(name, type=weight),), type=weight)) for name in ("first", "second"))
    graph = b.finish([make(b, x, first, second)], ["y"])
    groups = groups_of(verify(group_products(graph, types), "mir", "group_products", types))
    assert sorted(group.reason() for group in groups) == [f"one kernel of {text}" for text in GRAPHS[make]]
    for group in groups:
        nodes = tuple((n.op, n.inputs, n.types) for n in group.body.nodes)
        assert kernel_of(GroupKey(nodes, group.body.outputs, group.num_rows)).tiling.rows == 128


ROWS_OPS: dict[str, tuple[Mir, bool]] = {
    "a norm": (Standardize((-1,), 1e-6), True), "softmax": (Softmax(-1), True),
    "a row's mean": (JaxFn(lambda x: x - x.mean(-1, keepdims=True)), True),
    "a norm over rows too": (Standardize((1, 2), 1e-6), False), "a mean of all": (JaxFn(lambda x: x - x.mean()), False),
    "their number": (JaxFn(lambda x: x / x.shape[1]), False), "softmax over rows": (Softmax(1), False),
    "a fixed shape": (JaxFn(lambda x: (x.reshape(4, 256) * 2).reshape(1, 4, 256)), False),
    "joined rows": (JaxFn(lambda x: jnp.concatenate([x[:, i : i + 1] for i in range(x.shape[1])], 1)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS_OPS)
def test_ops_before_a_product_of_four_rows_are_of_each_row(name: str) -> None:
    """A kernel would compute an op over several rows for each of them alone."""
    (op, joins), types = ROWS_OPS[name], TypeCache()
    b, weight = Builder("rows", types, Origin(("block",))), TensorType((128, 256), BF16)
    x, leaf = b.input("x", TensorType((1, 4, 256), BF16)), b.leaf(Param((Key("w", type=weight),), type=weight))
    (group,) = groups_of(group_products(b.finish([b(MatMul(1), b(op, x), leaf)], ["y"]), types))
    assert op_names(group) == ("mat_mul" if not joins else f"{op.name()}, mat_mul")
    assert joins or group.limits == (f"not {op_name(op)} before it: {NOT_BY_ROWS}", "")


# The options of a plan, and a part of its lines about products: "" if there is no reason.
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "an H200": ({}, "by matvec (one kernel of rms_norm, matmul; not add before it: in the group of another product"),
    "off": ({"kernels": "off"}, ""),
    "an A100": ({"target": "a100"}, "no kernel: kernels run on H100 and H200, not on a100"),
    "products by XLA": ({"products": "xla"}, ""), "a scan": ({"roll": "scan"}, "no kernel: layers run in a scan"),
    "f32": ({"compute": "f32"}, "no kernel: f32 and f32, not bf16"),
    "eight rows": ({"batch": 8}, "by matvec"),
    "int8, too narrow": ({"weights": "int8"}, "no kernel: no tiles of 256 x 128"),
    "int8": ({"weights": "int8", "hidden": 512}, "by matvec"),
    "int8, eight rows": ({"weights": "int8", "hidden": 512, "batch": 8}, "by matvec"),
    "int8, nine rows": ({"weights": "int8", "hidden": 512, "batch": 9}, "by packed_tiles"),
    "int4, nine rows": ({"weights": "int4", "hidden": 512, "batch": 9}, "no kernel: 9 rows, more than 8"),
    "an older JAX": ({"mosaic": False}, "no kernel: kernels need jax 0.11"),
}  # fmt: skip


def plan_of(
    monkeypatch: pytest.MonkeyPatch, has_mosaic: bool = True, batch: int = 1, context: int = 16, hidden: int = 128,
    **fields: Any,
) -> Lir:  # fmt: skip
    """Return the decode step of a small Llama, planned by a profile for an H200 in bf16 with these changes."""
    monkeypatch.setattr(implementations, "has_mosaic", lambda: has_mosaic)
    profile = rlx.CompileProfile().replace(
        **{"fusion": {"target": "h200"}, "precision": {"compute": "bf16", "weights": "bf16"}, **fields}
    )
    flow = rlx.Llama32Flow.for_prefill({"rms_norm_eps": 1e-6, **SIZES, "hidden_size": hidden})
    model = rlx.CausalLM(flow, flow.shapes(), profile=profile, max_positions=64).model
    programs = model.programs
    template = programs.template(ProgramKey(model.name, "extend", last_only=True))
    sizes = {"batch": batch, "seq": 1}
    return make_lir(template, {symbol: sizes.get(symbol, context) for symbol in template.symbols}, programs.settings)


@pytest.mark.filterwarnings("ignore:.*the plan is for another device", "ignore:.*has no effect")
@pytest.mark.parametrize("case", PLANS)
def test_where_a_plan_has_groups(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the device, the profile, the dtype, the rows, and what JAX has."""
    options, want = PLANS[case]
    dtype = options.get("compute", "bf16")
    backend = {k: v for k, v in options.items() if k in ("kernels", "products")}
    lir = plan_of(
        monkeypatch, options.get("mosaic", True), options.get("batch", 1), hidden=options.get("hidden", 128),
        fusion={"target": options.get("target", "h200")},
        precision={"compute": dtype, "weights": options.get("weights", dtype)},
        backend={"cuda": backend}, layers={"roll": options.get("roll", "unroll")},
    )  # fmt: skip
    lines = "\n".join(lir.products())
    assert bool(groups_of(lir.graph)) == ("by matvec" in lines) == want.startswith("by matvec")
    assert want in lines and (want or "no kernel" not in lines), lines
    assert not any("by packed_tiles" in line and "no kernel" in line for line in lir.products())


def test_tilings_cover_a_weight() -> None:
    """Every entry belongs to one tile; sizes that do not divide are refused."""
    for rows, columns, parts in (
        (3072, 2048, 1),
        (16384, 2048, 2),
        (2048, 8192, 1),
        (3072, 576, 2),
        (4096, 14336, 1),
        (4096, 11008, 1),
    ):
        tiling = find_tiling(rows, columns, parts)
        assert tiling is not None
        assert tiling.rows * tiling.parts == rows and tiling.lines * tiling.width == columns
        assert tiling.rows % tiling.tile_rows == 0 and tiling.tile_lines > 1
        ends = [int(tiling.first_line(chunk)) + tiling.tile_lines for chunk in range(tiling.chunks)]
        assert ends == sorted(set(ends)) and ends[-1] == tiling.lines
    slots = [t.slots for size in ((128256, 2048), (262144, 1152), (2048, 8192)) if (t := find_tiling(*size, 1))]
    assert slots == [4, 6, 3]  # more for heads
    assert find_tiling(64, 96, 1) is None and find_tiling(66, 128, 1) is None and find_tiling(64, 64, 1) is None


def test_erf() -> None:
    """The kernel's error function is XLA's within 1e-6."""
    x = jnp.linspace(-6, 6, 1001, dtype=jnp.float32)
    (found,) = KernelTrace(jax.make_jaxpr(jax.lax.erf)(x))(x)
    np.testing.assert_allclose(found, jax.lax.erf(x), atol=1e-6, rtol=0)


def test_packed_tilings() -> None:
    """Schemes and sizes that the kernel has."""
    for scheme, columns in (("int8/32", 6912), ("gguf_q8_0", 2048), ("gguf_q4k", 14336), ("int4/128", 4096)):
        if (tiling := find_packed_tiling(4096, columns, 2, scheme)) is not None:
            assert tiling.rows == 2048 and tiling.blocks * tiling.form.values == columns
            assert tiling.rows % tiling.tile_rows == 0 and tiling.blocks % tiling.tile_blocks == 0
        assert (tiling is None) == (columns == 6912)  # 27 blocks: one at a time has no layout
    assert find_packed_tiling(4096, 2048, 1, "gguf_q6k") is None and find_packed_tiling(66, 2048, 1, "int8/32") is None


@needs_mosaic
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_kernel_equals_eval(name: str) -> None:
    """In Mosaic's interpreter, within the rounding of bf16, for each group of a model."""
    lir, _ = decode_step(name)
    rng = np.random.default_rng(1)
    for group in {op_names(g): g for g in groups_of(group_products(lir.graph, TypeCache()))}.values():
        inputs = [node.types[0] for node in group.body.nodes if isinstance(node.op, BodyInput)]
        arrays = [jnp.asarray(rng.normal(size=[int(n) for n in t.shape]), t.dtype) for t in inputs]
        found = interpreted(run_group, group, *arrays)
        for got, want in zip(found, group.eval(*arrays), strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            scale = float(jnp.abs(want.astype(jnp.float32)).max())
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=0.02 * scale)


RARE = ("int8/128", "int4/32", "int4/128", "gguf_q4_0")
PACKED = ["gguf_q8_0", "gguf_q4k", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in RARE)]


@needs_mosaic
@pytest.mark.parametrize("scheme", PACKED)
def test_the_kernel_of_a_packed_weight(scheme: str) -> None:
    """In Mosaic's interpreter it equals the product in float64 of the decoded weight, in several tiles.

    One entry of x may be 10,000 times as large as the others. Its group of the weight has scales of zero: the others
    decide the result, as precisely as without it. Infinite entries and NaN do to the result what XLA lets them do.
    """
    size = (16, 4096)
    b, rng = Builder("product", TypeCache(), Origin(("block",))), np.random.default_rng(3)
    weight_type = TensorType(size, BF16)
    leaf = b.leaf(Param((Key("w", type=weight_type),), type=weight_type))
    product = b(MatMul(1), b.input("x", TensorType((1, 1, size[1]), BF16)), leaf)
    gate, up = b.add(SplitLast((8, 8)), product)
    (group,) = groups_of(group_products(b.finish([b(Binary("add"), gate, up)], ["y"]), TypeCache()))
    arrays = random_arrays(scheme, size, rng)
    arrays["scales"][:, : 4 if scheme == "gguf_q4k" else 1] = 0
    weight = PackedWeight(jax.tree.map(jnp.asarray, arrays), scheme, BF16, BF16)
    values, numbers = decode_arrays(arrays, scheme).astype(np.float64), rng.normal(size=size[1])
    for place, number in ((5, 1e4), (5, 1.0), (2000, -np.inf), (2000, np.nan)):
        numbers[place] = number
        row = jnp.asarray(numbers, BF16).reshape(1, 1, -1)
        (found,) = interpreted(run_group, group, row, weight)
        entries = np.asarray(row, np.float64).ravel()
        with np.errstate(invalid="ignore"):
            terms = np.abs(values @ entries) * 2.0**-8  # each product is rounded to bf16
            terms += np.abs(values) @ np.abs(entries) * 2.0**-20
            want, atol = ((v[:8] + v[8:]) for v in (values @ entries, terms))
        got = np.asarray(found, np.float64).ravel()
        if not np.isfinite(number):
            np.testing.assert_array_equal(got, want)
            continue
        assert (np.abs(got - want) - np.abs(want) * 2.0**-8 < atol).all() and np.abs(want).max() > 20 * atol.max()


@needs_mosaic
@pytest.mark.parametrize(("rows", "columns"), [(1, 11008), (1, 12288), (8, 8192)], ids=str)
def test_rows_of_many_tiles(rows: int, columns: int) -> None:
    """Tiles that share columns count them once, and a loop's tiles equal unrolled ones."""
    types = {"x": TensorType((rows, 1, columns), BF16), "w": TensorType((16, columns), BF16)}
    b = Builder("product", TypeCache(), Origin(("block",)))
    out = b(MatMul(1), b.input("x", types["x"]), b.leaf(Param((Key("w", type=types["w"]),), type=types["w"])))
    (group,) = groups_of(group_products(b.finish([out], ["y"]), TypeCache()))
    rng = np.random.default_rng(2)
    x, w = (rng.integers(-2, 3, [int(n) for n in t.shape]) for t in types.values())  # exact sums
    (y,) = interpreted(run_group, group, jnp.asarray(x, BF16), jnp.asarray(w, BF16))
    np.testing.assert_array_equal(y[:, 0], (x[:, 0] @ w.T).astype(BF16))


@needs_mosaic
@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["", *PACKED[:1], pytest.param("gguf_q4k", marks=pytest.mark.slow), *PACKED[2:]])
def test_the_kernel_of_several_rows(scheme: str, rows: int) -> None:
    """In Mosaic's interpreter it equals `eval` of the decoded weight, by several warpgroups, in several tiles."""
    b, rng, columns = Builder("product", TypeCache(), Origin(("block",))), np.random.default_rng(3), 2048
    x, weight = TensorType((rows, 1, columns), BF16), TensorType((64, columns), BF16)
    key = Key("w", type=weight)
    leaf = b.leaf(Param((Quantized(key, scheme) if scheme else key,), type=weight))
    normed = b(RmsNormOp(1e-6), b.input("x", x), b.input("gamma", TensorType((columns,), BF16)))
    gate, up = b.add(SplitLast((32, 32)), b(MatMul(1), normed, leaf))
    out = b(Binary("add"), b.input("r", TensorType((rows, 1, 32), BF16)), b(Binary("mul"), b(Unary("silu"), gate), up))
    (group,) = groups_of(group_products(b.finish([out], ["y"]), TypeCache()))
    decoded: Any
    arrays: Any
    if scheme:
        packed = PackedWeight(jax.tree.map(jnp.asarray, random_arrays(scheme, (64, columns), rng)), scheme, BF16, BF16)
        decoded, arrays = packed.decode(), packed.arrays
    else:
        decoded = arrays = jnp.asarray(rng.normal(size=(64, columns)) / 64, BF16)
    row, residual = (jnp.asarray(rng.normal(size=(rows, 1, n)), BF16) for n in (columns, 32))
    gamma = jnp.asarray(rng.normal(size=columns), BF16)
    (want,) = group.eval(row, gamma, decoded, residual)
    nodes = tuple((n.op, n.inputs, n.types) for n in group.body.nodes)
    spec = kernel_of(GroupKey(nodes, group.body.outputs, group.num_rows, scheme))
    tile_groups = least_groups(scheme) if scheme == "gguf_q4k" else 16
    for warpgroups in (32 // tile_groups, 64 // tile_groups):
        tiling = replace(spec.tiling, warpgroups=warpgroups, programs=1, tile_groups=tile_groups)
        operands = [row.reshape(rows, -1), gamma], [residual.reshape(rows, -1)]
        (found,) = interpreted(multiply_rows, replace(spec, tiling=tiling), arrays, *operands)
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(found.astype("f4"), want.reshape(rows, -1).astype("f4"), atol=0.02 * scale)


@needs_mosaic
def test_races_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the barriers of its warpgroups, the kernel reads sums and rows that another one may not have written."""
    kernel: Any = multiply_rows
    kernel.clear_cache()
    monkeypatch.setattr("tests.interpreter.gpu", lambda: None)
    for name in ("barrier_arrive", "barrier_wait"):
        monkeypatch.setattr(f"jax.experimental.pallas.mosaic_gpu.{name}", lambda _: None)
    # The interpreter of jax 0.12 raises, that of 0.11 prints.
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE"):
        test_the_kernel_of_several_rows("", 3)
    kernel.clear_cache()


@needs_mosaic
@pytest.mark.parametrize(("name", "kind"), [("matvec", KernelGroup), ("decode_attention", AttentionGroup)])
def test_gradients_and_batches_of_a_group_run_its_ops(name: str, kind: Any) -> None:
    """Mosaic has neither of a kernel. Forward mode too; and such programs lower for a GPU."""
    lir, _ = decode_step("llama", context=64)
    grouped, rng = group_products(group_attention(lir.graph, TypeCache()), TypeCache()), np.random.default_rng(0)
    group = next(op for node in grouped.nodes if isinstance(op := node.op, kind))
    types = [node.types[0] for node in group.body.nodes if isinstance(node.op, BodyInput)]
    shapes = [(tuple(map(int, t.shape)), t.dtype) for t in types]
    arrays = [jnp.ones(s, d) if d == np.int32 else jnp.asarray(rng.normal(size=s), d) for s, d in shapes]
    floats = [i for i, (_, dtype) in enumerate(shapes) if dtype == BF16]

    def results(run: Any, arrays: Any) -> Any:
        slopes = jax.grad(lambda *a: sum(jnp.sum(r.astype(jnp.float32)) for r in run(*a)), floats)(*arrays)
        moved = jax.jvp(lambda a: run(a, *arrays[1:]), arrays[:1], arrays[:1])
        return slopes, moved, jax.vmap(run)(*(jnp.stack([a, a]) for a in arrays))

    def zeros(op: Any, *arrays: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, op.eval(*arrays))

    other = functools.partial(with_reference(lambda op, *arrays: op.eval(*arrays))(zeros), group)
    jax.tree.map(np.testing.assert_array_equal, results(other, arrays), results(group.eval, arrays))
    assert not any(jnp.any(result) for result in other(*arrays))
    run = functools.partial(IMPLEMENTATIONS[name], group)
    jax.jit(functools.partial(results, run)).trace(arrays).lower(lowering_platforms=("cuda",))


@needs_mosaic
@pytest.mark.parametrize(
    "rows, hidden, inner",
    [(1, 2048, 8192), (1, 576, 1536), (1, 1152, 6912), (1, 4096, 11008), (8, 2048, 8192), (3, 1024, 3072)],
    ids=str,
)
def test_the_kernel_lowers_for_a_gpu(rows: int, hidden: int, inner: int) -> None:
    """At the sizes of published models: every layout is found, without a GPU."""
    b = Builder("mlp", TypeCache(), Origin(("mlp",)))
    x, gamma = b.input("x", TensorType((rows, 1, hidden), BF16)), b.input("gamma", TensorType((hidden,), BF16))
    sizes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
    types = {key: TensorType(shape, BF16) for key, shape in sizes.items()}
    programs: dict[str, Program] = {key: Key(key, type=t) for key, t in types.items()}
    if rows == 3:  # not packed when loaded
        programs = {key: Quantized(program, "int8/32") for key, program in programs.items()}
    up, down = (b.leaf(Param((program,), type=types[key])) for key, program in programs.items())
    gate, value = b.add(SplitLast((inner, inner)), b(MatMul(1), b(RmsNormOp(1e-6), x, gamma), up))
    out = b(Binary("add"), x, b(MatMul(1), b(Binary("mul"), b(Unary("silu"), gate), value), down))
    groups = groups_of(group_products(b.finish([out], ["y"]), TypeCache()))
    assert [op_names(group) for group in groups] == [GATED, "mat_mul, binary"]
    for group in groups:
        operands = [struct(node.types[0]) for node in group.body.nodes if isinstance(node.op, BodyInput)]
        lowered = jax.jit(functools.partial(run_group, group)).trace(*operands).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()
