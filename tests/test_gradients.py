"""Gradients of stages against finite differences: reverse and forward mode, each leaf and each float input.

Those of every op stand in `test_ops.py`; here is what stages, layers and programs do with them.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks as b
from tests.small import declared

B, S, H, F, V, D = 2, 4, 8, 12, 9, 4
Arrays = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, S, H)).astype(np.float32)
IDS = RNG.integers(0, V, (B, S)).astype(np.int32)
KEEP = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], np.int32)  # the second row may read nothing
BIAS = RNG.standard_normal((B, 4, S, S)).astype(np.float32)
BIAS[0, 0, 1] = -np.inf


@dataclass(frozen=True)
class Case:
    """Stages over inputs, with the shapes of their weights. The first input is the active value."""

    inputs: Arrays
    stages: tuple[Any, ...]
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def flow(self) -> rlx.ModelFlow:
        flow = rlx.ModelFlow("case")
        for name, value in self.inputs.items():
            flow = flow.input(name, value.shape, dtype=value.dtype.name)
        return flow.stage(*self.stages)

    def params(self) -> dict[str, np.ndarray]:
        """Random weights that keep the size of what they multiply; vectors around 1, or around 0 for biases."""
        rng = np.random.default_rng(1)
        drawn = {key: rng.standard_normal(shape) for key, shape in self.weights.items()}
        for key, value in drawn.items():
            centre = 0.0 if np.ndim(value) > 1 or "bias" in key else 1.0
            drawn[key] = centre + value / math.sqrt((np.shape(value) or (1,))[-1])
        return {key: np.asarray(value, np.float32) for key, value in drawn.items()}


def with_biases(shapes: Mapping[str, tuple[int, ...]], names: str = "") -> Shapes:
    """`{name}.weight` for every shape; `.bias` for those whose name has a part in `names`."""
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    return weights | {f"{n}.bias": s[:1] for n, s in shapes.items() if n.split(".")[-1] in names.split()}


def llama_weights(layers: int, biased: str = "", norms: str = "") -> Shapes:
    """Those of layers with 4 heads on 2, and norms of that many more kinds."""
    q, kv = (4 * D, H), (2 * D, H)
    layer: Shapes = {f"self_attn.{n}_proj": s for n, s in {"q": q, "k": kv, "v": kv, "o": (H, 4 * D)}.items()}
    layer |= {"mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm", *norms.split()), (H,))
    layer |= {n: (D,) for n in layer if n.endswith(("q_norm", "k_norm"))}
    return with_biases({f"model.layers.{i}.{n}": s for i in range(layers) for n, s in layer.items()}, biased)


def bert_weights(prefix: str) -> Shapes:
    shapes: Shapes = {f"attention.self.{n}": (H, H) for n in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (H, H), "intermediate.dense": (F, H), "output.dense": (H, F)}
    shapes["attention.output.LayerNorm"] = shapes["output.LayerNorm"] = (H,)
    return with_biases({f"{prefix}.{n}": s for n, s in shapes.items()}, "query key value dense LayerNorm")


def registered(emit: Any, x: Any) -> Any:
    """What a GdnScan reads."""
    emit.set_gdn(*(emit.flow_input(name) for name in ("q", "k", "v", "g", "beta")))
    return x


def cell(h: Any, x: Any, w: Any) -> tuple[Any, Any]:
    """Elman's."""
    h = jnp.tanh(x + w @ h)
    return h, h


ROPE = b.RopeTables.theta(D)
SPEC = b.LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2)
QWEN = b.Qwen3DecoderSpec(num_heads=4, num_kv_heads=2, head_dim=D, attention_bias=True, output_bias=True,
                          mask=b.MaskKind.sliding_window(2))  # fmt: skip
GEMMA = b.gemma_attn_spec(0, 4, D, 2, b.MaskKind.sliding_window(2), 0.1, 3.0)  # a softcap that bites
ATTENTION = with_biases({"q": (4 * D, H), "k": (2 * D, H), "v": (2 * D, H)}, "q k v")
ATTEND = b.SelfAttnPrefillSpec("q.weight", "k.weight", "v.weight", 4, D, 2, b.MaskKind.CUSTOM, 0.7, 5.0,
                               qkv_bias=True)  # fmt: skip
QKV = (("q.weight", "k.weight", "v.weight"), "o.weight", 4, 2, D, ("q.bias", "k.bias", "v.bias"), "o.bias")
EXPERTS = b.MoeSpec(num_experts=3, top_k=3, inner=F, scores="sigmoid", scale=1.5, keys=b.GPT_OSS_KEYS,
                    clamp=b.ClampedGate(50.0, 1.7, 0.5))  # fmt: skip
