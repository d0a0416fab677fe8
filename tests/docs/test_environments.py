"""Every file and setting that docs/environments.md shows is valid."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_environments_page(follow: Follow) -> None:
    follow("docs/environments.md", no_servers=True)
