"""`rlx_jax.plan`: bytes are those of the model, and every argument counts; and the search for a profile."""

import functools
import json
import shutil
import time
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.cli.entry import main
from rlx_jax.device import DEVICES
from rlx_jax.errors import NumericsError, RequestError, UnsupportedError
from rlx_jax.inspection import rates
from rlx_jax.ir.region import Repeat
from rlx_jax.loading import model_plan, tuning
from rlx_jax.loading.tuning import Tuning, Workload, tune
from rlx_jax.lowering.lir.implementations import has_mosaic
from rlx_jax.lowering.lir.plan import state_leaves
from rlx_jax.runtime import estimate
from rlx_jax.runtime.estimate import CUBLAS_WORKSPACE
from rlx_jax.runtime.model_setup import make_programs
from tests.opening import load
from tests.oracles.checkpoints import FIXTURES

LLAMA = FIXTURES / "llama" / "gqa_plain_attnbias_v5"
BERT = FIXTURES / "bert" / "bare_v5"
FAMILIES = (
    "llama/gqa_plain_attnbias_v5", "mistral/window_v5", "gemma3_text/pattern_v4", "gpt2/bare_v4", "qwen3_moe/mixed_v5",
    "qwen3_5_text/blocks_v5", "mamba2/groups_v5", "gpt_oss/window_v5",
)  # fmt: skip
KINDS = {
    "gemma3_text/pattern_v4": "full", "mistral/window_v5": "window", "mamba2/groups_v5": "recurrent",
    "qwen3_5_text/blocks_v5": "recurrent",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 256,
}  # fmt: skip
RECIPE = rlx.Llama32Flow.for_prefill(CONFIG)
DEEP = rlx.Llama32Flow.for_prefill(CONFIG | {"num_hidden_layers": 24})
BF16 = rlx.CompileProfile().replace(precision={"compute": "bf16", "weights": "bf16"})


def zeros() -> dict[str, np.ndarray]:
    """Weights of `RECIPE`."""
    return {key: np.zeros(spec.shape, np.float32) for key, spec in RECIPE.shapes().items()}


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of fixed speed: measuring takes a second."""
    here = replace(rates.rates_named("h200"), device=replace(DEVICES["cpu"], memory=10**10))
    monkeypatch.setattr(rates, "_measured_cpu", lambda: here)


def nbytes(arrays: Any) -> int:
    """Bytes of the largest device's shards."""
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(arrays))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in KINDS and "mistral" not in n else pytest.mark.slow) for n in FAMILIES]
)
def test_bytes_of_parameters_and_caches(name: str) -> None:
    """Those of the arrays of the model, by kind of layer."""
    lm = load(FIXTURES / name)
    context = min(32, lm.max_positions or 32)
    plan = rlx.plan(FIXTURES / name, device="cpu", batch=3, context=context)
    extend = lm.model.as_program("extend")
    sizes = {"batch": 3, "context": plan.decode.sizes.get("context", context)} if plan.decode else {}
    state = lm.model.programs.empty_state(extend.key(), sizes)()
    assert plan.params_bytes == nbytes(lm.model.params)
    assert plan.cache_bytes == nbytes(state)
    assert KINDS.get(name, "full") in plan.cache


def test_bytes_of_packed_and_sharded_parameters() -> None:
    profile = rlx.CompileProfile().replace(precision={"weights": "int8"})
    lm = rlx.CausalLM(RECIPE, zeros(), profile=profile)
    plan = rlx.plan(RECIPE, device="cpu", profile=profile)
    assert plan.params_bytes == nbytes(lm.model.params) and plan.parameters["int8/32"] > 0
    lm = rlx.CausalLM(RECIPE, zeros(), mesh=2)
    plan = rlx.plan(RECIPE, device="cpu", mesh=2)
    assert plan.params_bytes == nbytes(lm.model.params) and plan.mesh == lm.report().mesh
    assert rlx.plan(RECIPE, device="h200", mesh={"data": 1, "tensor": 2}).params_bytes == plan.params_bytes


def test_the_peak_is_near_that_of_xla() -> None:
    """Of a prompt in f32. (The benchmark compares real sizes: tests compile without most of XLA's optimizations.)"""
    lm, plan = rlx.CausalLM(RECIPE, zeros()), rlx.plan(RECIPE, device="cpu", context=64)
    lm.prefill(np.zeros((1, 64), np.int32), max_len=64, logits="last")
    (executable,) = lm.model.programs.executables.values()
    memory: Any = executable.call.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert plan.peak_bytes == pytest.approx(peak - memory.alias_size_in_bytes, rel=0.1)


