"""Every block of docs/templates.md does what it says, and its tables are those that the tests check."""

from __future__ import annotations

from tests.docs.conftest import Follow
from tests.docs.template_tables import updated_pages


def test_templates_page(follow: Follow) -> None:
    follow("docs/templates.md")


def test_tables_of_templates_and_of_memory_are_those_that_the_code_makes() -> None:
    for page, text in updated_pages().items():
        assert page.read_text(encoding="utf-8") == text, "run `python -m tests.docs.template_tables`"
