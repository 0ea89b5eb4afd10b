"""Programs as text, differences and drawings, by environment variables too; and the page of an inspection."""

import base64
import dataclasses
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import cli, errors
from rlx_jax.cli import entry
from rlx_jax.errors import SaveFailedError
from rlx_jax.inspection.page import Page, make_page
from rlx_jax.inspection.records import BlockEntry, Finding, Inspection, KernelEntry, OpEntry, PassStep
from rlx_jax.ir.graph import Builder, TypeCache, constant
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.text import diff_text
from rlx_jax.ir.types import TensorType
from rlx_jax.runtime.model_program import LEVELS
from tests import divided, small
from tests.oracles.checkpoints import FIXTURES

ONE_LINEAR = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w")
IDENTITY = {"w": np.eye(8, dtype="f4")}
CHECKPOINT = str(Path(__file__).parent / "fixtures" / "llama" / "bf16_gqa_tied_v5")


@pytest.fixture(scope="module")
def llama() -> rlx.CompiledModel:
    """A Llama of two layers that fuses projections; it is not compiled."""
    merging = rlx.CompileProfile().replace(backend={"cpu": {"merge": True}})
    specs = {key: jax.ShapeDtypeStruct(w.shape, w.dtype) for key, w in divided.weights("llama").items()}
    return rlx.compile(divided.recipe("llama"), specs, profile=merging)


DIFFS: dict[tuple[str, str], tuple[str, list[str], list[str]]] = {
    # of a pass at a level: the change of each kind of op, lines that it has, and lines that it has not
    ("hir", "merge_linears"): (
        "Linear-3, Param-3, Split+2",
        [r"^- .*linear\(h\d+, h\d+\) .*q_proj", r"^\+ .*split\(sizes=\(48, 48\)\)", r"^\+ .*gated_ffn\(h20\.0, h20\.1"],
        [r"^[-+] .*down_proj", r"^[-+] .*rms_norm"],
    ),
    ("mir", "fuse_swiglu"): ("none", [r"^  … \d+ equal$"], [r"^[-+]"]),
    ("mir", "lower"): ("MatMul+5", [r"^- h\d+ = embed\(", r"^\+ %\d+ = gather\("], []),
    ("mir", ""): ("Constant-1", [r"^- .*constant\(128 bytes\)"], [r"^[-+] .*matmul"]),
}  # fmt: skip


@pytest.mark.parametrize(("level", "after"), DIFFS)
def test_the_difference_that_a_pass_made(llama: rlx.CompiledModel, level: str, after: str) -> None:
    delta, present, absent = DIFFS[level, after]
    text = llama.text(level, after=after, diff=True)
    nodes = [
        len(re.findall(r"^ *[h%]\d+ .*= ", llama.text(n, after=p), re.MULTILINE)) for n, p in _around(level, after)
    ]
    assert f"\n  diff: {nodes[0]} → {nodes[1]} nodes (1 → 1 outputs)\n" in text
    assert delta in re.findall(r"^  op delta: .*$", text, re.MULTILINE)[0]
    assert all(re.search(pattern, text, re.MULTILINE) for pattern in present), text
    assert not any(re.search(pattern, text, re.MULTILINE) for pattern in absent), text


def _around(level: str, after: str) -> list[tuple[str, str]]:
    """The level and the pass before the difference, and after it."""
    before = {"merge_linears": "undivided", "fuse_swiglu": "fuse_rms_norm_reshape", "lower": "derive", "": "lower"}
    return [("hir" if after == "lower" else level, before[after]), (level, after)]


def test_an_operand_that_is_another_value_is_a_difference() -> None:
    """Ops, types and numbers of nodes are the same; a difference by position alone would have none."""

    def module(swap: bool) -> Any:
        m = rlx.GraphModule.mir("m")
        x, y = m.input("x", (2, 8)), m.input("y", (2, 8))
        a, b = m.tanh(x), m.tanh(y)
        m.set_outputs([m.sub(b, a) if swap else m.sub(a, b)])
        return m.finish()

    text = diff_text(module(False), module(True), ("mir", "mir"))
    assert re.findall(r"^[-+] .*$", text, re.MULTILINE) == [
        "- %4 = sub(%2, %3) : f32[2,8]  // m  ← output", "+ %4 = sub(%3, %2) : f32[2,8]  // m  ← output",
    ]  # fmt: skip
    assert not re.findall(r"^[-+]", diff_text(module(True), module(True), ("mir", "mir")), re.MULTILINE)


