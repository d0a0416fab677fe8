"""Every block of docs/watching.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_watching_page(follow: Follow) -> None:
    follow("docs/watching.md")
