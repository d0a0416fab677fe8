"""Every block of docs/troubleshooting.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_troubleshooting_page(follow: Follow) -> None:
    follow("docs/troubleshooting.md")
