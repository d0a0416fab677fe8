"""Tests of mcp_servers.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.models import Server
from tests.config.conftest import LoadConfig, LoadErrors
from tests.conftest import Write


def _load_server(server: dict[str, Any]) -> str:
    return json.dumps({"mcpServers": {"s": server}})


def test_keys_of_other_clients_are_accepted(write: Write, load_files: LoadConfig) -> None:
    entries = {
        "a": {"type": "stdio", "command": "a", "alwaysAllow": ["x"], "autoApprove": [], "description": "A."},
        "b": {"type": "http", "url": "https://b", "headers": {"X-Key": "k"}},
        "c": {"type": "streamableHttp", "transport": "sse", "url": "https://c"},
        "d": {"url": "https://d", "disabled": True, "description": "D."},
    }
    write("mcp_servers.json", json.dumps({"$schema": "./servers.schema.json", "mcpServers": entries}))
    servers = load_files().servers
    transports = {name: entry.server.transport for name, entry in servers.items()}
    assert transports == {"a": "stdio", "b": "streamable-http", "c": "sse"}
    assert servers["b"].server.headers["X-Key"].get_secret_value() == "k"
    assert type(servers["a"].server) is Server


def test_relative_paths_are_resolved_from_the_file(write: Write, load_files: LoadConfig, tmp_path: Path) -> None:
    write("deep/servers.json", _load_server({"command": "./run.sh", "args": ["./left/alone"], "cwd": "work"}))
    write("tool_configs/s.yaml", "tools: [{mcp: {mcp_servers_config_path: ../deep/servers.json}}]")
    server = load_files().servers["s"].server
    assert server.command == str(tmp_path / "deep/run.sh")
    assert server.cwd == tmp_path / "deep/work"
    assert server.args == ("./left/alone",)


OF_ROLLOUT = {"command": "a", "args": ["${MTRL_ROLLOUT_DIR}"], "isolation": "process"}


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ({}, "s: a server needs either `command` or `url`"),
        ({"command": "a", "url": "http://a"}, "s: a server needs either `command` or `url`"),
        ({"url": "your_server_url"}, "s: `url` is not an HTTP address"),
        ({"url": "http://a", "args": ["b"]}, "s: `args` belongs to a server with `command`"),
        ({"command": "a", "auth_token": "t"}, "s: `auth_token` belongs to a server with `url`"),
        ({"command": "a", "type": "sse"}, "s: `sse` cannot reach this server"),
        ({"url": "http://a", "transport": "stdio"}, "s: `stdio` cannot reach this server"),
        ({"url": "http://a", "proxy": "socks5://a"}, "s: `proxy` is not the address of an HTTP proxy"),
        ({"url": "http://a", "key_file": "a"}, "s: `key_file` is the key of a `cert_file`"),
        ({"command": "a", "proxy": "http://a"}, "s: `proxy` belongs to a server with `url`"),
        ({"url": "http://a", "isolation": "process"}, "s: `isolation: process` needs a server with `command`"),
        ({"command": "a", "transport": "websocket"}, "s.transport: expected 'stdio', 'sse'"),
        ({"url": "http://a", "authToken": "t"}, "s.authToken: unknown key\n  remedy: did you mean `auth_token`?"),
        ({"url": "http://a", "auth_token": "t\n"}, "s.auth_token: contains characters that an HTTP header cannot have"),
        ({"url": "http://a", "headers": {"X-Key": "ü"}},
         "s.headers.X-Key: contains characters that an HTTP header cannot have"),
        ("npx", "s: expected a mapping, found 'npx'"),
        ({"command": "a", "oauth": {}}, "s: `oauth` belongs to a server with `url`"),
        ({"command": "a", "auth_command": ["b"]}, "s: `auth_command` belongs to a server with `url`"),
        ({"url": "http://a", "auth_token": "t", "oauth": {}}, "s: `auth_token` and `oauth` exclude each other"),
        ({"url": "http://a", "auth_command": ["b"], "headers": {"authorization": "t"}},
         "s: the `Authorization` header and `auth_command` exclude each other"),
        ({"url": "http://a", "auth_refresh_s": 5}, "s: `auth_refresh_s` belongs to `auth_command`"),
        ({"url": "http://a", "oauth": {"client_secret": "t"}}, "s.oauth: a secret or key without the client"),
        ({"url": "http://a", "oauth": {"client_id": "a", "client_secret": "b"}},
         "s.oauth: a secret or key without an issuer would go to whatever the server names"),
        ({"url": "http://a", "oauth": {"grant": "client_credentials", "client_id": "a"}},
         "s.oauth: `grant: client_credentials` needs a client's own credentials"),
        ({"url": "http://a", "oauth": {"client_id": "a", "client_secret": "b", "private_key_file": "c"}},
         "s.oauth: a client has either a secret or a private key"),
        ({"url": "http://a", "oauth": {"client_id": "a", "private_key_file": "c"}},
         "s.oauth: a private key is for jobs without a person"),
        ({"url": "http://a", "oauth": {"redirect_uri": "https://elsewhere.example/back"}},
         "s.oauth.redirect_uri: a redirect URI is an address of this machine with a port"),
        ({"url": "http://a", "oauth": {"client_metadata_url": "http://a/b"}},
         "s.oauth.client_metadata_url: a client metadata document has an https address"),
        (OF_ROLLOUT | {"isolation": "session"}, "s.args: `${MTRL_ROLLOUT_DIR}` belongs to one rollout"),
        (OF_ROLLOUT | {"args": [], "keep_state": "a"}, "s.keep_state: `keep_state` is for the folder of a rollout"),
        (OF_ROLLOUT | {"state": "nowhere"}, "s.state: there is no such folder or archive"),
        (OF_ROLLOUT | {"states": "nowhere"}, "s.states: there is no such folder"),
        (OF_ROLLOUT | {"warm": 2, "env": {"SEED": "${MTRL_SEED}"}}, "s.warm: `warm` starts processes before"),
        ({"url": "http://a", "oauth": {"issuer": "login"}}, "s.oauth.issuer: this is not an HTTP address"),
    ],
)  # fmt: skip
def test_contradictory_server_is_refused(server: Any, expected: str, write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", _load_server(server))
    (message,) = load_errors()
    assert message.startswith(f"mcp_servers.json:1: mcpServers.{expected}")
    assert "remedy: " in message


@pytest.mark.parametrize(
    "server",
    [
        {"url": "https://hunter2.example/?key=hunter2", "args": 5},
        {"url": "http://a", "auth_token": "hunter2\n", "headers": {"A": " hunter2", "B": "hunter2 ü"}},
        {"url": "http://a", "autToken": "hunter2"},
        {"url": "http://a", "oauth": {"client_secret": ["hunter2"], "issuer": "hunter2", "redirect_uri": "hunter2"}},
        {"url": "http://a", "oauth": "hunter2", "auth_command": "hunter2", "answers": "hunter2"},
    ],
)
def test_errors_never_contain_secrets(server: dict[str, Any], write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", _load_server(server))
    assert "hunter2" not in "".join(load_errors())


def test_repr_of_config_never_contains_secrets(write: Write, load_files: LoadConfig) -> None:
    oauth = {"client_id": "hunter2", "client_secret": "hunter2", "scopes": ["hunter2"], "issuer": "https://a"}
    entries = {
        "a": {"command": "hunter2", "args": ["hunter2"], "env": {"K": "hunter2"}, "cwd": "/hunter2"},
        "b": {"url": "https://hunter2", "headers": {"A": "hunter2"}, "auth_token": "hunter2"},
        "c": {"url": "https://hunter2", "oauth": oauth, "answers": {"pin": "hunter2"}},
        "d": {"url": "https://hunter2", "auth_command": ["hunter2"]},
    }
    write("mcp_servers.json", json.dumps({"mcpServers": entries}))
    write(
        "tool_configs/t.yaml",
        """
        tools:
          - {class_name: a.B, config: {key: "${KEY}"}, description: "${KEY}"}
          - {server: a, prefix: "${KEY}"}
        interaction: {class_name: a.B, config: {key: "${KEY}"}}
        """,
    )
    config = load_files({"KEY": "hunter2"})
    expected = f"{config} {config!r} {config.tools} {config.interactions} {config.servers}"
    assert "hunter2" not in expected
