"""Servers whose results are too large for tasks, or whose tools cannot be offered: both are told with their reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from mtrl_plugins.task_maker import explore
from mtrl_plugins.task_maker.explore import Explorer
from mtrl_plugins.task_maker.server_sessions import CallResult, Dropped, ServerSession, open_server
from mtrl_plugins.task_maker.values import Value
from tests.plugins.task_maker.test_make_tasks import make, quick  # noqa: F401 - a fixture


def plain_server(folder: Path, *arguments: str) -> Path:
    """A servers file with the server `plain`."""
    program = str(Path(__file__).with_name("plain_server.py"))
    entry = {"command": sys.executable, "args": [program, *arguments], "isolation": "process"}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"plain": entry}}))
    return folder / "servers.json"


async def test_server_without_usable_tools_is_refused_with_their_reasons(tmp_path: Path) -> None:
    file = plain_server(tmp_path, "broken")
    with pytest.raises(ConfigError, match=r"offers no tools; look: .*none"):
        async with open_server(file, "plain", None, ()):
            pass
    with pytest.raises(ConfigError, match=r"--tool: the tool 'look' cannot be offered: .*none"):
        async with open_server(file, "plain", None, ("look",)):
            pass


async def test_tools_with_results_that_are_too_large_are_left_out_after_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plain_server(tmp_path, "large", "3000000", "${MTRL_ROLLOUT_DIR}")
    called: list[str] = []
    call = ServerSession.call

    async def count(self: ServerSession, name: str, arguments: Mapping[str, Any]) -> CallResult:
        called.append(name)
        return await call(self, name, arguments)

    monkeypatch.setattr(ServerSession, "call", count)
    with pytest.raises(ConfigError, match=r"the results of all tools have more than 100,000 characters: look"):
        await make(4, file=file, name="plain")
    assert called == ["look"] * explore.MOST_LARGE
    async with open_server(file, "plain", None, ()) as server:
        explorer = Explorer(server, 0, known={"": []})
        with pytest.raises(Dropped, match="a result has more than 100,000 characters"):
            await explorer.explore(0, 1, "train")


async def test_tasks_that_were_made_keep_no_results() -> None:
    made, _ = await make(2)
    assert all(step.result is None and len(step.text) <= 2000 for task in made for step in task.chain.steps)


def test_message_of_an_error_is_not_asked_for() -> None:
    for path, is_plain in ((("Error - EISDIR",), False), (("rows", 0, "code"), True)):
        assert explore._is_plain(Value("illegal operation", "code", 0, path)) is is_plain
