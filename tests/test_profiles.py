"""Compile profiles: the schema, TOML in and out, presets; what changes with another one, and what none changes."""

import copy
import os
import pickle
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.compiler.settings import CLEANING
from rlx_jax.errors import MissingFileError, ProfileError, UnsupportedError
from rlx_jax.ir.roles import ROLES
from rlx_jax.profiles import PRESETS, Change, CompileProfile, Fusion, Options, Precision, schema
from rlx_jax.profiles.check import UNSUPPORTED_PLATFORMS, Table, field_types, iter_settings
from rlx_jax.profiles.profile import ALIASES, UNMEASURED
from tests import divided, profile_page
from tests.oracles import checkpoints, hugging_face

read = CompileProfile.from_toml_str


def another(hint: Any, default: Any) -> Any:
    """A value of a setting's type that is not its default."""
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if get_origin(hint) is tuple:
        return (16, 64) if get_args(hint)[0] is int else ("x", "y")
    if bool in arms:
        return default is not True
    return next((c for arm in arms for c in get_args(arm)[::-1] if c != default), 7)


def settings_of(table: Table, path: str = "") -> dict[str, Any]:
    """Each setting but names and options of XLA, with a value that is not its default."""
    found: dict[str, Any] = {}
    for key, hint in field_types(type(table)).items():
        value = getattr(table, key)
        if isinstance(value, Table):
            found |= settings_of(value, f"{path}{key}.")
        elif hint not in (str, Options):
            found[f"{path}{key}"] = another(hint, value)
    return found


SETTINGS = settings_of(CompileProfile())


def at(profile: CompileProfile, path: str) -> Any:
    value: Any = profile
    for key in path.split("."):
        value = getattr(value, key)
    return value


def nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("path", SETTINGS)
def test_toml_and_replace_set_the_same(path: str) -> None:
    value = SETTINGS[path]
    spelled = str(list(value) if isinstance(value, tuple) else value)
    spelled = spelled.lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else spelled
    from_text, replaced = read(f"{path} = {spelled}"), CompileProfile().replace(**nested(path, value))
    assert at(from_text, path) == at(replaced, path) == value != at(CompileProfile(), path)
    assert from_text == replaced != CompileProfile()
    assert hash(from_text) == hash(replaced) != hash(CompileProfile())
    others = [p for p in SETTINGS if p != path]
    assert all(at(replaced, p) == at(CompileProfile(), p) for p in others)


def test_an_empty_text_has_the_defaults() -> None:
    """And a name is no setting."""
    profile = read("")
    assert profile == CompileProfile() == CompileProfile.auto() and hash(profile) == hash(CompileProfile())
    assert (profile.name, CompileProfile().name) == ("custom", "auto")
    assert (profile.fusion.policy, profile.precision.compute, profile.layers.roll) == ("direct", "auto", "auto")
    assert profile.passes.dce and profile.passes.cse and profile.passes.constant_folding and profile.donation.state


def test_replace_merges_tables_and_options() -> None:
    first = CompileProfile().replace(
        precision={"compute": "bf16"}, backend={"cpu": {"compiler_options": {"xla_a": 1}, "merge": True}}
    )
    second = first.replace(precision={"matmul": "high"}, backend={"cpu": {"compiler_options": {"xla_b": "x"}}})
    assert second.precision == Precision("bf16", "high") and second.backend.cpu.merge is True
    assert second.backend.cpu.compiler_options == {"xla_a": 1, "xla_b": "x"}
    assert second.replace(precision=Precision(matmul="highest")).precision == Precision("auto", "highest")


