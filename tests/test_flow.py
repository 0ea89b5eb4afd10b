"""`ModelFlow`, `LayerStack` and the stages: what each computes, against NumPy, and what each refuses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.blocks import LlamaDecoderSpec, RopeTables, SelfAttnPrefillSpec
from rlx_jax.weights.mapping import MappingSource
from tests import small
from tests.opening import opened
from tests.oracles.numpy_reference import ACTIVATIONS
from tests.oracles.op_formulas import attention, layer_norm, rms_norm
from tests.oracles.op_formulas import rope as turned
from tests.small import compiled, x_flow

B, S, H, V, F = 2, 3, 8, 11, 12
RNG = np.random.default_rng(0)
X = RNG.standard_normal((B, S, H)).astype(np.float32)
IDS = RNG.integers(0, V, (B, S)).astype(np.int32)


def w(*shape: int, seed: int = 0) -> np.ndarray:
    """A random weight."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def ids_flow() -> rlx.ModelFlow:
    """A flow over `tokens` `[batch, seq]`."""
    return rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32")


def run(flow: rlx.ModelFlow, *inputs: Any, weights: dict[str, np.ndarray] | None = None, **named: Any) -> Any:
    """Compile and call."""
    return compiled(flow, weights or {})(*inputs, **named)


def close(got: Any, want: np.ndarray, tolerance: float = 3e-6) -> None:
    """Shape, and values within `tolerance` of the largest one."""
    got = np.asarray(got)
    assert got.shape == want.shape, (got.shape, want.shape)
    assert np.abs(got.astype(np.float64) - want).max(initial=0) <= tolerance * max(1.0, np.abs(want).max(initial=0))


def rope(x: np.ndarray, dim: int, theta: float = 10000.0) -> np.ndarray:
    """Half-split rotation of packed heads."""
    angles = np.arange(x.shape[1])[None, :, None] * theta ** (-np.arange(0, dim, 2) / dim)
    return turned(x.astype(np.float64), np.cos(angles), np.sin(angles), dim, dim)


def attend(q: Any, k: Any, v: Any, heads: int, kv_heads: int, **more: Any) -> np.ndarray:
    """Causal attention of packed heads."""
    return attention(q, k, v.astype(np.float64), heads=heads, kv_heads=kv_heads, causal=True, **more)


KINDS = RNG.integers(0, 5, (B, S)).astype(np.int32)
LAST = np.array([0, 2], np.int32)
KEEP = np.array([[1, 0, 1], [1, 1, 1]], np.int32)
MLP = {f"l.mlp.{n}_proj.weight": w(F, H, seed=i) for i, n in enumerate(("gate", "up"))}
MLP |= {"l.mlp.down_proj.weight": w(H, F)}
BERT = {"p.intermediate.dense.weight": w(F, H), "p.intermediate.dense.bias": w(F), "p.output.dense.weight": w(H, F)}
BERT |= {"p.output.dense.bias": w(H)}
QKV = {
    f"l.self_attn.{n}_proj.weight": w(d, H, seed=i) for i, (n, d) in enumerate(zip("qkv", (24, 12, 12), strict=True))
}
QKV |= {key.replace("weight", "bias"): w(len(value), seed=7) for key, value in QKV.items()}
WEIGHTS = {
    "e": w(V, H), "model.embed_tokens.weight": w(V, H), "t": w(5, H), "g": w(H, seed=1), "b": w(H, seed=2),
    "model.norm.weight": w(H, seed=1), "w": w(F, H), "turned": w(H, F), "bias": w(F), "w0": w(H, H) / 3,
    "w1": w(H, H, seed=1) / 3, "w2": w(H, H, seed=2) / 3, **MLP, **BERT, **QKV,
}  # fmt: skip
ATTEND = SelfAttnPrefillSpec.hf_layer("l", 4, 6, 2)
CAPPED = replace(SelfAttnPrefillSpec.hf_layer("l", 4, 6, 2, bias=True), score_scale=0.3, attn_logit_softcap=2.0)
MASKED = replace(ATTEND, mask="custom")
THETA = RopeTables.theta(6, 100.0)


def ids(emit: Any, x: Any) -> Any:
    return emit.flow_input("tokens")


def swiglu() -> np.ndarray:
    gate, up, down = MLP.values()
    return np.asarray((ACTIVATIONS["silu"](X @ gate.T) * (X @ up.T)) @ down.T)


