"""What becomes of a model: the work of its blocks, where its time goes, and what is found wrong with a program."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import GraphError, RequestError, RlxWarning
from rlx_jax.inspection.rates import rates_named
from rlx_jax.inspection.records import BlockEntry, Finding, Inspection
from rlx_jax.inspection.work import block_work
from rlx_jax.lowering.inspect.hlo import parse_instructions
from rlx_jax.runtime.explain import PaddedSizes, copied_caches, findings_of, largest_losses
from rlx_jax.runtime.inspect_program import program_facts
from tests import divided, small
from tests.opening import load
from tests.oracles.checkpoints import FIXTURES
from tests.oracles.packed import packed

CACHE = 2 * 2 * 64 * 4 * 8 * 4
"""Bytes of keys and values of the tiny models: two layers, 64 slots, 4 heads of width 8, f32."""


@pytest.mark.parametrize("weights", ["keep", "int8"])
@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen3"])
def test_a_step_reads_every_parameter_and_the_cache_once(family: str, weights: str) -> None:
    """But a table that only tokens read, a row for each; packed parameters count as they are stored."""
    profile = small.profile(precision={"weights": weights})
    model = rlx.compile(divided.recipe(family), divided.weights(family), profile=profile, program="extend")
    lir = model.programs.function(model.key_for_sizes({"batch": 1, "context": 64, "seq": 1})).lir
    stored = {name: t.nbytes for name, t in model.programs.layout.types().items()}
    works = block_work(lir)
    table = sum(size for name, size in stored.items() if "embed_tokens" in name) if family != "llama tied" else 0
    assert sum(part.param_bytes for parts in works.values() for part in parts) == pytest.approx(
        sum(stored.values()) - table, abs=64
    )
    attention = [part for path, parts in works.items() if path[-1] == "self_attn" for part in parts]
    assert CACHE < sum(part.bytes for part in attention) < 1.1 * CACHE


@pytest.fixture(scope="module")
def llama() -> rlx.CausalLM:
    return rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"))


def check_whole(inspection: Inspection, model: rlx.CompiledModel) -> None:
    """The blocks add up to the program: its time, its parameters, its operations."""
    assert math.isclose(sum(block.seconds for block in inspection.blocks), inspection.seconds, rel_tol=1e-6)
    assert sum(block.params for block in inspection.blocks) == model.programs.layout.num_parameters()
    assert sum(block.param_bytes for block in inspection.blocks) == inspection.param_bytes
    assert max(map(len, str(inspection).splitlines())) <= 80
    assert json.loads(inspection.to_json())["blocks"][0]["path"] == inspection.blocks[0].path


def test_a_call_is_measured(llama: rlx.CausalLM) -> None:
    """Repeated layers are one block, in the order of the program, with a time of each."""
    model, tokens = llama.model, np.ones((2, 8), np.int32)
    inspection = model.explain(tokens, runs=1)
    check_whole(inspection, model)
    blocks = {block.path: block for block in inspection.blocks}
    up = blocks["layers.*.mlp.gate_proj"]
    assert (up.layers, up.params, up.scheme, up.output) == (2, 2 * 2 * 48 * 32, "f32", "f32[2,8,48], f32[2,8,48]")
    assert up.flops == 2 * 2 * 8 * up.params and up.measured and len(up.layer_seconds) == 2
    assert sum(up.layer_seconds) == pytest.approx(up.seconds) and up.kernels[0].calls == 1
    assert [op.text for op in up.ops][:1] == ["matmul(contract=1)"]
    paths = list(blocks)
    assert paths.index("embed_tokens") < paths.index("layers.*.mlp") < paths.index("lm_head")
    assert "measured" in inspection.title and inspection.device == "cpu" and inspection.passes[-1].nodes_after > 0
    assert blocks["layers.*.self_attn"].implementation == "heads_first"


def test_what_does_not_run_is_estimated(llama: rlx.CausalLM) -> None:
    """Of shapes, of a model without parameters, and of the program that ran last. The text says so."""
    model = dataclasses.replace(llama.model, last_key=None)
    with pytest.raises(GraphError, match="explain needs inputs, as nothing ran yet"):
        model.explain()
    inspection = model.explain(jax.ShapeDtypeStruct((2, 8), jnp.int32))
    check_whole(inspection, model)
    assert not inspection.measured and "estimated" in inspection.title and inspection.losses == ()
    assert model.explain().sizes == {"batch": 2, "seq": 8}
    bare = rlx.CausalLM(divided.recipe("llama"), profile=small.profile(fusion={"target": "h200"}))
    step = bare.explain(batch=3, context=100)
    plan = rlx.plan(divided.recipe("llama"), device="h200", batch=3, context=100, profile=small.profile())
    assert plan.decode is not None and step.seconds == pytest.approx(plan.decode.seconds, rel=1e-3)
    check_whole(step, bare.model)
    assert step.program == "extend" and not step.measured and step.peak_bytes is None
    assert step.cache_bytes == 3 * (2 * 2 * 128 * 4 * 8 * 4 + 4)  # slots are a power of two


def test_a_plan_for_another_device() -> None:
    """An estimate is for that device; what ran is held against the limits of the one that ran it."""
    with pytest.warns(RlxWarning, match="the plan is for another device"):
        model = ran(linears("a"), SQUARE, fusion={"target": "h200"})
    estimate = model.explain(jax.ShapeDtypeStruct((64, 128), jnp.float32))
    measured = model.explain(np.ones((64, 128), np.float32), runs=1)
    assert (estimate.device, measured.device) == ("h200", "cpu")
    assert measured.roofline_seconds > 10 * estimate.roofline_seconds


def test_a_step_of_the_loop(llama: rlx.CausalLM) -> None:
    """Is one of those that a dispatch runs, with the sampler; the tokens of prefill are as many as asked for."""
    inspection = llama.explain(context=60, runs=2)
    check_whole(inspection, llama.model)
    blocks = {block.path: block for block in inspection.blocks}
    assert blocks["sampler"].seconds > 0 and blocks["layers.*.mlp.down_proj"].kernels[0].calls == 1
    prefill = llama.explain("prefill", batch=2, context=100, runs=1)
    check_whole(prefill, llama.model)
    (padding,) = [finding for finding in prefill.findings if finding.kind == "padding"]
    assert padding.text.startswith("22% of what the program computes is padding: seq 100 in 128")
    assert not [f for f in llama.explain("prefill", context=128, measure=False).findings if f.kind == "padding"]


def test_an_encoder_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = rlx.Encoder(divided.recipe("bert"), divided.weights("bert"))
    inspection = encoder.explain(batch=2, tokens=16, runs=1)
    check_whole(inspection, encoder.model)
    assert inspection.program == "packed" and inspection.measured
    words = ["explain", str(FIXTURES / "llama" / "bf16_gqa_tied_v5"), "--context", "40"]
    assert cli.main([*words, "--estimate"]) == 0
    told = capsys.readouterr().out
    assert "extend of batch 1, context 64" in told and "prefill of batch 1" in told and "estimated" in told
    assert cli.main([*words, "--program", "prefill", "--runs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]
    assert cli.main(["explain", str(FIXTURES / "sentence" / "base"), "--estimate"]) == 1
    assert "--estimate is for language models" in capsys.readouterr().err
    assert cli.main(["explain", str(FIXTURES / "bert" / "classifier_v4")]) == 1
    assert "is a classifier; explain takes language models and encoders of texts" in capsys.readouterr().err


@pytest.mark.slow
def test_encoders_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    directory = FIXTURES / "vision" / "dinov2_registers"
    encoder = load(directory, head=False)
    sides = encoder.processor.crop or encoder.processor.size
    inspection = encoder.explain(batch=3, runs=1)
    check_whole(inspection, encoder.model)
    assert inspection.measured and inspection.sizes["batch"] == 4
    assert any("images 3 in 4" in finding.text for finding in inspection.findings)
    other = encoder.explain(batch=3, size=(2 * sides[0], sides[1]), runs=1)
    assert other.flops > inspection.flops
    with pytest.raises(RequestError, match="size is 3; expected height and width"):
        encoder.explain(size=3)
    assert cli.main(["explain", str(directory), "--batch", "2", "--runs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["batch"] == 2
    assert cli.main(["explain", str(directory), "--context", "9"]) == 1
    assert "images take --batch and --runs alone" in capsys.readouterr().err


@pytest.mark.slow
def test_the_towers_of_a_dual_encoder() -> None:
    both = load(FIXTURES / "vision" / "dual" / "clip")
    texts, images = both.explain("texts", batch=2, runs=1), both.explain("images", batch=2, runs=1)
    assert texts.name != images.name and texts.measured and images.measured
    assert "vision" in both.show("images", batch=1, runs=1).html
    with pytest.raises(RequestError, match="'audio'.*'texts'.*'images'"):
        both.explain("audio")


BLOCK = BlockEntry("a", "", "", 0, 0, "f32", "f32", "", 0, 0, 0.0, True, 0.0, "")


def test_the_largest_losses() -> None:
    """Are those over the roofline, not the slowest blocks, and each has advice that follows from its figures."""
    rates = rates_named("h200")
    kinds: dict[str, tuple[dict[str, Any], str]] = {
        "few rows": ({"bytes": 10**9, "weight_bytes": 10**9, "flops": 10**9, "limited_by": "memory"}, "as many rows"),
        "moves": ({"bytes": 10**9, "limited_by": "memory"}, "only reads and writes values of other blocks"),
        "wide": ({"flops": 10**12, "limited_by": "compute"}, "a limit 2.0 times as high here: precision.compute"),
        "narrow": ({"flops": 10**12, "dtype": "bf16", "limited_by": "compute"}, "GFLOP/s reached"),
        "chosen": (
            {"flops": 10**9, "limited_by": "compute", "implementation": "xla", "reason": "no"},
            r"by xla \(no\)",
        ),
        "(no kernel runs)": ({}, "waits for the host"),
        "at the limit": ({"roofline_seconds": 0.9999, "bytes": 1, "limited_by": "memory"}, ""),
    }
    blocks = [
        dataclasses.replace(BLOCK, path=path, **{"roofline_seconds": 0.001 * i, **fields}, seconds=1.0)
        for i, (path, (fields, _)) in enumerate(kinds.items())
    ]
    whole = Inspection("m", "forward", {}, "h200", 7.0, True, 1.0, 0, 0, 0, 0, None, tuple(blocks))
    for i in range(0, len(blocks), 5):
        losses = largest_losses(dataclasses.replace(whole, blocks=tuple(blocks[i : i + 5])), rates)
        assert all(kinds[loss.path][1] in loss.advice.replace("(", r"\(").replace(")", r"\)") for loss in losses)
    losses = largest_losses(whole, rates)
    assert [loss.path for loss in losses] == ["few rows", "moves", "wide", "narrow", "chosen"]
    tiny = dataclasses.replace(
        BLOCK, seconds=4e-6, roofline_seconds=1e-9, flops=2000, limited_by="compute", dtype="bf16", layers=16,
        implementation="row", reason="few rows, in 1 of 16 layers",
    )  # fmt: skip
    ran = dataclasses.replace(whole, seconds=4e-6, blocks=(tiny,))
    (loss,) = largest_losses(ran, rates)
    assert "0.00 ms  a" not in dataclasses.replace(ran, losses=(dataclasses.replace(loss, seconds=4e-6),)).text()
    assert "takes 4.00 µs; compute allows 1.00 ns: 2.00 kFLOP at" in loss.text and "500.00 MFLOP/s" in loss.advice
    assert largest_losses(dataclasses.replace(whole, measured=False), rates) == largest_losses(whole, None) == ()


RNG = np.random.default_rng(0)
SQUARE = {name: RNG.standard_normal((128, 128)).astype(np.float32) for name in "abcd"}
X = np.ones((1, 128), np.float32)


def of_kind(kind: str, model: rlx.CompiledModel) -> list[Finding]:
    return [finding for finding in model.explain().findings if finding.kind == kind]


def ran(flow: rlx.ModelFlow, weights: Any, *inputs: np.ndarray, **tables: Any) -> rlx.CompiledModel:
    read = small.read_by(flow, weights) if isinstance(weights, dict) else weights
    model = rlx.compile(flow, read, profile=small.profile(**tables))
    for x in inputs:
        model(x)
    return model


def linears(*stages: str) -> rlx.ModelFlow:
    flow = rlx.ModelFlow("m").input("x", ("n", 128))
    for key in stages:
        flow = flow.linear(key)
    return flow


@pytest.mark.parametrize("wide", [False, True])
def test_f32_in_a_bf16_program(wide: bool) -> None:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = jnp.float32 if wide else jnp.bfloat16
        return (a.astype(dtype) @ b.astype(dtype)).astype(a.dtype)

    flow = linears("a", "b").custom_named("mine", lambda emit, x: emit.jax(product, x, emit.param("c"))).linear("d")
    found = of_kind("f32", ran(flow, SQUARE, X, precision={"compute": "bf16"}))
    assert [finding.path for finding in found] == ["mine"] * wide
    assert of_kind("f32", ran(flow, SQUARE, X)) == []  # a program in f32


def test_a_weight_in_the_slow_orientation() -> None:
    for layout, rows, paths in (("in_out", 1, ["a", "b"]), ("out_in", 1, []), ("in_out", 64, [])):
        x = np.ones((rows, 128), np.float32)
        found = of_kind("orientation", ran(linears("a", "b"), SQUARE, x, backend={"cpu": {"weight_layout": layout}}))
        assert [finding.path for finding in found] == paths
        assert all("65.54 kB of weights are stored [in, out], which cpu reads slower" in each.text for each in found)


@pytest.mark.parametrize("decoded", [False, True])
def test_an_unfused_decode(decoded: bool) -> None:
    """Of a packed weight whose rows are not the product's outputs."""
    weight = packed("gguf_q8_0", (96, 64), 5)
    width = 96 if decoded else 64
    flow = rlx.ModelFlow("m").input("x", ("n", width))
    flow = flow.custom(lambda emit, x: emit.linear(x, "w", transpose=not decoded))
    found = of_kind("unfused decode", ran(flow, small.Own(weight.data, weight.spec), np.ones((2, width), np.float32)))
    assert [finding.path for finding in found] == ["custom"] * decoded
    assert all("gguf_q8_0 weight is decoded to 24.58 kB" in finding.text for finding in found)


