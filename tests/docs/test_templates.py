"""Every block of docs/templates.md does what it says, and its tables are those that the tests check."""

from __future__ import annotations

from tests.docs.conftest import Follow
from tests.docs.template_tables import PAGE, updated_page


def test_templates_page(follow: Follow) -> None:
    follow("docs/templates.md")


def test_tables_of_the_templates_page_are_those_that_the_tests_check() -> None:
    assert PAGE.read_text(encoding="utf-8") == updated_page(), "run `python -m tests.docs.template_tables`"
