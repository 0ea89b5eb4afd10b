"""What users get wrong is refused by class, and the message names it: the pages of `tests/golden/refusals`."""

from __future__ import annotations

import pytest

from tests import refusals
from tests.refusals import Case


@pytest.mark.parametrize("case", refusals.cases(), ids=lambda c: f"{c.page.stem}: {c.name}")
def test_a_mistake_is_refused(case: Case) -> None:
    message = refusals.told(case)
    assert case.fits(message), f"expected\n{case.told}got\n{message}"


def test_the_pages_are_whole() -> None:
    """Every heading is a case with a name of its own, every row has a fragment, and the sample stays a sample."""
    cases = refusals.cases()
    assert len({(case.page, case.name) for case in cases}) == len(cases) >= 400
    assert sum(case.exact for case in cases) <= 60
    for page in refusals.PAGES:
        assert page.read_text("utf-8").count("\n## ") == len(list(refusals.cases_of(page))), page
    assert all(" | " in row or not row.endswith("Error") for case in cases for row in case.told.splitlines())


def test_the_page_of_errors_lists_them() -> None:
    """`python -m tests.refusals --write` renews it."""
    assert refusals.ERRORS_PAGE.read_text("utf-8") == refusals.errors_page()
