"""The tables of the migration guides are those in code, and the README leads to every guide."""

from __future__ import annotations

from tests.docs.migration_tables import updated_guides


def test_tables_of_the_guides_are_those_in_code() -> None:
    for guide, text in updated_guides():
        assert guide.read_text(encoding="utf-8") == text, "write them anew: python -m tests.docs.migration_tables"
