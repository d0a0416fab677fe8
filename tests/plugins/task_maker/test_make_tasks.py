"""Tasks made from the server of shelves and from one without state: executed, graded, and equal for equal seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from gateway.errors import ConfigError
from gateway.types import ToolSpec
from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from mtrl_plugins.task_maker import explore, make_tasks, server_sessions
from mtrl_plugins.task_maker.chain import Chain, Step, check_again, execute, find_shorter
from mtrl_plugins.task_maker.explore import Explorer, KnowsNothing, RandomTry
from mtrl_plugins.task_maker.make_tasks import MadeTask, MakeSettings, Report, TaskMaker, count_shared_values
from mtrl_plugins.task_maker.output import held_out_file, write_tasks
from mtrl_plugins.task_maker.server_sessions import (
    CallResult,
    Dropped,
    Server,
    ServerSession,
    describe_server,
    open_server,
    read_examples,
)
from mtrl_plugins.task_maker.values import Value, split_of
from tests.waiting import PATIENCE_S
from trainer.cli import app
from trainer.data.tasks import load_rows

SERVERS = FOLDER / "servers.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short survey, and few random calls."""
    monkeypatch.setattr(explore, "SURVEY_SESSIONS", 3)
    monkeypatch.setattr(explore, "RANDOM_CALLS", 4)


async def make(n: int, seed: int = 0, file: Path = SERVERS, name: str = "shelves") -> tuple[list[MadeTask], Report]:
    settings = MakeSettings(n, levels=(1, 2), held_out=0.5, seed=seed)
    with anyio.fail_after(PATIENCE_S):
        async with open_server(file, name, None, ()) as server:
            maker = TaskMaker(server, settings, lambda *_: None)
            await maker.make()
            return maker.made, maker.report


async def test_same_seed_makes_the_same_tasks_and_splits_share_no_value() -> None:
    (made, report), (again, _) = await make(4), await make(4)
    assert made == again and len(made) == report.total == 4
    by_split = [{value for task in made if task.chain.split == split for value in task.chain.values}
                for split in ("train", "held_out")]  # fmt: skip
    assert all(by_split) and not by_split[0] & by_split[1] and count_shared_values(made) == 0
    assert set(report.kept.values()) == {1} and {task.chain.level for task in made} == {1, 2}


async def test_files_that_are_written_load_as_data_and_as_a_run_file(tmp_path: Path) -> None:
    from trainer.cli.run_file import load_settings
    from trainer.train.settings import TrainSettings

    with anyio.fail_after(PATIENCE_S):
        async with open_server(SERVERS, "shelves", None, ("move",)) as server:
            maker = TaskMaker(server, MakeSettings(4, (1,), 0.5), lambda *_: None)
            await maker.make()
            files = write_tasks(tmp_path / "made.jsonl", maker.made, server, SERVERS)
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


async def test_server_whose_tools_tell_nothing_makes_no_task_and_says_what_to_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_tasks, "MOST_WITHOUT", 8)
    with pytest.raises(ConfigError, match="too few of its calls worked") as raised:
        await make(2, file=write_faulty_server(tmp_path, "look"))
    assert "give it a `state` with something in it" in str(raised.value.remedy)


async def test_tools_that_only_read_make_tasks_with_answers() -> None:
    with anyio.fail_after(PATIENCE_S):
        async with open_server(SERVERS, "shelves", None, ("shelf_of",)) as server:
            maker = TaskMaker(server, MakeSettings(3, (1,), 0), lambda *_: None)
            await maker.make()
    assert maker.report.graded == {"answer": 3} and maker.describe_limit() == ""