def test_profiles_are_values() -> None:
    """Copies are equal, and so is what is read of what was written; options of XLA of other types are others."""
    values = (True, 1, 1.0, "1", -(2**63), 1e300, 5e-324, 'é😀 \'x"""\\y\\', "# [a]\\n")
    options = [{"backend": {"cpu": {"compiler_options": {"xla_a": value}}}} for value in values]
    profiles = [CompileProfile().replace(name="a \"b\" 'c' \\ é", **tables) for tables in options]
    for one in profiles:
        for twin in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), read(one.to_toml())):
            assert twin == one and hash(twin) == hash(one) and twin.to_toml() == one.to_toml()
    assert len({*profiles, CompileProfile()}) == 1 + len(values)
    assert [p.backend.cpu.compiler_options["xla_a"] for p in profiles] == list(values)
    b_a = read("backend.cpu.compiler_options = {b = 2, a = 1}").backend.cpu.compiler_options
    assert b_a == {"a": 1, "b": 2} and hash(b_a) == hash(Options((("b", 2), ("a", 1))))


def test_the_page_lists_every_setting() -> None:
    """As `python -m tests.profile_page --write` has it, of the rows."""
    assert profile_page.PAGE.read_text("utf-8") == profile_page.page()
    assert [key for key in profile_page.entries(Fusion)] == [f.name for f in fields(Fusion)]


def test_roles_are_those_of_the_compiler() -> None:
    assert [f.name for f in fields(CompileProfile().sharding)] == list(ROLES)


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str) -> None:
    """It is itself again after writing, and leaves no table to other backends."""
    profile = CompileProfile.preset(name)
    assert profile.name == name
    assert profile is getattr(CompileProfile, name)()
    assert read(profile.to_toml()) == profile
    if name in ALIASES:  # one value under two names
        original = CompileProfile.preset(ALIASES[name])
        assert all(getattr(profile, f.name) is getattr(original, f.name) for f in fields(profile) if f.name != "name")
        return
    if name == "auto":
        return
    text = (Path(schema.__file__).parent / f"{name}.rlx.toml").read_text()
    assert "[backend" not in text


def test_presets_are_those_of_the_spec() -> None:
    """Its 15 names, each built or refused, `auto`, and what it has none for: training."""
    own = {"auto", "train_bf16", "train_mixed"}
    assert len({*PRESETS, *UNMEASURED} - own) == 15 and not set(PRESETS) & set(UNMEASURED)


@pytest.mark.parametrize("platform", UNSUPPORTED_PLATFORMS)
def test_platforms_that_are_not_built(platform: str) -> None:
    """As a target and as a table, be it empty."""
    for attempt in (
        lambda: read(f"[backend.{platform}]"),
        lambda: CompileProfile().replace(backend={platform: {"merge": True}}),
    ):
        with pytest.raises(UnsupportedError, match=f"backend.{platform}"):
            attempt()


@pytest.mark.parametrize("toml", [
    "name = '" + "[" * 500 + "'  # " + "[" * 500,
    'name = "' + "." * 500 + '\\"' + "{" * 500 + '"',
    "name = '''" + "''[" * 100 + "'''",
    'name = """' + '\\"""[' * 100 + '"""""',
    "backend.cpu.compiler_options = { " + ", ".join(f"a{i} = 1.5" for i in range(50)) + " }",

    "#" * 65000,
])  # fmt: skip
def test_limits_do_not_count_strings_comments_and_numbers(toml: str) -> None:
    read(toml)


def test_values_that_are_not_supported() -> None:
    refused = [(path, value) for path, row, _ in iter_settings(CompileProfile()) for value in row.unsupported]
    for path, value in refused:
        with pytest.raises(UnsupportedError, match=f"{path}.*'{value}'"):
            read(f'{path} = "{value}"')


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fast mode.rlx.toml"
    path.write_text("[precision]\r\ncompute = 'f16'\r\n", encoding="utf-8", newline="")
    for spelled in (path, str(path), os.fsencode(path)):
        profile = CompileProfile.from_toml(spelled)  # type: ignore[arg-type]  # bytes paths work as in open()
        assert profile.precision.compute == "f16" and profile.name == "fast_mode"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert CompileProfile.from_toml(link) == profile