def test_times_of_an_h200() -> None:
    """The 1B shape in bf16, as measured: benchmarks/README.md."""
    shape = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16", "weights": "bf16"})
    recipe = rlx.Llama32Flow.for_prefill(CONFIG | shape | heads)
    one = rlx.plan(recipe, device="h200", context=256, profile=profile)
    expected = 0.796 if has_mosaic() else 0.929  # with the package's kernels, or XLA's
    assert one.ms_per_token == pytest.approx(expected, rel=0.1) and one.bound == "memory bandwidth"
    assert one.basis == "measured" and one.parameters == {"bf16": 2 * sum(s.size for s in recipe.shapes().values())}
    short = rlx.plan(recipe, device="h200", context=16, profile=profile)  # the host takes longer than the device
    assert short.prefill.bound == "the host" and one.ms_prefill >= short.ms_prefill
    assert "; the host meanwhile 1.38);" in " ".join(str(short).split())
    prompts = rlx.plan(recipe, device="h200", batch=8, context=2048, profile=profile)
    assert prompts.ms_prefill == pytest.approx(58.5, rel=0.1) and prompts.prefill.bound == "FLOPs"
    hybrid = {"vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    rules = {f"linear_{name}": 16 for name in ("num_key_heads", "num_value_heads")} | {"linear_conv_kernel_dim": 4}
    rules |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 8192}
    deltas = rlx.Qwen35Flow.for_prefill(CONFIG | hybrid | heads | rules | {"model_type": "qwen3_5_text"})
    prompts = rlx.plan(deltas, device="h200", batch=8, context=4096, profile=profile)
    assert prompts.ms_prefill == pytest.approx(77.6 if has_mosaic() else 140.9, rel=0.2)


