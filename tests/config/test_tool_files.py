"""Tests of tool_configs/*.yaml in our own format, and of errors in them."""

from __future__ import annotations

import pytest

from gateway.config.configured_server import find_unknown_tools
from gateway.config.models import ResultLimit
from tests.config.conftest import LoadConfig, LoadErrors
from tests.conftest import Write

SERVERS = '{"mcpServers": {"time": {"command": "time-server"}, "web": {"url": "http://127.0.0.1:9/mcp"}}}'


def test_server_entry_applies_to_one_server_only(write: Write, load_files: LoadConfig) -> None:
    write("mcp_servers.json", SERVERS)
    write(
        "tool_configs/time.yaml",
        """
        tools:
          - server: time
            allow: [now, zones]
            prefix: t_
            parse: hooks:All
            parse_tools: {now: hooks:Now}
            isolation: process
            warm: 2
            most: 5
        """,
    )
    servers = load_files().servers
    time, web = servers["time"], servers["web"]
    assert (time.server.isolation, time.server.warm, time.server.most) == ("process", 2, 5)
    offer = time.offer("now")
    assert offer is not None
    assert (offer.hook_for("now"), offer.hook_for("zones"), offer.prefix_for("time")) == (
        "hooks:Now",
        "hooks:All",
        "t_",
    )
    assert time.offer("other") is None
    rest = web.offer("anything")
    assert rest is not None
    assert (rest.owner, rest.prefix, web.server.isolation) == ("mcp_servers.json mcpServers.web", "", "shared")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", "all tools of server 'time' are offered by two entries"),
        (", allow: [a, b]", ", allow: [b]", "the tool 'b' of server 'time' is in two entries"),
        (", warm: 1", ", warm: 2, allow: [a]", "server 'time' has two values of `warm`"),
    ],
)
def test_conflicting_entries_of_a_server_are_both_named(
    first: str, second: str, expected: str, write: Write, load_errors: LoadErrors
) -> None:
    write("mcp_servers.json", SERVERS)
    write("tool_configs/t.yaml", f"tools: [{{server: time{first}}}, {{server: time{second}}}]")
    (message,) = load_errors()
    assert message.startswith(
        f"tool_configs/t.yaml:1: tools[1]: {expected}: one of tool_configs/t.yaml tools[0], one of"
    )