def test_beside_the_weights(tmp_path: Path) -> None:
    """`<family>.rlx.toml` in the directory of the weights, else the default; a wrong one is an error."""
    weights = tmp_path / "model.safetensors"
    weights.touch()
    for place in (tmp_path, weights):
        assert CompileProfile.near(place, "llama") == CompileProfile.auto()
        assert CompileProfile.near(place, "llama", "encoder") is CompileProfile.encoder()
    (tmp_path / "llama.rlx.toml").write_text("[fusion]\npolicy = 'fusable'")
    for place in (tmp_path, weights):
        near = CompileProfile.near(place, "llama", "encoder")
        assert (near.fusion.policy, near.name) == ("fusable", "llama")
        assert CompileProfile.near(place, "qwen3", near) is near
    (tmp_path / "llama.rlx.toml").write_text("[fuson]")
    with pytest.raises(ProfileError, match="unknown key 'fuson'"):
        CompileProfile.near(tmp_path, "llama")


def test_a_profile_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a profile is taken: it is the preset of that name, else the file at that path, and the program's own."""
    path, weights = tmp_path / "encoder", {"w": np.ones((2, 2), "f4")}
    path.write_text("layers.roll = 'scan'")
    (tmp_path / "mine.rlx.toml").write_text("fusion.policy = 'fusable'")
    monkeypatch.chdir(tmp_path)
    profile = CompileProfile.of("mine.rlx.toml")
    assert profile.fusion.policy == "fusable" and CompileProfile.of(profile) is profile
    assert CompileProfile.of("encoder") == CompileProfile.encoder()  # the preset, though a file has its name
    assert CompileProfile.of(path).layers.roll == CompileProfile.of("./encoder").layers.roll == "scan"
    flow = rlx.ModelFlow("m").input("x", ("batch", 2)).linear("w")
    for model in (
        rlx.compile(flow, weights, profile="mine.rlx.toml"),
        rlx.compile(flow.with_profile("mine.rlx.toml"), weights),
    ):
        assert model.settings.profile.fusion.policy == "fusable"
    assert rlx.compile(flow, weights, profile="encoder").settings.profile.fusion.policy == "direct"
    high, module = tmp_path / "high.toml", flow.build(weights).into_graph_module()
    high.write_text("precision.matmul = 'highest'")
    planned = [module.into_lir(p, batch=1) for p in (str(high), high, CompileProfile.of(high), None)]
    texts = [rlx.GraphModule.from_lir(lir).to_json() for lir in planned]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert CompileProfile.near(tmp_path, "none", "mine.rlx.toml") == profile
    with pytest.raises(MissingFileError, match="nowhere.toml"):
        CompileProfile.of("nowhere.toml")


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
    assert set(other.diff(AUTO).fields) == {Change(c.name, c.theirs, c.ours) for c in wanted}
    assert all(change.name in str(found) for change in wanted)


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
    told = {change.name: (change.ours, change.theirs) for change in found.program or ()}
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
    assert not [c for c in AUTO.diff(other, model).program or () if c.name.startswith("runs")]
    model.text("lir", np.ones((2, 5), np.int32))
    (runs,) = [c for c in AUTO.diff(other, model).program or () if c.name == "runs attention"]
    assert "heads_first (faster on a CPU)" in runs.ours and "asked for" in runs.theirs


def test_presets_and_files(tmp_path: Any) -> None:
    """What `profile=` takes is taken here, and nothing else; only a model has a program."""
    (tmp_path / "mine.rlx.toml").write_text('[layers]\nroll = "scan"\n', "utf-8")
    for other in (tmp_path / "mine.rlx.toml", str(tmp_path / "mine.rlx.toml"), AUTO.replace(layers={"roll": "scan"})):
        assert AUTO.diff(other).fields == (Change("layers.roll", "auto", "scan"),)
    assert str(AUTO.diff("auto")) == "auto and auto have the same settings"
    assert CompileProfile.auto().diff("llama32_decode").theirs == "llama32_decode"
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
