"""Two models compared block by block: what differs, in which layers, and nothing else."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.cli import entry
from rlx_jax.inspection.diff import BlockDiff, block_diffs
from rlx_jax.profiles import Change
from rlx_jax.runtime.block_times import IDLE, BlockTime, BlockTimes
from tests import divided

LAYERS = 4
RECIPE = divided.recipe("llama", num_hidden_layers=LAYERS)
FIXTURES = Path(__file__).parent / "fixtures" / "llama"


def compiled(flow: Any, **tables: Any) -> rlx.CompiledModel:
    """A model of shapes alone."""
    built = rlx.ModelFlow.from_recipe(flow) if hasattr(flow, "assemble") else flow
    return rlx.compile(built, profile=rlx.CompileProfile().replace(**tables))


@functools.cache
def plain() -> rlx.CompiledModel:
    """`RECIPE`, compiled once: a diff changes no model."""
    return compiled(RECIPE)


def changed(diff: Any) -> dict[str, dict[str, tuple[str, str]]]:
    """The facts that differ, by block."""
    return {b.path: {c.name: (c.ours, c.theirs) for c in b.changes} for b in diff.blocks if b.kind != "equal"}


def test_a_model_equals_itself() -> None:
    diff = plain().diff(compiled(RECIPE), sizes={"batch": 1, "seq": 8})
    assert not diff and {b.kind for b in diff.blocks} == {"equal"} and not (diff.settings or diff.facts)
    (mlp,) = [b for b in diff.blocks if b.path == "layers.*.mlp.up_proj"]
    assert mlp == BlockDiff("layers.*.mlp.up_proj", "equal", LAYERS, ())
    assert "blocks: " in str(diff) and "~" not in str(diff)
    (flops,) = [c for c in diff.totals if c.name == "FLOPs"]
    hidden, inner, heads, kv, v = 32, 48, 64, 32, 61
    products = LAYERS * (hidden * (2 * heads + 2 * kv) + 3 * hidden * inner) + hidden * v
    attention = LAYERS * 2 * 8 * heads  # scores and values, of 8 keys
    assert flops.ours == flops.theirs == f"{2 * 8 * (products + attention):,}"


def test_one_edited_layer() -> None:
    """And no other."""
    edited = compiled(RECIPE.at("layers.2.mlp").scale(0.5))
    diff = plain().diff(edited)
    assert list(changed(diff)) == ["layers.2.mlp"] and not [c for c in diff.totals if c.ours != c.theirs]
    ops = changed(diff)["layers.2.mlp"]["ops"]
    assert ops == ("gated_ffn", "gated_ffn; mul")
    assert changed(edited.diff(plain()))["layers.2.mlp"]["ops"] == ops[::-1]


def plus_one(a: Any) -> Any:
    return a + 1


def plus_two(a: Any) -> Any:
    return a + 2


plus_two.__name__ = "plus_one"
HIDDEN: dict[str, tuple[Any, str]] = {
    "a rope base": (divided.recipe("llama", num_hidden_layers=LAYERS, rope_theta=5e5), "rotary_emb"),
    "a scale": (RECIPE.at("layers.2.mlp").scale(0.25), "layers.2.mlp"),
    "a function": (RECIPE.at("layers.2.mlp").wrap(lambda emit, x, inner: emit.jax(plus_one, inner(x))), "layers.2.mlp"),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_text_of_ops_leaves_out(name: str) -> None:
    """Is a difference all the same: other constants, tables and functions."""
    others = {
        "a rope base": RECIPE, "a scale": RECIPE.at("layers.2.mlp").scale(0.5),
        "a function": RECIPE.at("layers.2.mlp").wrap(lambda emit, x, inner: emit.jax(plus_two, inner(x))),
    }  # fmt: skip
    flow, path = HIDDEN[name]
    model = compiled(flow)
    differences = changed(model.diff(compiled(others[name])))
    assert {block: list(facts) for block, facts in differences.items()} == {path: ["hash of ops"]}
    assert not model.diff(compiled(flow))


def test_another_profile() -> None:
    """The dtypes of every block and half the bytes, from the same settings as `CompileProfile.diff`."""
    ours, theirs = plain(), compiled(RECIPE, precision={"compute": "bf16"})
    diff = ours.diff(theirs, sizes={"batch": 2, "seq": 8})
    assert diff.settings == (Change("precision.compute", "auto", "bf16"),)
    assert diff.facts == ours.compare(ours.settings.profile, theirs.settings.profile)[: len(diff.facts)]
    totals = {c.name: [int(n.replace(",", "")) for n in (c.ours, c.theirs)] for c in diff.totals}
    assert totals["parameter bytes"][0] == 2 * totals["parameter bytes"][1] and len(set(totals["FLOPs"])) == 1
    down = changed(diff)["layers.*.mlp.down_proj"]
    assert down["weights"] == ("f32[32,48]", "bf16[32,48]") and down["output"] == (
        "f32[batch,seq,32]",
        "bf16[batch,seq,32]",
    )
    assert down["parameter bytes"] == ("6,144", "3,072") and "ops" not in down and "FLOPs" not in down


def test_packed_weights() -> None:
    packed = rlx.compile(
        RECIPE,
        divided.weights("llama", ("num_hidden_layers", LAYERS)),
        profile=rlx.CompileProfile().replace(precision={"weights": "int8"}),
    )
    weights = changed(plain().diff(packed))
    assert weights["layers.*.mlp.up_proj"] == {
        "weights": ("f32[48,32]", "int8/32 f32[48,32]"),
        "parameter bytes": ("6,144", f"{48 * 32 + 2 * 48:,}"),  # a scale of two bytes for each 32 columns
    }
    assert "layers.*.mlp.down_proj" not in weights  # 48 columns are no multiple of 32


def test_a_mesh() -> None:
    """The sharding of weights, where there is one."""
    meshed = rlx.compile(RECIPE, RECIPE.shapes(), mesh=divided.mesh("tensor", 2))
    down = changed(plain().diff(meshed))["layers.*.mlp.down_proj"]
    assert down["sharding"][0] == "none" and "tensor" in down["sharding"][1] and "weights" not in down


def test_blocks_of_one_model() -> None:
    """Are removed from the first, or added by the second."""
    flow = rlx.ModelFlow("m").input("x", (2, 8)).linear("a")
    specs = {name: jax.ShapeDtypeStruct((8, 8), np.float32) for name in "ab"}
    short, long = rlx.compile(flow, {"a": specs["a"]}), rlx.compile(flow.linear("b"), specs)
    (added,) = [b for b in short.diff(long).blocks if b.kind != "equal"]
    assert (added.path, added.kind) == ("b", "added")
    facts = {c.name: c.theirs for c in added.changes}
    assert facts["weights"] == "f32[8,8]" and facts["FLOPs"] == "256" and facts["parameters"] == "64"  # static sizes
    (removed,) = [b for b in long.diff(short).blocks if b.kind != "equal"]
    assert next(c for c in removed.changes if c.name == "ops").theirs == "none"
    assert removed.kind == "removed" and "\n- b\n" in str(long.diff(short)) and "\n+ b\n" in str(short.diff(long))


LABELS = {
    "all layers": ("layers.*.up", {f"layers.{i}.up": {"a": "2"} for i in range(3)}),
    "some layers": ("layers.0-1,3.up", {f"layers.{i}.up": {"a": "1" if i in (2, 4) else "2"} for i in range(5)}),
    "one layer": ("layers.1.up", {f"layers.{i}.up": {"a": "2" if i == 1 else "1"} for i in range(3)}),
    "names with signs": ("a+b.0-1.(c", {f"a+b.{i}.(c": {"a": "2" if i < 2 else "1"} for i in range(3)}),
    "layers of layers": ("a.*.b.*", {f"a.{i}.b.{i}": {"a": "2" if i < 2 else "1"} for i in range(3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", LABELS)
def test_layers_that_differ_alike_are_one_line(name: str) -> None:
    label, theirs = LABELS[name]
    ours = {path: {"a": "1"} for path in theirs}
    (diff,) = [b for b in block_diffs(ours, theirs) if b.kind == "changed"]
    assert diff.path == label and diff.changes == (Change("a", "1", "2"),)
    assert diff.layers == sum(facts["a"] == "2" for facts in theirs.values())


def test_measured_times() -> None:
    def times(*seconds: float) -> BlockTimes:
        paths = ("layers.0.up", "layers.1.up", "norm")
        rows = [BlockTime("forward", path, s, 1) for path, s in zip(paths, seconds, strict=True)]
        return BlockTimes(sum(seconds) + 0.001, 1, "cpu", (*rows, BlockTime("", IDLE, 0.001, 0)))

    diff = plain().diff(plain(), times=(times(0.001, 0.002, 0.004), times(0.001, 0.001, 0.008)))
    assert diff.times == (
        Change("a run", "8.000", "11.000"), Change("norm", "4.000", "8.000"), Change("layers.*.up", "3.000", "2.000"),
        Change(IDLE, "1.000", "1.000"),
    )  # fmt: skip
    assert not diff and "layers.*.up" in str(diff)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Two checkpoints, and one in two dtypes."""
    first, second = str(FIXTURES / "bf16_gqa_tied_v5"), str(FIXTURES / "gqa_plain_attnbias_v5")
    assert entry.main(["diff", first, second, "--program", "extend"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{first} → {second}: extend\n") and "parameters        77,568   56,070" in text
    assert "linear → linear+bias" in text and "FLOPs" not in text
    words = ["diff", first, first, "--other-dtype", "bf16", "--size", "batch=1", "--size", "seq=8", "--json"]
    assert entry.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ours"] == f"{first} (auto)" and result["theirs"] == f"{first} (bf16)"
    assert result["settings"] == [{"name": "precision.compute", "ours": "auto", "theirs": "bf16"}]
    assert result["sizes"] == {"batch": 1, "seq": 8} and len(result["blocks"]) > 10
    assert entry.main(["diff", first, first, "--size", "context=8"]) == 1
    assert "no size 'context'" in capsys.readouterr().err
