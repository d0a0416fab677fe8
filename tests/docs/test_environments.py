"""Every block of docs/environments.md does what it says, with a data folder in which nothing is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.conftest import Follow


def test_environments_page(follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(Path("data").absolute()))
    done = follow("docs/environments.md", no_servers=True)
    assert done["env list"].count("not installed") == 4
