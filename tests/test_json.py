"""Facts of ops and blocks: every class states all of them, and goes to JSON and back with the same text and numbers."""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule
from rlx_jax.errors import GraphError, RlxError
from rlx_jax.ir import serial
from rlx_jax.ir.graph import Hir, Input, Leaf, Mir, Op, StateRead, TypeCache
from rlx_jax.ir.hir import BLOCKS
from rlx_jax.ir.operands import ELEMENTWISE, Traits
from rlx_jax.ir.ops import OPS
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.pointwise import FullLike, Unary
from rlx_jax.ir.ops.shape import Slice
from rlx_jax.ir.paths import LayerIndex, StateLeaf
from rlx_jax.ir.types import TensorType, as_dtype, tensor_type
from rlx_jax.lowering.hir.derive import derive
from rlx_jax.lowering.lower import expand_composites
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from tests import small
from tests.oracles.fuzzing import mutated
from tests.refusal_names import document, graph
from tests.small import compiles_of

RNG = np.random.default_rng(0)
LLAMA = LlamaConfig.from_hf(small.LLAMA)


def again(module: GraphModule) -> GraphModule:
    """There and back; the second text is the first."""
    text = module.to_json()
    back = GraphModule.from_json(text)
    assert back.to_json() == text == module.to_json()
    return back


def op_classes(base: type[Any]) -> Iterator[type[Any]]:
    """The op classes of the package below `base`."""
    for cls in base.__subclasses__():
        if cls.__module__.startswith("rlx_jax.") and cls not in (Mir, Hir, Leaf):
            yield cls
        yield from op_classes(cls)


def test_every_op_is_stored() -> None:
    """A new op cannot be forgotten: all of them are stored, but for a user's function and an exported program."""
    users = {"JaxFn", "TokenScan", "Recurrent", "ExportedCall"}
    building = {
        "Boundary",
        "AttentionGroup",
        "DeltaGroup",
        "ExpertGroup",
        "HeadGroup",
        "KernelGroup",
    }  # no graph before its plan has one
    assert {cls.__name__ for cls in op_classes(Op)} == {*serial.SERIALIZABLE_OPS, *users, *building}, (
        "SERIALIZABLE_OPS: rlx_jax/ir/serial.py"
    )


def test_attributes_that_json_has_no_word_for() -> None:
    """Infinities, Ellipsis, dtypes, layer indices."""
    ops: list[Op] = [
        Slice((None, ..., (1, None, -1), 0)),
        StateRead(StateLeaf(("layers", LayerIndex(2, 1), "attn"), "k"), type=tensor_type(("batch", 4), "bf16", "t")),
        FullLike(-np.inf, as_dtype("f8_e4m3")),
        Input("x", type=tensor_type(("batch", "seq"), "i32", "t")),
    ]
    for op in ops:
        assert serial.decode(Op, json.loads(json.dumps(serial.encode(op))), "op") == op


def llama() -> Any:
    """A two-layer Llama and its weights."""
    weights = {k: RNG.standard_normal(s.shape).astype(np.float32) * 0.1 for k, s in weight_specs(LLAMA).items()}
    return rlx.Llama32Flow(LLAMA), weights


def test_a_llama_goes_there_and_back() -> None:
    """At each level the same dump; bit-equal logits when compiled again from LIR."""
    recipe, weights = llama()
    module = recipe.assemble().build(weights).into_graph_module()
    planned = Graph.from_lir(module.into_lir(batch=2, seq=5))
    for m in (module, module.lower(), planned):
        back = again(m)
        assert back.stage == m.stage and back.inspect() == m.inspect() and back.plan == m.plan
    tokens = RNG.integers(0, 31, (2, 5)).astype(np.int32)
    got, want = (np.asarray(rlx.compile(m, weights)(tokens)) for m in (again(planned), module))
    np.testing.assert_array_equal(got, want)


def test_a_program_with_a_state_goes_there_and_back() -> None:
    """State, writes, regions: the same dump and structure."""
    recipe, weights = llama()
    built = recipe.assemble().build(weights)
    extend = Graph.from_hir(derive(expand_composites(built.hir, built.types), "extend", built.types, False))
    for module in (extend, extend.lower()):
        back = again(module)
        assert back.inspect() == module.inspect()
        assert back.finish().writes == module.finish().writes


def test_a_graph_that_is_wrong() -> None:
    """What the verifier says of it, line by line. What is no graph is in `golden/refusals/rows.md`."""
    for path, value, message in (
        ("level", "mir", "not legal"), ("graph.outputs", [], "no outputs"), ("graph.inputs", [], "not declared"),
    ):  # fmt: skip
        with pytest.raises(GraphError, match=message):
            graph(path, value)


