"""Every block of docs/vision.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_vision_page(follow: Follow) -> None:
    follow("docs/vision.md")
