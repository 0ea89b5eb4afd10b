"""Mixtures of experts: routing, the ways that they run, storage, custom models, and experts that devices share."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.blocks import ClampedGate, GemmaStyle, MoeSpec
from rlx_jax.device import named_device
from rlx_jax.ir import hir
from rlx_jax.ir.graph import TypeCache
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.lowering.lir.experts import (
    block_rows,
    choose,
    choose_sharded,
    compare_into_blocks,
    count_into_blocks,
    sort_into_blocks,
)
from rlx_jax.lowering.lir.implementations import IMPLEMENTATIONS
from rlx_jax.lowering.lower import as_function
from rlx_jax.lowering.sharding import ModelSharding
from rlx_jax.models.mixture import MixtralConfig, Qwen3MoeConfig
from tests.divided import mesh
from tests.oracles import checkpoints, op_formulas
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record
from tests.small import declared

MIXTRAL = checkpoints.FIXTURES / "mixtral" / "window_v5"
MIXED = checkpoints.FIXTURES / "qwen3_moe" / "mixed_v5"
WAYS = ("xla", "gathered", "blocked", "looped", "ragged")
SIZES = {"one token": ((1, 1), 2, 7), "few": ((3, 3), 3, 4), "many": ((2, 40), 2, 3), "one expert": ((2, 3), 1, 1)}
"""Tokens, choices of each, experts."""


def operands(name: str, contract: int, seed: int = 0, biased: bool = False) -> list[np.ndarray]:
    """x, gate, up, down, weights, ids and biases; no expert is chosen twice by one token."""
    lead, top, experts = SIZES[name]
    rng = np.random.default_rng(seed)
    x, weights = rng.normal(size=(*lead, 6)), rng.uniform(0.1, 1, (*lead, top))
    gate, up, down = (rng.normal(size=(experts, *size)) for size in ((5, 6), (5, 6), (6, 5)))
    ids = np.stack([rng.permutation(experts)[:top] for _ in range(x[..., 0].size)]).reshape(*lead, top)
    if not contract:
        gate, up, down = (w.transpose(0, 2, 1) for w in (gate, up, down))
    floats = [a.astype(np.float32) for a in (x, gate, up, down)]
    biases = [rng.normal(size=(experts, n)).astype(np.float32) for n in (5, 5, 6)] if biased else []
    return [np.array(a) for a in (*floats, weights.astype(np.float32), ids.astype(np.int32), *biases)]


@pytest.mark.parametrize(
    ("name", "contract", "biased"),
    [
        ("few", 1, True),
        *(pytest.param(*case, marks=pytest.mark.slow)
          for case in (("many", 0, False), ("one token", 0, True), ("one expert", 1, True))),
    ],
)  # fmt: skip
def test_every_way_is_the_formula(name: str, contract: int, biased: bool) -> None:
    """All implementations, and the block by its own expansion, against NumPy in float64, with gradients; also with
    biases and a clamped gate, as gpt-oss has them. Sums of bf16 are taken in f32, and the result is bf16."""
    own: dict[str, Any] = {"biased": True, "clamp": ClampedGate(1.3, 1.7, 0.6)} if biased else {}
    act = "silu" if biased else "gelu_tanh"
    op, arrays = ExpertFfn(act, contract, **own), operands(name, contract, biased=biased)
    floats = [i for i in range(len(arrays)) if i != 5]
    want = op_formulas.experts(op, *arrays)
    types = tuple(TensorType(a.shape, a.dtype) for a in arrays)
    ways: dict[str, Any] = {way: lambda *a, way=way: IMPLEMENTATIONS[way](op, *a) for way in WAYS}
    expanded = as_function(hir.Experts(act, contract, **own), types, TypeCache())
    ways["expanded"] = lambda *a: expanded(*a)[0]
    pull = np.random.default_rng(1).normal(size=want.shape).astype(np.float32)

    def both(way: Any) -> Any:
        return jax.jit(lambda *a: (way(*a), jax.grad(lambda *p: (way(*p) * pull).sum(), floats)(*a)))

    found = {way: both(run)(*arrays) for way, run in ways.items()}
    for value, slopes in found.values():
        assert_close(value, want, tolerance=1e-6)
        for slope, other in zip(slopes, found["xla"][1], strict=True):
            assert_close(slope, np.asarray(other), tolerance=3e-6)
    if name == "few":
        low = [a.astype(as_dtype("bf16")) if i < 4 else a for i, a in enumerate(arrays)]
        wide = [a.astype(np.float64) if i != 5 else a for i, a in enumerate(low)]
        for way in WAYS:
            got = jax.jit(lambda *a, way=way: IMPLEMENTATIONS[way](op, *a))(*low)
            assert got.dtype == jnp.bfloat16
            assert_close(np.asarray(got, np.float32), op_formulas.experts(op, *wide), tolerance=0.02)


@pytest.mark.parametrize("way", [*WAYS, "expanded"])
def test_what_was_not_chosen_is_not_seen(way: str) -> None:
    """An expert whose product is infinite does not reach the tokens that do not go to it; an id alone decides."""
    op, arrays = ExpertFfn(), operands("few", 1)
    arrays[5] = np.stack([np.full((3, 3), 0), np.full((3, 3), 1), np.full((3, 3), 2)], -1).astype(np.int32)
    want = op_formulas.experts(op, *arrays)
    arrays[1][3], arrays[2][3] = 1e38, 1e38
    types = tuple(TensorType(a.shape, a.dtype) for a in arrays)
    expanded = as_function(hir.Experts(), types, TypeCache())
    run = (lambda *a: expanded(*a)[0]) if way == "expanded" else lambda *a: IMPLEMENTATIONS[way](op, *a)
    assert_close(jax.jit(run)(*arrays), want, tolerance=1e-6)


def test_which_way() -> None:
    """By the numbers of tokens and experts, and the kind of device."""
    bf16, i32, top, experts = as_dtype("bf16"), as_dtype("i32"), 8, 128
    wide, narrow = TensorType((experts, 768, 2048), bf16), TensorType((experts, 2048, 768), bf16)
    for device, tokens, way in (
        ("cpu", 1, "looped"), ("cpu", 512, "looped"), ("h200", 1, "gathered"), ("h200", 16, "gathered"),
        ("h200", 17, "xla"), ("h200", 64, "xla"), ("h200", 16384, "blocked"), ("cuda", 64, "xla"),
        ("tpu", 1, "gathered"), ("tpu", 64, "ragged"),
    ):  # fmt: skip
        x, choice = TensorType((tokens, 1, 2048), bf16), (tokens, 1, top)
        call = (ExpertFfn(), (x, wide, wide, narrow, TensorType(choice, bf16), TensorType(choice, i32)))
        assert choose(call, named_device(device)).implementation == way, (device, tokens)


ROUTES = [hir.Route(3, "chosen", normalise=False), hir.Route(2, "sigmoid", biased=True, scale=2.5)]


@pytest.mark.parametrize("op", ROUTES, ids=str)
def test_routes(op: hir.Route) -> None:
    """Weights and ids against NumPy; of equal scores the first expert wins; a bias moves the choice alone."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 5)).astype(np.float32)
    logits[0, 0] = [1, 3, 3, 1, 3]
    given = [logits, 3 * rng.normal(size=5).astype(np.float32)][: 1 + op.biased]
    run = as_function(op, tuple(TensorType(a.shape, a.dtype) for a in given), TypeCache())
    weights, ids = jax.jit(run)(*given)
    want = op_formulas.route(op, *given)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    np.testing.assert_array_equal(ids, want[1])
    assert_close(weights, want[0], tolerance=1e-6)
    if op.biased:
        assert (np.asarray(ids) != op_formulas.route(op, logits)[1]).any()


