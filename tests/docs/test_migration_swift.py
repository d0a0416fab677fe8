"""Every block of docs/migration-swift.md does what it says, where swift is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.docs.conftest import Follow


def test_migration_swift_page(follow: Follow) -> None:
    assert importlib.util.find_spec("verl") is None and importlib.util.find_spec("swift") is None
    done = follow("docs/migration-swift.md", no_servers=True)
    assert "Same meaning" in done["translate"] and " -> " in done["translate"]
    assert '"reward/solved"' in Path("runs/moved/metrics.jsonl").read_text(encoding="utf-8")
    assert "policy" in done["mtrl-train show"]