def ffn(activation: str) -> np.ndarray:
    i, bi, o, bo = BERT.values()
    return np.asarray(ACTIVATIONS[activation](X @ i.T + bi) @ o.T + bo)


def prefill(bias: bool = False, **options: Any) -> np.ndarray:
    """Rotary, causal, grouped attention, packed `[B,S,N·D]`, without the output projection."""
    q, k, v = (X @ QKV[f"l.self_attn.{n}_proj.weight"].T + bias * QKV[f"l.self_attn.{n}_proj.bias"] for n in "qkv")
    return attend(rope(q, 6, 100.0), rope(k, 6, 100.0), v, 4, 2, **options)


TWO = X @ WEIGHTS["w0"].T @ WEIGHTS["w1"].T
THREE = TWO @ WEIGHTS["w2"].T
LINEARS = [blocks.Linear(f"w{i}") for i in range(3)]
STAGES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "embed": (lambda s: s.custom(ids).embed("e"), WEIGHTS["e"][IDS]),
    "token_embed": (lambda s: s.custom(ids).token_embed(), WEIGHTS["model.embed_tokens.weight"][IDS]),
    "ids of another rank and dtype": (lambda s: s.custom(lambda e, x: ids(e, x)[0].astype("u8")).embed("e"),
        WEIGHTS["e"][IDS[0]]),
    "gather_from_input": (lambda s: s.gather_from_input("kinds", "t"), WEIGHTS["t"][KINDS]),
    "gather_add": (lambda s: s.gather_add("kinds", "t"), X + WEIGHTS["t"][KINDS]),
    "rms_norm": (lambda s: s.rms_norm("g", 0.1), rms_norm(X, WEIGHTS["g"], eps=0.1)),
    "layer_norm": (lambda s: s.layer_norm("g", "b", 0.1), layer_norm(X, WEIGHTS["g"], WEIGHTS["b"], 0.1)),
    "final_norm": (lambda s: s.final_norm(1e-6), rms_norm(X, WEIGHTS["g"], eps=1e-6)),
    "zero_beta": (lambda s: s.zero_beta(H).zero_beta_named("zero_beta.head", 4).rms_norm("g"),
        rms_norm(X, WEIGHTS["g"])),
    "linear": (lambda s: s.linear("w"), X @ WEIGHTS["w"].T),
    "linear, as it is": (lambda s: s.linear("turned", transpose=False), X @ WEIGHTS["turned"]),
    "linear with a bias": (lambda s: s.linear("w", bias="bias"), X @ WEIGHTS["w"].T + WEIGHTS["bias"]),
    "linear of rank 1": (lambda s: s.custom(lambda e, x: x[0, 0]).linear("w"), X[0, 0] @ WEIGHTS["w"].T),
    "a residual": (lambda s: s.residual_save().linear("w0").residual_add(), X + X @ WEIGHTS["w0"].T),
    "the second residual": (lambda s: s.residual_save().linear("w0").residual_save().linear("w1").residual_add(),
        X @ WEIGHTS["w0"].T + TWO),
    "swiglu": (lambda s: s.swiglu(*MLP), swiglu()),
    "swiglu_hf_mlp of its own prefix": (lambda s: s.swiglu_hf_mlp("l.mlp"), swiglu()),
    "gelu_ffn": (lambda s: s.gelu_ffn("p"), ffn("gelu")),
    "GeluFfn by tanh": (lambda s: s.stage(replace(blocks.GeluFfn.hf_bert("p"), approx_gelu=True)), ffn("gelu_new")),
    "self_attn_prefill": (lambda s: s.stage(THETA).self_attn_prefill(ATTEND), prefill()),
    "self_attn_prefill, capped": (lambda s: s.stage(THETA).self_attn_prefill(CAPPED),
        prefill(True, scale=0.3, softcap=2.0)),
    "a mask of an input": (lambda s: s.stage(THETA, blocks.AttnMask.from_input("keep")).self_attn_prefill(MASKED),
        prefill(keep=KEEP)),
    "a mask of ones": (lambda s: s.stage(THETA).attn_mask_ones().self_attn_prefill(MASKED), prefill()),
    "cls_token_pool": (lambda s: s.cls_token_pool(), X[:, 0]),
    "gather_last_token_at": (lambda s: s.gather_last_token_at(), X[:, -1:]),
    "gather_last_token_dynamic": (lambda s: s.gather_last_token_dynamic(), X[np.arange(B), LAST][:, None]),
    "sequence": (lambda s: s.sequence(LINEARS), THREE),
    "repeat": (lambda s: s.repeat_layers(3, LINEARS.__getitem__), THREE),
}  # fmt: skip


