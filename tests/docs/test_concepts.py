"""Every block of docs/concepts.md does what it says."""

from __future__ import annotations

from tests.docs.conftest import Follow


def test_concepts_page(follow: Follow) -> None:
    done = follow("docs/concepts.md")
    assert "; 0 differ" in done["replay"]
