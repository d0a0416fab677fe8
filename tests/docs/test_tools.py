"""Every block of docs/tools.md does what it says."""

from __future__ import annotations

from pathlib import Path

from tests.docs.conftest import Follow


def test_tools_page(follow: Follow) -> None:
    done = follow("docs/tools.md", no_servers=True)
    listed = done["mtrl-gateway list --tools my_tools "]
    assert listed.count("my_tools/") == 8  # in the whole list, and in its two columns
    assert all(name in listed for name in ("count", "roll", "look", "paint"))
    assert list(Path("tmp/painted").glob("*.png"))
