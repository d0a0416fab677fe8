"""The reference pages say what the code says."""

from __future__ import annotations

import pytest

from tests.docs.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_generated_from_the_code(name: str) -> None:
    page = (FOLDER / name).read_text(encoding="utf-8")
    assert page == PAGES[name]().rstrip() + "\n", "run `python -m tests.docs.reference --write`"
