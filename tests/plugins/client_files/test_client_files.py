"""Tests of servers files that were written for other MCP clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.load import Config, load_config
from gateway.errors import ConfigErrors
from mtrl_plugins.client_files.client_files import IGNORED, RENAMED, SECTIONS, is_milliseconds, translate_file
from tests.conftest import Write

CLAUDE_DESKTOP = """{
  "globalShortcut": "Ctrl+Space",
  "mcpServers": {
    "files": {"command": "npx", "args": ["-y", "server-filesystem", "/srv"], "env": {"PORT": 80, "DEBUG": true}}
  },
  "preferences": {"menuBarEnabled": true}
}"""
CURSOR = """{"mcpServers": {
  "near": {"type": "stdio", "command": "./near.sh", "args": ["${workspaceFolder}/data"], "envFile": ".env",
           "env": {"KEY": "${env:NEAR_KEY}"}},
  "far": {"url": "https://far.example/mcp", "headers": {"X-Key": "${env:FAR_KEY}"}, "auth": {"CLIENT_ID": "x"}}
}}"""
VS_CODE = """{
  // Asked once.
  "inputs": [
    {"type": "promptString", "id": "api-key", "description": "Key of the search", "password": true},
    {"type": "promptString", "id": "level", "default": "a,]//b"},
  ],
  "servers": {
    "search": {"type": "http", "url": "https://search.example//mcp", "headers": {"X-Key": "${input:api-key}"}},
    "local": {"type": "stdio", "command": "node", "args": ["${workspaceFolder}/s.js"], "dev": {"watch": "src"},
              "env": {"LEVEL": "${input:level}"}}, /* the last one */
  },
}"""
WINDSURF = """{"mcpServers": {
  "remote": {"serverUrl": "https://remote.example/mcp", "headers": {"A": "b"}, "disabledTools": ["drop"]},
  "off": {"command": "x", "disabled": true}
}}"""
GEMINI = """{
  "theme": "Dark",
  "mcp": {"excluded": []},
  "mcpServers": {
    "http": {"httpUrl": "https://g.example/mcp", "timeout": 30000, "trust": true, "includeTools": ["a", "b"],
             "excludeTools": ["b"], "headers": {"Authorization": "$TOKEN"}},
    "sse": {"url": "https://g.example/sse", "cwd": null, "description": "Old."}
  }
}"""
CLINE = """{"mcpServers": {
  "c": {"command": "c", "timeout": 1800, "autoApprove": ["x"], "disabledTools": ["y"], "disabled": false,
        "transportType": "stdio"},
  "r": {"type": "streamableHttp", "url": "https://r.example", "alwaysAllow": ["z"], "timeout": 30, "watchPaths": []}
}}"""
CODEX = """
model = "o9"
[mcp_servers.docs]
command = "docs-server"
args = ["--fast"]
env = { LEVEL = "1" }
env_vars = ["HOME_KEY"]
startup_timeout_sec = 20
tool_timeout_sec = 45
enabled_tools = ["search"]
[mcp_servers.far]
url = "https://far.example/mcp"
bearer_token_env_var = "FAR_TOKEN"
http_headers = { X-Team = "rl" }
env_http_headers = { X-Key = "FAR_KEY" }
[mcp_servers.off]
command = "off"
enabled = false
"""
ZED = """{
  // Zed's settings
  "ui_font_size": 16,
  "context_servers": {
    "plain": {"source": "custom", "command": "p", "args": [], "env": null},
    "old": {"command": {"path": "o", "args": ["-x"], "env": {"A": "1"}}, "settings": {}},
    "store": {"source": "extension", "settings": {}}
  }
}"""
OPENCODE = """{"mcp": {
  "local": {"type": "local", "command": ["bun", "x", "server"], "environment": {"A": "1"}, "enabled": true},
  "far": {"type": "remote", "url": "https://far.example/mcp", "enabled": true, "timeout": 500}
}}"""
ENV = {"NEAR_KEY": "n", "FAR_KEY": "f", "API_KEY": "a", "TOKEN": "t", "FAR_TOKEN": "ft", "HOME_KEY": "h"}


def _load(file: Path, env: dict[str, str] | None = None) -> Config:
    return load_config(None, file, ENV if env is None else env)


def _fields(config: Config, name: str) -> dict[str, Any]:
    server = config.servers[name].server
    fields = {key: getattr(server, key) for key in server.model_fields_set}
    headers = {key: value.get_secret_value() for key, value in server.headers.items()}
    return fields | ({"headers": headers} if headers else {})


def _notes(config: Config) -> str:
    return "\n".join(config.notes)


def test_file_of_claude_desktop_is_read(write: Write) -> None:
    config = _load(write("claude_desktop_config.json", CLAUDE_DESKTOP))
    env = {"PORT": "80", "DEBUG": "true"}
    assert _fields(config, "files") == {"command": "npx", "args": ("-y", "server-filesystem", "/srv"), "env": env}
    assert config.notes == (
        "claude_desktop_config.json:2: globalShortcut: "
        "ignored, as keys of another program: `globalShortcut`, `preferences`",
    )


def test_file_of_cursor_is_read_from_its_project(write: Write, tmp_path: Path) -> None:
    write(".env", "# Keys\nexport NEAR=1\nKEY=\"no\"\nSPACED = 'a b'\nPLAIN=x # a comment\n\n")
    file = write(".cursor/mcp.json", CURSOR)
    config = _load(file)
    near = _fields(config, "near")
    assert near["command"] == str(tmp_path / "near.sh")
    assert near["args"] == (f"{tmp_path}/data",)
    assert near["env"] == {"NEAR": "1", "SPACED": "a b", "PLAIN": "x", "KEY": "n"}
    assert _fields(config, "far")["headers"] == {"X-Key": "f"}
    assert config.notes == (
        ".cursor/mcp.json:4: mcpServers.far.auth: `auth` is ignored: it is a setting of another program",
    )
    assert config.files == (file, tmp_path / ".env")


def test_file_of_vs_code_is_read_with_comments_and_inputs(write: Write, tmp_path: Path) -> None:
    config = _load(write(".vscode/mcp.json", VS_CODE))
    search = {"url": "https://search.example//mcp", "transport": "streamable-http", "headers": {"X-Key": "a"}}
    assert _fields(config, "search") == search
    assert _fields(config, "local")["args"] == (f"{tmp_path}/s.js",)
    assert _fields(config, "local")["env"] == {"LEVEL": "a,]//b"}
    assert config.notes == (
        ".vscode/mcp.json:9: servers.local.dev: `dev` is ignored: it is a setting of another program",
    )


def test_missing_input_names_the_variable_and_the_question(write: Write) -> None:
    with pytest.raises(ConfigErrors) as caught:
        _load(write(".vscode/mcp.json", VS_CODE), {})
    assert str(caught.value) == (
        ".vscode/mcp.json:8: servers.search.headers.X-Key: the environment variable API_KEY is not set\n"
        "  remedy: export API_KEY, the answer to `${input:api-key}`: Key of the search, "
        "or give it a default: `${API_KEY:-...}`"
    )


def test_file_of_windsurf_is_read(write: Write) -> None:
    config = _load(write("mcp_config.json", WINDSURF))
    assert _fields(config, "remote") == {"url": "https://remote.example/mcp", "headers": {"A": "b"}}
    assert config.servers["remote"].offer("drop") is None
    assert config.servers["remote"].offer("other") is not None
    assert [*config.servers] == ["remote"]
    assert config.notes == ()


def test_file_of_gemini_cli_is_read_with_milliseconds(write: Write) -> None:
    config = _load(write(".gemini/settings.json", GEMINI))
    entry = config.servers["http"]
    assert _fields(config, "http") == {
        "url": "https://g.example/mcp",
        "transport": "streamable-http",
        "headers": {"Authorization": "t"},
    }
    assert _fields(config, "sse") == {"url": "https://g.example/sse"}
    (offer,) = entry.offers
    assert (offer.timeout_s, entry.offer("a"), entry.offer("b"), entry.offer("c")) == (30.0, offer, None, None)
    assert "settings.json:5: mcpServers.http.timeout: `timeout: 30000` is read as milliseconds (30 s)" in _notes(config)
    assert "`trust` is ignored: nothing asks for confirmation here" in _notes(config)


def test_file_of_cline_is_read_with_seconds(write: Write) -> None:
    config = _load(write("cline_mcp_settings.json", CLINE))
    assert [config.servers[name].offers[0].timeout_s for name in ("c", "r")] == [1800, 30]
    assert config.servers["c"].offer("y") is None
    assert _fields(config, "r")["transport"] == "streamable-http"
    assert "`watchPaths` is ignored" in _notes(config)


def test_file_of_codex_is_read(write: Write) -> None:
    config = _load(write("config.toml", CODEX))
    docs = config.servers["docs"]
    assert _fields(config, "docs") == {
        "command": "docs-server",
        "args": ("--fast",),
        "env": {"LEVEL": "1", "HOME_KEY": "h"},
        "connect_timeout_s": 20,
    }
    assert (docs.offers[0].timeout_s, docs.included) == (45, ("search",))
    assert _fields(config, "far")["headers"] == {"X-Team": "rl", "X-Key": "f"}
    assert _fields(config, "far")["auth_token"].get_secret_value() == "ft"
    assert [*config.servers] == ["docs", "far"]


def test_file_of_zed_is_read_and_its_extensions_are_left_out(write: Write) -> None:
    config = _load(write(".zed/settings.json", ZED))
    assert _fields(config, "plain") == {"command": "p", "args": ()}
    assert _fields(config, "old") == {"command": "o", "args": ("-x",), "env": {"A": "1"}}
    assert [*config.servers] == ["plain", "old"]
    assert "context_servers.store: the server is left out, since only its own client can reach" in _notes(config)


def test_file_of_opencode_is_read(write: Write) -> None:
    config = _load(write("opencode.json", OPENCODE))
    local = {"command": "bun", "args": ("x", "server"), "env": {"A": "1"}, "transport": "stdio"}
    assert _fields(config, "local") == local
    assert (_fields(config, "far")["url"], config.servers["far"].offers[0].timeout_s) == (
        "https://far.example/mcp",
        0.5,
    )


@pytest.mark.parametrize("section", SECTIONS, ids=".".join)
def test_each_section_is_found_and_its_errors_have_lines(section: tuple[str, ...], write: Write) -> None:
    servers: Any = {"s": {"command": "x", "comand": "y"}}
    for key in reversed(section):
        servers = {key: servers}
    file = write("theirs.json", json.dumps(servers, indent=1))
    with pytest.raises(ConfigErrors, match="unknown key\n  remedy: did you mean `command`") as caught:
        _load(file)
    line = file.read_text().splitlines().index(next(x for x in file.read_text().splitlines() if "comand" in x)) + 1
    assert caught.value.errors[0].where.startswith(f"theirs.json:{line}: ")


@pytest.mark.parametrize("key", ["comand", "Command", "arg", "auth-token", "disabledTool", "serverURL", "isolaton"])
def test_misspelt_key_is_refused_with_the_right_one(key: str, write: Write) -> None:
    file = write("mcp.json", json.dumps({"mcpServers": {"s": {"command": "x", key: 1}}}))
    with pytest.raises(ConfigErrors, match="did you mean"):
        _load(file)


@pytest.mark.parametrize("key", [*IGNORED, "somethingNew", "x-note", "max_connections"])
def test_key_of_somebody_else_is_told_once_and_never_refused(key: str, write: Write) -> None:
    servers = {name: {"command": "x", key: {"any": ["thing"]}} for name in ("a", "b")}
    config = _load(write("mcp.json", json.dumps({"mcpServers": servers}, indent=1)))
    assert [*config.servers] == ["a", "b"]
    (note,) = config.notes
    assert note.startswith("mcp.json:5: mcpServers.a.")
    assert f"`{key}` is ignored: " in note


def test_error_in_a_translated_key_names_the_clients_key(write: Write) -> None:
    file = write("mcp.json", '{\n"mcpServers": {\n"s": {\n"serverUrl": 5}}}')
    with pytest.raises(ConfigErrors, match=r"mcp\.json:4: mcpServers\.s\.serverUrl: expected a valid string"):
        _load(file)


def test_our_key_counts_where_both_are_given(write: Write) -> None:
    server = {"serverUrl": "https://a", "url": "https://b", "timeout": 5, "timeout_s": 7}
    config = _load(write("mcp.json", json.dumps({"mcpServers": {"s": server}})))
    assert _fields(config, "s") == {"url": "https://b"}
    assert config.servers["s"].offers[0].timeout_s == 7


def test_entry_in_yaml_overrides_deadline_and_hidden_tools(write: Write, tmp_path: Path) -> None:
    write("mcp.json", '{"mcpServers": {"s": {"command": "x", "timeout": 30, "disabledTools": ["a", "b"]}}}')
    write("tools/t.yaml", "tools: [{server: s, allow: [a], timeout_s: 5}, {server: s}]")
    entry = load_config(tmp_path / "tools", tmp_path / "mcp.json", {}).servers["s"]
    named, rest = entry.offers
    assert (entry.offer("a"), entry.offer("b"), entry.offer("c")) == (named, None, rest)
    assert (named.timeout_s, rest.timeout_s) == (5, 30)


@pytest.mark.parametrize(
    ("value", "keys", "expected"),
    [
        (30, (), False),
        (999, (), False),
        (1000, (), True),
        (5000, ("autoApprove",), True),
        (3600, ("autoApprove",), False),
        (500, ("httpUrl",), True),
        (60000, (), True),
    ],
)
def test_unit_of_a_timeout_follows_from_keys_and_size(value: float, keys: tuple[str, ...], expected: bool) -> None:
    assert is_milliseconds(value, {"command": 1, **dict.fromkeys(keys)}.keys()) is expected


@pytest.mark.parametrize("text", ["A", "=b", "A B=c", "A-B=c"])
def test_line_of_an_env_file_that_sets_nothing_is_refused(text: str, write: Write) -> None:
    write(".env", f"OK=1\n{text}\n")
    file = write("mcp.json", '{"mcpServers": {"s": {"command": "x", "envFile": ".env"}}}')
    with pytest.raises(ConfigErrors, match=r"\.env:2: is not `NAME=value`"):
        _load(file)


def test_missing_env_file_is_an_error(write: Write) -> None:
    file = write("mcp.json", '{"mcpServers": {"s": {"command": "x", "envFile": "gone.env"}}}')
    with pytest.raises(ConfigErrors, match=r"gone\.env: there is no such file"):
        _load(file)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["${input:a}", "${env:B}", "ws"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*RENAMED, *IGNORED, "command", "url", "type", "env", "timeout", "enabled", "args", "env_vars"])
SERVERS = st.dictionaries(st.text(max_size=5), st.dictionaries(KEYS | st.text(max_size=9), VALUES, max_size=6) | VALUES)


@given(section=st.sampled_from(SECTIONS), servers=SERVERS, others=st.dictionaries(st.text(max_size=5), VALUES))
def test_translating_any_values_never_fails(section: tuple[str, ...], servers: Any, others: Any) -> None:
    raw = servers
    for key in reversed(section):
        raw = {**others, key: raw}
    translate_file(raw, Path("/srv/.vscode/mcp.json"))


def test_oauth_of_gemini_is_read_and_its_addresses_are_left_to_the_server(write: Write) -> None:
    theirs = {"enabled": True, "clientId": "ours", "scopes": ["read"], "tokenUrl": "https://a.example/token"}
    file = {"mcpServers": {"s": {"httpUrl": "https://a.example", "oauth": theirs}}}
    config = _load(write("settings.json", json.dumps(file)))
    oauth = _fields(config, "s")["oauth"]
    assert (oauth.client_id, oauth.scopes) == ("ours", ("read",))
    assert len(config.notes) == 2
