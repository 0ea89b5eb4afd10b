"""The names of IR 1.1, 3–7, 9 and 13 in the form of the specification: operands by position, then attributes.

Numbers are held against float64 NumPy. What differs on purpose is the table "Differences from the specification" of
docs/graph.md; IR 8 is in test_quantized_builders.py, and the names of IR 10 and 12 are not here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import Graph, GraphModule, GraphStage, ModelFlow, plugins
from rlx_jax.compiler.compat import FusionPolicy, hir_from_json, hir_to_json, lir_from_json, lir_to_json
from rlx_jax.compiler.graph_module import BuiltModel
from rlx_jax.errors import DTypeError, GraphError, RlxError, ShapeError
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Graph as GraphIR
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.operands import ELEMENTWISE
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.ir.region import everywhere, rewrite
from rlx_jax.plugins import FlowExtensionPlan
from tests.op_cases import OpCase, check_all
from tests.oracles import image_formulas as image
from tests.oracles import op_formulas as formulas
from tests.oracles.gated_delta import causal_conv, gated_delta
from tests.oracles.mtp_head import mtp_head
from tests.oracles.numpy_reference import ACTIVATIONS

RNG = np.random.default_rng(3)
Call = Callable[..., Any]
ops: Any = rlx.ops


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


B, S, N, D, H, F = 2, 3, 2, 4, 8, 6
X, Y, W, V, SQ, BIAS = normal(B, S, H), normal(B, S, H), normal(H, F), normal(F, H), normal(H, H), normal(F)
G, BETA, HEADS = normal(H), normal(H), [normal(B, S, N, D) for _ in range(3)]
GATES = [-np.abs(normal(B, S, N)), 1 / (1 + np.exp(-normal(B, S, N)))]
KEEP = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 0.2]])
SCORES = normal(B, N, S, S)
IMG, KERNEL, C = normal(2, 4, 5, 5), normal(4, 2, 3, 3), normal(4)
ANGLES = normal(S, D // 2)
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)
IDS = np.array([[4, 0, 2], [7, 7, 1]])
POSITIVE = np.abs(X) + 0.1
MASK = hir.MaskKind
ROWS = X[0, :2].astype("f4")


def attended(**options: Any) -> Callable[..., np.ndarray]:
    return lambda q, k, v, *_: formulas.attention(q, k, v, heads=N, kv_heads=N, **options)


def wide(table: np.ndarray) -> np.ndarray:
    """A table of tokens as the formula takes it, the same for every row."""
    return np.broadcast_to(table, (B, *table.shape))


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, n_rot: int = D) -> np.ndarray:
    return formulas.rope(x, wide(cos), wide(sin), D, n_rot)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def swiglu(x: np.ndarray, up: np.ndarray, gate: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate) * (x @ up)) @ down


def grouped(x: np.ndarray, g: np.ndarray, b: np.ndarray) -> np.ndarray:
    parts = x.reshape(len(x), 2, -1)
    normed = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + 1e-5)
    return normed.reshape(x.shape) * g[:, None, None] + b[:, None, None]


def scanned(x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """IR 7.7, token by token."""
    state, out = np.zeros((len(x), *a.shape)), np.zeros(x.shape)
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        state = np.exp(step * a) * state + step * b[:, t, None, :] * x[:, t, :, None]
        out[:, t] = np.einsum("bn,bhn->bh", c[:, t], state)
    return out


def layer(
    x: np.ndarray, g1: Any, b1: Any, q: Any, k: Any, v: Any, o: Any, g2: Any, b2: Any, gate: Any, up: Any, down: Any,
    cos: Any, sin: Any,
) -> np.ndarray:  # fmt: skip
    """IR 5.3."""
    a = formulas.rms_norm(x, g1, b1, 1e-5)
    context = formulas.attention(
        turned(a @ q, cos, sin), turned(a @ k, cos, sin), a @ v, heads=N, kv_heads=1, causal=True
    )  # fmt: skip
    y = x + context @ o
    f = formulas.rms_norm(y, g2, b2, 1e-5)
    return y + swiglu(f, up, gate, down)


LAYER = [X, G, BETA, SQ, normal(H, D), normal(H, D), SQ, G, BETA, W, W, V, COS, SIN]
MTP = [
    normal(B, S, H), IDS, COS, SIN, np.array([2, 0]), normal(9, H), G, BETA, G, BETA, normal(2 * H, H), G, BETA,
    normal(H, 2 * H), SQ, SQ, *[normal(D) for _ in range(4)], SQ, G, BETA, W, W, V, G, BETA, normal(H, 5),
]  # fmt: skip


def by_name(name: str, fn: Any, *arrays: np.ndarray) -> OpCase:
    """A builder whose arguments are its operands."""
    return OpCase(lambda m, *values: getattr(m, name)(*values), list(arrays), fn)


BUILDERS: dict[str, OpCase] = {
    "mm": by_name("mm", np.matmul, X, W),
    "gelu_approx": by_name("gelu_approx", ACTIVATIONS["gelu_new"], X),
    "ln": OpCase(lambda m, *v: m.ln(*v, 1e-3), [X, G, BETA], lambda x, g, b: formulas.layer_norm(x, g, b, 1e-3)),
    "rms_norm": OpCase(lambda m, *v: m.rms_norm(*v, 1e-3), [X, G, BETA], lambda x, g,
        b: formulas.rms_norm(x, g, b, 1e-3)),
    "group_norm": OpCase(lambda m, x, g, b: m.group_norm(x, g, b, 2, 1e-5), [IMG, C, -C], grouped),
    "conv2d": OpCase(lambda m, x, w: m.conv2d(x, w, [3, 3], [2, 2], [1, 1], [1, 1], 2), [IMG, KERNEL], lambda x,
        w: image.conv(x, w, (2, 2), ((1, 1), (1, 1)), (1, 1), 2)),
    "conv_transpose2d": OpCase(lambda m, x, w: m.conv_transpose2d(x, w, [3, 3], [2, 2], [0, 0], [1, 1], [0, 0], 1),
        [IMG, KERNEL], lambda x, w: image.conv_transpose(x, w, (2, 2), ((0, 0), (0, 0)), (0, 0), (1, 1), 1)),
    "sum": OpCase(lambda m, x: m.sum(x, [1], True), [X], lambda x: x.sum(1, keepdims=True)),
    "mean": OpCase(lambda m, x: m.mean(x, [-1], False), [X], lambda x: x.mean(-1)),
    "sm": OpCase(lambda m, x: m.sm(x, -1), [X], formulas.softmax),
    "reshape_": OpCase(lambda m, x: m.reshape_(x, [-1, H]), [X], lambda x: x.reshape(-1, H)),
    "transpose_": OpCase(lambda m, x: m.transpose_(x, [0, 2, 1]), [X], lambda x: x.transpose(0, 2, 1)),
    "narrow_": OpCase(lambda m, x: m.narrow_(x, 2, 1, 4), [X], lambda x: x[..., 1:5]),
    "concat_": OpCase(lambda m, x, y: m.concat_([x, y], 1), [X, Y], lambda x, y: np.concatenate([x, y], 1)),
    "gather_": OpCase(lambda m, t, i: m.gather_(t, i, 0), [SQ, IDS], lambda t, i: t[i], symbolic=False),
    "gather_ of a later axis": OpCase(lambda m, x, i: m.gather_(x, i, 1), [X, IDS % S], lambda x,
        i: np.take_along_axis(x, i[..., None], 1)),
    "attention_": OpCase(lambda m, q, k, v, keep: m.attention_(q, k, v, keep, N, D), [X, Y, X, KEEP],
        lambda *v: formulas.attention(*v[:3], heads=N, kv_heads=N, keep=v[3])),
    "attention_kind": OpCase(lambda m, q, k, v: m.attention_kind(q, k, v, N, D, MASK.CAUSAL), [X, Y, X],
        attended(causal=True)),
    "attention_kind_opts": OpCase(lambda m, q, k,
        v: m.attention_kind_opts(q, k, v, N, D, MASK.sliding_window(2), 0.3, 5.0), [X, Y, X],
            attended(causal=True, window=2, scale=0.3, softcap=5.0)),
    "rope": OpCase(lambda m, x, c, s: m.rope(x, c, s, D), [X, COS, SIN], turned),
    "rope_n": OpCase(lambda m, x, c, s: m.rope_n(x, c, s, D, 2), [X, COS, SIN], lambda x, c, s: turned(x, c, s, 2)),
    "activation": OpCase(lambda m, x: m.activation(x, "silu"), [X], silu),
    "gated_delta_net": OpCase(lambda m, *v: m.gated_delta_net(*v, D), [*HEADS, *GATES], lambda *v: gated_delta(*v)[0]),
    "gated_delta_net_carry": OpCase(lambda m, *v: m.gated_delta_net_carry(*v, D), [*HEADS, *GATES, normal(B, N, D, D)],
        gated_delta),
    "linear": OpCase(lambda m, *v: m.linear(*v, "relu"), [X, W, BIAS], lambda x, w, b: np.maximum(x @ w + b, 0)),
    "linear_fused": OpCase(lambda m, x, w, b: m.linear_fused(x, w, b, "silu"), [X, W, BIAS], lambda x, w,
        b: silu(x @ w + b)),
    "shared_linear_pair": OpCase(lambda m, *v: m.shared_linear_pair(*v), [X, W, SQ], lambda x, a, b: (x @ a, x @ b)),
    "swiglu_ffn": OpCase(lambda m, *v: m.swiglu_ffn(*v), [X, W, -W, V], swiglu),
    "residual_rms_norm": OpCase(lambda m, *v: m.residual_rms_norm(*v, 1e-3), [X, Y, G, BETA], lambda x, r, g,
        b: formulas.rms_norm(x + r, g, b, 1e-3)),
    "attention": OpCase(lambda m, q, k, v: m.attention(q, k, v, N, D, MASK.NONE), [X, Y, X], attended()),
    "attention with a mask": OpCase(lambda m, q, k, v, keep: m.attention(q, k, v, keep, N, D, MASK.CUSTOM),
        [X, Y, X, KEEP], lambda *v: formulas.attention(*v[:3], heads=N, kv_heads=N, keep=v[3], causal=True)),
    "attention with its names": OpCase(lambda m, q, k,
        v: m.attention(q, k, v, num_heads=N, head_dim=D, mask_kind=MASK.CAUSAL, score_scale=0.5,
            attn_logit_softcap=3.0), [X, Y, X], attended(causal=True, scale=0.5, softcap=3.0)),
    "depthwise_conv1d_causal": OpCase(lambda m, x, w, pad: m.depthwise_conv1d_causal(x, w, pad, 4),
        [X, normal(H, 1, 1, 4), normal(B, 3, H)], lambda x, w, pad: causal_conv(x, w[:, 0, 0], None, pad)[0]),
    "hir_mir": OpCase(lambda m, x, w: m.hir_mir(ops.MatMul(), [x, w], None), [X, W], np.matmul),
    "llama_decoder_block": OpCase(lambda m, *v: m.llama_decoder_block(*v, N, D, 1, 1e-5, MASK.CAUSAL), LAYER, layer),
    "qwen35_mtp_head": OpCase(lambda m, *v: m.qwen35_mtp_head(*v, N, N, D, 4, H, F, 5, 1e-6), MTP, lambda h, ids, c, s,
        last, *w: mtp_head(h, np.asarray(ids, int), wide(c), wide(s), np.asarray(last, int), *w, heads=N, kv_heads=N,
            head_dim=D, n_rot=4, eps=1e-6), symbolic=False),
    "linear_bias": by_name("linear_bias", lambda x, w, b: x @ w + b, X, W, BIAS),
    "linear_bias_act": OpCase(lambda m, *v: m.linear_bias_act(*v, "tanh"), [X, W, BIAS], lambda x, w,
        b: np.tanh(x @ w + b)),
    "shared_matmul_pair": by_name("shared_matmul_pair", lambda x, a, b: (x @ a, x @ b), X, W, SQ),
    "fused_swiglu_ffn": by_name("fused_swiglu_ffn", swiglu, X, W, -W, V),
    "attention_opts": OpCase(lambda m, *v: m.attention_opts(*v, N, D, 0.3, 5.0), [X, Y, X, KEEP],
        lambda *v: formulas.attention(*v[:3], heads=N, kv_heads=N, keep=v[3], scale=0.3, softcap=5.0)),
    "attention_bias": OpCase(lambda m, *v: m.attention_bias(*v, N, D), [X, Y, X, SCORES],
        lambda *v: formulas.attention(*v[:3], heads=N, kv_heads=N, bias=v[3])),
    "fused_matmul_bias_act": OpCase(lambda m, *v: m.fused_matmul_bias_act(*v, "gelu"), [X, W, BIAS], lambda x, w,
        b: ACTIVATIONS["gelu"](x @ w + b)),
    "fused_residual_ln": OpCase(lambda m, *v: m.fused_residual_ln(*v, 1e-3), [X, Y, G, BETA], lambda x, r, g,
        b: formulas.layer_norm(x + r, g, b, 1e-3)),
    "fused_residual_ln with a bias": OpCase(lambda m, *v: m.fused_residual_ln(*v, 1e-3), [X, Y, -G, G, BETA], lambda x,
        r, c, g, b: formulas.layer_norm(x + c + r, g, b, 1e-3)),
    "fused_residual_rms_norm": OpCase(lambda m, *v: m.fused_residual_rms_norm(*v, 1e-3), [X, Y, -G, G, BETA], lambda x,
        r, c, g, b: formulas.rms_norm(x + c + r, g, b, 1e-3)),
    "lora_matmul": OpCase(lambda m, *v: m.lora_matmul(*v, 0.5), [X, SQ, W, V], lambda x, w, a,
        b: x @ w + x @ a @ b / 2),
    "dense_solve": OpCase(lambda m, *v: m.dense_solve(*v), [SQ + 9 * np.eye(H), G], np.linalg.solve, symbolic=False),
    "batched_dense_solve": by_name("batched_dense_solve", lambda a, b: np.linalg.solve(a, b[..., None])[..., 0],
        normal(2, 3, 3) + 5 * np.eye(3), normal(2, 3)),
    "reduce": OpCase(lambda m, x: m.reduce(x, "max", [1], True), [X], lambda x: x.max(1, keepdims=True)),
    "softmax": OpCase(lambda m, x: m.softmax(x, 1), [X], lambda x: formulas.softmax(x, 1)),
    "cumsum": OpCase(lambda m, x: m.cumsum(x, -1, True), [X], lambda x: np.cumsum(x, -1) - x),
    "sample": OpCase(lambda m, x: m.sample(x, 3, 0.9, 0.0, 7), [X], lambda x: x.argmax(-1)),
    "selective_scan": OpCase(lambda m, *v: m.selective_scan(*v, 5),
        [X, POSITIVE, -np.abs(normal(H, 5)), normal(B, S, 5), normal(B, S, 5)], scanned),
    "custom_fn": OpCase(lambda m, x: m.custom_fn(m.sin, x), [X], np.sin),
    "custom_fn_multi": OpCase(lambda m, x: m.custom_fn_multi(lambda v: (m.sin(v), m.cos(v)), x), [X],
        lambda x: (np.sin(x), np.cos(x))),
    "axial_rope_2d": OpCase(lambda m, x: m.axial_rope_2d(x, 3, 1, D, N, 100.0, 1), [X], lambda x: axial(x)),
    "reduce with its names": OpCase(lambda m, x: m.mean(x, axes=[1], keep_dim=True), [X],
        lambda x: x.mean(1, keepdims=True)),
}  # fmt: skip


def axial(x: np.ndarray) -> np.ndarray:
    """Three tokens in one row: the first half of each head turns by the column, and nothing by the row."""
    out = x.copy()
    for token in range(S):
        for head in range(N):
            a, b = x[:, token, head * D], x[:, token, head * D + 1]
            out[:, token, head * D] = a * math.cos(token) - b * math.sin(token)
            out[:, token, head * D + 1] = b * math.cos(token) + a * math.sin(token)
    return out


def test_builders_in_the_form_of_the_specification(subtests: pytest.Subtests) -> None:
    check_all(BUILDERS, subtests)


# IR 12: the text of a block; of some blocks the ops differ, see docs/graph.md.
TEXTS = {
    "linear": "linear+bias+relu", "linear_fused": "linear_fused(silu)", "swiglu_ffn": "swiglu_ffn",
    "shared_linear_pair": "shared_linear_pair(out=1)", "residual_rms_norm": "residual_rms_norm(eps=0.001)",
    "rms_norm": "rms_norm(eps=0.001)", "attention": "attention(heads=2, kv_heads=2)", "hir_mir": "mir(matmul)",
    "depthwise_conv1d_causal": "mir(causal_conv_op)", "rope": "rope(head_dim=4, n_rot=4)",
    "gated_delta_net": "gated_delta(key_heads=2, value_heads=2)",
    "gated_delta_net_carry": "mir(gated_delta_op(from_state=True))",
    "llama_decoder_block": "llama_decoder_block(heads=2, dim=4, kv=1, eps=1e-05, mask=causal)",
    "qwen35_mtp_head": "qwen35_mtp_head(heads=2, dim=4, vocab=5)",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_block(name: str) -> None:
    m: Any = Graph.hir("m")
    arrays = [np.asarray(a) for a in BUILDERS[name].arrays]
    values = [m.input(f"x{i}", a.shape, "i32" if a.dtype.kind == "i" else "f32") for i, a in enumerate(arrays)]
    made = BUILDERS[name].call(m, *values)
    m.set_outputs(made if isinstance(made, tuple) else [made])
    assert f" = {TEXTS[name]}(h" in m.inspect()


KINDS = {
    "activation": "gelu gelu_tanh silu relu sigmoid tanh exp log sqrt rsqrt neg abs sin cos tan atan round",
    "binary": "add sub mul div max min pow", "compare": "eq ne lt le gt ge", "reduce": "sum mean max min prod",
}  # fmt: skip


def test_the_kinds_of_an_op() -> None:
    """IR 6 and 7.1, in lower case."""
    m: Any = Graph.mir("m")
    x = m.input("x", (2, 8))
    for builder, kinds in KINDS.items():
        for kind in kinds.split():
            getattr(m, builder)(kind, *([x] * (2 if builder in ("binary", "compare") else 1)))


def test_an_error_of_the_users_own_function_stays_as_it_is() -> None:
    """A TypeError of a body is not taken for one of the call."""
    m = Graph.hir("m")
    with pytest.raises(TypeError, match="my own"):
        m.custom_fn(lambda v: (_ for _ in ()).throw(TypeError("my own")), m.input("x", (2,)))


T = ("batch", "seq", 8)


def test_out_shape_of_each_result() -> None:
    m: Any = Graph.hir("m")
    x = m.input("x", T)
    m.split(x, (2, 6), out_shape=[("batch", "seq", 2), None])
    m.split(x, (2, 6), out_shape=None)
    for wrong, message in (([T, None], "declared"), ([T], "1 shapes for 2 results")):
        with pytest.raises(ShapeError, match=message):
            m.split(x, (2, 6), out_shape=wrong)


def test_shapes() -> None:
    m: Any = Graph.hir("m")
    s, t = m.shape(m.input("x", ("batch", 1, 3))), m.shape(m.input("y", ("seq", 3)))
    assert (s.rank, s.dims[1:], s.dim(-1), s.dtype, s.is_static) == (3, (1, 3), 3, np.float32, False)
    assert (s.num_elements, s.size_bytes, s.dynamic_symbols) == (None, None, ("batch",))
    bound = s.bind({"batch": 2})
    assert (bound.num_elements, bound.size_bytes, bound.is_static, str(bound)) == (6, 24, True, "f32[2,1,3]")
    assert str(s.with_dim(1, "seq")) == "f32[batch,seq,3]" and str(s.with_dtype("bf16")) == "bf16[batch,1,3]"
    assert str(s.broadcast_with(t)) == "f32[batch,seq,3]" and str(s.scalar("i32")) == "i32[]"
    for call, error in ((lambda: s.dim(3), ShapeError), (lambda: s.broadcast_with(t.with_dtype("i32")), DTypeError),
                        (lambda: s.broadcast_with(t.with_dim(1, 4)), ShapeError)):  # fmt: skip
        with pytest.raises(error):
            call()


def module() -> GraphModule:
    def build(m: Any) -> Any:
        return m.swiglu_ffn(m.input("x", (2, H)), *(m.param(k, s) for k, s in FFN.items()))

    return Graph.define("m", build)


FFN = {"up": (H, F), "gate": (H, F), "down": (F, H)}


def test_levels_and_policies() -> None:
    m = module()
    assert m.as_hir_mut() is m and m.lower().as_hir_mut() is None and m.as_hir() is not None
    assert FusionPolicy.for_autodiff() == "fusable" and m.with_fusion_policy(FusionPolicy.DIRECT) is m
    assert len(m.lower_for_autodiff()) == 9 == len(module().with_fusion_policy(FusionPolicy.FUSABLE).lower_to_mir())
    assert m.fusion_policy == "direct" and m.lower_for_autodiff().lower_for_autodiff().stage == GraphStage.MIR
    wrapped = GraphModule.wrap_mir_graph(m.into_graph())
    assert wrapped.stage == GraphStage.HIR and [i.name for i in wrapped.inputs] == ["x"]
    arrays = {k: normal(*s).astype("f4") for k, s in FFN.items()}
    for graph in (m, wrapped, m.lower_for_autodiff(), Graph.from_lir(m.into_lir())):
        model: Any = rlx.compile(graph, arrays)
        np.testing.assert_allclose(np.asarray(model(ROWS)), swiglu(ROWS, *arrays.values()), rtol=1e-4)
    node = m.node(m.outputs[0])
    assert isinstance(node.op, hir.SwiGLU) and len(node.inputs) == 4
    assert m.set_hir_outputs(m.outputs) is None and m.finish_hir(m.outputs[0]) is m
    assert isinstance(Graph.block(m, "again", lambda m: m.relu(m.outputs[0])).node, int)


def test_json_by_level() -> None:
    m = module()
    planned = Graph.from_lir(m.into_lir())
    assert hir_to_json(hir_from_json(hir_to_json(m))) == m.to_json()
    assert lir_to_json(lir_from_json(lir_to_json(planned))) == planned.to_json()
    for call in (lambda: hir_to_json(planned), lambda: lir_to_json(m), lambda: lir_from_json(m.to_json()),
                 lambda: hir_from_json(planned.to_json())):  # fmt: skip
        with pytest.raises(GraphError, match="expected a GraphModule at"):
            call()


def test_the_fields_of_emit() -> None:
    """`hir`, `module`, `params`, `weights`, `profile`: a stage writes by them, and what it read is there."""
    profile, seen = rlx.CompileProfile.preset("encoder"), dict[str, Any]()

    def stage(emit: Any, x: Any) -> Any:
        y = emit.hir().linear(x, emit.load_param("w"), None, "relu")
        seen.update(params=dict(emit.params), profile=emit.profile, has=emit.weights.has("w"))
        return emit.module.add(y, 1.0)

    flow = ModelFlow("f").input("x", (2, H)).custom(stage).with_profile(profile)
    model: Any = rlx.compile(flow, {"w": SQ.astype("f4")})
    np.testing.assert_allclose(np.asarray(model(ROWS)), np.maximum(ROWS @ SQ, 0) + 1, rtol=1e-4)
    assert seen["params"]["w"].shape == (H, H) and seen["profile"] == profile and seen["has"]


def test_what_a_built_model_has() -> None:
    packed = rlx.Packed(np.zeros((4, 34), np.uint8), "gguf_q8_0", (4, 32))
    built = ModelFlow("f").input("x", (2, 32)).linear("w").build({"w": packed})
    assert built.typed_params == (("w", 4 * 34, "u8"),)
    assert BuiltModel.from_hir(module().into_hir()).typed_params == ()

    @dataclass(frozen=True)
    class Config:
        """As the configs of STAGES 9.4."""

        def compile_profile(self) -> str:
            return "llama32_decode"

    for config in (Config(), rlx.CompileProfile.preset("llama32_decode"), "llama32_decode"):
        profile = built.with_execution_config(config).profile
        assert profile is not None and profile.name == "llama32_decode"
    with pytest.raises(RlxError, match="expected a CompileProfile"):
        built.with_execution_config(3)


def to_negative(graph: GraphIR, types: Any = None) -> GraphIR:
    """relu(x) → −x"""
    replace = everywhere(lambda b, n, node, i: b.add(Unary("neg"), *i) if node.op == Unary("relu") else None)
    return rewrite(graph, replace, TypeCache() if types is None else types, "to_negative")


def test_registered_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_registered", {})
    flow = ModelFlow("f").input("x", (2, H)).custom(lambda emit, x: emit.relu(x))
    x, seen = ROWS, list[str]()

    def only_look(graph: GraphIR) -> GraphIR:
        seen.append(graph.name)
        return graph

    plugins.register_hir_extension("negative", to_negative)
    plugins.register_hir_extension("look", only_look)
    plugins.register_hir_extension("negative", to_negative)  # registered again: it runs last
    assert plugins.registered_hir_extensions() == ("look", "negative")
    np.testing.assert_array_equal(np.asarray(rlx.compile(flow)(x)), np.maximum(x, 0))  # none by default
    for plan in (FlowExtensionPlan.all(), FlowExtensionPlan.only(["negative"])):
        np.testing.assert_array_equal(np.asarray(rlx.compile(flow.with_extensions(plan))(x)), -x)
    graph = flow.build().hir
    assert plugins.apply_hir_extensions(graph).nodes[-1].op == Unary("neg") and seen == ["f", "f"]
    assert plugins.apply_hir_extensions_named(graph, ["look"]).nodes[-1].op == Unary("relu")
    assert plugins.apply_hir_extensions_named(graph, ["negative", "look"]).nodes[-1].op == Unary("neg")
    with pytest.raises(GraphError, match="an extension 'lok'.*did you mean 'look'"):
        plugins.apply_hir_extensions_named(graph, ["lok"])
    for wrong in (3, lambda: None):
        with pytest.raises(GraphError, match="expected a function of a graph"):
            plugins.register_hir_extension("wrong", wrong)  # type: ignore[arg-type]
    with rlx.plugins.using(rlx.Plugin("p", extensions={"theirs": to_negative})):
        with pytest.raises(GraphError, match="a plugin has an extension 'theirs'"):
            plugins.register_hir_extension("theirs", to_negative)
    with rlx.plugins.using(rlx.Plugin("p", extensions={"look": to_negative})):
        with pytest.raises(GraphError, match="both provide"):
            plugins.registered_hir_extensions()


@dataclass(frozen=True)
class Scaled(Mir):
    """`factor · x`."""

    traits = ELEMENTWISE

    factor: float = 2.0

    def eval(self, x: Any) -> Any:
        return self.factor * x


def test_an_op_of_a_plugin_by_name() -> None:
    m = Graph.hir("m")
    x = m.input("x", (2, H))
    with rlx.plugins.using(rlx.Plugin("p", ops=(Scaled,))):
        m.set_outputs([m.custom_op("Scaled", [x], {"factor": 3.0}), m.custom_op("Scaled", [x])])
        with pytest.raises(GraphError, match="Scaled does not take"):
            m.custom_op("Scaled", [x], {"by": 3.0})
    first, second = rlx.compile(m)(ROWS).values()
    np.testing.assert_allclose([first, second], [3 * ROWS, 2 * ROWS], rtol=1e-6)