"""All are chosen: where the choice changes there is a step."""
DELTA = b.GatedDeltaSpec(key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=2, eps=1e-2)
SSM = b.Mamba2Spec(heads=2, head_dim=3, state_size=4, kernel=2, bias=True, eps=1e-2)
GDN = np.random.default_rng(8).standard_normal((3, B, S, 2, 3)).astype(np.float32)
PAST = np.random.default_rng(5).standard_normal((2, B, 3, 2 * D)).astype(np.float32)
MIXED = (
    b.StoreStream("a"), b.Linear("w.weight", bias_key="w.bias"), b.StoreStream("b"),
    b.DualStream("mix", "a", "b", lambda emit, a, b: (a * emit.sigmoid(b), b + emit.jax(jnp.tanh, a))),
    b.Custom(lambda emit, x: emit.stream("b") - x, "difference"),
    b.Named("again", b.Sequence([b.LoadStream("a"), b.Linear("t.weight", transpose=False)])),
)  # fmt: skip

QUICK = {
    "tokens": Case({"ids": IDS, "kinds": IDS % 3, "last_token_idx": np.array([2, 0], np.int32)},
                   (b.Embed("e"), b.GatherAdd("kinds", "k"), b.GatherLastToken.dynamic(), b.LmHead.tied(V, H)),
                   {"e": (V, H), "k": (3, H)}),
    "tokens beside hidden states": Case({"x": X, "hidden": 0.7 - X[:, ::-1]},
                                        (b.MtpMerge(b.RmsNorm("e"), b.GemmaRmsNorm("h"), "fc"),),
                                        {"e": (H,), "h": (H,), "fc": (H, 2 * H)}),
    "a step along the tokens": Case(
        {"x": X},
        (b.CausalWindow(2), b.Custom(lambda emit, x: x.mean(2)), b.Recurrent(cell, ("w",), init=np.full(H, 0.3, "f4")),
         b.Custom(lambda emit, x: emit.recurrent(cell, x, "w", init=emit.param("start")))),
        {"w": (H, H), "start": (H,)}),
    "states of fixed size": Case(
        {"x": X}, (b.GatedDeltaNet("delta", DELTA), b.ResidualSave(), b.Mamba2Mixer("ssm", SSM), b.ResidualAdd()),
        declared(b.GatedDeltaNet("delta", DELTA), H) | declared(b.Mamba2Mixer("ssm", SSM), H)),
    "a gated delta rule": Case(
        {"x": X, "q": GDN[0], "k": GDN[1], "v": GDN[2], "g": -np.abs(GDN[0, ..., 0]), "beta": GDN[1, ..., 0]},
        (b.Custom(registered), b.GdnScan(3))),
    "residuals and norms": Case(
        {"x": X}, (b.ZeroBeta(H), b.ResidualSave(), b.RmsNorm("rms"), b.EmbedScale(H), b.Linear("w"), b.ResidualAdd(),
                   b.LogitSoftcap(3.0), b.LayerNorm("ln", "ln.bias")),
        {"rms": (H,), "w": (H, H), "ln": (H,), "ln.bias": (H,)}),
    "streams": Case({"x": X}, MIXED, with_biases({"w": (H, H), "t": (H, F)}, "w")),
    "experts": Case({"x": X}, (b.MoeFfn("l", EXPERTS),), declared(b.MoeFfn("l", EXPERTS), H)),
    "rows that read nothing": Case(
        {"x": X, "keep": KEEP}, (ROPE, b.AttnMask.from_input("keep"), b.SelfAttnPrefill(ATTEND)), ATTENTION),
    "bias mask": Case({"x": X, "mask": BIAS},
                      (ROPE, b.LlamaDecoder.layer(0, dataclasses.replace(SPEC, mask=b.MaskKind.BIAS), "mask")),
                      llama_weights(1)),
    "decode": Case(
        {"x": X, "past_k_0": PAST[0], "past_v_0": PAST[1], "mask": np.concatenate([KEEP[:, :3], KEEP], axis=1)},
        (ROPE, b.BindDecodeInputs(1, use_custom_mask=True), b.LlamaDecodeLayer.layer(
            0, b.LlamaDecodeLayerSpec(num_heads=4, head_dim=D, num_kv_heads=2, use_custom_mask=True))),
        llama_weights(1)),
    "bert": Case({"x": X, "attention_mask": KEEP}, (b.BertEncoderLayer(b.BertEncoderLayerSpec.hf("l", H, 2)),),
                 bert_weights("l")),
    "similarity": Case({"texts": X[0], "images": X[1, :3]},
                       (b.bind_inputs_to_streams([("images", "images")]), b.Linear("w"), b.Similarity("scale", "bias")),
                       {"w": (H, H), "scale": (), "bias": (1,)}),
}  # fmt: skip
SLOW = {
    "llama": Case({"x": X}, (ROPE, b.Repeat(2, lambda i: b.LlamaDecoder.layer(i, SPEC))), llama_weights(2)),
    "qwen3": Case({"x": X}, (ROPE, b.qwen3_prefill_layer_fused(0, QWEN)),
                  llama_weights(1, "q_proj k_proj v_proj o_proj", "self_attn.q_norm self_attn.k_norm")),
    "gemma 3": Case(
        {"x": X}, (ROPE, b.gemma_prefill_layer_composed(0, b.GemmaStyle.GEMMA3, GEMMA, 1e-3)), llama_weights(
            1, "", "pre_feedforward_layernorm post_feedforward_layernorm self_attn.q_norm self_attn.k_norm")),
    "self-attention": Case(
        {"x": X, "keep": KEEP},
        (b.SelfAttention(*QKV, window=(2, 1), mask_input="keep", scale=0.7, softcap=5.0, rope_theta=30.0, n_rot=2,
                         rope_style="interleaved", sinks="sinks"),),
        ATTENTION | with_biases({"o": (H, 4 * D)}, "o") | {"sinks": (4,)}),
}  # fmt: skip
CASES = QUICK | SLOW


