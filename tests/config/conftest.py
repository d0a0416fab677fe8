"""Fixtures that load configuration files from the working folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gateway.config.load import Config, load_config
from gateway.errors import ConfigErrors
from tests.conftest import Write

LoadConfig = Callable[..., Config]
LoadErrors = Callable[..., tuple[str, ...]]


@pytest.fixture
def load_files(write: Write, tmp_path: Path) -> LoadConfig:
    """Loads `tool_configs/` and, if it exists, `mcp_servers.json`."""

    def _load_files(env: Mapping[str, str] | None = None) -> Config:
        folder, servers = tmp_path / "tool_configs", tmp_path / "mcp_servers.json"
        return load_config(folder if folder.exists() else None, servers if servers.exists() else None, env or {})

    return _load_files


@pytest.fixture
def load_errors(load_files: LoadConfig) -> LoadErrors:
    """The error messages of a failed load."""

    def _load_errors(env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        with pytest.raises(ConfigErrors) as caught:
            load_files(env)
        assert caught.value.__cause__ is None
        return tuple(str(error) for error in caught.value.errors)

    return _load_errors
