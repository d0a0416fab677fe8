"""Every block of docs/engines.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_engines_page(follow: Follow) -> None:
    follow("docs/engines.md")