@pytest.mark.parametrize("roll", ["scan", "unroll"])
def test_a_scan_that_copies_its_weights(roll: str) -> None:
    weights = {f"{i}.{key}": value for i in range(3) for key, value in SQUARE.items()}
    flow = rlx.ModelFlow("m").input("x", ("n", 128)).repeat_layers(3, lambda i: rlx.blocks.Linear(f"{i}.a"))
    model = ran(flow, weights, np.ones((8, 128), np.float32), layers={"roll": roll})
    found = of_kind("copied weight", model)
    assert len(found) == (roll == "scan")
    assert all("the scan over layers copies its weights, 196.61 kB" in finding.text for finding in found)


def test_a_copied_cache() -> None:
    """As the proof about a compiled program has it."""
    step = rlx.compile(divided.recipe("llama"), divided.weights("llama"), program="extend")
    tokens, lengths = np.ones((1, 1), np.int32), np.ones(1, np.int32)
    step(tokens, lengths, state=step.init_state(1, 64))
    assert step.last_key is not None
    facts = program_facts(step.programs, step.last_key)
    assert facts.executable is not None and facts.executable.donation is not None and not list(copied_caches(facts))
    copy = "%copy.7 = f32[1,64,4,8]{3,2,1,0} copy(%fusion.3)"
    executable = dataclasses.replace(
        facts.executable, donation=dataclasses.replace(facts.executable.donation, copies=(copy,))
    )
    (finding,) = copied_caches(dataclasses.replace(facts, executable=executable))
    assert copy in finding.text and "nothing may read the old state" in finding.advice
    rates = rates_named("cpu")
    assert finding.seconds == pytest.approx(2 * 64 * 4 * 8 * 4 / rates.bandwidth)


