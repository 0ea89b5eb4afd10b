"""What changes with another profile, in the settings and in a program; and what none changes: the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.settings import CLEANING
from rlx_jax.errors import ProfileError
from rlx_jax.profiles import Change, CompileProfile
from tests import divided
from tests.oracles import checkpoints, hugging_face

AUTO = CompileProfile()
FIELDS: dict[str, tuple[dict[str, Any], set[Change]]] = {
    "nothing, but the name": ({"name": "other"}, set()),
    "a value": ({"precision": {"compute": "bf16"}}, {Change("precision.compute", "auto", "bf16")}),
    "a list": ({"fusion": {"disable": ["cse", "dce"]}}, {Change("fusion.disable", "[]", "[cse, dce]")}),
    "a table in a table": ({"backend": {"cpu": {"merge": True}}}, {Change("backend.cpu.merge", "auto", "true")}),
    "a class of ops": ({"precision": {"classes": {"compute": "bf16"}, "mixed": "custom"}},
        {Change("precision.classes.compute", "f32", "bf16"), Change("precision.mixed", "none", "custom")}),
    "an option of XLA": ({"backend": {"cpu": {"compiler_options": {"xla_one": True}}}},
        {Change("backend.cpu.compiler_options.xla_one", "unset", "true")}),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_settings_that_differ(name: str) -> None:
    """Each by its path, and the other way round."""
    changes, wanted = FIELDS[name]
    other = AUTO.replace(**changes)
    found = AUTO.diff(other)
    assert set(found.fields) == wanted and found.program is None and bool(found) == bool(wanted)
    assert set(other.diff(AUTO).fields) == {Change(c.what, c.theirs, c.ours) for c in wanted}
    assert all(change.what in str(found) for change in wanted)


@pytest.fixture(scope="module")
def model() -> Any:
    """Of which nothing is compiled."""
    return rlx.compile(divided.recipe("llama"), divided.recipe("llama").shapes())


IN_THE_PROGRAM: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "a pass": ({"passes": {"cse": False}}, {"pass cse": ("runs", "does not run")}),
    "dtypes": (
        {"precision": {"compute": "bf16"}},
        {
            "pass precision": ("does not run", "runs"),
            **dict.fromkeys(("compute dtype", "parameters in"), ("f32", "bf16")),
        },
    ),
    "parameters that are one": (
        {"backend": {"cpu": {"merge": True}}},
        {"pass merge_linears": ("does not run", "runs"), "ops mat_mul": ("8", "5")},
    ),
    "layers": ({"layers": {"roll": "scan"}}, {"layers": ("one after the other", "one loop")}),
    "inputs": ({"donation": {"inputs": ["input_ids"]}}, {"inputs consumed": ("none", "input_ids")}),
    "options": (
        {"backend": {"cpu": {"compiler_options": {"xla_one": True}}}},
        {"options of XLA": ("none", "xla_one yes")},
    ),
    "what a forward program has not": (
        {"donation": {"state": False}, "precision": {"kv": "bf16"}, "buckets": {"prompt": [8]}},
        {},
    ),
    "what auto means": ({"layers": {"roll": "unroll"}, "precision": {"compute": "f32"}}, {}),
}


@pytest.mark.parametrize("name", IN_THE_PROGRAM)
def test_what_changes_in_a_program(model: Any, name: str) -> None:
    """By what is made of the flow: settings without effect there change nothing."""
    changes, wanted = IN_THE_PROGRAM[name]
    found = AUTO.diff(AUTO.replace(**changes), model)
    told = {change.what: (change.ours, change.theirs) for change in found.program or ()}
    assert {what: told.get(what) for what in wanted} == wanted and bool(told) == bool(wanted)
    assert ("the program is the same" in str(found)) == (not wanted)
    assert all(change.ours != change.theirs for change in found.program or ())
    assert max(map(len, str(found).splitlines())) <= 80
    assert model.report().compiles == 0


def test_programs_with_a_state_and_sizes(model: Any) -> None:
    """Of the program that is asked; how ops run where its sizes are known."""
    step = model.as_program("extend")
    changes = AUTO.diff(AUTO.replace(donation={"state": False}), step).program
    assert changes == (Change("state updated in place", "yes", "no"),)
    other = AUTO.replace(fusion={"target": "h200"}, precision={"compute": "bf16"}, attention={"implementation": "xla"})
    assert not [c for c in AUTO.diff(other, model).program or () if c.what.startswith("runs")]
    model.text("lir", np.ones((2, 5), np.int32))
    (runs,) = [c for c in AUTO.diff(other, model).program or () if c.what == "runs attention"]
    assert "heads_first (faster on a CPU)" in runs.ours and "asked for" in runs.theirs


def test_presets_and_files(tmp_path: Any) -> None:
    """What `profile=` takes is taken here, and nothing else; only a model has a program."""
    (tmp_path / "mine.rlx.toml").write_text('[layers]\nroll = "scan"\n', "utf-8")
    for other in (tmp_path / "mine.rlx.toml", str(tmp_path / "mine.rlx.toml"), AUTO.replace(layers={"roll": "scan"})):
        assert AUTO.diff(other).fields == (Change("layers.roll", "auto", "scan"),)
    assert str(AUTO.diff("auto")) == "auto and auto have the same settings"
    assert CompileProfile.auto().diff("llama32_decode").theirs == "llama32_decode"
    with pytest.raises(ProfileError, match="diff: profile is 3; expected a CompileProfile"):
        AUTO.diff(3)  # type: ignore[arg-type]
    flow = rlx.ModelFlow("m").input("x", ("n", 4)).linear("w")
    with pytest.raises(ProfileError, match="fusion.disable: unknown pass 'cze'"):
        AUTO.diff(AUTO.replace(fusion={"disable": ["cze"]}), rlx.compile(flow, {"w": np.ones((4, 4), np.float32)}))


MODELS = {
    "llama": checkpoints.FIXTURES / "llama" / "gqa_plain_attnbias_v5",
    "bert": checkpoints.FIXTURES / "bert" / "bare_v5",
}
FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "everything": {
        "fusion": {"policy": "fusable", "skip": True}, "layers": {"roll": "scan"},
        "passes": {name: False for name in CLEANING}, "backend": {"cpu": {"merge": True, "weight_layout": "in_out"}},
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has no effect:rlx_jax.errors.RlxWarning")
@pytest.mark.parametrize("name", MODELS)
def test_forms_of_one_program(name: str) -> None:
    """direct = fusable, unrolled = scanned, apart = merged, as stored = turned, with passes = without."""
    with np.load(MODELS[name].with_suffix(".npz")) as file:
        tokens = np.asarray(file["tokens"], np.int32)
    profiles = [rlx.CompileProfile().replace(**tables) for tables in FORMS.values()]
    want, got = (np.asarray(rlx.compile(rlx.from_pretrained(MODELS[name]), profile=p)(tokens)) for p in profiles)
    assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_exact_as_the_reference(name: str) -> None:
    """Against transformers in f32, our error in bf16 is at most 1.5 times that of transformers in bf16."""
    import torch

    kind = {"llama": "AutoModelForCausalLM", "bert": "AutoModel"}[name]
    model = hugging_face.load(MODELS[name], kind)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (8, 32)).astype(np.int32)

    def reference(dtype: torch.dtype) -> np.ndarray:
        in_dtype = type(model).from_pretrained(MODELS[name], dtype=dtype, attn_implementation="eager").eval()
        with torch.no_grad():
            out = in_dtype(torch.from_numpy(tokens.astype(np.int64)))
        return np.asarray((out.logits if name == "llama" else out.last_hidden_state).float())

    want, theirs = reference(torch.float32), reference(torch.bfloat16)
    for table in ({"compute": "bf16"}, {"mixed": "auto_mixed_bf16"}, {"weights": "bf16"}):
        profile = rlx.CompileProfile().replace(precision=table)
        ours: Any = rlx.compile(rlx.from_pretrained(MODELS[name]), profile=profile)
        errors = [np.asarray(got, np.float64) - want for got in (ours(tokens), theirs)]
        for size in (lambda e: np.abs(e).max(), lambda e: np.sqrt((e**2).mean())):
            assert 0 < size(errors[0]) <= 1.5 * size(errors[1]), table
