"""Every block of docs/migration-verl.md does what it says, where verl is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.docs.conftest import Follow


def test_migration_verl_page(follow: Follow) -> None:
    assert importlib.util.find_spec("verl") is None and importlib.util.find_spec("swift") is None
    done = follow("docs/migration-verl.md", no_servers=True)
    assert "Same meaning" in done["translate"] and " -> " in done["translate"]
    assert '"reward/custom"' in Path("runs/moved/metrics.jsonl").read_text(encoding="utf-8")
    assert "policy" in done["mtrl-train show"]
