"""Follows the pages that have no test of their own: every block does what it says."""

from __future__ import annotations

import pytest

from tests.docs.conftest import Follow

PAGES = (
    "docs/authorization.md",
    "docs/engines.md",
    "docs/modes.md",
    "docs/troubleshooting.md",
    "docs/vision.md",
    "docs/watching.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_does_what_it_says(page: str, follow: Follow) -> None:
    follow(page)


@pytest.mark.parametrize("page", ["docs/index.md", "docs/results.md"])
def test_every_command_is_a_make_target_or_a_benchmark(page: str, follow: Follow) -> None:
    assert all(item.command.startswith(("make ", "python -m bench.")) for item in follow(page).done)


@pytest.mark.parametrize("page", ["docs/environments.md", "docs/made-tasks.md"])
def test_every_block_does_what_it_says_without_the_shipped_servers(page: str, follow: Follow) -> None:
    follow(page, no_servers=True)
