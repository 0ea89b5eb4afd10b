"""The page of an inspection: what it embeds stays data, whatever names a model has, and it is written as a whole."""

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
from rlx_jax.inspection.page import Page, make_page
from rlx_jax.inspection.records import BlockEntry, Finding, Inspection, KernelEntry, OpEntry, PassStep
from tests import small
from tests.oracles.checkpoints import FIXTURES

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
