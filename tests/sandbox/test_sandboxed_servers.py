"""MCP servers with `isolation: sandbox`: they serve as others do, and see only what is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.build import build_plan
from gateway.errors import ConfigError
from gateway.sandbox import sandboxed_command
from gateway.types import Outcome, Task, ToolCall
from tests.conftest import Write
from tests.mcp_client.test_rollout_folder import call, find_folder, notes_toolset
from tests.waiting import wait_until


async def test_each_rollout_has_a_server_that_writes_to_its_folder_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("kept")
    async with notes_toolset(isolation="sandbox") as server:
        async with server.open(Task("a")) as first, server.open(Task("b")) as second:
            await call(first, "write", text="only of a")
            assert (await call(first, "read"), await call(second, "read")) == ("only of a", "nothing")
            folders = [await find_folder(first), await find_folder(second)]
            for target in (folders[0] / "note.txt", tmp_path / "secret"):
                arguments = f'{{"path": "{target}", "text": "stolen"}}'
                written = await second.call(ToolCall("1", "write_to", arguments))
                assert written.outcome is Outcome.ERROR, written
            assert await call(first, "read") == "only of a"
        await wait_until(lambda: not any(folder.exists() for folder in folders))
    assert (tmp_path / "secret").read_text() == "kept"


async def test_server_is_down_with_the_reason_where_there_are_no_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxed_command, "find_problem", lambda: "bwrap is not installed\n  remedy: install it")
    async with notes_toolset(isolation="sandbox") as server:
        assert server.status.state == "down"
        assert "bwrap is not installed" in str(server.status.reason)


def test_the_key_of_another_client_changes_nothing(write: Write) -> None:
    file = write("servers.json", '{"mcpServers": {"a": {"command": "true", "sandbox": {"filesystem": {}}}}}')
    assert any("`sandbox` is ignored" in note for note in build_plan(None, file).config.notes)


def test_a_list_of_hosts_is_refused_by_name(write: Write) -> None:
    text = '{"mcpServers": {"a": {"command": "true", "isolation": "sandbox", "sandbox": {"network": ["pypi.org"]}}}}'
    with pytest.raises(ConfigError, match="a list of hosts is not supported"):
        build_plan(None, write("servers.json", text))
