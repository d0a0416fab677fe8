"""Every entry that docs/authorization.md shows is one that the gateway reads."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_authorization_page(follow: Follow) -> None:
    follow("docs/authorization.md")
