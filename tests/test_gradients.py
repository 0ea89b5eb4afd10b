"""Gradients of every stage against finite differences: reverse and forward mode, each leaf and each float input."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import (
    AttnMask,
    BertEncoderLayer,
    BertEncoderLayerSpec,
    BindDecodeInputs,
    ClsTokenPool,
    Custom,
    DecodeRopeParams,
    DualStream,
    Embed,
    EmbedScale,
    GatherAdd,
    GatherFromInput,
    GatherLastToken,
    GeluFfn,
    GemmaDecodeLayerSpec,
    GemmaStyle,
    LayerNorm,
    Linear,
    LlamaDecodeLayer,
    LlamaDecodeLayerSpec,
    LlamaDecoder,
    LlamaDecoderSpec,
    LlamaKvTap,
    LmHead,
    LoadStream,
    LogitSoftcap,
    MaskKind,
    Named,
    Qwen3DecodeLayer,
    Qwen3DecodeLayerSpec,
    Qwen3DecoderSpec,
    Repeat,
    ResidualAdd,
    ResidualSave,
    RmsNorm,
    RopeTables,
    SelfAttnDecode,
    SelfAttnPrefill,
    SelfAttnPrefillSpec,
    Sequence,
    StoreStream,
    SwiGlu,
    ZeroBeta,
    gemma_attn_spec,
    gemma_decode_layer,
    gemma_prefill_layer_composed,
    gemma_prefill_layer_kv,
    llama_prefill_layer_composed,
    qwen3_prefill_layer_composed,
    qwen3_prefill_layer_fused,
)

B, S, H, F, V, D = 2, 4, 8, 12, 9, 4
Arrays = Mapping[str, Any]
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
            centre = 0.0 if value.ndim > 1 or "bias" in key else 1.0
            drawn[key] = centre + value / math.sqrt(value.shape[-1])
        return {key: value.astype(np.float32) for key, value in drawn.items()}


def with_biases(shapes: Mapping[str, tuple[int, ...]], names: str = "") -> dict[str, tuple[int, ...]]:
    """`{name}.weight` for every shape; `.bias` for those whose name has a part in `names`."""
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    biased = {f"{n}.bias": s[:1] for n, s in shapes.items() if n.split(".")[-1] in names.split()}
    return weights | biased


def llama_weights(layers: int, kv_heads: int, biased: str = "") -> dict[str, tuple[int, ...]]:
    """Those of Llama layers with 4 heads."""
    q, kv = (4 * D, H), (kv_heads * D, H)
    parts = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": (H, 4 * D)}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{n}": s for n, s in parts.items()}
    layer |= {"mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
    layer["input_layernorm"] = layer["post_attention_layernorm"] = (H,)
    return with_biases({f"model.layers.{i}.{n}": s for i in range(layers) for n, s in layer.items()}, biased)


def bert_weights(prefix: str) -> dict[str, tuple[int, ...]]:
    """Those of a BERT layer."""
    shapes: dict[str, tuple[int, ...]] = {f"attention.self.{n}": (H, H) for n in ("query", "key", "value")}
    shapes |= {"attention.output.dense": (H, H), "intermediate.dense": (F, H), "output.dense": (H, F)}
    shapes["attention.output.LayerNorm"] = shapes["output.LayerNorm"] = (H,)
    return with_biases({f"{prefix}.{n}": s for n, s in shapes.items()}, "query key value dense LayerNorm")


def llama(kind: MaskKind | str, kv_heads: int = 2, layers: int = 1, biases: bool = False, **inputs: Any) -> Case:
    """Llama layers over x; the input `mask` where the kind takes one."""
    spec = LlamaDecoderSpec(
        num_heads=4, head_dim=D, num_kv_heads=kv_heads, mask=kind, attention_bias=biases, mlp_bias=biases
    )
    name = "mask" if inputs else None
    biased = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj" if biases else ""
    repeat = Repeat(layers, lambda i: LlamaDecoder.layer(i, spec, name))
    return Case({"x": X, **inputs}, (RopeTables.theta(D), repeat), llama_weights(layers, kv_heads, biased))


def qwen3(layer: Any) -> Case:
    """One layer with a norm of each head, biases and a window."""
    spec = Qwen3DecoderSpec(
        num_heads=4, num_kv_heads=2, head_dim=D, attention_bias=True, output_bias=True, mask=MaskKind.sliding_window(2)
    )
    weights = llama_weights(1, 2, "q_proj k_proj v_proj o_proj")
    norms = {f"model.layers.0.self_attn.{n}_norm.weight": (D,) for n in "qk"}
    return Case({"x": X}, (RopeTables.theta(D), layer(0, spec)), weights | norms)


def gemma_weights(style: GemmaStyle) -> dict[str, tuple[int, ...]]:
    """Those of a Gemma layer with 4 heads on 2."""
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (style is not GemmaStyle.GEMMA)
    norms: dict[str, tuple[int, ...]] = dict.fromkeys(names, (H,))
    norms |= {f"self_attn.{n}_norm": (D,) for n in "qk"} if style is GemmaStyle.GEMMA3 else {}
    return llama_weights(1, 2) | {f"model.layers.0.{n}.weight": s for n, s in norms.items()}


def gemma_attention(mask: MaskKind | str) -> SelfAttnPrefillSpec:
    """A softcap that bites."""
    return gemma_attn_spec(0, 4, D, 2, mask, 0.1, 3.0)


def gemma(style: GemmaStyle, mask: MaskKind, layer: Callable[..., Any] = gemma_prefill_layer_composed) -> Case:
    """A layer, without a cache."""
    stages = (RopeTables.theta(D), layer(0, style, gemma_attention(mask), 1e-3))
    return Case({"x": X}, stages, gemma_weights(style))


def attention(mask: MaskKind | str, mask_input: str | None = None) -> SelfAttnPrefill:
    """Grouped heads, softcap and a scale of its own, biases; weights as `ATTENTION`."""
    biases = ("q.bias", "k.bias", "v.bias")
    return SelfAttnPrefill(
        SelfAttnPrefillSpec(
            "q.weight", "k.weight", "v.weight", 4, D, 2, mask, 0.7, 5.0, biases=biases, mask_input=mask_input
        )
    )


def decode(*stages: Any, weights: Mapping[str, tuple[int, ...]], **inputs: Any) -> Case:
    """Stages behind three cached tokens of one layer with two key heads; keys and values are outputs too."""
    past = {f"past_{n}_0": np.random.default_rng(5).standard_normal((B, 3, 2 * D)).astype(np.float32) for n in "kv"}
    return Case({"x": X, **past, **inputs}, stages, weights)


ATTENTION = with_biases({"q": (4 * D, H), "k": (2 * D, H), "v": (2 * D, H)}, "q k v")
ROPE = {"rope_cos": np.cos(X[0, :, :2]), "rope_sin": np.sin(X[0, :, :2])}
MLP = with_biases({"l.mlp.gate_proj": (F, H), "l.mlp.up_proj": (F, H), "l.mlp.down_proj": (H, F)})
MIXED = (
    StoreStream("a"),
    Linear("w.weight", bias_key="w.bias"),
    StoreStream("b"),
    DualStream("mix", "a", "b", lambda emit, a, b: (a * emit.sigmoid(b), b + emit.jax(jnp.tanh, a))),
    Custom(lambda emit, x: emit.stream("b") - x, "difference"),
    Named("again", Sequence([LoadStream("a"), Linear("t.weight", transpose=False)])),
)
CASES = {
    "tokens": Case(
        {"ids": IDS, "kinds": IDS % 3, "last_token_idx": np.array([2, 0], np.int32)},
        (Embed("e"), GatherAdd("kinds", "k"), GatherLastToken.dynamic(), LmHead.tied(V, H)),
        {"e": (V, H), "k": (3, H)},
    ),
    "another input's table": Case(
        {"x": X, "ids": IDS},
        (GatherFromInput("ids", "e"), LmHead.separate("head", V, H)),
        {"e": (V, H), "head": (V, H)},
    ),
    "residuals and norms": Case(
        {"x": X},
        (
            ZeroBeta(H),
            ResidualSave(),
            RmsNorm("rms"),
            EmbedScale(H),
            Linear("w"),
            ResidualAdd(),
            LogitSoftcap(3.0),
            LayerNorm("ln", "ln.bias"),
        ),
        {"rms": (H,), "w": (H, H), "ln": (H,), "ln.bias": (H,)},
    ),
    "streams": Case({"x": X}, MIXED, with_biases({"w": (H, H), "t": (H, F)}, "w")),
    "gated ffn": Case({"x": X}, (SwiGlu.hf_mlp("l", bias=False),), MLP),
    "gelu ffn": Case(
        {"x": X},
        (GeluFfn.hf_bert("l"), ClsTokenPool()),
        with_biases({"l.intermediate.dense": (F, H), "l.output.dense": (H, F)}, "dense"),
    ),
    "attention, causal": Case({"x": X}, (attention("causal"),), ATTENTION),
    "attention, rows that read nothing": Case(
        {"x": X, "keep": KEEP},
        (RopeTables.theta(D), AttnMask.from_input("keep"), attention(MaskKind.CUSTOM)),
        ATTENTION,
    ),
    "attention, ones mask": Case({"x": X}, (AttnMask.ones(), attention(MaskKind.CUSTOM)), ATTENTION),
    "llama": llama("causal", layers=2, biases=True),
    "llama, window mask": llama(MaskKind.sliding_window(2), kv_heads=1),
    "llama, keep mask": llama(MaskKind.CUSTOM, mask=KEEP),
    "llama, bias mask": llama(MaskKind.BIAS, mask=BIAS),
    "llama, no mask": llama(MaskKind.NONE, kv_heads=4),
    "llama, composed": Case(
        {"x": X},
        (
            llama_prefill_layer_composed(
                0, LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2, hidden_shape=(B, S, H))
            ),
        ),
        llama_weights(1, 2),
    ),
    "qwen3": qwen3(qwen3_prefill_layer_fused),
    "qwen3, composed": qwen3(qwen3_prefill_layer_composed),
    "gemma": gemma(GemmaStyle.GEMMA, MaskKind.CAUSAL),
    "gemma 3": gemma(GemmaStyle.GEMMA3, MaskKind.sliding_window(2)),
    "gemma, tap": gemma(GemmaStyle.GEMMA3, MaskKind.CAUSAL, gemma_prefill_layer_kv),
    "gemma, decode": decode(
        RopeTables.theta(D),
        BindDecodeInputs(1),
        gemma_decode_layer(0, GemmaDecodeLayerSpec.of(GemmaStyle.GEMMA3, gemma_attention("sliding:3"), 1e-3)),
        weights=gemma_weights(GemmaStyle.GEMMA3),
    ),
    "llama, tap": Case(
        {"x": X},
        (
            RopeTables.theta(D),
            LlamaKvTap.layer(0, LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2)),
            LlamaDecoder.layer(0, LlamaDecoderSpec(num_heads=4, head_dim=D, num_kv_heads=2)),
        ),
        llama_weights(1, 2),
    ),
    "llama, decode": decode(
        RopeTables.theta(D),
        BindDecodeInputs(1, use_custom_mask=True),
        LlamaDecodeLayer.layer(0, LlamaDecodeLayerSpec(num_heads=4, head_dim=D, num_kv_heads=2, use_custom_mask=True)),
        weights=llama_weights(1, 2),
        mask=np.concatenate([KEEP[:, :3], KEEP], axis=1),
    ),
    "qwen, decode": decode(
        DecodeRopeParams(np.cos(X[0, :, :2]), np.sin(X[0, :, :2]), 2),
        BindDecodeInputs(1),
        Qwen3DecodeLayer.layer(
            0, Qwen3DecodeLayerSpec(num_heads=4, num_kv_heads=2, head_dim=D, attention_bias=True, mask="sliding:3")
        ),
        weights=llama_weights(1, 2, "q_proj k_proj v_proj")
        | {f"model.layers.0.self_attn.{n}_norm.weight": (D,) for n in "qk"},
    ),
    "attention, decode": decode(
        BindDecodeInputs(1), SelfAttnDecode(attention("causal").spec, 0), weights=ATTENTION, **ROPE
    ),
    "bert": Case(
        {"x": X, "attention_mask": KEEP}, (BertEncoderLayer(BertEncoderLayerSpec.hf("l", H, 2)),), bert_weights("l")
    ),
}
SLOW_CASES = (
    "llama",  # the default suite has it in QUICK_PLANS
    "attention, ones mask",
    "gemma, decode",
    "llama, window mask",
    "llama, keep mask",
    "llama, no mask",
    "llama, composed",
    "qwen3, composed",
    "gemma",
    "gemma 3",
    "llama, tap",
    "qwen, decode",
    "attention, decode",
    "gemma, tap",
)
PLANS = [f"{roll} {remat}" for roll in ("scan", "unroll") for remat in ("none", "layer", "dots")]
QUICK_PLANS = ("scan layer", "unroll dots")


def model_of(case: Case, **tables: Any) -> Any:
    return rlx.compile(
        case.flow(), case.params(), profile=rlx.CompileProfile().replace(**tables) if tables else None, program="train"
    )


def differentiable(case: Case, model: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """`f(leaves) → output` and its point: the parameters and the float inputs by name."""
    floats = {f"input {n}": v for n, v in case.inputs.items() if v.dtype == np.float32}

    def f(leaves: Arrays) -> Any:
        params = {n: leaves[n] for n in model.params}
        outputs = model.apply(params, **{n: leaves.get(f"input {n}", v) for n, v in case.inputs.items()})
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


def slow_unless(quick: bool, value: Any) -> Any:
    """A parameter that only the slow tier runs, unless `quick`."""
    return pytest.param(value, id=str(value), marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [slow_unless(name not in SLOW_CASES, name) for name in CASES])
def test_gradients(name: str) -> None:
    """The `train` program as it is by default."""
    check_gradients(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("plan", [slow_unless(plan in QUICK_PLANS, plan) for plan in PLANS])
def test_rolled_and_recomputed(plan: str) -> None:
    """Two layers in every way that the profile can run them."""
    roll, remat = plan.split()
    check_gradients(CASES["llama"], layers={"roll": roll, "remat": remat})


@pytest.mark.parametrize("name", [slow_unless("rows" in name, name) for name in CASES])
def test_the_other_policy(name: str) -> None:
    """`fusable` differentiates other ops than `direct`."""
    check_gradients(CASES[name], fusion={"policy": "fusable"})


@pytest.mark.parametrize("name", [slow_unless(name == "tokens", name) for name in ("tokens", "llama", "bert")])
def test_bf16(name: str) -> None:
    """With bf16 compute the gradient is finite, has the leaf's dtype, and points where the f32 one does."""
    gradients = []
    for compute in ("f32", "bf16"):
        f, point = differentiable(CASES[name], model_of(CASES[name], precision={"compute": compute}))
        gradient = jax.jit(jax.grad(lambda p, f=f: jnp.square(f(p).astype(jnp.float32)).mean()))(point)
        assert {n: g.dtype for n, g in gradient.items()} == {n: v.dtype for n, v in point.items()}
        gradients.append(np.concatenate([np.ravel(g).astype(np.float32) for g in gradient.values()]))
    exact, rounded = gradients
    assert np.isfinite(rounded).all()
    assert exact @ rounded >= 0.99 * np.linalg.norm(exact) * np.linalg.norm(rounded)