def test_an_attribute_that_texts_leave_out_is_a_difference() -> None:
    """Such as the elements of a constant."""
    graphs = []
    for number in (1.0, 2.0):
        b = Builder("m", TypeCache())
        x = b.input("x", TensorType((4,), np.dtype("f4")))
        graphs.append(b.finish([b(Binary("add"), x, b.leaf(constant(np.full(4, number), np.float32)))], ["y"]))
    text = diff_text(graphs[0], graphs[1], ("mir", "mir"))
    assert re.findall(r"^[-+].*$", text, re.MULTILINE) == [f"{sign} %1 = constant(16 bytes) : f32[4]" for sign in "-+"]


def test_sizes_and_inputs_change_what_is_shown() -> None:
    model = rlx.compile(ONE_LINEAR, IDENTITY)
    for level in LEVELS:
        text = model.text(level, sizes={"batch": 3})
        assert ("3x8" if level == "stablehlo" else "[3,8]") in text
        assert (
            text == model.text(level, jax.ShapeDtypeStruct((3, 8), np.float32)) != model.text(level, sizes={"batch": 2})
        )
    assert "f32[batch,8]" in model.text("mir") and "f32[batch,8]" in model.text("mir", sizes={})
    assert model.text("mir", format="stats") == "\n".join(model.text("mir").splitlines()[1:3])
    shown = model.text("mir", after="specialise", diff=True, sizes={"batch": 3})
    assert re.search(r"^- .*batch", shown, re.MULTILINE) and re.search(r"^\+ .*\[3,8\]", shown, re.MULTILINE)


def test_programs_have_their_sizes(llama: rlx.CompiledModel) -> None:
    """Without a state or inputs."""
    step = llama.as_program("extend").text("lir", sizes={"batch": 2, "seq": 1, "context": 16})
    assert "f32[2,16,4,8]" in step and "cached_attention" not in step
    assert "f32[2,1,61]" in step


X = np.zeros((2, 8), np.float32)


NASTY = 'a"b\\c]d[e`f<g>h&i;j#k|l{m}n(o)\n%% end --> r\\'
DOT_LABEL = r'"(?:[^"\\\n]|\\.)*"'
SYNTAX = {
    "dot": rf'digraph {DOT_LABEL} \{{|  label={DOT_LABEL}; labelloc=t|  node \[shape=box, font.*\]'
           rf"| +\w+ \[label={DOT_LABEL}(, (style=rounded|shape=plaintext))?\]"
           rf"| +subgraph cluster_\w+ \{{ label={DOT_LABEL}"
           rf"|  \w+ -> \w+( \[label={DOT_LABEL}\])?| *\}}",
    "mermaid": r"%% .*|flowchart TD|  +\w+(\[|\(\[|\[/)LABEL(\]|\]\)|/\])|  +subgraph \w+\[LABEL\]|  +end"
               r"|  \w+ -->(\|\d+\|)? \w+".replace("LABEL", r'"([\w _.,:=+@×…→-]|#\d+;|<br/>)*"'),
}  # fmt: skip
"""Of each language, the lines that a drawing may have. Graphviz 12 and Mermaid 11 draw both as they should be."""


def unescaped(text: str, format: str) -> str:
    """The text as a drawing shows it."""
    if format == "dot":
        return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], text).replace("&amp;", "&")
    return re.sub(r"#(\d+);", lambda m: chr(int(m[1])), text.replace("<br/>", "\n"))


@pytest.mark.parametrize("format", SYNTAX)
@pytest.mark.parametrize("level", ["hir", "mir", "lir"])
def test_drawings_of_hostile_names(level: str, format: str) -> None:
    """Every line is one of the language, and what it shows is the name."""
    flow = rlx.ModelFlow('e"\\').input("x", ("n", 4)).linear(NASTY).custom_named('bl"o\\ck]', lambda emit, x: x * 2)
    model = rlx.compile(flow, {NASTY: np.ones((4, 4), np.float32)})
    text = model.text(level, format=format, sizes={"n": 2})
    wrong = [line for line in text.splitlines() if not re.fullmatch(SYNTAX[format], line)]
    assert not wrong
    shown = unescaped(text, format)
    assert f'param("{NASTY}")' in shown and '\nbl"o\\ck]\n' in shown and 'e"\\' in shown