def test_a_part_of_a_program_is_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few layers and rows of it run, and the estimate is as many times the roofline as their time was."""
    here = replace(rates._measured_cpu(), samples=True, call_seconds=0.0, argument_seconds=0.0)
    roofline = rlx.plan(DEEP, device="cpu", batch=64, context=256)
    monkeypatch.setattr(rates, "_measured_cpu", lambda: here)
    samples: list[tuple[int, int, tuple[int, ...], bool]] = []

    def measure(lir: Any, layout: Any, steps: int) -> float:
        (count,) = [node.op.count for node in lir.graph.nodes if isinstance(node.op, Repeat)]
        samples.append((count, len(state_leaves(lir.graph, False)), lir.graph.inputs[0].type.shape, steps > 1))
        return 1.0

    monkeypatch.setattr(estimate, "sample_seconds", measure)
    plan = rlx.plan(DEEP, device="cpu", batch=64, context=256)
    assert plan.decode is not None and roofline.decode is not None
    # Of 24 layers the last is no part of the loop: it computes the last token alone.
    assert samples == [(16, 2 * 17 + 1, (64, 1), True), (16, 2 * 17 + 1, (64, 256), False)]
    assert plan.decode.seconds == pytest.approx(24 / 17, rel=0.1) and plan.prefill.seconds > 1
    assert plan.decode.bound == roofline.decode.bound and plan.peak_bytes == roofline.peak_bytes
    here = replace(here, device=replace(here.device, memory=1))
    samples.clear()
    assert not rlx.plan(DEEP, device="cpu", batch=64, context=256).suggestions
    assert len(samples) == 2  # none of changes that do not fit either
    for limit in ("MAX_LAYER_BYTES", "MAX_SAMPLE_BYTES"):
        monkeypatch.setattr(estimate, limit, 1)
    assert rlx.plan(DEEP, device="cpu", batch=64, context=256).decode == roofline.decode


SAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "layers that are unrolled": (RECIPE, {}), "packed weights": (RECIPE, {"precision": {"weights": "int8"}}),
    "a scan over layers": (FIXTURES / "qwen3_5_text" / "blocks_v5", {"layers": {"roll": "scan"}}),
    "an encoder": (BERT, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("packed weights", "a scan over layers"))) for n in SAMPLED],
)
def test_a_part_of_a_program_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, changes = SAMPLED[name]
    here = replace(rates._measured_cpu(), samples=True)
    monkeypatch.setattr(rates, "_measured_cpu", lambda: here)
    times, sample = [], estimate.sample_seconds

    def measure(lir: Any, layout: Any, steps: int) -> float:
        times.append(sample(lir, layout, steps))
        return times[-1]

    monkeypatch.setattr(estimate, "sample_seconds", measure)
    plan = rlx.plan(model, device="cpu", batch=2, context=32, profile=rlx.CompileProfile().replace(**changes))
    parts = [plan.decode.parts, plan.prefill.parts] if plan.decode is not None else [plan.prefill.parts]
    assert [sum(p.values()) for p in parts] == pytest.approx(times) and 0 < min(times) < 1


def test_the_times_of_runs_that_take_turns() -> None:
    order: list[int] = []

    def run(number: int) -> None:
        order.append(number)
        time.sleep(0.02 * number)

    long, short = rates.least_seconds([functools.partial(run, 1), functools.partial(run, 0)], 0.0)
    assert long >= 0.02 > short and order[2:4] == [1, 0] and order.count(1) == 4


CHANGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "device": ({"device": "l4"}, ("ms_per_token", "prefill.memory_seconds", "memory", "basis")),
    "batch": ({"batch": 3}, ("ms_per_token", "prefill.flops", "cache_bytes", "peak_bytes")),
    "context": ({"context": 128}, ("ms_per_token", "prefill.flops", "cache_bytes", "peak_bytes")),
    "profile": ({"profile": rlx.CompileProfile().replace(precision={"compute": "f32"})}, ("dtype", "params_bytes")),
    "cache": ({"profile": rlx.CompileProfile().replace(precision={"kv": "int8"})}, ("cache_bytes",)),
    "mesh": ({"mesh": 2}, ("params_bytes", "mesh", "ms_per_token")),
}


BASE: dict[str, Any] = {"device": "h200", "batch": 2, "context": 64, "profile": BF16}


@functools.cache
def plan_with() -> Any:
    """The plan that those of other arguments are compared with."""
    return rlx.plan(RECIPE, **BASE)


@pytest.mark.parametrize("name", CHANGES)
def test_every_argument_changes_the_result(name: str) -> None:
    arguments, attributes = CHANGES[name]
    first, other = plan_with(), rlx.plan(RECIPE, **BASE | arguments)
    assert [name for name in attributes if attrgetter(name)(first) == attrgetter(name)(other)] == []


@pytest.mark.slow
def test_what_would_make_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suggestion fits, and its figures are those of a plan with its arguments."""
    t4, peak = rates.rates_named("t4"), rlx.plan(RECIPE, device="t4", batch=8, context=256).peak_bytes
    memory = CUBLAS_WORKSPACE + (peak - CUBLAS_WORKSPACE) * 7 // 10  # no change makes the workspace smaller
    small = replace(t4, device=replace(t4.device, memory=memory))
    monkeypatch.setattr(model_plan, "rates_named", lambda name: small)
    plan = rlx.plan(RECIPE, device="t4", batch=8, context=256)
    assert plan.fits is False and plan.bound == "memory size"
    changes = {s.change for s in plan.suggestions}
    assert {"a context of 128", "a batch of 4", "4 devices"} <= changes, changes
    auto = rlx.CompileProfile.preset("auto")
    for suggestion in plan.suggestions[1:]:
        arguments = {"batch": 8, "context": 256, **suggestion.arguments}
        arguments["profile"] = auto.replace(**arguments.get("profile", {}))
        other = rlx.plan(RECIPE, device="t4", **arguments)
        assert other.fits and other.peak_bytes == suggestion.peak_bytes
        assert other.ms_per_token == suggestion.ms_per_token
    assert "it would fit with" in str(plan)


