"""Tests of `mtrl-gateway import`, which collects the servers of other MCP clients."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config.load import load_config
from mtrl_plugins.client_files.import_servers import (
    HOME_FILES,
    PROJECT_FILES,
    SETTINGS_FILES,
    find_servers,
    known_places,
    settings_folder,
)
from tests.conftest import Write

SECRET = "hunter2"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def _servers(**servers: object) -> str:
    return json.dumps({"mcpServers": servers})


def _write_clients(write: Write) -> None:
    """Files of five clients; two servers are the same, and two differ under one name."""
    search = {"command": "search", "args": ["--api-key", SECRET], "env": {"SEARCH_TOKEN": SECRET, "LEVEL": "info"}}
    write("home/.cursor/mcp.json", _servers(search=search, gone={"type": "ws", "url": "wss://x"}))
    write("home/.codeium/windsurf/mcp_config.json", _servers(search=search))
    remote = {
        "serverUrl": f"https://u:{SECRET}@x.example/mcp?token={SECRET}",
        "headers": {"Authorization": f"Bearer {SECRET}"},
    }
    write("home/.gemini/settings.json", _servers(search={"httpUrl": "https://s.example"}, remote=remote))
    write("home/.codex/config.toml", '[mcp_servers.docs]\ncommand = "docs"\nbearer = 1\n')
    local = {"mcpServers": {"mine": {"command": "mine"}}}
    write("home/.claude.json", json.dumps({"projects": {str(write("project/x", "").parent): local}, "numStartups": 5}))
    write("home/.kiro/settings/mcp.json", "{ not json")
    inputs = [{"id": "key", "description": "The key"}]
    asked = {"command": "./asked.sh", "env": {"KEY": "${input:key}"}, "cwd": "sub"}
    write("project/.vscode/mcp.json", json.dumps({"inputs": inputs, "servers": {"asked": asked}}))


def test_servers_of_all_clients_are_found_once(write: Write, home: Path, tmp_path: Path) -> None:
    _write_clients(write)
    found = find_servers(home, tmp_path / "project")
    names = {server.name for server in found.servers}
    assert names == {"asked", "mine", "search", "search-gemini-cli", "remote", "docs"}
    notes = "\n".join(found.notes)
    assert "two servers are named 'search'" in notes
    assert "home/.kiro/settings/mcp.json" in notes and "is not valid JSON" in notes
    assert "only its own client can reach 'ws'" in notes
    assert "numStartups" not in notes


def test_secrets_become_variables(write: Write, home: Path, tmp_path: Path) -> None:
    _write_clients(write)
    found = find_servers(home, tmp_path / "project")
    servers = json.loads(found.to_text())["mcpServers"]
    assert SECRET not in found.to_text() + "".join(found.notes) + str(found.exports())
    assert servers["search"]["env"] == {"SEARCH_TOKEN": "${SEARCH_TOKEN}", "LEVEL": "info"}
    assert servers["search"]["args"] == ["--api-key", "${SEARCH_API_KEY}"]
    assert servers["remote"] == {
        "url": "https://u:${REMOTE_PASSWORD}@x.example/mcp?token=${REMOTE_TOKEN}",
        "headers": {"Authorization": "Bearer ${REMOTE_AUTHORIZATION}"},
    }
    assert found.exports()["REMOTE_TOKEN"].endswith("home/.gemini/settings.json, server 'remote', url")
    assert found.exports()["KEY"] == "`${input:key}`: The key"


def test_one_variable_never_stands_for_two_secrets(write: Write, home: Path) -> None:
    write("home/.cursor/mcp.json", _servers(a={"command": "a", "env": {"API_KEY": "one"}}))
    write("home/.lmstudio/mcp.json", _servers(b={"command": "b", "env": {"API_KEY": "two"}}))
    servers = json.loads(find_servers(home, home).to_text())["mcpServers"]
    assert servers["a"]["env"] == {"API_KEY": "${API_KEY}"}
    assert servers["b"]["env"] == {"API_KEY": "${B_API_KEY}"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--token=hunter2"], ["--token=${S_TOKEN}"]),
        (["--header", "Authorization: Bearer hunter2"], ["--header", "Authorization: Bearer ${S_AUTHORIZATION}"]),
        (["-e", "GITHUB_TOKEN=hunter2"], ["-e", "GITHUB_TOKEN=${GITHUB_TOKEN}"]),
        (["postgresql://u:hunter2@db/x"], ["postgresql://u:${S_PASSWORD}@db/x"]),
        (["-e", "GITHUB_TOKEN", "--port", "80"], ["-e", "GITHUB_TOKEN", "--port", "80"]),
        (["--api-key", "${KEY}"], ["--api-key", "${KEY}"]),
        (["-y", "@scope/pkg@1", "/srv"], ["-y", "@scope/pkg@1", "/srv"]),
    ],
)
def test_secrets_in_arguments_become_variables(args: list[str], expected: list[str], write: Write, home: Path) -> None:
    write("home/.cursor/mcp.json", _servers(s={"command": "x", "args": args}))
    assert json.loads(find_servers(home, home).to_text())["mcpServers"]["s"]["args"] == expected


def test_every_known_place_is_looked_at(write: Write, home: Path, tmp_path: Path) -> None:
    settings = settings_folder(home).relative_to(tmp_path)
    names = [f"home/{name}" for _, name in HOME_FILES] + [f"{settings}/{name}" for _, name in SETTINGS_FILES]
    for name in [*names, *(f"project/{name}" for _, name in PROJECT_FILES)]:
        write(name, "")
    files = {place.file.relative_to(tmp_path).as_posix() for place in known_places(home, tmp_path / "project")}
    assert files == {*names, *(f"project/{name}" for _, name in PROJECT_FILES)}


def test_settings_folder_follows_the_system() -> None:
    home = Path("/home/me")
    assert settings_folder(home, "darwin", {}) == home / "Library/Application Support"
    assert settings_folder(home, "linux", {}) == home / ".config"
    assert settings_folder(home, "linux", {"XDG_CONFIG_HOME": "/conf"}) == Path("/conf")
    assert settings_folder(home, "win32", {"APPDATA": "/roaming"}) == Path("/roaming")


def test_import_shows_and_writes_a_file_that_loads(
    write: Write, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_clients(write)
    monkeypatch.chdir(tmp_path / "project")
    shown = CliRunner().invoke(app, ["import"])
    assert shown.exit_code == 0 and SECRET not in shown.output
    assert "Cursor: " in shown.output and "export SEARCH_TOKEN: its value is in " in shown.output
    assert "nothing was written: --write makes ./mcp_servers.json" in shown.output
    assert not Path("mcp_servers.json").exists()
    printed = CliRunner().invoke(app, ["import", "--json"])
    written = CliRunner().invoke(app, ["import", "--write"])
    assert written.exit_code == 0, written.output
    file = tmp_path / "project/mcp_servers.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == printed.output
    exports = find_servers(home, tmp_path / "project").exports()
    config = load_config(None, file, dict.fromkeys(exports, "value"))
    assert config.notes == ()
    assert config.servers["asked"].server.command == str(tmp_path / "project/asked.sh")
    assert config.servers["asked"].server.cwd == tmp_path / "project/sub"
    assert len(config.servers) == 6


def test_import_never_overwrites_a_file(write: Write, home: Path) -> None:
    write("home/.cursor/mcp.json", _servers(s={"command": "x"}))
    file = write("mine.json", "mine")
    refused = CliRunner().invoke(app, ["import", "--out", "mine.json"])
    assert refused.exit_code == 2
    assert "mine.json exists, and is not overwritten" in refused.output
    assert file.read_text() == "mine"


def test_import_writes_nothing_where_nothing_is_found(write: Write, home: Path) -> None:
    write("x", "")
    empty = CliRunner().invoke(app, ["import", "--write"])
    assert empty.exit_code == 2
    assert "no servers of other MCP clients were found" in empty.output
    assert not Path("mcp_servers.json").exists()