# -- no stage is forgotten ---------------------------------------------------------------------


def stages_in(stage: Any) -> Iterator[type]:
    """The stage's class and those of the stages inside it."""
    yield type(stage)
    inner = {Named: lambda s: [s.inner], Sequence: lambda s: s.stages, Repeat: lambda s: [s.stage_for_index(0)]}
    for part in inner.get(type(stage), lambda s: [])(stage):
        yield from stages_in(part)


def all_stages() -> set[type]:
    """Every dataclass with `emit` in the modules of `rlx_jax.blocks`, but for those that stages are made from."""
    found = set()
    for info in pkgutil.iter_modules(blocks.__path__):
        module = importlib.import_module(f"rlx_jax.blocks.{info.name}")
        found |= {c for c in vars(module).values() if isinstance(c, type) and dataclasses.is_dataclass(c)}
    return {c for c in found if hasattr(c, "emit") and not c.__subclasses__()}


def test_every_stage_has_a_case() -> None:
    """A new stage fails here until a case has it."""
    covered = {c for case in CASES.values() for stage in case.stages for c in stages_in(stage)}
    assert {c.__name__ for c in all_stages() - covered} == set()
    assert Embed in all_stages() and LlamaDecoder in all_stages(), "the search finds stages"


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison fails for a function whose derivative is not its own."""

    @jax.custom_jvp
    def wrong(x: Any) -> Any:
        return x**3

    @wrong.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return wrong(primals[0]), 2.9 * primals[0] ** 2 * tangents[0]

    with pytest.raises(AssertionError):
        check_gradients(Case({"x": X}, (Custom(lambda emit, x: emit.jax(wrong, x)),)))