def test_what_a_plan_does_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that are here, and the programs of changes that cannot fit."""
    builds, build = list[Any](), make_programs

    def count(*args: Any, **options: Any) -> Any:
        builds.append(options)
        return build(*args, **options)

    monkeypatch.setattr("rlx_jax.compiler.settings.running_device", pytest.fail)
    monkeypatch.setattr(model_plan, "make_programs", count)
    v5e = rates.rates_named("v5e")
    tiny = replace(v5e, device=replace(v5e.device, memory=10))
    monkeypatch.setattr(model_plan, "rates_named", lambda name: tiny)
    assert not rlx.plan(RECIPE, device="v5e").suggestions
    assert len(builds) == 2


def test_heads_of_tokens_are_planned() -> None:
    head = FIXTURES / "bert" / "masked_lm_v4"
    plan, model = rlx.plan(head, device="h200"), load(head)
    assert plan.params_bytes == sum(leaf.nbytes for leaf in model.model.params.values()) and plan.decode is None


def test_an_encoder_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    plan = rlx.plan(BERT, device="h200", batch=4)
    assert plan.decode is None and plan.ms_per_token is None and plan.cache_bytes == 0 and plan.ms_prefill > 0
    assert "a call" in str(plan)
    words = ["plan", str(LLAMA), "--device", "l4", "--batch", "2", "--mesh", "data=2", "--json"]
    assert cli.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    expected = rlx.plan(LLAMA, device="l4", batch=2, mesh={"data": 2})
    assert record == json.loads(expected.to_json())
    assert cli.main(words[:-1]) == 0 and "from the data sheet" in capsys.readouterr().out
    assert cli.main([*words[:-2], "two"]) == 1 and "expected a number of devices, or axes" in capsys.readouterr().err


@pytest.mark.usefixtures("with_kernels")
def test_packed_weights_in_kernels() -> None:
    """Few rows read them packed on an H200, and nothing is decoded to memory; kernels of one row start sooner."""
    wide = rlx.Llama32Flow.for_prefill(CONFIG | {"hidden_size": 1024, "intermediate_size": 2048})
    steps = []
    for weights, rows in (("bf16", 1), ("int8", 1), ("bf16", 2)):
        profile = rlx.CompileProfile().replace(precision={"compute": "bf16", "weights": weights})
        steps.append(rlx.plan(wide, device="h200", batch=rows, context=64, profile=profile).decode)
    plain, packed, two = steps
    assert plain is not None and packed is not None and two is not None
    assert plain.start_seconds < 0.95 * two.start_seconds
    assert packed.bytes < 0.6 * plain.bytes and packed.compute_seconds == plain.compute_seconds


WORKLOAD = Workload(batch=2, prompt_tokens=8, new_tokens=2, runs=1)


FEW = (
    ("precision.compute", ("bf16",)), ("layers.roll", ("scan",)), ("attention.implementation", ("cudnn",)),
    ("backend.{}.merge", (False,)), ("backend.{}.experts", ("dense",)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting that is tried takes a compile."""
    monkeypatch.setattr(tuning, "SETTINGS", FEW)
    monkeypatch.setattr(tuning, "XLA_OPTIONS", {})


def test_every_setting_is_one_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for target in ("cpu", "cuda", "tpu"):
        changes = list(tuning.changes_for(target))
        profiles = [rlx.CompileProfile().replace(**change) for change in changes]
        assert len(set(map(repr, profiles))) == len(changes) and rlx.CompileProfile() not in profiles


def search(monkeypatch: pytest.MonkeyPatch, times: Any, real: bool = False, **options: Any) -> Tuning:
    """The result for a tiny Llama whose time is a function of its profile; it runs if `real`."""

    def ratios(self: Workload, model: Any, other: Any, runs: int) -> list[float]:
        self.run(model)
        return [float(times(model.model.settings.profile) / times(other.model.settings.profile))]

    monkeypatch.setattr(Workload, "ratios", ratios)
    if not real:
        monkeypatch.setattr(Workload, "run", lambda self, model: None)
        monkeypatch.setattr(Workload, "outputs", lambda self, model: np.ones(3))
    open_model = lambda profile: rlx.load(LLAMA, profile=profile)  # noqa: E731
    return tune(open_model, rlx.CompileProfile(), WORKLOAD, **options)


@pytest.mark.slow
def test_the_fastest_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(profile: rlx.CompileProfile) -> float:
        scan = 0.5 if profile.layers.roll == "scan" else 1.0
        bf16 = 0.1 if profile.precision.compute == "bf16" else 1.0
        return scan * bf16 * (0.9 if profile.backend.cpu.merge is False else 1.0)

    result = search(monkeypatch, times, real=True)
    assert result.profile == rlx.CompileProfile().replace(layers={"roll": "scan"}, backend={"cpu": {"merge": False}})
    assert result.ratio == pytest.approx(0.45)
    found = {trial.change.split(" = ")[0]: trial for trial in result.trials}
    bf16 = next(trial for trial in result.trials if trial.change == "precision.compute = bf16")
    assert bf16.error is not None and bf16.error > 1e-4 and "error is over" in bf16.reason and not bf16.kept
    assert "cudnn" in found["attention.implementation"].reason and not found["attention.implementation"].kept
    assert "no effect" in found["backend.cpu.experts"].reason and found["backend.cpu.experts"].ratio is None
    toml = result.to_toml()
    assert rlx.CompileProfile.from_toml_str(toml) == result.profile and "precision" not in toml.split("name =")[1]
    assert "0.450 x the time of 'auto'" in toml and "rlx-jax tune" in toml
    monkeypatch.setattr(tuning, "SETTINGS", FEW[:1])
    assert search(monkeypatch, times, real=True, tolerance=0.1).profile.precision.compute == "bf16"