def test_mutants_are_refused_or_mean_a_graph() -> None:
    """Random damage: an RlxError, or a module that verifies; never another exception."""
    rng, refused = random.Random(7), 0
    recipe, _ = llama()
    module = recipe.assemble().build(weight_specs(LLAMA)).into_graph_module()
    sources = [document(), json.loads(module.to_json()), json.loads(module.lower().to_json())]
    odd: list[Any] = [None, True, -1, 0, 1, 2**31, 2**64, 1e308, -0.0, "", "seq", "Where", [], {}, [[0, 0]]]
    for _ in range(90):
        text = json.dumps(mutated(rng.choice(sources), rng, odd, times=(1,)))
        try:
            again(GraphModule.from_json(text))
        except RlxError:
            refused += 1
    assert 60 < refused < 90


COMPOSITES = {"LlamaDecoderBlock", "LinearFused", "SharedLinearPair", "SwiGLU", "ResidualRmsNorm", "Qwen35MtpHead"}
KEEP_F32 = {"Positions", "Rope", "RopeAngles", "RopeRows", "Sinusoids"}


def test_the_lists_are_whole() -> None:
    """Every class of the package stands in the one list of its kind."""
    ops, blocks = ({cls.__name__ for cls in op_classes(base)} for base in (Mir, Hir))
    groups = {f"{kind}Group" for kind in ("Attention", "Delta", "Expert", "Head", "Kernel")}
    assert {cls.__name__ for cls in OPS} | groups == ops, "OPS stands in rlx_jax/ir/ops/__init__.py"
    assert {cls.__name__ for cls in BLOCKS} == blocks >= COMPOSITES | KEEP_F32, (
        "BLOCKS stands in rlx_jax/ir/hir/__init__.py"
    )


def test_nothing_is_left_open() -> None:
    """An op without facts, or with some of them, is refused where it is defined; a subclass does not inherit them."""
    with pytest.raises(GraphError, match=r"Forgotten: .*Traits\(…\)"):
        type("Forgotten", (Mir,), {})
    with pytest.raises(GraphError, match=r"Forgotten: .*traits = BlockTraits\(…\)"):
        type("Forgotten", (Hir,), {"traits": ELEMENTWISE})
    with pytest.raises(GraphError, match="Narrower: "):
        type("Narrower", (Unary,), {})
    with pytest.raises(TypeError, match="missing"):
        Traits("compute")  # type: ignore[call-arg]


def types(*texts: str) -> list[TensorType]:
    """`f32 2 8` is `f32[2,8]`."""
    split = [text.split() for text in texts]
    return [TensorType(tuple(map(int, shape)), as_dtype(dtype)) for dtype, *shape in split]


W = np.ones((8, 6), "f4")
FUNCTIONS: dict[str, tuple[Any, int]] = {
    "no product": (jnp.tanh, 0), "a product": (lambda x: x @ W, 2 * 5 * 8 * 6),
    "one in a jit": (jax.jit(lambda x: x @ W), 2 * 5 * 8 * 6),
    "one in a loop": (lambda x: jax.lax.scan(lambda c, r: (c, r @ W), 0, x)[1], 2 * 5 * 8 * 6),
    "one of two": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: x[:, :6], x), 2 * 5 * 8 * 6),
    "an outer product of each row": (lambda x: jnp.einsum("ab,ac->abc", x, x), 2 * 5 * 8 * 8),
    "rows with rows": (lambda x: jnp.einsum("ab,cb->ac", x, x), 2 * 5 * 5 * 8),
}  # fmt: skip


def test_products_of_a_users_function_count() -> None:
    (x,) = types("f32 5 8")
    for case, (fn, want) in FUNCTIONS.items():
        op = JaxFn(fn)
        assert op.traits.flops(op, [x], TypeCache().infer(op, (x,))) == want, case


LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, tuple(5e5 ** (-2 * i / 128) for i in range(64)), 1e-5, 8192)
WEIGHTS_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
"""Entries of the matrices that a token is multiplied with."""


def test_an_8b_model_is_counted_without_a_compile() -> None:
    """FLOPs are 2 a weight and token, and those of attention; a step reads every weight. In a fraction of a second."""
    model = rlx.compile(Llama32Flow.for_prefill(LLAMA_8B), program="extend")
    model.text("mir")  # the template is there
    start = time.perf_counter()
    report, compiles = compiles_of(lambda: model.report(batch=1, seq=1, context=2048))
    seconds = time.perf_counter() - start
    assert compiles == [] and report.compiles == 0
    assert report.flops == 2 * WEIGHTS_8B + 32 * 4 * 4096 * 2048
    assert report.bytes is not None and 4 * WEIGHTS_8B < report.bytes < 1.05 * 4 * WEIGHTS_8B
    assert report.workspace == 3 * 4 * 32 * 2048
    assert seconds < 2, seconds  # 0.05 s on a machine of its own; this one may be shared