def test_the_router_is_f32() -> None:
    """In bf16 logits are summed, softened and ranked in f32: an order that bf16 cannot tell is told."""
    spec = MoeSpec(num_experts=2, top_k=1, inner=1, normalise=False)
    flow = rlx.ModelFlow("m").input("x", ("batch", 2)).stage(blocks.MoeFfn("l", spec))
    weights = {key: np.ones(shape, np.float32) for key, shape in declared(blocks.MoeFfn("l", spec), 2).items()}
    weights["l.mlp.gate.weight"] = np.array([[1, 2**-10], [1, 2**-9]], np.float32)
    weights["l.mlp.experts.1.down_proj.weight"] *= -1
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    got = rlx.compile(flow, weights, profile=profile)(np.ones((1, 2), np.float32))
    assert float(np.asarray(got)[0, 0]) < 0


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Normal numbers."""
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


def in_numpy(spec: MoeSpec, weights: dict[str, np.ndarray], x: np.ndarray, activation: str = "silu") -> np.ndarray:
    """A mixture whose experts are stored one by one under `l`."""
    stacked = [
        np.stack([weights[f"l.{key.format(e)}"] for e in range(spec.num_experts)])
        for key in (spec.keys.gate, spec.keys.up, spec.keys.down)
    ]
    biased = spec.choice_bias is not None
    op = hir.Route(spec.top_k, spec.scores, spec.normalise, spec.scale, biased)
    bias = [weights[f"l.{spec.choice_bias}"]] if biased else []
    routed = op_formulas.route(op, x @ weights[f"l.{spec.keys.router}"].T, *bias)
    return op_formulas.experts(ExpertFfn(activation), x, *stacked, *routed)


@pytest.mark.parametrize(
    ("policy", "way"), [("fusable", "auto"), *(("direct", way) for way in ("auto", "dense", "blocked"))]
)
def test_a_mixture_of_ones_own(policy: str, way: str) -> None:
    """`flow.moe` under any setting; the report and the plan say how it ran."""
    spec = MoeSpec(num_experts=4, top_k=2, inner=5, scores="sigmoid", scale=1.5, choice_bias="mlp.gate.bias")
    weights = random_weights(declared(blocks.MoeFfn("l", spec), 6))
    x = np.random.default_rng(1).normal(size=(2, 3, 6)).astype(np.float32)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 6)).stage(blocks.MoeFfn("l", spec, "gelu_tanh"))
    settings: dict[str, Any] = {"backend": {"cpu": {"experts": way}}} if way != "auto" else {}
    model = rlx.compile(flow, weights, profile=rlx.CompileProfile().replace(fusion={"policy": policy}, **settings))
    assert_close(model(x), in_numpy(spec, weights, x, "gelu_tanh"), tolerance=2e-6)
    told = {"auto": "looped (batches of products are slow on a CPU)", "dense": "xla (dense, as asked for)"}.get(
        way, f"{way} (asked for)"
    )
    assert model.report().experts == ((f"mlp.experts: {told}",) if policy == "direct" else ())
    assert policy != "direct" or f"experts mlp.experts: {told}" in model.text("lir")


SPARSE = MoeSpec(num_experts=3, top_k=2, inner=7, normalise=True)


@pytest.mark.slow
@pytest.mark.parametrize("style", [GemmaStyle.GEMMA, GemmaStyle.GEMMA2], ids=lambda s: s.name)
def test_gemma_layers_with_experts(style: GemmaStyle) -> None:
    """`x + after(experts(before(x)))` of norms with 1 + w and experts gated by GELU, where attention gives nothing; the
    decode layer of no cached token is the same."""
    spec = dataclasses.replace(SPARSE, normalise=False)
    attend = blocks.gemma_attn_spec(0, 2, 4, 1, "causal")
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (style is GemmaStyle.GEMMA2)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (6,) for name in norms}
    shapes |= {f"self_attn.{n}_proj.weight": s for n, s in (("q", (8, 6)), ("k", (4, 6)), ("v", (4, 6)), ("o", (6, 8)))}
    shapes = {f"model.layers.0.{key}": shape for key, shape in shapes.items()}
    weights = random_weights(shapes | declared(blocks.MoeFfn("model.layers.0", spec), 6))
    weights["model.layers.0.self_attn.o_proj.weight"][:] = 0
    x = np.random.default_rng(4).normal(size=(2, 3, 6)).astype(np.float32)
    flow, past = rlx.ModelFlow("m").input("x", ("batch", "seq", 6)), dict[str, Any]()
    plain = flow.stage(blocks.gemma_moe_prefill_layer_composed(0, style, attend, spec, 1e-3))
    for n in "kv":
        flow, past[f"past_{n}_0"] = flow.input(f"past_{n}_0", ("batch", "past", 4)), np.ones((2, 4, 4), np.float32)
    sizes = dataclasses.replace(blocks.gemma_layer_spec(style, attend), eps=1e-3)
    decode = flow.rope_tables(blocks.RopeTables.theta(4)).bind_decode_inputs(1)
    decode = decode.stage(blocks.gemma_moe_decode_layer_composed(0, sizes, spec))

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return op_formulas.rms_norm(x, weights[f"model.layers.0.{name}.weight"], eps=1e-3, offset=1.0)

    before, after = norms[-2:] if style is GemmaStyle.GEMMA2 else (norms[-1], None)
    named = {key.replace("model.layers.0", "l"): value for key, value in weights.items()}
    want = in_numpy(spec, named, norm(before, x.astype(np.float64)), "gelu_tanh")
    want = x + (want if after is None else norm(after, want))
    assert_close(rlx.compile(plain, weights)(x), want, tolerance=3e-6)
    assert_close(rlx.compile(decode, weights)(x=x, **past)["output"], want, tolerance=3e-6)


def stacked(directory: Path, target: Path, prefix: str = "mlp") -> Path:
    """The checkpoint with its experts as transformers 5 holds them in memory."""
    names = ("w1", "w3", "w2") if prefix == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")

    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        kept = {k: v for k, v in tensors.items() if ".experts." not in k}
        for router in [k for k in kept if k.endswith(f"{prefix}.gate.weight")]:
            p = router.removesuffix(f"{prefix}.gate.weight")
            count = len(kept[router])
            gate, up, down = (
                np.stack([tensors[f"{p}{prefix}.experts.{e}.{name}.weight"] for e in range(count)]) for name in names
            )
            kept[f"{p}mlp.gate.weight"] = kept.pop(router)
            kept[f"{p}mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
            kept[f"{p}mlp.experts.down_proj"] = down
        return kept

    copied = checkpoints.copy(directory, target)
    checkpoints.edit_tensors(copied, edit)
    return copied


@pytest.mark.parametrize(
    ("prefix", "format"),
    [("block_sparse_moe", "safetensors"), *(pytest.param(p, "orbax", marks=pytest.mark.slow) for p in ("", "mlp"))],
)
def test_how_experts_are_stored(prefix: str, format: Any, tmp_path: Path) -> None:
    """One by one, or gate and up of all experts in one tensor and down in another: the same logits from leaves that
    have all experts; saved, they are under their keys again."""
    directory = MIXED if prefix == "mlp" else MIXTRAL
    path = stacked(directory, tmp_path / "stacked", prefix) if prefix else directory
    model, record = rlx.compile(rlx.recipe_for(path)), load_record(directory)
    assert_close(model(record["tokens"]), record["logits"])
    if not prefix:
        assert model.params is not None
        assert model.params["model.layers.1.block_sparse_moe.experts.{0..4}.w1.weight"].shape == (5, 26, 34)
    rlx.save(model, tmp_path / "out", format=format)
    source, before = rlx.open_weights(tmp_path / "out"), rlx.open_weights(path)
    assert set(source.keys()) == set(before.keys())
    for key in source.keys():
        np.testing.assert_array_equal(source.read(key), before.read(key))


SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 8}


def test_configs() -> None:
    """What a config leaves out is what the family's class says; layers with experts are those of the reference."""
    mixtral = MixtralConfig.from_hf(SMALL)
    assert (mixtral.num_local_experts, mixtral.num_experts_per_tok, mixtral.sliding_window) == (8, 2, None)
    assert (mixtral.rms_norm_eps, mixtral.num_key_value_heads) == (1e-5, 8)
    wide = MixtralConfig.from_hf(SMALL | {"head_dim": 4})
    assert np.isclose(wide.inv_freq[1], 1e6**-0.5)
    qwen = Qwen3MoeConfig.from_hf(SMALL)
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.moe_intermediate_size) == (128, 8, 768)
    assert (qwen.norm_topk_prob, qwen.num_key_value_heads, qwen.sliding_window) == (False, 4, None)
    assert Qwen3MoeConfig.from_hf(SMALL | {"num_experts": 9}) == Qwen3MoeConfig.from_hf(
        SMALL | {"num_local_experts": 9}
    )
    for fields, layers in (
        ({"mlp_only_layers": None}, [0, 1, 2, 3]), ({"mlp_only_layers": [0, 3]}, [1, 2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3]),
    ):  # fmt: skip
        config = Qwen3MoeConfig.from_hf(SMALL | fields)
        assert [i for i in range(4) if config.layer_spec(i).moe is not None] == layers
    window = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 4}
    assert Qwen3MoeConfig.from_hf(SMALL | window).sliding_window == 3


