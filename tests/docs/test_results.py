"""Every block of docs/results.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_results_page(follow: Follow) -> None:
    done = follow("docs/results.md")
    assert all(item.command.startswith(("make ", "python -m bench.")) for item in done.done)
