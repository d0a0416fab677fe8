"""Tests of tool_configs/*.yaml in our own format, and of errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.configured_server import find_unknown_tools
from gateway.config.entries import FunctionEntry
from gateway.config.load import load_config
from gateway.errors import ConfigErrors
from tests.config.conftest import LoadConfig, LoadErrors
from tests.conftest import Write

SERVERS = '{"mcpServers": {"time": {"command": "time-server"}, "web": {"url": "http://127.0.0.1:9/mcp"}}}'


def test_function_entry_accepts_all_limits(write: Write, load_files: LoadConfig) -> None:
    write(
        "tool_configs/maths.yaml",
        """
        tools:
          - function: maths:add
            name: plus
            description: Adds.
            parameters: {type: object, properties: {a: true}}
            prefix: my_
            timeout_s: 2
            at_once: 3
            queue_limit: 0
            rate_per_s: 0.5
            retries: 0
            result_limit: 100
            pure: true
        """,
    )
    (entry,) = load_files().tools
    assert isinstance(entry, FunctionEntry)
    assert (entry.function, entry.declared_name, entry.description) == ("maths:add", "my_plus", "Adds.")
    assert (entry.timeout_s, entry.at_once, entry.queue_limit) == (2.0, 3, 0)
    assert (entry.rate_per_s, entry.retries, entry.pure) == (0.5, 0, True)
    assert entry.result_limit is not None
    assert (entry.result_limit.chars, entry.result_limit.side) == (100, "middle")


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


def test_tool_belongs_to_the_entry_that_names_it(write: Write, load_files: LoadConfig) -> None:
    write("mcp_servers.json", SERVERS)
    write("tool_configs/t.yaml", "tools: [{server: time, timeout_s: 1}, {server: time, allow: [slow], timeout_s: 9}]")
    entry = load_files().servers["time"]
    slow, second = entry.offer("slow"), entry.offer("now")
    assert slow is not None
    assert second is not None
    assert (slow.timeout_s, second.timeout_s) == (9.0, 1.0)


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


def test_process_isolation_needs_a_command(write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", SERVERS)
    write("tool_configs/w.yaml", "tools: [{server: web, isolation: process}]")
    (message,) = load_errors()
    assert message.startswith(
        "tool_configs/w.yaml:1: tools[0]: server 'web': `isolation: process` needs a server with `command`"
    )


def test_unknown_server_suggests_a_similar_name(write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", SERVERS)
    write("tool_configs/t.yaml", "tools: [{server: tmie}, {server: database}]")
    near, far = load_errors()
    assert near == "tool_configs/t.yaml:1: tools[0].server: there is no server 'tmie'\n  remedy: did you mean 'time'?"
    assert far.endswith("remedy: known servers: time, web")


def test_broken_servers_file_causes_no_unknown_server_errors(write: Write, load_errors: LoadErrors) -> None:
    write("mcp_servers.json", '{"mcpServers": {"time": {"command": "x", "isolation": "both"}}}')
    write("tool_configs/t.yaml", "tools: [{server: time}]")
    (message,) = load_errors()
    assert message == (
        "mcp_servers.json:1: mcpServers.time.isolation: expected 'shared', 'session', 'process' or 'sandbox', found "
        "'both'\n  remedy: write 'shared', 'session', 'process' or 'sandbox'"
    )


def test_duplicate_tool_name_names_both_owners(write: Write, load_errors: LoadErrors) -> None:
    schema = "tool_schema: {function: {name: add}}"
    write("tool_configs/a.yaml", f"tools: [{{class_name: my.Add, {schema}}}]")
    write("tool_configs/b.yaml", "tools: [{function: my:plus, name: add}, {function: my:plus, name: dd, prefix: a}]")
    messages = load_errors()
    assert len(messages) == 2
    assert "two tools are named 'add': one of tool_configs/a.yaml tools[0], one of tool_configs/b.yaml" in messages[0]
    assert "`prefix`" in messages[0]


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
    expected = [message.removeprefix("tool_configs/") for message in load_errors()]
    assert [message.replace("\n  remedy", "; remedy") for message in expected] == [
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
        "mcp_servers.json:1: mcpServers.two: a server needs either `command` or `url`; "
        "remedy: give exactly one of the two",
    ]


def test_infinite_deadline_is_refused(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/a.yaml", "tools: [{function: a:b, timeout_s: .inf}]")
    (message,) = load_errors()
    assert "tools[0].timeout_s: expected a finite number" in message


def test_hidden_and_non_yaml_files_are_ignored(write: Write, load_files: LoadConfig) -> None:
    write("tool_configs/.a.yaml", "broken: [")
    write("tool_configs/notes.md", "broken: [")
    write("tool_configs/b.yml", "tools: [{function: a:b}]")
    write("tool_configs/empty.yaml", "# nothing yet\n")
    assert [entry.owner for entry in load_files().tools] == ["tool_configs/b.yml tools[0]"]


def test_single_file_loads_like_a_folder(write: Write) -> None:
    file = write("any.yaml", "tools: [{function: a:b}]")
    assert len(load_config(file, None, {}).tools) == 1


def test_missing_file_is_named(write: Write, tmp_path: Path) -> None:
    write("x", "")
    with pytest.raises(ConfigErrors) as caught:
        load_config(tmp_path / "nowhere", tmp_path / "none.json", {})
    assert str(caught.value) == (
        "nowhere: there is no such folder\n"
        "  remedy: create the folder, or name another with --tools\n"
        "none.json: there is no such file\n"
        "  remedy: create it, or name another"
    )


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


def test_moved_entry_is_equal(write: Write, load_files: LoadConfig) -> None:
    write("tool_configs/a.yaml", "tools: [{function: a:b}]")
    (before,) = load_files().tools
    write("tool_configs/a.yaml", "tools: [{function: c:d}, {function: a:b}]")
    after = load_files().tools[1]
    assert after == before
    assert after.owner != before.owner


def test_error_location_of_a_single_interaction_has_no_index(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/i.yaml", "interaction: {class_name: my.Own, confg: {}, timeout_s: 0}")
    assert {message.partition("\n")[0] for message in load_errors()} == {
        "tool_configs/i.yaml:1: interaction.confg: unknown key",
        "tool_configs/i.yaml:1: interaction.timeout_s: expected greater than 0, found 0",
    }


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


def test_long_value_is_shortened_in_a_message(write: Write, load_errors: LoadErrors) -> None:
    write("tool_configs/m.yaml", f"tools: [{{function: a:b, timeout_s: {'x' * 500}}}]")
    (message,) = load_errors()
    assert "xxx...\n" in message
    assert len(message) < 250