GSM8K = "interaction: [{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction}]"
UNKNOWN = """
tools:
  - {class_name: a.B, config: {own: 1}, tool_schema: {function: {name: b, parameters: {own: {}}, zz: 1}, zz: 1}}
  - {function: a:b, parameters: {own: 1}, result_limit: {chars: 5, zz: 1}}
  - {server: time, parse_tools: {own: a:B}}
  - {mcp: {mcp_servers_config_path: ../mcp_servers.json, zz: 1}, config: {own: 1}}
interaction: [{class_name: a.B, config: {own: 1}, media: {zz: 1}}]
"""
PLACES = ("tools[0].tool_schema.function", "tools[0].tool_schema", "tools[1].result_limit", "tools[3].mcp")
DISABLED = SERVERS.replace('"time": {', '"time": {"disabled": true, ')
MISTAKES: dict[str, tuple[dict[str, str], list[str]]] = {
    "keys that nothing has": (
        {"a.yaml": UNKNOWN},
        [f"{place}.zz: unknown key" for place in (*PLACES, "interaction[0].media")],
    ),
    "unknown servers": (
        {"a.yaml": "tools: [{server: tmie}, {server: database}]"},
        ["tools[0].server: there is no server 'tmie'\n  remedy: did you mean 'time'?", "known servers: time, web"],
    ),
    "a broken file of servers": (
        {"a.yaml": "tools: [{server: x}]", "../mcp_servers.json": '{"mcp_server": {}}'},
        ["mcpServers: is missing", "mcp_server: unknown key\n  remedy: did you mean `mcpServers`?"],
    ),
    "a disabled server": (
        {"a.yaml": "tools: [{server: time}, {server: t}]", "../mcp_servers.json": DISABLED},
        ["there is no server 't'"],
    ),
    "two servers with one name": (
        {"a.yaml": "tools: [{mcp: {mcp_servers_config_path: ../b.json}}]", "../b.json": DISABLED},
        ["two servers are named 'web': one of mcp_servers.json mcpServers.web, one of b.json mcpServers.web"],
    ),
    "no file of servers": (
        {"a.yaml": "tools: [{mcp: {mcp_servers_config_path: ./b.json}}]"},
        ["mcp.mcp_servers_config_path: there is no servers file tool_configs/b.json nor b.json\n"],
    ),
    "two tools with one name": (
        {"a.yaml": "tools: [{function: a:b, name: add}]", "b.yml": "tools: [{function: a:c, name: dd, prefix: a}]"},
        ["b.yml:1: tools[0]: two tools are named 'add': one of tool_configs/a.yaml tools[0], one of tool_configs/b.y"],
    ),
    "two interactions with one name": (
        {"a.yaml": GSM8K, "b.yaml": "interaction: {class_name: my.Checker, name: gsm8k}"},
        ["b.yaml:1: interaction[0]: two interactions are named 'gsm8k': one of tool_configs/a.yaml interaction[0]"],
    ),
    "a single interaction": (
        {"a.yaml": "interaction: {class_name: my.Own, confg: {}}"},
        ["tool_configs/a.yaml:1: interaction.confg: unknown key"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_between_files_name_their_places(mistake: str, write: Write, load_errors: LoadErrors) -> None:
    files, expected = MISTAKES[mistake]
    for name, text in {"../mcp_servers.json": SERVERS, **files, ".hidden.yaml": "[", "notes.md": "["}.items():
        write(f"tool_configs/{name}", text)
    messages = load_errors()
    assert all(words in message for words, message in zip(expected, messages, strict=True)), messages


def test_a_copy_of_settings_cannot_have_a_name_that_they_lack() -> None:
    with pytest.raises(AttributeError, match="ResultLimit has no characters_at_most"):
        ResultLimit(chars=5).model_copy(update={"characters_at_most": 5})


def test_entry_that_moved_in_its_file_is_equal(write: Write, load_files: LoadConfig) -> None:
    write("tool_configs/a.yaml", "tools: [{function: c:d}, {function: a:b}, {function: a:b}]")
    _, before, after = load_files().tools
    assert before == after and before.owner != after.owner


def test_errors_of_all_files_are_reported_together(write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", '{"mcpServers": {"x": {"comand": "y"}, "two": {"command": "a", "url": "http://b"}}}')
    write(
        "tool_configs/a.yaml",
        """
        tools:
          - function: maths:add
            timeout: 5
          - server: x
            timeout_s: soon
          - function: maths
            retries: 11
          - fnction: maths:add
          - name: lost
          - function: a:b
            allow: [c]
          - just a text
        """,
    )
    write("tool_configs/b.yaml", "interactions: []")
    write("tool_configs/c.yaml", "- tools")
    errors = [message.removeprefix("tool_configs/").replace("\n  remedy", "; remedy") for message in load_errors()]
    assert errors[:11] == [
        "a.yaml:4: tools[0].timeout: unknown key; remedy: did you mean `timeout_s`?",
        "a.yaml:6: tools[1].timeout_s: expected a valid number, found 'soon'; remedy: correct `timeout_s`",
        "a.yaml:8: tools[2].retries: expected less than or equal to 10, found 11; remedy: correct `retries`",
        "a.yaml:7: tools[2].function: expected a name, found 'maths'; remedy: write `package.module:name`",
        "a.yaml:9: tools[3]: is not a tool; remedy: did you mean `function` instead of `fnction`?",
        "a.yaml:10: tools[4]: is not a tool; remedy: give it one of `class_name`, `function`, `server`, `mcp`",
        "a.yaml:12: tools[5].allow: unknown key; remedy: `allow` goes with `server` or `mcp`; remove it here",
        "a.yaml:13: tools[6]: is not a tool; remedy: give it one of `class_name`, `function`, `server`, `mcp`",
        "b.yaml:1: interactions: unknown key; remedy: did you mean `interaction`?",
        "c.yaml: expected a mapping, found a list; remedy: write `key: value` pairs there",
        "mcp_servers.json:1: mcpServers.x.comand: unknown key; remedy: did you mean `command`?",
    ]
    assert len(errors) == 12 and errors[11].startswith("mcp_servers.json:1: mcpServers.two: ")


def test_unknown_tool_is_reported_once_all_servers_have_listed(write: Write, load_files: LoadConfig) -> None:
    write("mcp_servers.json", SERVERS)
    write(
        "tool_configs/t.yaml",
        """
        tools:
          - mcp: {mcp_servers_config_path: ../mcp_servers.json, tool_selected_list: [now, time_zones, serach]}
        """,
    )
    entries = load_files().servers.values()
    assert find_unknown_tools(entries, {"time": ["now", "zones"]}) == []
    (error,) = find_unknown_tools(entries, {"time": ["now", "zones"], "web": ["search"]})
    assert error.problem == "time and web has no tool 'serach'"
    assert error.remedy == "did you mean `search`?"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("allow: [a], mcp: {mcp_servers_config_path: s.json, tool_selected_list: [a]}", "both select tools"),
        ("class_name: my.Hook, parse: my.Hook, mcp: {mcp_servers_config_path: s.json}", "both name a parse hook"),
    ],
)
def test_redundant_settings_are_refused(keys: str, expected: str, write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/m.yaml", f"tools: [{{{keys}}}]")
    (message,) = load_errors()
    assert message.startswith("tool_configs/m.yaml:1: tools[0]: ")
    assert expected in message