def test_nothing_faster_leaves_the_first_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SETTINGS", FEW[1:2])
    result = search(monkeypatch, lambda profile: 1.0)
    assert result.profile == result.base == rlx.CompileProfile() and result.ratio == 1.0
    assert not any(trial.kept for trial in result.trials)


def test_each_trial_is_reported_as_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "SETTINGS", FEW[1:3])
    monkeypatch.setattr(Workload, "run", lambda self, model: None)
    monkeypatch.setattr(Workload, "outputs", lambda self, model: np.ones(3))
    reported = []

    def ratios(self: Workload, model: Any, other: Any, runs: int) -> list[float]:
        reported.append(capsys.readouterr().err)
        return [0.5]

    monkeypatch.setattr(Workload, "ratios", ratios)
    assert main(["tune", str(LLAMA), "--output", str(tmp_path / "x.toml"), "--json"]) == 0
    assert len(reported) == 3 and "layers.roll = scan: 0.500 x the time" in reported[1]  # measured again at the end
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_gain_that_does_not_last_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result runs in turn with the first profile at the end."""
    monkeypatch.setattr(tuning, "SETTINGS", FEW[1:2])
    calls = iter([0.5] + [1.0] * 100)
    result = search(monkeypatch, lambda profile: 1.0 if profile.layers.roll == "auto" else next(calls))
    assert any(trial.kept for trial in result.trials) and result.profile == rlx.CompileProfile()


@pytest.mark.parametrize(
    ("ratios", "faster"),
    [
        ([0.9, 0.95, 0.96, 0.97, 1.2], True),
        ([0.5, 0.6, 0.9, 1.1, 1.2], False),  # its median alone is a gain
        ([0.985, 0.99, 0.99], False),
        ([0.97], True),
    ],
)
def test_a_gain_is_more_than_noise(ratios: list[float], faster: bool) -> None:
    assert tuning.is_faster(ratios) == faster


@pytest.mark.slow
def test_an_encoder_and_other_models() -> None:
    encoder = rlx.load(FIXTURES / "sentence" / "base")
    assert WORKLOAD.outputs(encoder).shape[0] == 2 and WORKLOAD.ratios(encoder, encoder, 2)[0] > 0
    lm = rlx.load(LLAMA)
    assert np.isfinite(WORKLOAD.outputs(lm)).all()
    with pytest.raises(UnsupportedError, match="CompiledModel"):
        tune(lambda profile: lm.model, rlx.CompileProfile(), WORKLOAD)
    bf16 = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    with pytest.raises(NumericsError, match="tolerance"):
        tune(lambda profile: rlx.load(LLAMA, profile=profile), bf16, WORKLOAD, tolerance=1e-6)
    with pytest.raises(RequestError, match="runs"):
        Workload(runs=0)


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read by load; an existing one is not replaced unasked."""
    monkeypatch.setattr(tuning, "SETTINGS", FEW[1:2])
    monkeypatch.setattr(Workload, "ratios", lambda self, model, other, runs: [1.0])
    directory = tmp_path / "model"
    shutil.copytree(LLAMA, directory)
    arguments = ["tune", str(directory), "--prompt-tokens", "8", "--new-tokens", "2", "--dtype", "f32", "--quiet"]
    missing = [*arguments, "--output", str(tmp_path / "none" / "x.toml")]
    assert main(missing) == 1 and "no directory" in capsys.readouterr().err  # before the search
    assert main([*arguments, "--new-tokens", "9999999"]) == 1 and "SequenceLengthError" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "nothing was faster" in capsys.readouterr().out
    file = directory / "tuned.rlx.toml"
    assert rlx.load(directory, profile=file).model.settings.profile.precision.compute == "f32"
    assert main(arguments) == 1 and "--overwrite" in capsys.readouterr().err
    monkeypatch.setattr(Workload, "run", lambda self, model: None)  # it has run
    monkeypatch.setattr(Workload, "outputs", lambda self, model: np.ones(3))
    assert main([*arguments, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"file": str(file), "ratio": 1.0}
    assert rlx.CompileProfile.near(directory, "tuned") == rlx.CompileProfile.from_toml(file)
