"""Every block of docs/quickstart.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_quickstart(follow: Follow) -> None:
    done = follow("docs/quickstart.md")
    assert (
        "(the small job stands in)" in done["--config second"] and "(the small job stands in)" in done["--config sight"]
    )
    assert "policy, turn 0" in done["why runs/default 0 25"]
    assert "; 0 differ" in done["replay"] and "the loss is" in done["replay"]