def model_of(case: Case, **tables: Any) -> Any:
    profile = rlx.CompileProfile().replace(**tables) if tables else None
    return rlx.compile(case.flow(), case.params(), profile=profile, program="train")


def differentiable(case: Case, model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """`f(leaves) → output` and its point: the parameters and the float inputs by name."""
    read = {d.name: case.inputs[d.name] for d in model.inputs if d.name in case.inputs}
    floats = {f"input {n}": v for n, v in read.items() if v.dtype == np.float32}

    def f(leaves: Arrays) -> Any:
        params = {n: leaves[n] for n in model.params}
        moved = {n.removeprefix("input "): leaves[n] for n in floats}
        outputs = model.apply(params, **{**read, **moved})
        return jnp.concatenate([v.ravel() for v in outputs.values()]) if isinstance(outputs, dict) else outputs

    return jax.jit(f), {n: np.asarray(v) for n, v in model.params.items()} | floats


def slope(f: Any, point: Arrays, name: str, along: np.ndarray, weights: np.ndarray) -> float:
    """d/dt of ⟨weights, f(point + t·along on one leaf)⟩ at 0, by central differences of fourth order."""

    def at(t: float) -> float:
        moved = {**point, name: point[name] + np.float32(t) * along}
        return float((np.asarray(f(moved), np.float64) * weights).sum())

    t = 0.005
    return (8 * (at(t) - at(-t)) - (at(2 * t) - at(-2 * t))) / (12 * t)


def check_gradients(case: Case, **tables: Any) -> None:
    """Vector-Jacobian and Jacobian-vector products on every leaf, against `slope` in a random direction."""
    f, point = differentiable(case, model_of(case, **tables))
    rng = np.random.default_rng(2)
    weights = rng.standard_normal(jax.eval_shape(f, point).shape).astype(np.float32)
    along = {name: rng.standard_normal(v.shape).astype(np.float32) for name, v in point.items()}

    @jax.jit
    def both(point: Any, along: Any) -> Any:
        (gradient,) = jax.vjp(f, point)[1](weights)
        return gradient, (jax.jvp(f, (point,), (along,))[1] * weights).sum()

    gradient, forward = jax.tree.map(np.asarray, both(point, along))
    size = math.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
    assert 0 < size < np.inf
    total = 0.0
    for name, g in gradient.items():
        assert g.shape == point[name].shape and g.dtype == point[name].dtype
        want = slope(f, point, name, along[name], weights)
        total += want
        assert abs(float((g * along[name]).sum()) - want) <= 1e-3 * np.linalg.norm(g) + 2e-5 * size, name
    assert abs(float(forward) - total) <= 1e-3 * size


LONG = {"states of fixed size", "experts", "decode", "bert", "rows that read nothing", *SLOW}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in CASES])
def test_gradients(name: str) -> None:
    """The `train` program as it is by default."""
    check_gradients(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["scan layer", "unroll dots"])
def test_rolled_and_recomputed(plan: str) -> None:
    """Two layers in a loop and apart, with either way to compute anew."""
    roll, remat = plan.split()
    check_gradients(CASES["llama"], layers={"roll": roll, "remat": remat})


OTHER = [pytest.param(n, marks=pytest.mark.slow) for n in ("gemma 3", "self-attention")]


@pytest.mark.parametrize("name", ["rows that read nothing", *OTHER])
def test_the_other_policy(name: str) -> None:
    """`fusable` differentiates other ops than `direct`."""
    check_gradients(CASES[name], fusion={"policy": "fusable"})


def test_bf16() -> None:
    """With bf16 compute the gradient is finite, has the leaf's dtype, and points where the f32 one does."""
    gradients, case = [], CASES["rows that read nothing"]
    for compute in ("f32", "bf16"):
        f, point = differentiable(case, model_of(case, precision={"compute": compute}))
        gradient = jax.jit(jax.grad(lambda p, f=f: jnp.square(f(p).astype(jnp.float32)).mean()))(point)
        assert {n: g.dtype for n, g in gradient.items()} == {n: v.dtype for n, v in point.items()}
        gradients.append(np.concatenate([np.ravel(g).astype(np.float32) for g in gradient.values()]))
    exact, rounded = gradients
    assert np.isfinite(rounded).all()
    assert exact @ rounded >= 0.99 * np.linalg.norm(exact) * np.linalg.norm(rounded)


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison fails for a function whose derivative is not its own."""

    @jax.custom_jvp
    def wrong(x: Any) -> Any:
        return x**3

    @wrong.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return wrong(primals[0]), 2.9 * primals[0] ** 2 * tangents[0]

    with pytest.raises(AssertionError):
        check_gradients(Case({"x": X}, (b.Custom(lambda emit, x: emit.jax(wrong, x)),)))
