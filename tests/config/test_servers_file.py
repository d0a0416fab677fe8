"""The servers file in the form that MCP clients share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.models import Server
from tests.config.conftest import Loaded, Refused
from tests.conftest import Write


def _one(server: dict[str, Any]) -> str:
    return json.dumps({"mcpServers": {"s": server}})


def test_other_clients_keys_are_understood(write: Write, loaded: Loaded) -> None:
    write(
        "mcp_servers.json",
        json.dumps(
            {
                "$schema": "./servers.schema.json",
                "mcpServers": {
                    "a": {
                        "type": "stdio",
                        "command": "a",
                        "alwaysAllow": ["x"],
                        "autoApprove": [],
                        "description": "A.",
                    },
                    "b": {"type": "http", "url": "https://b", "headers": {"X-Key": "k"}},
                    "c": {"type": "streamableHttp", "transport": "sse", "url": "https://c"},
                    "d": {"url": "https://d", "disabled": True, "description": "D."},
                },
            }
        ),
    )
    servers = loaded().servers
    assert {name: entry.server.transport for name, entry in servers.items()} == {
        "a": "stdio",
        "b": "streamable-http",
        "c": "sse",
    }
    assert servers["b"].server.headers["X-Key"].get_secret_value() == "k"
    assert type(servers["a"].server) is Server


def test_a_disabled_server_takes_the_entries_that_name_it_along(write: Write, loaded: Loaded) -> None:
    write("mcp_servers.json", _one({"command": "a", "disabled": True}))
    write("tool_configs/s.yaml", "tools: [{server: s}]")
    assert loaded().servers == {}


def test_relative_paths_are_seen_from_the_file(write: Write, loaded: Loaded, tmp_path: Path) -> None:
    write("deep/servers.json", _one({"command": "./run.sh", "args": ["./left/alone"], "cwd": "work"}))
    write("tool_configs/s.yaml", "tools: [{mcp: {mcp_servers_config_path: ../deep/servers.json}}]")
    server = loaded().servers["s"].server
    assert server.command == str(tmp_path / "deep/run.sh")
    assert server.cwd == tmp_path / "deep/work"
    assert server.args == ("./left/alone",)


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({}, "s: a server is started with `command` or reached at a `url`"),
        ({"command": "a", "url": "http://a"}, "s: a server is started with `command` or reached at a `url`"),
        ({"url": "your_server_url"}, "s: `url` is no HTTP address"),
        ({"url": "http://a", "args": ["b"]}, "s: `args` belongs to a server with `command`"),
        ({"command": "a", "auth_token": "t"}, "s: `auth_token` belongs to a server with `url`"),
        ({"command": "a", "type": "sse"}, "s: `sse` cannot reach this server"),
        ({"url": "http://a", "transport": "stdio"}, "s: `stdio` cannot reach this server"),
        ({"url": "http://a", "isolation": "process"}, "s: `isolation: process` starts children"),
        ({"command": "a", "transport": "websocket"}, "s.transport: expected 'stdio', 'sse'"),
        ({"command": "a", "args": "b"}, "s.args: expected a valid tuple, found a text"),
        ({"url": "http://a", "authToken": "t"}, "s.authToken: unknown key\n  remedy: did you mean `auth_token`?"),
        ({"url": "http://a", "auto-approve": []}, "s.auto-approve: unknown key\n  remedy: did you mean `autoApprove`?"),
        ({"url": "http://a", "auth_token": "t\n"}, "s.auth_token: holds what no HTTP header can carry"),
        ({"url": "http://a", "headers": {"X-Key": "ü"}}, "s.headers.X-Key: holds what no HTTP header can carry"),
        ("npx", "s: expected a mapping, found 'npx'"),
    ],
)
def test_a_server_that_cannot_work_is_refused(server: Any, told: str, write: Write, refused: Refused) -> None:
    write("mcp_servers.json", _one(server))
    (message,) = refused()
    assert message.startswith(f"mcp_servers.json:1: mcpServers.{told}")
    assert "remedy: " in message


def test_a_file_of_another_form_is_pointed_to_ours(write: Write, refused: Refused) -> None:
    write("mcp_servers.json", '{"servers": {}}')
    missing, unknown = refused()
    assert missing == "mcp_servers.json: mcpServers: is missing\n  remedy: add `mcpServers`"
    assert unknown == "mcp_servers.json:1: servers: unknown key\n  remedy: did you mean `mcpServers`?"


def test_two_files_with_one_server_name_are_both_named(write: Write, refused: Refused) -> None:
    write("mcp_servers.json", _one({"command": "a"}))
    write("other.json", _one({"command": "b"}))
    write("tool_configs/m.yaml", "tools: [{mcp: {mcp_servers_config_path: ../other.json}}]")
    (message,) = refused()
    assert "two servers are named 's': one of mcp_servers.json mcpServers.s, one of other.json mcpServers.s" in message


@pytest.mark.parametrize(
    "server",
    [
        {"url": "https://hunter2.example/?key=hunter2", "args": 5},
        {"url": 5, "auth_token": ["hunter2"]},
        {"url": "http://a", "headers": {"A": {"hunter2": "hunter2"}}, "auth_token": {"k": "hunter2"}},
        {"command": "a", "env": {"KEY": ["hunter2"]}, "args": [["hunter2"]]},
        {"url": "hunter2"},
        {"url": "http://a", "auth_token": "hunter2\n", "headers": {"A": " hunter2", "B": "hunter2 ü"}},
        {"url": "http://a", "autToken": "hunter2"},
    ],
)
def test_no_mistake_quotes_a_secret(server: dict[str, Any], write: Write, refused: Refused) -> None:
    write("mcp_servers.json", _one(server))
    assert "hunter2" not in "".join(refused())


def test_nothing_loaded_shows_a_secret(write: Write, loaded: Loaded) -> None:
    write(
        "mcp_servers.json",
        json.dumps(
            {
                "mcpServers": {
                    "a": {"command": "hunter2", "args": ["hunter2"], "env": {"K": "hunter2"}, "cwd": "/hunter2"},
                    "b": {"url": "https://hunter2", "headers": {"A": "hunter2"}, "auth_token": "hunter2"},
                }
            }
        ),
    )
    write(
        "tool_configs/t.yaml",
        """
        tools:
          - {class_name: a.B, config: {key: "${KEY}"}, description: "${KEY}"}
          - {server: a, prefix: "${KEY}"}
        interaction: {class_name: a.B, config: {key: "${KEY}"}}
        """,
    )
    config = loaded({"KEY": "hunter2"})
    told = f"{config} {config!r} {config.tools} {config.interactions} {config.servers}"
    assert "hunter2" not in told
