"""What each field of a profile changes: one test a field, visible in the LIR, the jaxpr or the HLO."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler import pipeline
from rlx_jax.device import DEVICES
from rlx_jax.errors import RequestError, RlxWarning, UnsupportedError
from rlx_jax.ir.ops.attention import AttentionOp
from rlx_jax.ir.types import tensor_type
from rlx_jax.lowering.lir import attention
from rlx_jax.lowering.precision import POLICIES
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.profiles import NumericClasses
from tests.small import TIED_LLAMA as LLAMA
from tests.small import equations, profile, relative

IDS = np.random.default_rng(0).integers(0, 31, (2, 6)).astype(np.int32)
BF16 = np.dtype(ml_dtypes.bfloat16)


def llama(program: str = "forward", **tables: Any) -> Any:
    """A tiny Llama compiled with these settings, without parameters."""
    return rlx.compile(Llama32Flow.for_prefill(LLAMA), profile=profile(**tables), program=program)


@functools.cache
def checkpoint() -> dict[str, np.ndarray]:
    """Random parameters of `llama`, by checkpoint key."""
    rng = np.random.default_rng(0)
    shapes = {k: spec.shape for k, spec in weight_specs(LlamaConfig.from_hf(LLAMA)).items()}
    normal = {k: rng.normal(0.0, shape[-1] ** -0.5, shape) for k, shape in shapes.items()}
    return {k: (v + (len(v.shape) == 1)).astype(np.float32) for k, v in normal.items()}


def loaded(program: str = "forward", **tables: Any) -> Any:
    """`llama` with the parameters of `checkpoint`."""
    return rlx.compile(Llama32Flow.for_prefill(LLAMA), checkpoint(), profile=profile(**tables), program=program)


@functools.cache
def logits() -> np.ndarray:
    """What it says under the default profile."""
    return np.asarray(loaded()(IDS))


def small(**tables: Any) -> Any:
    """A flow of two Linears around a function, and its weights."""
    flow = (
        rlx.ModelFlow("small").input("x", ("batch", 8)).linear("up.weight", shape=(24, 8))
        .custom(lambda emit, x: x * emit.sigmoid(x)).linear("down.weight", shape=(8, 24))
    )  # fmt: skip
    rng = np.random.default_rng(0)
    weights = {"up.weight": rng.normal(size=(24, 8)).astype("f4"), "down.weight": rng.normal(size=(8, 24)).astype("f4")}
    return rlx.compile(flow, weights, profile=profile(**tables))


X = np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32)


def traced(model: Any, *inputs: Any) -> list[Any]:
    """The equations of the forward pass."""
    return list(equations(jax.make_jaxpr(model.apply)(model.param_specs(), *inputs).jaxpr))


def dtypes_of(name: str, eqns: list[Any]) -> set[str]:
    """The dtypes of the first operand of every equation of one primitive."""
    return {str(eqn.invars[0].aval.dtype) for eqn in eqns if eqn.primitive.name == name}


def test_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each step on stderr, with the nodes that are left."""
    passes = small(passes={"verbose": True}).report().nodes
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == list(passes)
    assert all(re.fullmatch(r"small forward: \w+: \d+ nodes, \d+\.\d{3} s", line) for line in lines)
    small()
    assert capsys.readouterr().err == ""