async def test_server_without_more_tasks_ends_the_command_which_says_what_is_missing_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only tool does the same whatever its arguments, so that a random call solves any task of level 1."""
    monkeypatch.setattr(make_tasks, "MOST_WITHOUT", 16)
    with anyio.fail_after(PATIENCE_S):
        async with open_server(write_faulty_server(tmp_path, "same"), "shelves", None, ()) as server:
            maker = TaskMaker(server, MakeSettings(2, (1, 2), 0), lambda *_: None)
            await maker.make()
    assert [task.chain.level for task in maker.made] == [2]
    limit = maker.describe_limit()
    assert limit.startswith("1 of 2 tasks: the last 16 chains made no new task. Missing: 1 of level 1, training.")
    assert "Most chains were dropped because: " in limit and "solved by one random call (" in limit


async def test_servers_are_described_with_what_limits_their_tasks(tmp_path: Path) -> None:
    described = []
    args = ["-I", "-S", str(tmp_path / "faulty.py")]
    for changes in ({}, {"args": [*args, str(tmp_path), "write"]}, {"args": [*args, "${MTRL_ROLLOUT_DIR}", "write"]}):
        write_faulty_server(tmp_path)
        file = write_servers(tmp_path, **changes, **({"state": None} if changes else {}))
        async with open_server(file, "shelves", None, ()) as server:
            described.append(describe_server(server))
    assert described[0] == "server shelves: 4 tools, 1 prepared state"
    assert "only answers are graded" in described[1] and "an empty folder, since" in described[2]


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
import json, os, sys, time
for line in sys.stdin:
    message = json.loads(line)
    method, result = message.get("method"), {}
    if method == "initialize":
        info = {"name": "faulty", "version": "1"}
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        key = {"$ref": "#/$defs/none"} if "broken" in sys.argv else {"type": "string"}
        schema = {"type": "object", "properties": {"key": key}, "required": ["key"]}
        result = {"tools": [{"name": name, "inputSchema": schema} for name in sys.argv[2:]]}
    if method == "tools/call":
        name, key = message["params"]["name"], message["params"]["arguments"]["key"]
        if name == "end":
            os._exit(1)
        written = {"write": key, "fill": "x" * 100_000, "stamp": str(time.time_ns()), "same": "again"}.get(name, "")
        if written:
            with open(os.path.join(sys.argv[1], "keys"), "a") as file:
                file.write(written)
        texts = {"clock": {"at": time.time_ns()}, "large": {"code": key, "more": "x" * 200_000}}
        text = json.dumps(texts[name]) if name in texts else "ok"
        result = {"content": [{"type": "text", "text": text}]}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def write_faulty_server(folder: Path, *tools: str) -> Path:
    (folder / "faulty.py").write_text(FAULTY_SERVER)
    return write_servers(
        folder, args=["-I", "-S", str(folder / "faulty.py"), "${MTRL_ROLLOUT_DIR}", *tools], state=None
    )


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("clock", "its results differ when it is executed again"),
        ("stamp", "its end state differs when it is executed again"),
        ("end", "a call ended the server"),
    ],
)
async def test_chains_that_cannot_be_repeated_are_dropped_and_counted(tmp_path: Path, tool: str, reason: str) -> None:
    """Tasks are made of the tool that works."""
    made, report = await make(4, file=write_faulty_server(tmp_path, "write", tool))
    assert {step.tool for task in made for step in task.chain.steps} == {"write"} and report.total == 4
    assert report.dropped[reason] > 0


def value_of(split: str) -> int:
    return next(number for number in range(100, 999) if split_of(number) == split)


def test_chains_with_a_value_of_the_other_split_are_dropped() -> None:
    """A parameter whose few values all belong to one split has none for the other."""
    server = Server(None, "one", {"move": ToolSpec("move")}, has_folder=True)
    maker = TaskMaker(server, MakeSettings(4, (1,), 0.5), lambda *_: None)
    for split, other in (("train", "held_out"), ("held_out", "train")):
        step = Step("move", {"box": value_of(other)}, {}, (value_of(other),), writes=True)
        with pytest.raises(Dropped, match="belongs to the other split"):
            maker._make_task(Chain((step,), split, end_state={"one": "sha256:1"}))


def test_values_that_the_policy_does_not_read_are_no_answers() -> None:
    """A structured result may hold more than its text, which is what the policy is given."""
    explorer = Explorer(Server(None, "one", {"find": ToolSpec("find")}, has_folder=True), 0)
    seen, hidden = "Ann \u00e9", value_of("train")
    step = Step("find", {}, {}, (), {"name": seen, "key": hidden}, text=json.dumps({"name": seen}))
    assert [value.text for value in explorer._answers([step], split_of(seen))] == [seen]
    assert hidden not in [value.value for value in explorer._answers([step], "train")]


def test_questions_ask_for_plain_values_among_the_first_of_a_list() -> None:
    explorer = Explorer(Server(None, "one", {"list": ToolSpec("list")}, has_folder=True), 0)
    names = ["a.txt    24 B", "docs: Error - is a directory", *(f"name{number}" for number in range(40))]
    step = Step("list", {}, {}, (), {"names": names}, text=json.dumps(names))
    asked = {value.text for split in ("train", "held_out") for value in explorer._answers([step], split)}
    assert asked == set(names[2 : explore.MAX_ITEM])


async def test_calls_that_are_not_needed_are_left_out(tmp_path: Path) -> None:
    """Moving a box twice does what the second move does, which is then the chain."""
    moves = tuple(
        Step("move", {"box": 100, "shelf": shelf}, {}, (100, shelf), {"done": 1}, True) for shelf in (555, 666)
    )
    with anyio.fail_after(PATIENCE_S):
        async with open_server(SERVERS, "shelves", None, ()) as server:
            _, end = await execute(server, Chain(moves, "train"))
            shorter = await find_shorter(server, Chain(moves, "train", end_state=end))
            assert shorter is not None and [dict(step.arguments) for step in shorter.steps] == [
                {"box": 100, "shelf": 666}
            ]
            await check_again(server, shorter)
            assert await find_shorter(server, shorter) is None
            with pytest.raises(Dropped, match="end state differs"):
                await check_again(server, Chain(moves[:1], "train", end_state=end))


async def test_calls_that_lead_back_to_an_earlier_state_are_no_part_of_a_chain() -> None:
    """A session whose state is the shelf of a box: the explorer moves it away and back before it moves it on."""
    calls = iter([1, 0, 2, 3])

    class OneBox:
        shelf = 0

        async def call(self, tool: str, arguments: object) -> CallResult:
            self.shelf = next(calls)
            return CallResult(True, {"done": 1}, "")

        async def state(self) -> dict[str, str]:
            return {"box": str(self.shelf)}

    explorer = Explorer(Server(None, "box", {"move": ToolSpec("move")}, has_folder=True), 0, known={"": []})
    session: Any = OneBox()
    steps, end = await explorer._walk(session, "", 2, "train", Random(0))
    assert (len(steps), end) == (2, {"box": "3"})


async def test_server_without_usable_tools_is_refused_with_their_reasons(tmp_path: Path) -> None:
    file = write_faulty_server(tmp_path, "broken")
    with pytest.raises(ConfigError, match=r"offers no tools; broken: .*none"):
        async with open_server(file, "shelves", None, ()):
            pass
    with pytest.raises(ConfigError, match=r"--tool: the tool 'broken' cannot be offered: .*none"):
        async with open_server(file, "shelves", None, ("broken",)):
            pass


async def test_tools_with_results_that_are_too_large_are_left_out_after_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_faulty_server(tmp_path, "large")
    called: list[str] = []
    call = ServerSession.call

    async def count(self: ServerSession, name: str, arguments: Mapping[str, Any]) -> CallResult:
        called.append(name)
        return await call(self, name, arguments)

    monkeypatch.setattr(ServerSession, "call", count)
    with pytest.raises(ConfigError, match=r"the results of all tools have more than 100,000 characters: large"):
        await make(4, file=file)
    assert called == ["large"] * explore.MOST_LARGE
    async with open_server(file, "shelves", None, ()) as server:
        explorer = Explorer(server, 0, known={"": []})
        with pytest.raises(Dropped, match="a result has more than 100,000 characters"):
            await explorer.explore(0, 1, "train")


async def test_tasks_that_were_made_keep_no_results() -> None:
    made, _ = await make(2)
    assert all(step.result is None and len(step.text) <= 2000 for task in made for step in task.chain.steps)


def test_message_of_an_error_is_not_asked_for() -> None:
    for path, is_plain in ((("Error - EISDIR",), False), (("rows", 0, "code"), True)):
        assert explore._is_plain(Value("illegal operation", "code", 0, path)) is is_plain


def test_policies_that_know_nothing_are_held_against_state_and_answer() -> None:
    untouched, changed = {"s": "sha256:0"}, {"s": "sha256:1"}
    knows_nothing = KnowsNothing({"": untouched}, {"": (RandomTry(changed, "Ann"),)})
    step, answer = Step("find", {}, {}, ()), Value("ANN", "name")
    other = Value("Bob", "name")
    problems = {
        "solved by doing nothing": Chain((step,), "train", end_state=untouched),
        "solved by one random call": Chain((step,), "train", answer=answer, end_state=changed),
        "one random call leaves its end state": Chain((step,), "train", answer=other, end_state=changed),
    }
    assert {problem: knows_nothing.find_problem(chain) for problem, chain in problems.items()} == {
        problem: problem for problem in problems
    }
    assert knows_nothing.find_problem(Chain((step,), "train", answer=answer, end_state=untouched)) is None
    assert knows_nothing.find_problem(Chain((step,), "train", answer=other)) is None
    assert knows_nothing.find_problem(Chain((step,), "train", answer=answer)) == "solved by one random call"


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["make-tasks", "--mcp", str(FOLDER / "servers.json"), *words])
    return done.exit_code, done.output


def test_command_writes_tasks_and_prints_a_report(tmp_path: Path) -> None:
    out = tmp_path / "tasks.jsonl"
    code, text = run("--server", "shelves", "--n", "3", "--levels", "1", "--out", str(out))
    assert code == 0, text
    assert "3 tasks of the server `shelves`" in text and "| level (calls) | training | held out |" in text
    assert "mtrl-train --config" in text.replace("\n", " ") and len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--server", "shelves", "--levels", "one"), "--levels"),
        (("--server", "shelves", "--state", "other"), "no state 'other' remedy: give the server a folder of them"),
        (("--server", "shelves", "--n", "0"), "--n"),
    ],
)
def test_mistakes_are_told_with_their_option(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    code, text = run(*words, "--out", str(tmp_path / "tasks.jsonl"))
    assert code != 0 and problem in " ".join(text.split()) and "Traceback" not in text


def test_files_that_exist_are_refused_before_the_server_starts(tmp_path: Path) -> None:
    (tmp_path / "tasks.held_out.jsonl").write_text("mine")
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks.jsonl"))
    assert code == 2 and "tasks.held_out.jsonl" in text.replace("\n", "") and "already exists" in text
    assert (tmp_path / "tasks.held_out.jsonl").read_text() == "mine" and "server shelves" not in text
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks.yaml"))
    assert code == 2 and "name it tasks.jsonl" in text


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped; the tasks so far are in"),
        (ConfigError("the server cannot be used: gone", remedy="correct its entry"), 2, "the server cannot be used"),
    ],
)
def test_tasks_made_so_far_are_written_when_the_command_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    """By a user's Ctrl-C, or as a server is gone, in the middle of the work."""
    settle = TaskMaker._settle

    def settle_and_stop(self: TaskMaker, found: Any) -> None:
        settle(self, found)
        if self.made:
            raise error

    monkeypatch.setattr(TaskMaker, "_settle", settle_and_stop)
    out = tmp_path / "tasks.jsonl"
    ended, text = run("--server", "shelves", "--n", "40", "--levels", "1", "--held-out", "0", "--out", str(out))
    assert ended == code and words in " ".join(text.split())
    assert len(out.read_text().splitlines()) == 1 and "evaluation" not in out.with_suffix(".yaml").read_text()
    assert not out.with_name("tasks.held_out.jsonl").exists()
    assert "1 of 40 tasks: it was stopped." in " ".join(text.split())


def test_command_stopped_before_the_first_task_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explore.Explorer, "survey", stop)
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks.jsonl"))
    assert code == 130 and "there are no tasks yet" in text and not list(tmp_path.iterdir())
