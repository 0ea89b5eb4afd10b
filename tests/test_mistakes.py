"""What users get wrong is answered by a message that names it: the pages of `tests/golden/mistakes`."""

from __future__ import annotations

import pytest

from tests import mistakes
from tests.mistakes import Case


@pytest.mark.parametrize("case", mistakes.cases(), ids=lambda c: f"{c.page.stem}: {c.name}")
def test_a_user_is_told(case: Case) -> None:
    """Word by word. `python -m tests.mistakes --write` renews the pages; read the difference."""
    assert mistakes.told(case) == case.told


def test_names_of_cases_differ() -> None:
    """Each names its own mistake; and the pages have what they are there for."""
    names = [(case.page, case.name) for case in mistakes.cases()]
    assert len(set(names)) == len(names) >= 100
    for page in mistakes.PAGES:
        assert page.read_text("utf-8").count("\n## ") == len(list(mistakes.cases_of(page))), page


def test_each_message_was_read() -> None:
    """Somebody read every message as it is now, in a user's place."""
    marked, now = (set(text.splitlines()) for text in (mistakes.MARKS.read_text("utf-8"), mistakes.marks()))
    unread = sorted(line.partition(" ")[2] for line in now - marked)
    assert not unread, f"{unread}: read the message as a user would; if it helps: python -m tests.mistakes --mark"
    assert not marked - now, f"{sorted(marked - now)}: marks of no case; python -m tests.mistakes --mark drops them"
