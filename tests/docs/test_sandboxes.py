"""Every block of docs/sandboxes.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_sandboxes_page(follow: Follow) -> None:
    done = follow("docs/sandboxes.md", no_servers=True)
    assert "3628800" in done["mtrl-gateway call --tools my_tools python "]
    assert "42" in done["mtrl-gateway call --tools my_tools evaluate "]