def test_ids_of_a_request_number_experts() -> None:
    """Those that a flow's input has are held against the experts that there are, however many tokens it has."""
    rng = np.random.default_rng(2)
    weights = {"g": rng.normal(size=(4, 6, 8)), "u": rng.normal(size=(4, 6, 8)), "d": rng.normal(size=(4, 8, 6))}
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).input("ids", ("batch", "seq", 1), dtype="int32")

    def chosen(emit: Any, x: Any) -> Any:
        ids = emit.flow_input("ids")
        return emit.experts(x, emit.ones_like(emit.cast(ids, "f32")), ids, gate="g", up="u", down="d")

    model = rlx.compile(flow.custom(chosen), {name: value.astype(np.float32) for name, value in weights.items()})
    one = np.asarray(model(np.ones((1, 1, 8), np.float32), np.full((1, 1, 1), 3, np.int32)))
    inner = weights["g"][3].sum(-1)
    want = weights["d"][3] @ (inner / (1 + np.exp(-inner)) * weights["u"][3].sum(-1))
    np.testing.assert_allclose(one[0, 0], want, rtol=1e-4, atol=1e-5)
    with pytest.raises(errors.TokenIdError, match=r"id 7 .* is not in \[0, 4\)"):
        model(np.ones((1, 9, 8), np.float32), np.full((1, 9, 1), 7, np.int32))


