"""Tasks made from the server of shelves and from one without state: executed, graded, and equal for equal seeds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.errors import ConfigError
from gateway.state import state_hash
from gateway.types import Outcome, ToolCall
from tests.waiting import PATIENCE_S
from trainer.data.tasks import load_rows
from trainer.demo.shelves.shelves_demo import FILES, FOLDER
from trainer.setup import open_server_gateway
from trainer.task_maker import explore, make_tasks, random_policy, server_sessions
from trainer.task_maker.make_tasks import MadeTask, MakeSettings, Report, TaskMaker
from trainer.task_maker.open_server import open_server, read_examples
from trainer.task_maker.output import held_out_file, write_tasks
from trainer.task_maker.server_sessions import ServerSession

SERVERS = FOLDER / "servers.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short survey, and few random calls."""
    monkeypatch.setattr(explore, "SURVEY_SESSIONS", 3)
    monkeypatch.setattr(random_policy, "RANDOM_CALLS", 4)


async def make(n: int, seed: int = 0, file: Path = SERVERS, name: str = "shelves") -> tuple[list[MadeTask], Report]:
    settings = MakeSettings(n, levels=(1, 2), held_out=0.5, seed=seed)
    with anyio.fail_after(PATIENCE_S):
        async with open_server(file, name, None, ()) as server:
            maker = TaskMaker(server, settings, None, lambda *_: None)
            return await maker.make(), maker.report


async def test_same_seed_makes_the_same_tasks_and_splits_share_no_value() -> None:
    (made, report), (again, _) = await make(4), await make(4)
    assert made == again and len(made) == report.total == 4
    by_split = [{value for task in made if task.chain.split == split for value in task.chain.values}
                for split in ("train", "held_out")]  # fmt: skip
    assert all(by_split) and not by_split[0] & by_split[1] and report.shared_values == 0
    assert set(report.kept.values()) == {1} and {task.chain.level for task in made} == {1, 2}


@asynccontextmanager
async def shipped_rows(split: Any, count: int) -> AsyncIterator[tuple[Any, Sequence[Any]]]:
    with anyio.fail_after(PATIENCE_S):
        async with open_server_gateway(SERVERS, "shelves") as opened:
            yield opened.gateway, load_rows(FOLDER / FILES[split])[:count]


@pytest.mark.parametrize("split", ["train", "held_out"])
async def test_gold_calls_of_shipped_rows_lead_to_their_answers_and_end_states(split: str) -> None:
    async with shipped_rows(split, 4) as (gateway, tasks):
        for task in tasks:
            async with gateway.open(task.session_task) as session:
                for call in task.columns["gold"]:
                    result = await session.call(ToolCall("1", call["tool"], json.dumps(call["arguments"])))
                    assert result.outcome is Outcome.OK and result.text == call["result"]
                await session.finish()
            assert dict(session.states) == task.columns.get("end_state", session.states)
            assert task.truth is None or task.truth in task.columns["gold"][-1]["result"]


def test_shipped_splits_share_no_value() -> None:
    values = []
    for file in FILES.values():
        rows = [json.loads(line) for line in (FOLDER / file).read_text().splitlines()]
        told = {value for row in rows for call in row["gold"] for value in map(str, call["arguments"].values())}
        values.append(told | {row["ground_truth"] for row in rows if "ground_truth" in row})
    assert len(values[0]) > 100 and not values[0] & values[1]


async def test_files_that_are_written_load_as_data_and_as_a_run_file(tmp_path: Path) -> None:
    from trainer.cli.run_file import load_settings
    from trainer.train.settings import TrainSettings

    with anyio.fail_after(PATIENCE_S):
        async with open_server(SERVERS, "shelves", None, ("move",)) as server:
            maker = TaskMaker(server, MakeSettings(4, (1,), 0.5), None, lambda *_: None)
            files = write_tasks(tmp_path / "made.jsonl", await maker.make(), server, SERVERS)
    assert files == [tmp_path / "made.jsonl", held_out_file(tmp_path / "made.jsonl"), tmp_path / "made.yaml"]
    tasks = [*load_rows(files[0]), *load_rows(files[1])]
    assert len(tasks) == 4 and {task.session_task.tools for task in tasks} == {("move",)}
    settings = load_settings(TrainSettings, files[2], {"model": str(tmp_path)})
    assert settings.data == str(files[0]) and settings.mcp == SERVERS