def test_numbers(subtests: pytest.Subtests) -> None:
    """Each stage is a side output of one program. Zeros that an older flow declares are no parameter."""
    flow = x_flow().input("tokens", ("batch", "seq"), "int32").input("kinds", ("batch", "seq"), "int32")
    flow = flow.input("keep", ("batch", "seq"), "int32").input("last_token_idx", ("batch",), "int32")
    flow = flow.stage(*(blocks.SideOutput(name, make(rlx.LayerStack()).build()) for name, (make, _) in STAGES.items()))
    model = compiled(flow, WEIGHTS)
    got = model(X, IDS, KINDS, KEEP, LAST)
    for name, (_, want) in STAGES.items():
        with subtests.test(name):
            close(got[name], want, 1e-5)
    assert set(model.params) == set(WEIGHTS)


def test_rope_tables_read_position_ids_where_declared() -> None:
    """An optional input: absent, positions are 0, 1, 2 …"""
    spec = SelfAttnPrefillSpec.hf_layer("l", 2, 4, 2)
    flow = ids_flow().input("position_ids", ("batch", "seq"), dtype="int32", default="positions").embed("e")
    weights = {f"l.self_attn.{n}_proj.weight": w(8, H, seed=i) for i, n in enumerate("qkv")} | {"e": w(V, H)}
    model = compiled(flow.rope_tables(RopeTables.theta(4)).self_attn_prefill(spec), weights)
    plain, at = np.asarray(model(IDS)), np.tile(np.arange(S, dtype=np.int32), (B, 1))
    close(model(IDS, position_ids=at), plain)
    # Rotary attention sees differences of positions only, so a shift changes nothing, and a stretch does.
    close(model(IDS, position_ids=at + 7), plain, 2e-5)
    assert np.abs(np.asarray(model(IDS, position_ids=3 * at)) - plain).max() > 1e-3


def test_lm_head() -> None:
    """Tied, separate, or under a key; the output is called logits and the widths are checked."""
    e, head = w(V, H), w(V, H, seed=1)
    both = {"model.embed_tokens.weight": e, "lm_head.weight": head}
    assert ids_flow().token_embed().lm_head(V, H, tied=True)._outputs.primary == "logits"
    stage = blocks.LmHead.separate("h", V, H)
    for flow, weights, table in (
        (ids_flow().embed("e").lm_head(V, H, tied=True), {"e": e}, e),
        (ids_flow().token_embed().lm_head(), both, head),
        (ids_flow().embed("e").stage(stage), {"e": e, "h": head}, head),
    ):
        close(run(flow, IDS, weights=weights), e[IDS] @ table.T)
    drawn = {key: spec.shape for key, spec in ids_flow().embed("e", shape=(V, H)).lm_head(7).build().params.items()}
    assert drawn == {"e": (V, H), "lm_head.weight": (7, H)}
    with pytest.raises(errors.GraphError, match="Embed"):
        x_flow().lm_head(V, H, tied=True).build()


def test_outputs_and_names() -> None:
    """`output`, `hidden_states`, and side outputs after the primary one."""

    def side(emit: Any, x: Any) -> Any:
        emit.output("doubled", x + x)
        return x

    assert x_flow().hidden_states()._outputs.primary == "hidden"
    built = x_flow().custom(side).output("mine").build()
    assert built.output_names == ("mine", "doubled")
    assert [str(d) for d in built.primary_shape] == ["batch", "seq", str(H)]
    got = run(x_flow().custom(side).custom(lambda emit, x: x * 3).output("mine"), X)
    assert list(got) == ["mine", "doubled"]
    close(got["mine"], 3 * X)
    close(got["doubled"], 2 * X)
    assert not isinstance(run(x_flow().custom(lambda e, x: x * 1), X), dict)


def tied_llama(layers: int) -> dict[str, np.ndarray]:
    """A tied Llama of width 8 with two heads of width 4."""
    return {"model.embed_tokens.weight": w(V, H), "model.norm.weight": w(H)} | small.llama_weights(layers, H, 8, 4, F)


