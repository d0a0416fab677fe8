"""Every block of docs/modes.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_modes_page(follow: Follow) -> None:
    follow("docs/modes.md")