@pytest.mark.parametrize(("format", "cluster"), [("dot", "subgraph cluster_"), ("mermaid", "subgraph c")])
@pytest.mark.parametrize("level", ["hir", "mir"])
def test_repeated_layers_are_one_cluster(llama: rlx.CompiledModel, level: str, format: str, cluster: str) -> None:
    """And every arrow has two boxes."""
    text = llama.text(level, format=format)
    assert text.count(cluster) == 1 and "layers × 2" in text and "kv_proj" not in text
    assert not [line for line in text.splitlines() if not re.fullmatch(SYNTAX[format], line)]
    boxes = set(re.findall(r"^ +(\w+) ?[\[(]", text, re.MULTILINE))
    arrows = re.findall(r"^  (\w+) --?>(?:\|\d+\|)? (\w+)", text, re.MULTILINE)
    ids, nodes = (
        re.findall(pattern, llama.text(level), re.MULTILINE) for pattern in (r"(?<!\w)[h%]\d+", r"^ +[h%]\d+ ")
    )
    assert len(arrows) == len(ids) - len(nodes) > 20 and {end for arrow in arrows for end in arrow} <= boxes


SECTIONS = ["HIR", "MIR (lowered)", "MIR (fusion diff)", "MIR (optimized)", "FUSION", "LIR"]


def test_the_dump_of_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a file, or in a directory to a file of each program; it is what `text("pipeline")` returns."""
    model = rlx.compile(ONE_LINEAR, IDENTITY)
    monkeypatch.setenv("RLX_IR_DUMP", str(tmp_path / "ir.txt"))
    model(X)
    text = (tmp_path / "ir.txt").read_text("utf-8")
    assert re.findall(r"^═{80}\n(.*)\n═{80}$", text, re.MULTILINE) == SECTIONS and text == model.text("pipeline")
    assert "fusion report:\n  nodes=" in text and "lir @m {" in text and "f32[2,8]" in text
    monkeypatch.setenv("RLX_IR_DUMP", f"{tmp_path}/new/")
    rlx.compile(ONE_LINEAR, IDENTITY)(X)
    rlx.compile(divided.recipe("llama"), divided.weights("llama")).as_program("extend").text(
        "lir", sizes={"batch": 1, "seq": 1, "context": 8}
    )
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["llama.extend.ir.txt", "m.ir.txt"]
    assert (tmp_path / "new" / "m.ir.txt").read_text("utf-8") == text
    monkeypatch.setenv("RLX_IR_DUMP", str(tmp_path / "ir.txt" / "below"))
    with pytest.raises(SaveFailedError, match="RLX_IR_DUMP: .*below.*not written"):
        rlx.compile(ONE_LINEAR, IDENTITY)(X)


@pytest.mark.parametrize(("value", "is_printed"), [("1", True), ("yes", True), ("0", False), ("false", False)])
def test_the_fusion_report_of_what_is_compiled(
    value: str, is_printed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLX_FUSION_REPORT", value)
    model = rlx.compile(ONE_LINEAR, IDENTITY)
    wanted = f"m forward: {model.report().fusion}\n"
    assert wanted.startswith("m forward: fusion report:\n  nodes=")
    assert capsys.readouterr().err == (wanted if is_printed else "")


COMMANDS = {
    "a level": (["hir"], "hir @llama (12 nodes"),
    "a difference": (["hir", "--pass", "derive", "--diff", "--program", "extend"], "CachedAttention+1"),
    "a program": (["mir", "--program", "explicit", "--format", "stats"], "Input=5"),
    "sizes": (["lir", "--batch", "2", "--context", "16", "--size", "seq=4"], "f32[2,16,"),
    "a profile": (["mir", "--dtype", "bf16", "--program", "forward"], "bf16[batch,seq,"),
    "a format": (["hir", "--format", "mermaid"], "flowchart TD"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_inspect_writes_a_level(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, out = COMMANDS[name]
    assert entry.main(["inspect", CHECKPOINT, "--level", *words]) == 0
    captured = capsys.readouterr()
    assert out in captured.out and not captured.err


HOSTILE = (
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "{{script}}", "\\u003c/script>", "a\u2028b",
    "\x00\x1b[0m", "<img src=x onerror=alert(1)>", '"&amp;', "\ud800",
)  # fmt: skip

SCRIPT = files("rlx_jax.inspection.page").joinpath("page.js").read_text("utf-8")


def filled(record: Any, text: str, **values: Any) -> Any:
    """A record whose texts are all `text`."""
    kinds = {"str": text, "int": 2, "float": 0.5, "bool": True, "float | None": 0.5, "int | None": None}
    return record(**{f.name: kinds[str(f.type)] for f in dataclasses.fields(record) if f.name not in values}, **values)


def inspection(text: str) -> Inspection:
    """Every text of it is this one."""
    ops, kernels = (filled(OpEntry, text, inputs=(text,)),), (filled(KernelEntry, text),)
    block = filled(BlockEntry, text, ops=ops, kernels=kernels, layer_seconds=(0.25, 0.25))
    finding, step = filled(Finding, text), filled(PassStep, text)
    lists = {"blocks": (block,), "losses": (finding,), "findings": (finding,), "passes": (step,)}
    result: Inspection = filled(Inspection, text, sizes={text: 1}, **lists)
    return result


class Elements(HTMLParser):
    """Tags of a page with their attributes, and the text inside each style, script and title."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self.texts.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.texts and self.tags[-1][0] == self.texts[-1][0]:
            self.texts[-1] = (self.texts[-1][0], self.texts[-1][1] + data)

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(("/" + tag, {}))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_data(name: str) -> None:
    """The page has the elements of a page with harmless names, and its data is the inspection's."""
    elements = Elements(make_page([inspection(name)], [{name: name}]).html)
    assert [tag for tag, _ in elements.tags] == [tag for tag, _ in Elements(make_page([inspection("x")]).html).tags]
    (_, data), (_, script) = [pair for pair in elements.texts if pair[0] == "script"]
    assert json.loads(data) == {"inspections": [json.loads(inspection(name).to_json())], "texts": [{name: name}]}
    assert script == SCRIPT


