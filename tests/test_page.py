"""The page of an inspection: what it embeds stays data, whatever names a model has, and it is written as a whole."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from rlx_jax import errors
from rlx_jax.inspection.page import Page, make_page
from rlx_jax.inspection.records import BlockEntry, Finding, Inspection, KernelEntry, OpEntry, PassStep

HOSTILE = (
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "{{script}}", "\\u003c/script>", "a\u2028b",
    "\x00\x1b[0m", "<img src=x onerror=alert(1)>", '"&amp;', "\ud800",
)  # fmt: skip

SCRIPT = files("rlx_jax.inspection.page").joinpath("page.js").read_text("utf-8")


def inspection(name: str) -> Inspection:
    """Every text of it is this name."""
    op = OpEntry(name, name, (name,), name, name, 2, 3, name)
    kernel = KernelEntry(name, name, name, 0.5, 2)
    block = BlockEntry(
        *(name, name, name), 1, 4, *(name, name, name), 2, 3, 1.0, True, 0.5, *(name, name, name), 2, (0.25, 0.75),
        ops=(op,), kernels=(kernel,),
    )  # fmt: skip
    finding = Finding(name, name, name, name, 0.5)
    lists = (block,), (finding,), (finding,), (PassStep(name, 2, 1, 0.0, name),)
    return Inspection(name, name, {name: 1}, name, 1.0, True, 0.5, 2, 3, 4, 0, None, *lists)


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
    assert target.read_text("utf-8") == "other" and [path.name for path in tmp_path.iterdir()] == ["model.html"]
