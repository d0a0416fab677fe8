"""A folder to configure a gateway in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gateway.config.load import Config, load
from gateway.errors import ConfigErrors
from tests.conftest import Write

Loaded = Callable[..., Config]
Refused = Callable[..., tuple[str, ...]]


@pytest.fixture
def loaded(write: Write, tmp_path: Path) -> Loaded:
    """Loads `tool_configs/` and, where there is one, `mcp_servers.json`."""

    def _loaded(env: Mapping[str, str] | None = None) -> Config:
        folder, servers = tmp_path / "tool_configs", tmp_path / "mcp_servers.json"
        return load(folder if folder.exists() else None, servers if servers.exists() else None, env or {})

    return _loaded


@pytest.fixture
def refused(loaded: Loaded) -> Refused:
    """The mistakes that loading ends in, each as an operator reads it."""

    def _refused(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        with pytest.raises(ConfigErrors) as caught:
            loaded(env)
        assert caught.value.__cause__ is None
        return tuple(str(error) for error in caught.value.errors)

    return _refused