def test_nothing_but_its_own_script_runs_and_nothing_is_fetched() -> None:
    elements = Elements(make_page([inspection("x")]).html)
    policy = next(str(a["content"]) for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules: dict[str, str] = {rule.split()[0]: rule for rule in policy.split(";")}
    assert rules["default-src"] == "default-src 'none'"
    for tag in ("style", "script"):
        text = [text for name, text in elements.texts if name == tag][-1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"].split()[1:] == [f"'sha256-{digest}'"]
    attributes: dict[str, Any] = {name: value for _, pairs in elements.tags for name, value in pairs.items()}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "style")}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|fetch\(|https?:", SCRIPT)


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    page = make_page([inspection('a "quoted" & <b>')])
    (frame,) = [attributes for tag, attributes in Elements(page._repr_html_()).tags if tag == "iframe"]
    assert frame["srcdoc"] == page.html and frame["sandbox"] == "allow-scripts"
    assert "<script" not in page._repr_html_() and len(repr(page)) < 200


def test_a_page_is_saved_as_a_whole(tmp_path: Path) -> None:
    target, page = tmp_path / "model.html", Page("t", "<p>ä</p>")
    page.save(target)
    with pytest.raises(errors.TargetExistsError, match="model.html"):
        Page("t", "other").save(str(target))
    assert target.read_text("utf-8") == page.html
    Page("t", "other").save(target, overwrite=True)
    with pytest.raises(errors.TargetExistsError, match="is not a file"):
        page.save(tmp_path, overwrite=True)
    with pytest.raises(errors.TargetExistsError, match="is not a file"):
        page.save(os.devnull)
    assert target.read_text("utf-8") == "other" and [path.name for path in tmp_path.iterdir()] == ["model.html"]


def data_of(page: str) -> Any:
    """What a page embeds."""
    return json.loads(next(text for tag, text in Elements(page).texts if tag == "script"))


def test_the_page_of_a_model() -> None:
    """Its programs with their text, and what passes changed; then what it is compared with."""
    flow = rlx.ModelFlow("mlp").input("x", ("n", 4)).linear("a", transpose=True).linear("b", transpose=True)
    model = small.compiled(flow, {"a": small.w(4, 4), "b": small.w(4, 4)})
    data = data_of(model.show(jax.ShapeDtypeStruct((2, 4), np.float32), compare=[inspection("other")]).html)
    assert [each["name"] for each in data["inspections"]] == ["mlp", "other"]
    assert data["texts"] == [{level: model.text(level) for level in ("hir", "mir")}]
    shown = data["inspections"][0]
    assert shown["sizes"] == {"n": 2} and not shown["measured"]
    diffs = {step["name"]: step["diff"] for step in shown["passes"] if step["diff"]}
    assert diffs["lower"] == model.text("mir", after="lower", diff=True)
    assert all(step["nodes_before"] == step["nodes_after"] for step in shown["passes"] if step["name"] not in diffs)


def test_view_writes_the_page_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, source = tmp_path / "model.html", str(FIXTURES / "llama" / "gqa_tied_llama3_v5")
    words = ["view", source, "-o", str(target), "--estimate", "--context", "48", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(target), "bytes": target.stat().st_size}
    data = data_of(target.read_text("utf-8"))
    assert [(each["program"], each["sizes"]["batch"]) for each in data["inspections"]] == [
        ("extend", 1),
        ("prefill", 1),
    ]
    assert cli.main(words) == 1 and "model.html" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite", "--program", "decode", "--batch", "2"]) == 0
    (each,) = data_of(target.read_text("utf-8"))["inspections"]
    assert each["sizes"]["batch"] == 2
