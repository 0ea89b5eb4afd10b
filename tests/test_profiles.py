"""Compile profiles: the schema, TOML in and out, presets, and what bad input gives."""

from __future__ import annotations

import copy
import os
import pickle
import re
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax.errors import MissingFileError, ProfileError, UnsupportedError
from rlx_jax.ir.roles import ROLES
from rlx_jax.models.families import FAMILIES
from rlx_jax.profiles import PRESETS, CompileProfile, Fusion, Options, Precision, schema
from rlx_jax.profiles.check import OTHER_PLATFORMS, Table, field_types, rows
from rlx_jax.profiles.profile import UNMEASURED
from tests import profile_page

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


# -- the schema --------------------------------------------------------------------------------


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
    """Copies are equal; options of XLA of other types are other options."""
    options = [{"backend": {"cpu": {"compiler_options": {"xla_a": value}}}} for value in (True, 1, 1.0, "1")]
    profiles = [CompileProfile().replace(**tables) for tables in options]
    for twin in (copy.deepcopy(profiles[0]), pickle.loads(pickle.dumps(profiles[0]))):
        assert twin == profiles[0] and hash(twin) == hash(profiles[0])
    assert len({*profiles, CompileProfile()}) == 5
    assert [type(p.backend.cpu.compiler_options["xla_a"]) for p in profiles] == [bool, int, float, str]
    b_a = read("backend.cpu.compiler_options = {b = 2, a = 1}").backend.cpu.compiler_options
    assert b_a == {"a": 1, "b": 2} and hash(b_a) == hash(Options((("b", 2), ("a", 1))))


def test_the_page_lists_every_setting() -> None:
    """As `python -m tests.profile_page --write` has it, of the rows."""
    assert profile_page.PAGE.read_text("utf-8") == profile_page.page()
    assert [key for key in profile_page.entries(Fusion)] == [f.name for f in fields(Fusion)]


def test_roles_are_those_of_the_compiler() -> None:
    assert [f.name for f in fields(CompileProfile().sharding)] == list(ROLES)


# -- TOML out ----------------------------------------------------------------------------------

printable = st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"]) | st.just(" "), max_size=20)
scalars = (
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | printable
)
options = st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True), scalars, max_size=4)
backends = st.fixed_dictionaries(
    {}, optional={"merge": st.sampled_from([True, False, "auto"]), "compiler_options": options}
)
changes = st.fixed_dictionaries(
    {"name": printable.filter(bool)},
    optional={
        "fusion": st.fixed_dictionaries({"target": st.sampled_from(["auto", "cpu", "cuda", "rocm", "tpu"])}),
        "passes": st.dictionaries(st.sampled_from(["dce", "cse", "constant_folding"]), st.booleans()),
        "precision": st.fixed_dictionaries({"matmul": st.sampled_from(["default", "high", "highest"])}),
        "backend": st.dictionaries(st.sampled_from(["cpu", "cuda", "rocm", "tpu"]), backends),
    },
)


@settings(max_examples=15)
@given(changes)
def test_round_trip(change: dict[str, Any]) -> None:
    profile = CompileProfile().replace(**change)
    again = read(profile.to_toml())
    assert again == profile and hash(again) == hash(profile) and again.name == profile.name
    assert again.to_toml() == profile.to_toml()


# -- presets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str) -> None:
    """Every setting that it holds stands under a comment with its figures, and it leaves no table to other backends."""
    profile = CompileProfile.preset(name)
    assert profile.name == name
    assert profile is getattr(CompileProfile, name)()
    assert read(profile.to_toml()) == profile
    if name == "auto":
        return
    text = (Path(schema.__file__).parent / f"{name}.rlx.toml").read_text()
    assert text.startswith("# ") and "[backend" not in text
    chosen = re.findall(r"((?:^#.*\n)*)^(\w+) = ", text.partition("name = ")[2], re.MULTILINE)
    assert chosen and all(re.search(r"\d (ms|x|µs)\b", comment) for comment, _ in chosen)


def test_presets_are_those_of_the_spec() -> None:
    """Its 15 names, each built or refused, `auto`, and what it has none for: training."""
    own = {"auto", "train_bf16", "train_mixed"}
    assert len({*PRESETS, *UNMEASURED} - own) == 15 and not set(PRESETS) & set(UNMEASURED)
    families = {name.partition("_")[0].rstrip("0123456789") for name in set(PRESETS) - own} - {"encoder"}
    assert "Flux2Transformer2DModel" in FAMILIES
    families -= {"flux"}
    assert families <= {name.rstrip("0123456789") for name in FAMILIES}


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", OTHER_PLATFORMS)
def test_platforms_that_are_not_built(platform: str) -> None:
    """As a target and as a table, be it empty."""
    for attempt in (
        lambda: read(f"[backend.{platform}]"),
        lambda: CompileProfile().replace(backend={platform: {"merge": True}}),
    ):
        with pytest.raises(UnsupportedError, match=f"backend.{platform}: this setting is known but not built yet"):
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
    refused = [(path, value) for path, row, _ in rows(CompileProfile()) for value in row.unsupported]
    for path, value in refused:
        with pytest.raises(UnsupportedError, match=f"{path}: '{value}' is known but not supported; expected '(auto|k"):
            read(f'{path} = "{value}"')


# -- files -------------------------------------------------------------------------------------


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
    with pytest.raises(ProfileError, match="family is letters"):
        CompileProfile.near(tmp_path, "../llama")


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
