"""Every block of docs/index.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_index_page(follow: Follow) -> None:
    done = follow("docs/index.md")
    assert all(item.command.startswith(("make ", "python -m bench.")) for item in done.done)
