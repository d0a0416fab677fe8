"""Every block of docs/made-tasks.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_made_tasks_page(follow: Follow) -> None:
    follow("docs/made-tasks.md", no_servers=True)