E, K, H, F, S = 8, 3, 6, 10, 5
RNG = np.random.default_rng(0)
STACKED = {"gate": (E, F, H), "up": (E, F, H), "down": (E, H, F)}
BIASES = {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, H)}
WEIGHTS = {name: RNG.normal(size=size).astype(np.float32) for name, size in (STACKED | BIASES).items()}


def stage(emit: Any, x: Any) -> Any:
    names = {name: name for name in STACKED}
    return emit.experts(x, emit.flow_input("weights"), emit.flow_input("ids"), **names, biases=list(BIASES))


FLOW = (
    rlx.ModelFlow("apart")
    .input("x", ("batch", "seq", H))
    .input("weights", ("batch", "seq", K))
    .input("ids", ("batch", "seq", K), dtype="int32")
    .custom(stage)
)


def model(way: str, kinds: str, devices: int) -> Any:
    """One mixture over a mesh."""
    profile = rlx.CompileProfile().replace(backend={"cpu": {"experts": way}})
    return rlx.compile(FLOW, WEIGHTS, mesh=mesh(kinds, devices), profile=profile)


def drawn(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and weights of their choices."""
    rng = np.random.default_rng(rows)
    return rng.normal(size=(rows, S, H)).astype(np.float32), rng.normal(size=(rows, S, K)).astype(np.float32)


def routings(rows: int) -> dict[str, np.ndarray]:
    """Ids: of any experts, of one for all, of those of one device, of one twice, and none of 0, 1 and 3."""
    rng, shape = np.random.default_rng(rows), (rows, S, K)
    found = {"any": rng.integers(0, E, shape), "one": np.full(shape, 5), "neighbours": rng.integers(6, 8, shape)}
    found["twice"] = np.tile([2, 7, 2], (*shape[:2], 1))
    return {name: ids.astype(np.int32) for name, ids in found.items()} | {
        "some": rng.choice(np.array([2, 4, 5, 6, 7], np.int32), shape)
    }


def formula(x: np.ndarray, shares: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Token by token in float64."""
    out = np.zeros(x.shape)
    for at in np.ndindex(ids.shape):
        token, own = x[at[:2]], {name: w[ids[at]].astype(np.float64) for name, w in WEIGHTS.items()}
        inner, up = (own[name] @ token + own[f"{name}_bias"] for name in ("gate", "up"))
        out[at[:2]] += shares[at] * (own["down"] @ (inner / (1 + np.exp(-inner)) * up) + own["down_bias"])
    return out


def sent(ours: Any, rows: int) -> list[str]:
    """What the program of so many rows sends."""
    (made,) = (e for key, e in ours.programs.executables.items() if dict(key.binding)["batch"] == rows)
    return re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", made.call.as_text() or "")


ROUTED = (
    ("auto", "data expert", 8), ("blocked", "expert", 4), ("ragged", "expert tensor", 4), ("gathered", "expert", 8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("way", "kinds", "devices"), [ROUTED[0], *(pytest.param(*routed, marks=pytest.mark.slow) for routed in ROUTED[1:])]
)
def test_any_routing(way: str, kinds: str, devices: int) -> None:
    """The formula, of rows that divide and of some that do not; experts that no token chose overflow unseen. Tokens
    are sent once, with their choices, and results once; where rows do not divide, results alone."""
    ours = model(way, kinds, devices)
    wild = {name: np.array(w) for name, w in WEIGHTS.items()}
    for w in wild.values():
        w[[0, 1, 3]] = 1e38
    for rows in (8, 3):
        x, shares = drawn(rows)
        for name, ids in routings(rows).items():
            held = {n: jax.device_put(w, ours.params[n].sharding) for n, w in wild.items()}
            got = (ours.replace(params=held) if name == "some" else ours)(x, shares, ids)
            assert_close(got, formula(x, shares, ids))
    inner = ["all-reduce"] * ("tensor" in kinds)
    assert sent(ours, 8) == ["all-gather"] * 3 + ["reduce-scatter"] + inner
    assert sent(ours, 3) == ["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "ragged"])
def test_gradients(way: str) -> None:
    """Of tokens, weights of choices and every expert: those of the formula, written in plain JAX."""
    ours, (x, shares) = model(way, "data expert", 8), drawn(8)

    def plain(w: Any, x: Any, shares: Any, ids: Any) -> Any:
        wide = (jnp.einsum("bskfh,bsh->bskf", w[name][ids], x) + w[f"{name}_bias"][ids] for name in ("gate", "up"))
        gate, up = wide
        made = jnp.einsum("bskhf,bskf->bskh", w["down"][ids], jax.nn.silu(gate) * up) + w["down_bias"][ids]
        return (made * shares[..., None]).sum(2)

    def slopes(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *args: (function(*args) ** 2).sum(), argnums=(0, 1, 2)))

    got, want = slopes(ours.apply), slopes(plain)
    for ids in routings(8).values():
        found, wanted = got(ours.params, x, shares, ids), want(WEIGHTS, x, shares, ids)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert_close(one, np.asarray(other))


@pytest.mark.parametrize("name", ["any", "one", "neighbours"])
def test_each_device_computes_its_own_choices(name: str) -> None:
    """All devices together no more blocks than one device has, whatever the routing: full ones, and the last of each
    expert."""
    ids, devices = np.tile(routings(8)[name], (4, 1, 1)), 4
    rows = block_rows(ids.size // devices, E // devices)
    used, cut = [], jax.jit(lambda own: sort_into_blocks(own, E // devices, rows).row_mask)
    for device in range(devices):
        own = ids - device * (E // devices)
        own = np.where((own >= 0) & (own < E // devices), own, E // devices)
        filled = np.asarray(cut(own.astype(np.int32)))
        used.append(int(filled.any(1).sum()))
        assert filled.sum() == (own < E // devices).sum()
    assert sum(used) == sum(-(-n // rows) for n in np.bincount(ids.ravel(), minlength=E))


@pytest.mark.parametrize("sort", [compare_into_blocks, count_into_blocks])
@pytest.mark.parametrize("name", ["any", "one"])
def test_ways_to_sort_choices(name: str, sort: Any) -> None:
    """In several parts, the last of them not full."""
    ids = np.tile(routings(8)[name], (7, 1, 1)).astype(np.int32)
    want, got = ({k: np.asarray(v) for k, v in vars(run(ids, E, 4)).items()} for run in (sort_into_blocks, sort))
    used = want["row_mask"]
    for name in ("choice_row", "row_mask"):
        np.testing.assert_array_equal(got[name], want[name])
    np.testing.assert_array_equal(got["row_choice"][used], want["row_choice"][used])
    np.testing.assert_array_equal(got["block_expert"][used.any(1)], want["block_expert"][used.any(1)])


@pytest.mark.parametrize(("rows", "device", "chosen"), [
    (1, "cuda", "gathered (16 of 64 experts on each device: 16 choices of 16 experts)"),
    (4, "cuda", "xla (16 of 64 experts on each device: 16 tokens: reading the experts takes longer"),
    (512, "cuda", "blocked (16 of 64 experts on each device: 8192 choices of 16 experts)"),
    (512, "tpu", "ragged (16 of 64 experts on each device: one kernel)"),
    (512, "cpu", "looped (16 of 64 experts on each device: batches"),
])  # fmt: skip
def test_the_choice_is_of_what_a_device_has(rows: int, device: str, chosen: str) -> None:
    """Its experts, and the tokens that are brought to it: over `data` 2 and `expert` 4 half of all."""
    op = ExpertFfn(roles=("batch", None))
    axes = {"batch": ("data", "expert"), "experts": ("expert",)}
    model_sharding = ModelSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert")), axes, {})
    shapes = {"x": (8, rows, H), "gate": (64, F, H), "up": (64, F, H), "down": (64, H, F)}
    shapes |= {"weights": (8, rows, 4), "ids": (8, rows, 4)}
    types = [TensorType(s, np.dtype(np.int32 if n == "ids" else np.float32)) for n, s in shapes.items()]
    assert str(choose_sharded((op, tuple(types)), named_device(device), model_sharding)).startswith(chosen)