COMPUTE = {"auto": "float32", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@pytest.mark.parametrize("compute", COMPUTE)
def test_compute(compute: str) -> None:
    """Products and parameters."""
    dtype = COMPUTE[compute]
    model = small(precision={"compute": compute})
    assert dtypes_of("dot_general", traced(model, X)) == {dtype}
    assert {str(p.dtype) for p in model.params.values()} == {dtype}


NARROW = {"always_f16": "float16", "auto_mixed_conservative": "float16", "auto_mixed": "float16", "auto": "float16",
          "auto_mixed_bf16": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize(("policy", "roll"), [*((policy, "scan") for policy in NARROW), ("auto", "unroll")])
def test_mixed(policy: str, roll: str) -> None:
    """Products take the narrow dtype; parameters, outputs and what is carried from layer to layer stay f32."""
    model = llama(precision={"mixed": policy}, layers={"roll": roll})
    eqns = traced(model, IDS)
    assert dtypes_of("dot_general", eqns) == {NARROW[policy]}
    assert {str(p.dtype) for p in model.param_specs().values()} == {"float32"}
    assert all(str(v.aval.dtype) != NARROW[policy] for e in eqns if e.primitive.name == "scan" for v in e.outvars)
    assert set(NARROW) - {"auto"} == set(POLICIES)


def test_mixed_rounds_and_no_more() -> None:
    """Forward; behind a cache, which stays f32 and is written in place; and of the gradient, which is f32."""
    tables: dict[str, Any] = {"precision": {"mixed": "auto_mixed_bf16"}}
    got = np.asarray(loaded(**tables, layers={"roll": "scan"})(IDS))
    assert got.dtype == np.float32 and 1e-4 < relative(got, logits()) < 5e-2
    extend = loaded("extend", **tables)
    got, state = extend(IDS, np.full(2, 6, np.int32), state=extend.init_state(2, 8))
    assert {str(a.dtype) for a in state.leaves.values()} == {"float32"}
    assert relative(got, loaded(**tables)(IDS)) < 0.02
    model = loaded("train", **tables)
    assert {str(g.dtype) for g in jax.eval_shape(jax.grad(loss(model)), model.params).values()} == {"float32"}


def test_a_mixed_policy_of_ones_own() -> None:
    """Each class has the dtype that its key says, and what is not said stays f32."""
    classes = {"compute": "bf16", "reduction": "f16", "movement": "f32"}
    model = llama(precision={"mixed": "custom", "classes": classes})
    text = model.text("mir")
    found = {
        name: set(re.findall(rf"= {name}.*\) : (\w+)\[", text)) for name in ("attention", "rms_norm", "silu", "rope\\(")
    }
    assert found == {"attention": {"bf16"}, "rms_norm": {"f16"}, "silu": {"f32"}, "rope\\(": {"f32"}}
    same = llama(precision={"mixed": "custom", "classes": dict.fromkeys(NumericClasses().__dict__, "bf16")})
    stock = llama(precision={"mixed": "auto_mixed_bf16"})
    assert same.text("mir").replace("mixed_custom", "mixed_auto_mixed_bf16") == stock.text("mir")


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_weights(weights: str, compute: str) -> None:
    """The dtype of leaves; products stay in the compute dtype."""
    model = loaded(precision={"weights": weights, "compute": compute})
    full = {"f32": "float32", "bf16": "bfloat16"}
    assert {str(p.dtype) for p in model.params.values()} == {full[weights]}
    eqns = traced(model, IDS)
    assert dtypes_of("dot_general", eqns) == {full[compute]}
    if weights != compute:
        assert 1e-4 < relative(model(IDS), logits()) < 0.05
    assert {str(w.dtype) for w in model.weights().values()} == {"float32"}
    # Rows of the embedding are cast after they are read. The head is tied, and reads all of it.
    table = [e.invars[0].aval for e in eqns if e.primitive.name == "gather" and e.invars[0].aval.shape == (31, 16)]
    assert {str(t.dtype) for t in table} == {full[weights]}


def test_weights_of_a_narrow_checkpoint() -> None:
    """Stored as they are, half the bytes; the numbers are those of the checkpoint in f32, not rounded again."""
    narrow = {k: v.astype(BF16) for k, v in checkpoint().items()}
    keep, bf16 = (
        rlx.compile(Llama32Flow.for_prefill(LLAMA), narrow, profile=profile(precision={"weights": w}))
        for w in ("keep", "bf16")
    )
    assert keep.report().parameter_bytes == 2 * bf16.report().parameter_bytes
    np.testing.assert_array_equal(bf16.weights()["model.norm.weight"], narrow["model.norm.weight"])
    assert {value.dtype for model in (keep, bf16) for value in model.weights().values()} == {BF16}
    assert relative(bf16(IDS), keep(IDS)) < 2e-6


@pytest.mark.parametrize(("kv", "compute"), [("f32", "bf16"), ("f16", "f32")])
def test_kv(kv: str, compute: str) -> None:
    """The dtype of the cache, whatever the program computes in."""
    model = llama("extend", precision={"kv": kv, "compute": compute})
    assert {str(t.dtype) for t in model.template("extend").state.values() if t.rank > 1} == {
        {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}[kv]
    }
    state = jax.eval_shape(lambda: model.init_state(2, 8))
    text = model.lower(IDS[:, :1], np.ones(2, np.int32), state=state).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
    assert model.template("prefill").state == model.template("extend").state


def test_donation_of_the_state() -> None:
    state = jax.eval_shape(lambda: llama("extend").init_state(2, 8))
    for on in (True, False):
        model = llama("extend", donation={"state": on})
        text = model.lower(IDS[:, :1], np.ones(2, np.int32), state=state).as_text()
        assert ("tf.aliasing_output" in text or "jax.buffer_donor" in text) == on
        assert f"donate_state={str(on).lower()}" in model.text("lir")


def test_donation_of_inputs() -> None:
    """The input's memory holds the output; `apply` consumes nothing."""
    plain, model = small(), small(donation={"inputs": ["x"]})
    want = np.asarray(plain(X))
    assert "tf.aliasing_output" not in plain.text("stablehlo", X)
    assert "tf.aliasing_output" in model.text("stablehlo", X) and "donate_inputs=[x]" in model.text("lir")
    np.testing.assert_array_equal(model(X), want)  # a NumPy array is copied to the device, and stays
    given = jnp.array(X)
    np.testing.assert_array_equal(model.apply(model.params, given), want)
    assert not given.is_deleted()
    np.testing.assert_array_equal(model(given), want)
    assert given.is_deleted()
    assert model.report().donated_bytes == X.nbytes


def test_donation_that_saves_nothing_warns() -> None:
    model = llama(donation={"inputs": ["input_ids"]})
    with pytest.warns(RlxWarning, match=r"donation.inputs.*'input_ids'.*i32\[2,6\]"):
        assert "donate_inputs=[]" in model.text("lir", IDS)


def loss(model: Any) -> Any:
    """A function of the parameters to differentiate."""
    return lambda params: (model.apply(params, IDS) ** 2).sum()


def test_training_scans_and_other_programs_unroll() -> None:
    """Unless the profile says otherwise; on a TPU everything scans."""
    for model, scan in (
        (llama(), False),
        (llama("train"), True),
        (llama("train", layers={"roll": "unroll"}), False),
        (llama(fusion={"target": "tpu"}), True),
        (llama("train", fusion={"target": "h200"}), False),
    ):
        assert ("scan" in {e.primitive.name for e in traced(model, IDS)}) == scan
        assert ("layers=scan" in model.text("lir")) == scan
    assert "model.layers.{0..1}.mlp.up_proj.weight" in llama("train").param_specs()


@pytest.mark.parametrize("target, remat", [("cpu", "none"), ("tpu", "none"), ("h200", "products")])
def test_what_a_gradient_recomputes_by_default(target: str, remat: str) -> None:
    fields: dict[str, Any] = {"fusion": {"target": target}}
    layer = {"layers": {"remat": "layer"}}
    models = llama("train", **fields), llama(**fields), llama("train", **fields, **layer)
    assert [model.settings.plan.remat for model in models] == [remat, "none", "layer"]


@pytest.mark.parametrize(
    ("remat", "roll"), [*((remat, "scan") for remat in ("none", "layer", "dots", "products", "offload")),
    ("layer", "unroll")]
)  # fmt: skip
def test_what_a_gradient_recomputes(remat: str, roll: str) -> None:
    """`layer` keeps nothing of a layer and computes all its products again; `dots` keeps those with weights, and
    `products` those of cuDNN too, which the CPU has none of."""
    model = llama("train", layers={"remat": remat, "roll": roll})
    jaxpr = jax.make_jaxpr(jax.grad(loss(model)))(model.param_specs())
    names = [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]
    assert bool({"remat2", "checkpoint"} & set(names)) == (remat != "none")
    # 9 products a layer (7 with weights, 2 of attention) and the head; a gradient has two more for each.
    layers = 1 if roll == "scan" else 2
    # The last product of a layer is not needed again.
    again = {"none": 0, "layer": 9 - 1, "dots": 2, "products": 2, "offload": 2}[remat]
    assert names.count("dot_general") == layers * (27 + again) + 3
    assert ("<host>" in str(jaxpr)) == (remat == "offload")
    assert f"remat={remat}" in model.text("lir")


@pytest.mark.slow
def test_recomputing_changes_no_gradient() -> None:
    """Nor do layers that are scanned, nor the program."""

    def gradient(model: Any) -> dict[str, np.ndarray]:
        found = model.weights(jax.jit(jax.grad(loss(model)))(model.params))
        return {k: np.asarray(v) for k, v in found.items()}

    want = gradient(loaded())
    for remat, roll in (("dots", "scan"), ("layer", "unroll")):
        model = loaded("train", layers={"remat": remat, "roll": roll})
        assert relative(model(IDS), logits()) < 2e-6
        assert max(relative(g, want[k]) for k, g in gradient(model).items()) < 1e-5


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(
    "options, reason",
    [
        ({}, "H100 and H200, not on cpu"),
        ({"program": "train", "fusion": {"target": "h200"}}, "training programs have no kernels"),
        ({"fusion": {"target": "h200"}}, ""),
    ],
)
def test_required_kernels(options: dict[str, Any], reason: str) -> None:
    """`on` is `auto` where kernels can run, and an error elsewhere."""
    kernels: dict[str, Any] = {"backend": {"cuda" if "fusion" in options else "cpu": {"kernels": "on"}}}
    if reason:
        with pytest.raises(UnsupportedError, match=f"kernels = 'on' is not available: .*{reason}"):
            llama(**options, **kernels)
    else:
        assert llama("extend", **options, **kernels).settings.plan.kernels


WIDE = {**LLAMA, "head_dim": 8}


def wide(program: str = "forward", implementation: str = "auto", **tables: Any) -> Any:
    """A Llama that cuDNN would take: bf16, heads of width 8, for cuda."""
    tables = {"fusion": {"target": "cuda"}, "precision": {"compute": "bf16"}, **tables}
    chosen = profile(attention={"implementation": implementation}, **tables)
    return rlx.compile(Llama32Flow.for_prefill(WIDE), profile=chosen, program=program)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CUDA device were here: enough to lower for one."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(pipeline, "running_device", lambda: DEVICES["h200"])
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def lowered(model: Any, *inputs: Any, **named: Any) -> str:
    """StableHLO for cuda."""
    trace = jax.jit(lambda p, i, n: model.apply(p, *i, **n)).trace(model.param_specs(), inputs, named)
    return str(trace.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize(("implementation", "roll"), [("auto", "unroll"), ("cudnn", "scan"), ("xla", "unroll")])
def test_implementation(implementation: str, roll: str, cuda: None) -> None:
    """A call of cuDNN in the StableHLO, and the reason beside each block in the LIR."""
    model = wide(implementation=implementation, layers={"roll": roll})
    text = lowered(model, IDS)
    assert text.count("__cudnn$fmhaSoftmax") == (0 if implementation == "xla" else 1 if roll == "scan" else 2)
    reason = {"auto": "cudnn (faster here)", "cudnn": "cudnn (asked for)", "xla": "xla (asked for)"}[implementation]
    assert f"  attention layers.{{i}}.self_attn: {reason}\n" in model.text("lir")


def test_implementation_of_decoding(cuda: None) -> None:
    """A prompt and one new token by cuDNN; several new tokens by XLA."""
    prefill, extend = wide("prefill"), wide("extend")
    lengths = np.ones(2, np.int32)
    for model, tokens, want in ((prefill, 5, "cudnn"), (extend, 1, "cudnn"), (extend, 3, "xla")):
        state = jax.eval_shape(lambda: prefill.init_state(2, 16))
        text = lowered(model, jax.ShapeDtypeStruct((2, tokens), np.int32), lengths, state=state)
        assert ("__cudnn$fmha" in text) == (want == "cudnn")
        assert f"self_attn: {want} (" in model.text("lir")


@pytest.mark.parametrize(("window", "queries"), [(2, 3), (2, 1), (None, 1)])
def test_queries_at_positions_by_cudnn(
    window: int | None, queries: int, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen where all scores are large, and lowered with a mask that means the same as `eval`."""
    monkeypatch.setattr(attention, "MAX_SCORE_BYTES", 0)
    op = AttentionOp(heads=4, kv_heads=2, causal=True, window=window, extra=("positions",))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, w)), "f4") for n, w in ((queries, 32), (9, 16), (9, 16)))
    positions = jnp.asarray(np.array([[2], [5]], np.int32) + np.arange(queries, dtype=np.int32))
    types = tuple(tensor_type(a.shape, "bf16", "t") for a in (q, k, v))
    assert attention.choose((op, types), DEVICES["h200"], "auto").implementation == "cudnn"
    halves = (*(jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in (q, k, v)), positions)
    text = str(
        jax.jit(functools.partial(attention.cudnn, op)).trace(*halves).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert ("__cudnn$fmhaScaleBiasSoftmax" in text) == (queries > 1 or window is not None)
    on_host = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **b: on_host(*a, **{**b, "implementation": "xla"}))
    got, want = jax.jit(lambda *a: (attention.cudnn(op, *a), op.eval(*a)))(q, k, v, positions)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(("causal", "lengths"), [(True, (5, 5)), (False, (4, 7)), (False, (7, 4))])
def test_odd_lengths_have_gradients_by_cudnn(causal: bool, lengths: tuple[int, int], cuda: None) -> None:
    """One more token is put behind an odd number of them, which cuDNN wants for a gradient."""
    op = AttentionOp(heads=4, kv_heads=2, causal=causal)
    q, k = (jax.ShapeDtypeStruct((2, n, width), "bfloat16") for n, width in zip(lengths, (32, 16), strict=True))
    assert jax.eval_shape(lambda *a: attention.cudnn(op, *a), q, k, k).shape == q.shape
    gradient = jax.jit(jax.grad(lambda *a: attention.cudnn(op, *a).sum().astype("float32"), (0, 1, 2)))
    text = str(gradient.trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text())
    assert "__cudnn$fmhaSoftmaxBackward" in text
    lengths_given = not causal and lengths[1] % 2
    assert ("PADDING" in text) == bool(lengths_given)


@pytest.mark.parametrize(("options", "sizes", "dtype", "reason"), [
    ({}, (4, 4), "bf16", ""),
    ({}, (5, 5), "bf16", ""),
    ({"window": 2, "causal": True}, (4, 4), "f16", ""),
    ({"causal": False}, (4, 6), "bf16", ""),
    ({}, (4, 4), "f32", "cuDNN takes bf16 and f16, not f32"),
    ({"softcap": 3.0}, (4, 4), "bf16", "cuDNN has no softcap"),
    ({"causal": False, "window": 2, "ahead": 1}, (4, 4), "bf16", "windows that end with the query's own key"),
    ({"width": 24}, (4, 4), "bf16", "values as wide as keys, not 24 and 16"),
    ({}, (4, 6), "bf16", "4 queries and 6 keys"),
    ({"heads": 8}, (4, 4), "bf16", "head widths that 8 divides, up to 128, not 4"),
    ({"precision": "highest"}, (4, 4), "bf16", "products are pinned to highest"),
    ({"extra": ("keep",)}, (4, 4), "bf16", "not mean the same with the operands keep"),
    ({"extra": ("sinks",)}, (4, 4), "bf16", "not mean the same with the operands sinks"),
    ({"extra": ("positions",)}, (4, 9), "bf16", "4 queries stand at positions of their own"),
    ({"extra": ("positions",)}, (1, 9), "bf16", ""),
])  # fmt: skip
def test_why_not_cudnn(options: Any, sizes: tuple[int, int], dtype: str, reason: str) -> None:
    heads = options.get("heads", 4)
    fields = {name: value for name, value in options.items() if name != "width"}
    op = AttentionOp(**{"heads": heads, "kv_heads": heads // 2, "causal": True, **fields})
    widths = (32, 16, options.get("width", 16))
    q, k, v = (tensor_type((2, n, w), dtype, "t") for n, w in zip((*sizes, sizes[1]), widths, strict=True))
    choice = attention.choose((op, (q, k, v)), DEVICES["cuda"], "auto")
    assert choice.implementation == ("xla" if reason else "cudnn") and re.search(reason, choice.reason)


def test_cudnn_that_cannot_be_had_is_an_error() -> None:
    """Named with its block and the reason; and one that is planned for another device is not run by something else."""
    here = llama(attention={"implementation": "cudnn"})
    with pytest.raises(UnsupportedError, match="self_attn: .*'cudnn'.*cpu") as caught:
        here.text("lir", IDS)
    assert str(caught.value).startswith("layers.{i}.self_attn: attention.implementation = ")
    away = wide(implementation="cudnn")
    assert "self_attn: cudnn (asked for)" in away.text("lir", IDS)
    with pytest.raises(UnsupportedError, match="'cudnn'.*cuda.*cpu"):
        away.lower(IDS)


def test_what_only_another_device_runs_is_run_by_xla_with_a_warning() -> None:
    """The plan stays what it is."""
    model = wide()
    with pytest.warns(RlxWarning, match="cuda with cudnn.*cpu"):
        jax.eval_shape(model.apply, model.param_specs(), IDS)
    assert "self_attn: cudnn (faster here)" in model.text("lir")


def test_buckets() -> None:
    """The sizes of the programs that a request runs; and a size outside is a warning, or an error."""
    tables: dict[str, Any] = {"prompt": [5, 3], "batch": [2], "context": [12]}
    lm: Any = rlx.CausalLM(Llama32Flow.for_prefill(LLAMA), checkpoint(), profile=profile(buckets=tables))
    lm.generate([[1, 2]], max_new_tokens=2)
    assert {k.binding for k in lm.model.programs.executables} == {
        (("batch", 2), ("context", 12), ("seq", n)) for n in (3, 1)
    }
    tables = {"prompt": [5, 3], "batch": [2]}
    told = llama(buckets={**tables, "on_recompile": "warn"})
    with pytest.warns(RlxWarning, match="'input_ids' with 2 rows, length 6"):
        told.lower(IDS)
    with pytest.raises(RequestError, match="length 6"):
        llama(buckets={**tables, "on_recompile": "error"}).lower(IDS)


@pytest.mark.parametrize(("layout", "merge"), [("auto", False), ("in_out", True), ("out_in", True)])
def test_weight_layout(layout: str, merge: bool) -> None:
    """Stored turned, read turned, and named by its key; the tied embedding is stored once, as it is."""
    model = loaded(backend={"cpu": {"weight_layout": layout, "merge": merge}})
    turned = layout == "in_out"
    name = "model.layers.0.mlp.{gate,up}_proj.weight" if merge else "model.layers.0.mlp.up_proj.weight"
    shape = (48 if merge else 24, 16)
    assert model.params[f"{name}.T" if turned else name].shape == (shape[::-1] if turned else shape)
    assert model.params["model.embed_tokens.weight"].shape == (31, 16)
    contract = {e.params["dimension_numbers"][0][1] for e in traced(model, IDS) if e.primitive.name == "dot_general"}
    assert ((0,) in contract) == turned
    assert relative(model(IDS), logits()) < 2e-6
    for key, value in model.weights().items():
        np.testing.assert_array_equal(value, checkpoint()[key], err_msg=key)


def test_compiler_options() -> None:
    """They reach XLA."""
    option = {"xla_cpu_enable_fast_math": True}
    model = small(backend={"cpu": {"compiler_options": option}})
    assert "compiler_options=xla_cpu_enable_fast_math=True" in model.text("lir", X)
    assert relative(model(X), small()(X)) < 1e-5