def test_recompilations() -> None:
    """After warm-up each has its reason; without one, a program of many sizes is one finding."""
    inputs = [np.ones((n, 128), np.float32) for n in (1, 2, 3, 4)]
    assert of_kind("recompiled", ran(linears("a"), SQUARE, *inputs[:3])) == []
    model = ran(linears("a"), SQUARE, *inputs)
    (finding,) = of_kind("recompiled", model)
    assert finding.text.startswith("forward is compiled for 4 choices of sizes") and "n 1, 2, 3, 4" in finding.text
    model.programs.record_recompile("forward of n 9: other sizes")
    assert "forward of n 9: other sizes" in [finding.text for finding in of_kind("recompiled", model)]


@pytest.mark.parametrize(("rows", "waste"), [(8, 0.0), (7, 0.125), (1, 0.875)])
def test_padding(rows: int, waste: float) -> None:
    padding = PaddedSizes({"batch": (rows, 8), "seq": (4, 4)})
    assert padding.waste == waste
    model = ran(linears("a"), SQUARE, X)
    assert model.last_key is not None
    found = findings_of(program_facts(model.programs, model.last_key), padding)
    assert [finding.kind for finding in found] == ["padding"] * (waste > 0)


HLO = """HloModule m

%body (arg: (s32[], f32[4,8], f32[1,8])) -> (s32[], f32[4,8], f32[1,8]) {
  %arg = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  %w = f32[4,8]{1,0} get-tuple-element(%arg), index=1
  %x = f32[1,8]{1,0} get-tuple-element(%arg), index=2
  %dot.1 = f32[1,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %t = (s32[], f32[4,8], f32[1,8]) tuple(%arg)
}

ENTRY %main (p: f32[4,8], q: f32[1,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="params[\\'up.weight\\']"}
  %q = f32[1,8]{1,0} parameter(1), metadata={op_name="inputs[\\'x\\']"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[4,8]{1,0}, /*index=2*/f32[1,8]{1,0}) tuple(%zero, /*index=1*/%p, %q)
  %loop = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) while(%start), condition=%c, body=%body
  %copy.1 = f32[4,8]{0,1} copy(%p)
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_product_without_metadata_belongs_to_the_reader_of_its_weight() -> None:
    """XLA:CPU drops the metadata of products of one row; the weight is found through the loop that carries it."""
    found = parse_instructions(HLO, frozenset({"up"}), {"up.weight": "up"})
    assert found["dot.1"].path == "up" and found["dot.1"].parameter == "up.weight" and found["dot.1"].has_kernel
    copy = found["copy.1"]
    assert copy.moves and copy.parameter == "up.weight" and copy.result == "f32[4,8]{0,1}" and not copy.path
    assert parse_instructions(HLO, frozenset({"up"}))["dot.1"].path == ""
    assert not found["out"].has_kernel