def write_servers(folder: Path, **changes: Any) -> Path:
    entry = json.loads(SERVERS.read_text())["mcpServers"]["shelves"] | {"cwd": str(FOLDER)}
    entry = {key: value for key, value in (entry | changes).items() if value is not None}
    if "state" in entry:
        entry["state"] = str(FOLDER / "state")
    file = folder / "mcp_servers.json"
    file.write_text(json.dumps({"mcpServers": {"shelves": entry}}))
    return file


@pytest.mark.parametrize(
    ("changes", "name", "problem"),
    [
        ({}, "shelfs", "there is no server 'shelfs'"),
        ({"isolation": "shared", "state": None, "args": ["-I", "-S", "shelf_server.py", "state"]}, "shelves", "reset"),
        ({"state": None}, "shelves", "is down"),
    ],
)
async def test_server_that_cannot_be_used_is_refused(
    tmp_path: Path, changes: dict[str, Any], name: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        await make(2, file=write_servers(tmp_path, **changes), name=name)


async def test_unknown_tools_and_broken_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tool 'mvoe'"):
        async with open_server(SERVERS, "shelves", None, ("mvoe",)):
            pass
    (tmp_path / "examples.jsonl").write_text('{"tool": "move", "arguments": {"box": 1}}\n\n{"tool": 3}\n')
    with pytest.raises(ConfigError, match="is no example") as raised:
        read_examples(tmp_path / "examples.jsonl")
    assert raised.value.file == f"{tmp_path / 'examples.jsonl'}:3"


async def test_tool_that_hangs_costs_its_call_and_not_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging:
        async def call(self, call: object) -> None:
            await anyio.sleep_forever()

    monkeypatch.setattr(server_sessions, "CALL_S", 0.01)
    assert not (await ServerSession(Hanging()).call("look", {})).ok


FAULTY_SERVER = """
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    method, result = message.get("method"), {}
    if method == "initialize":
        info = {"name": "faulty", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        schema = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
        result = {"tools": [{"name": name, "inputSchema": schema} for name in sys.argv[2:]]}
    if method == "tools/call" and message["params"]["name"] == "end":
        os._exit(1)
    if method == "tools/call":
        with open(os.path.join(sys.argv[1], "keys"), "a") as file:
            file.write(message["params"]["arguments"]["key"])
            file.write("x" * 100_000 * (message["params"]["name"] == "fill"))
        result = {"content": [{"type": "text", "text": "ok"}]}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def write_faulty_server(folder: Path, *tools: str) -> Path:
    (folder / "faulty.py").write_text(FAULTY_SERVER)
    return write_servers(
        folder, args=["-I", "-S", str(folder / "faulty.py"), "${MTRL_ROLLOUT_DIR}", *tools], state=None
    )


async def require_dropped(folder: Path, tool: str, reason: str) -> None:
    """Tasks are made of the tool that works, and chains with the faulty one are counted."""
    made, report = await make(4, file=write_faulty_server(folder, "write", tool))
    assert {step.tool for task in made for step in task.chain.steps} == {"write"} and report.total == 4
    assert report.dropped[reason] > 0


async def test_calls_that_end_the_server_cost_their_chain_and_are_counted(tmp_path: Path) -> None:
    await require_dropped(tmp_path, "end", "a call ended the server")


async def test_states_too_large_to_compare_cost_their_chain_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_hash, "MAX_BYTES", 50_000)
    await require_dropped(tmp_path, "fill", "the state is too large to compare")


async def test_server_that_every_call_ends_makes_no_task_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_tasks, "MIN_ATTEMPTS", 8)
    monkeypatch.setattr(make_tasks, "ATTEMPTS_PER_TASK", 4)
    with pytest.raises(ConfigError, match="a call ended the server"):
        await make(2, file=write_faulty_server(tmp_path, "end"))
