"""What pages repeat of the code is what the code says: reference pages, tables, and the example of a plug-in."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.guide_tables import updated_guides
from tests.docs.reference import FOLDER, PAGES

EXAMPLE = ROOT / "tests" / "plugins" / "example"


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_generated_from_the_code(name: str) -> None:
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name]().rstrip() + "\n", "run `python -m tests.docs.reference --write`"


def test_tables_of_the_guides_are_those_that_the_code_makes() -> None:
    for guide, text in updated_guides().items():
        assert guide.read_text(encoding="utf-8") == text, "run `python -m tests.docs.guide_tables`"


def test_documented_plugin_is_the_example() -> None:
    """`tests/plugins/test_plugins.py` installs and runs it."""
    titled = {block.title: block.text.strip() for block in blocks_of(ROOT / "docs/plugins.md") if block.title}
    files = {file.relative_to(EXAMPLE).as_posix(): file.read_text().strip() for file in EXAMPLE.rglob("[a-z]*.*")}
    assert titled == files, 'the blocks of "docs/plugins.md" differ from the files in tests/plugins/example'
