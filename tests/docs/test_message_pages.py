"""Every error text and every alarm of the code stands in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.message_pages import GROUPS, TROUBLESHOOTING, WATCHING, errors_by_group, group_of, updated_pages
from tests.docs.messages import messages

UPDATE = "write them anew: python -m tests.docs.message_pages"


@pytest.mark.parametrize("page", [TROUBLESHOOTING, WATCHING], ids=lambda page: page.name)
def test_page_has_every_message_of_the_code(page: Path) -> None:
    assert dict(updated_pages())[page] == page.read_text(encoding="utf-8"), UPDATE


def test_messages_of_every_kind_are_collected() -> None:
    modules = {item.module for item in messages()}
    assert len(messages()) > 400
    assert {group_of(module) for module in modules} == {*GROUPS}
    assert all(errors_by_group().values())
