"""The search for a profile: what is kept, what is refused, and the file that it writes. Times are made up."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.cli.entry import main
from rlx_jax.errors import NumericsError, RequestError, UnsupportedError
from rlx_jax.loading import tuning
from rlx_jax.loading.tuning import Tuning, Workload, tune
from tests.oracles.checkpoints import FIXTURES

LLAMA = FIXTURES / "llama" / "gqa_plain_attnbias_v5"
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