def test_recipes_and_functions_are_flows() -> None:
    """Anything that assembles a flow, and a function without arguments. A flow's own profile is used, unless `compile`
    gets another; flows are values."""

    @dataclass(frozen=True)
    class Recipe:
        name: str = "r"

        def assemble(self) -> rlx.ModelFlow:
            return x_flow().linear("w")

    want, flow = X @ w(F, H).T, x_flow().linear("w")
    for given in (Recipe(), Recipe().assemble, lambda: flow, rlx.ModelFlow.from_recipe(Recipe())):
        close(compiled(given, {"w": w(F, H)})(X), want)
    for name in ("profile_prefill", "profile_decode", "profile_encoder"):
        assert getattr(flow, name)().profile is not None and flow.profile is None
        close(run(getattr(flow, name)(), X, weights={"w": w(F, H)}), want)
    other = rlx.CompileProfile().replace(fusion={"policy": "fusable"})
    assert "fusion=fusable" in compiled(flow.profile_prefill(), {"w": w(F, H)}, profile=other).text("hir")


OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "+": (lambda e, x: x + x, lambda x: x + x),
    "+ number": (lambda e, x: x + 1, lambda x: x + 1),
    "number +": (lambda e, x: 1.5 + x, lambda x: x + 1.5),
    "-": (lambda e, x: x - 2, lambda x: x - 2),
    "number -": (lambda e, x: 2 - x, lambda x: 2 - x),
    "*": (lambda e, x: x * x * 3, lambda x: x * x * 3),
    "/": (lambda e, x: x / 4, lambda x: x / 4),
    "number /": (lambda e, x: 1 / (x * x + 1), lambda x: 1 / (x * x + 1)),
    "**": (lambda e, x: x**2, lambda x: x**2),
    "number **": (lambda e, x: 2**x, lambda x: 2**x),
    "numpy number": (lambda e, x: np.float32(2) * x + np.float64(1), lambda x: 2 * x + 1),
    "neg abs": (lambda e, x: abs(-x), np.abs),
    "@ weight": (lambda e, x: x @ e.param("w"), lambda x: x @ w(H, F)),
    "@ value": (lambda e, x: x @ x.transpose(0, 2, 1), lambda x: x @ x.transpose(0, 2, 1)),
    "T": (lambda e, x: x @ e.param("wt").T, lambda x: x @ w(F, H).T),
    "compare": (lambda e, x: e.where(x > 0, x, -1.0), lambda x: np.where(x > 0, x, -1)),
    "compare all": (
        lambda e, x: (x >= 0).astype("f32") + (x <= 1).astype("f32") + (x < 2).astype("f32") + (x != 3).astype("f32"),
        lambda x: (x >= 0) * 1.0 + (x <= 1) + (x < 2) + (x != 3),
    ),
    "sum": (lambda e, x: x.sum(-1), lambda x: x.sum(-1)),
    "mean": (lambda e, x: x.mean((1, 2), keepdims=True), lambda x: x.mean((1, 2), keepdims=True)),
    "max min": (lambda e, x: x.max(1) - x.min(1), lambda x: x.max(1) - x.min(1)),
    "sum of all": (lambda e, x: x.sum(), lambda x: x.sum()),
    "slice": (lambda e, x: x[:, 1:, ::2], lambda x: x[:, 1:, ::2]),
    "index": (lambda e, x: x[..., 3], lambda x: x[..., 3]),
    "last": (lambda e, x: x[:, -1], lambda x: x[:, -1]),
    "reverse": (lambda e, x: x[:, ::-1], lambda x: x[:, ::-1]),
    "new axis": (lambda e, x: x[:, None], lambda x: x[:, None]),
    "static slice": (lambda e, x: x[:, :, 2:5], lambda x: x[:, :, 2:5]),
    "reshape": (lambda e, x: x.reshape(x.shape[0], x.shape[1], 2, 4), lambda x: x.reshape(B, S, 2, 4)),
    "reshape tuple": (lambda e, x: x.reshape((x.shape[0], -1)), lambda x: x.reshape(B, -1)),
    "reshape merge": (lambda e, x: x.reshape(x.shape[0] * x.shape[1], H), lambda x: x.reshape(B * S, H)),
    "reshape swap": (
        lambda e, x: x.reshape(x.shape[1], x.shape[0], H), lambda x: x.reshape(S, B, H),
    ),
    "transpose": (lambda e, x: x.transpose(0, 2, 1), lambda x: x.transpose(0, 2, 1)),
    "transpose all": (lambda e, x: x.transpose(), lambda x: x.T),
    "astype": (lambda e, x: x.astype("i32").astype("f32"), np.trunc),
    "iterate": (lambda e, x: sum(v * 2 for v in x.transpose(2, 0, 1)[:2]), lambda x: 2 * x[..., :2].sum(-1)),
    "jax": (
        lambda e, x: e.jax(lambda a, b: jnp.einsum("bsh,bth->bst", a, b), x, x),
        lambda x: np.einsum("bsh,bth->bst", x, x),
    ),
    "jax cumsum": (lambda e, x: e.jax(lambda a: jnp.cumsum(a, 1), x), lambda x: np.cumsum(x, 1)),
    "jax tuple": (lambda e, x: (lambda a, b: a - b)(*e.jax(lambda t: (t * 3, t), x)), lambda x: 2 * x),
    "jax list": (lambda e, x: e.jax(lambda t: [t, t + 1], x)[1], lambda x: x + 1),
    "jax one-tuple": (lambda e, x: e.jax(lambda t: (t + 1,), x)[0], lambda x: x + 1),
}  # fmt: skip


