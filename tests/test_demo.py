"""`make demo`: passages are cut as they should be, and what is printed fits a terminal."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

import pytest

from rlx_jax import demo


def test_passages_are_the_first_paragraphs() -> None:
    """Paragraphs are joined until they have some length; a title is left out of what is shown."""
    long = "word " * 100
    text = f"The title\n*********\n\n{long}\n\nshort\n\n{long}\n\nthe end\n"
    first, second, third = demo.passages({"topic": text}, 5)
    assert first.begin == long.strip() and first.topic == "topic"
    assert second.text.startswith("short\n\nword") and third.text == "the end"
    assert demo.passages({"topic": text, "other": long}, 1) == [first, demo.Passage("other", long.strip())]


@pytest.mark.slow
def test_the_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what `try` does, tells a share of the peak, and nothing is over 80 columns or coloured in a file."""
    names = {"break", "continue", "for", "while", "try", "raise", *sorted(topics)[::9]}
    monkeypatch.setattr(demo, "topics", {name: topics[name] for name in sorted(names)})
    assert demo.main(1) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines()) and "\x1b" not in out
    answer = dict(re.findall(r"^  (How .*\?)\n    0\.\d\d  help\('(.*?)'\)", out, re.MULTILINE))
    assert answer["How do I leave a loop early?"] in ("break", "continue", "for", "while")
    assert answer["How do I run code whether or not an exception was raised?"] in ("try", "raise")
    (share,) = re.findall(r"the model reaches (\d+)% of it", out)
    assert 1 <= int(share) <= 200
    cosines = [float(c) for c in re.findall(r"cosine (0\.\d\d)", out)]
    assert len(cosines) == len(demo.QUESTIONS) and all(0.2 < c < 0.99 for c in cosines)