def test_operators_and_methods(subtests: pytest.Subtests) -> None:
    """A FlowValue computes what NumPy does; all of them are side outputs of one program."""

    def all_of(emit: Any, x: Any) -> Any:
        for name, (fn, _) in OPERATORS.items():
            with subtests.test(name):
                emit.output(f"of {name}", fn(emit, x))
        return x

    got = compiled(x_flow().custom(all_of), {"w": w(H, F), "wt": w(F, H)})(X)
    for name, (_, want) in OPERATORS.items():
        with subtests.test(name):
            close(got[f"of {name}"], np.asarray(want(X.astype(np.float64))), 1e-5)


SLICES: list[Any] = [
    slice(1, None), slice(None, 5), slice(2, 5), slice(-3, None), slice(1, -1), slice(None, None, -2),
    slice(None, None, 3), slice(-4, -1), slice(4, 1, -1), slice(None, -2), -1, 0,
]  # fmt: skip


def test_slices_of_a_symbolic_axis() -> None:
    """As NumPy cuts them, whatever the size turns out to be."""

    def cut(emit: Any, x: Any) -> Any:
        for key in SLICES:
            emit.output(str(key), x[key] * 1)
        return x

    model = compiled(rlx.ModelFlow("m").input("x", ("seq",)).custom(cut))
    for size in (1, 3, 6):
        x = np.arange(size, dtype=np.float32)
        with jax.disable_jit():
            got = model.apply({}, x)
        for key in SLICES:
            np.testing.assert_array_equal(got[str(key)], x[key], err_msg=f"{key} of {size}")


def test_weights_of_other_dtypes_enter_as_f32() -> None:
    """bf16, f16 and f64 checkpoints; integers and bools stay."""
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float64):
        stored = w(F, H).astype(dtype)
        close(run(x_flow().linear("w"), X, weights={"w": stored}), X @ stored.astype(np.float32).T)
    for dtype in (np.int32, np.int64, np.uint8):
        index = np.array([2, 0], dtype)
        flow = x_flow().custom(lambda e, x: e.jax(lambda t, i: t[:, :, i], x, e.param("i").astype("i32")))
        close(run(flow, X, weights={"i": index}), X[:, :, index])
    keep = np.arange(H) % 2 == 0
    close(run(x_flow().custom(lambda e, x: e.where(e.param("k"), x, 0.0)), X, weights={"k": keep}), X * keep)


class CountingSource(MappingSource):
    """A weight source that counts what is asked of it."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.reads: list[str] = []

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        self.reads.append(key)
        return super().read(key, index)


def test_build_and_lowering_read_no_data() -> None:
    """Shapes alone; then each weight is read once."""
    source, spec = CountingSource(tied_llama(2)), LlamaDecoderSpec(num_heads=2, head_dim=4, num_kv_heads=1)
    flow = ids_flow().token_embed().repeat_layers(2, lambda i: blocks.llama_prefill_layer_fused(i, spec))
    flow = flow.final_norm().lm_head(V, H, tied=True)
    flow.build(source)
    assert f"{sum(a.size for a in tied_llama(2).values()):,} parameters" in flow.summary(source)
    model = opened(flow, source)
    for program in ("forward", "prefill", "extend"):
        model.template(program)
    assert source.reads == []
    model = compiled(flow, source)
    assert sorted(source.reads) == sorted(source.keys())
    model(IDS)
    model.lower(IDS[:1])
    assert len(source.reads) == len(source.keys())
