"""The command `rollout`, in this process and as one with signals and children, and `replay` of what it recorded."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import trainer.collect_rollouts
from gateway.types import Image
from tests.trainer.cli_data import FEEDBACK_ROW, PLAIN_ROW, ROOT, SMALL_SETTINGS, TOOLS, RunCommand, write_rows
from tests.trainer.native_tools import native_tools
from tests.trainer.policy_scripts import render_calls
from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.scripted_train import make_scripted_engine
from trainer.cli import app
from trainer.engine.base import EngineError, Sampling
from trainer.ledger import Author, Entry, Ledger
from trainer.replay_rollouts import RecordedPolicy
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import Rollouts, RolloutWriter
from trainer.storage.run_status import RunStatus


def test_invalid_row_and_a_server_that_is_down_are_reported_before_the_run(run: RunCommand, model: Path) -> None:
    data, server = write_rows("wrong.jsonl", {"prompt": "?", "tools": ["ad"]}), {"command": "/nowhere/server"}
    words = ("rollout", "--tools", native_tools(), "--model", model, "--data", data, "--out", "r", "--record")
    words += ("--mcp", "servers.json")
    Path("servers.json").write_text(json.dumps({"mcpServers": {"gone": server}}))
    output = run(*words, code=2).output
    assert "wrong.jsonl:1: tools: the gateway offers no tool 'ad'" in output and "did you mean 'add'?" in output
    assert "server gone is down: cannot start '/nowhere/server'" in output
    assert not Path("r", "rollouts.jsonl").exists()
    write_rows("wrong.jsonl", PLAIN_ROW)
    Path("servers.json").write_text(json.dumps({"mcpServers": {"gone": {**server, "optional": True}}}))
    Path("small.yaml").write_text(json.dumps(SMALL_SETTINGS))
    run(*words, "--config", "small.yaml", "--n", 1)
    assert len(Rollouts(Path("r"))) == 1, "what the first attempt left does not stand in the way of the second"


def test_rollout_run_records_how_it_was_made(run: RunCommand, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[RunStatus] = []
    monkeypatch.setattr("trainer.storage.run_status.write_status", lambda _, status: statuses.append(status))
    Path("run.yaml").write_text(
        json.dumps(
            {
                **SMALL_SETTINGS,
                "tools": native_tools(),
                "model": str(model),
                "n": 3,
                "data": write_rows("t.jsonl", FEEDBACK_ROW, PLAIN_ROW),
            }
        )
    )
    output = run("rollout", "--config", "run.yaml", "--out", "runs/a", "--n", 2, "--seed", 5).output
    assert "2 tasks x 2 rollouts: torch engine, hermes parser" in output
    assert "4 of 4 rollouts" in output and "read it with: mtrl-train show runs/a" in output
    about = json.loads(Path("runs/a/run.json").read_text())
    assert about["engine"] == "torch" and about["settings"]["n"] == 2 and about["settings"]["seed"] == 5
    metrics = json.loads(Path("runs/a/metrics.json").read_text())
    rollouts = list(Rollouts(Path("runs/a")))
    assert metrics["rollouts/ended"] == len(rollouts) == 4
    assert metrics["tokens/written"] == sum(sum(rollout.ledger.mask) for rollout in rollouts)
    assert not any(rollout.stop.is_infrastructure for rollout in rollouts)
    assert not Path("runs/a/tape").exists()
    assert statuses[0] == replace(RunStatus(phase="collecting rollouts", total=4), phase_s=statuses[0].phase_s)
    output = run("rollout", "--config", "run.yaml", "--out", "runs/a", code=2).output
    assert "runs/a: there are rollouts already" in output and "--out" in output
    run("rollout", "--config", "run.yaml", "--out", "runs/b", "--n", 2, "--seed", 5)
    again = {(rollout.group, rollout.index): rollout.ledger.ids for rollout in Rollouts(Path("runs/b"))}
    assert again == {(rollout.group, rollout.index): rollout.ledger.ids for rollout in rollouts}


def test_run_without_scored_rollouts_fails_with_reasons(
    run: RunCommand, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("says.json").write_text("{}")
    monkeypatch.setattr(trainer.collect_rollouts, "make_engine", make_scripted_engine(Path("says.json")))
    data = write_rows("t.jsonl", {**PLAIN_ROW, "interaction_kwargs": {"name": "gsm8k"}})
    output = run(
        "rollout", "--tools", native_tools(), "--model", model, "--data", data, "--out", "r", "--n", 2, code=1
    ).output
    assert "6 x tool_failed: interaction 'gsm8k' could not start" in output
    assert "groups: 0 whole, 0 short of a rollout, 1 dropped" in output
    assert json.loads(Path("r/metrics.json").read_text())["groups/dropped"] == 1
    assert len(Rollouts(Path("r"))) == 6 and "saved in r" in output


SCRIPTED = Path(__file__).with_name("scripted_train.py")
LEAVE_S = 90.0

SLOW = '''
import time
import anyio

async def wait() -> str:
    """Never answers."""
    await anyio.sleep_forever()

def doze() -> str:
    """Holds a thread for a minute."""
    open("dozing", "w").close()
    time.sleep(60)
    return "awake"
'''


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """The shipped configuration, and tools that hold whoever calls them."""
    tools = tmp_path / "tool_configs"
    tools.mkdir()
    (tools / "slow.py").write_text(SLOW)
    (tools / "tools.yaml").write_text(
        "tools:\n  - function: slow:wait\n  - function: slow:doze\n  - server: notebook\n    isolation: process\n"
        "    warm: 1\n"
    )
    notebook = str(ROOT / "tool_configs/servers/notebook.py")
    servers = {"mcpServers": {"notebook": {"command": sys.executable, "args": [notebook]}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    return tmp_path


def saved(run: Path) -> int:
    return len(Rollouts(run)) if (run / "rollouts.jsonl").exists() else 0


def interrupted(process: subprocess.Popen[str]) -> str:
    """Sends SIGINT and returns the output; asserts that the process and its children end in time."""
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - began < LEAVE_S, output
    assert process.returncode == 130, output
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    return output


def rows(slow: Path, *ids: str) -> str:
    file = slow / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": id, "prompt": f"What of {id}?"}) + "\n" for id in ids))
    return str(file)


@pytest.mark.parametrize("tool", ["wait", "doze"])
def test_ctrl_c_closes_everything_and_saves_finished_rollouts(tool: str, slow: Path, model: Path) -> None:
    says = {
        "quick": [render_calls(("write_note", {"text": "kept"})), "done"],
        "held": [render_calls(("write_note", {"text": "lost"})), render_calls((tool, {}))],
    }
    (slow / "says.json").write_text(json.dumps(says))
    words = ("--model", str(model), "--data", rows(slow, "quick", "held"), "--out", "runs/a", "--n", "2", "--record")
    with run_process(slow, str(SCRIPTED), "says.json", "rollout", *words) as process:
        wait_until(lambda: saved(slow / "runs/a") == 2 and (tool == "wait" or (slow / "dozing").exists()), process)
        output = interrupted(process)
    assert "mtrl-train: stopped; rollouts that ended before are saved" in output and "Traceback" not in output
    rollouts = list(Rollouts(slow / "runs/a"))
    assert {rollout.task for rollout in rollouts} == {"quick"}
    assert {rollout.stop for rollout in rollouts} == {StopReason.DONE}
    assert json.loads((slow / "runs/a/metrics.json").read_text())["rollouts/ended"] >= 2
    assert (slow / "runs/a/tape/tape.jsonl").read_text().count("kept") >= 2


SAYS = {
    "both": [
        "I add and note.\n" + render_calls(("add", {"a": 3, "b": 4}), ("write_note", {"text": "the sum"})),
        render_calls(("read_notes", {"containing": "sum"})),
        "It is #### 8",
        "Then #### 7",
    ],
    "wrong": [render_calls(("nope", {})), "done"],
}
ROWS = ({**FEEDBACK_ROW, "id": "both"}, {**PLAIN_ROW, "id": "wrong"})


@pytest.fixture(scope="module")
def tape(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recorded run: a native tool, a server over stdio, and an interaction in one rollout."""
    folder = tmp_path_factory.mktemp("tape")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("says.json").write_text(json.dumps(SAYS))
        patch.setattr(trainer.collect_rollouts, "make_engine", make_scripted_engine(Path("says.json")))
        data = write_rows("t.jsonl", *ROWS)
        words = ("--tools", TOOLS, "--model", str(model), "--data", data, "--out", "runs/rec", "--n", "2", "--record")
        done = CliRunner().invoke(app, ["rollout", *words])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def recorded(tape: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(tape, place, dirs_exist_ok=True)
    return Path("runs/rec")


def test_native_tool_stdio_server_and_feedback_work_in_one_rollout(recorded: Path) -> None:
    both = [rollout for rollout in Rollouts(recorded) if rollout.task == "both"]
    assert len(both) == 2
    for rollout in both:
        assert rollout.stop is StopReason.FEEDBACK_DONE and rollout.rewards == {"feedback": 1.0, "end": 0.0}
        told = [entry for entry in rollout.ledger if entry.author in (Author.TOOL, Author.FEEDBACK)]
        assert [entry.source for entry in told] == ["add, write_note", "read_notes", "gsm8k", "gsm8k"]
        answers = [str(message["content"]) for entry in told for message in entry.messages]
        assert answers[0].startswith("7") and answers[1] == "Note 1 is written."
        assert "1: the sum" in answers[2], "each rollout has a notebook of its own"
        assert rollout.ledger.rewards == ((), (), (0.0,), (1.0,))
        assert "drift" not in rollout.infos


def test_recorded_run_is_replayed_exactly(recorded: Path, run: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.collect_rollouts.make_gateway", None)
    assert "4 rollouts replayed, 0 of them differ" in run("replay", recorded).output


ODD = '''
from collections.abc import Iterator
from itertools import count

numbers: Iterator[int] = count()

async def draw() -> int:
    """Draws the next number; each third time the line is dead."""
    number = next(numbers)
    if number % 3 == 0:
        raise ConnectionResetError("the line is dead")
    return number
'''


def test_repeated_rollouts_and_siblings_with_other_answers_are_replayed(
    run: RunCommand, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("odd").mkdir()
    Path("odd/draws.py").write_text(ODD)
    Path("odd/tools.yaml").write_text("tools:\n  - function: draws:draw\n")
    Path("says.json").write_text(json.dumps({"*": [render_calls(("draw", {})), "done"]}))
    monkeypatch.setattr(trainer.collect_rollouts, "make_engine", make_scripted_engine(Path("says.json")))
    data = write_rows("t.jsonl", {**PLAIN_ROW, "id": "a"}, {**PLAIN_ROW, "id": "b"})
    words = ("--tools", "odd", "--model", model, "--data", data, "--out", "r", "--n", 4, "--record")
    told = run("rollout", *words).output
    assert "tool_failed: tool 'draw' raised ConnectionResetError" in told
    counted = [rollout for rollout in Rollouts(Path("r")) if not rollout.stop.is_infrastructure]
    assert len({rollout.ledger.entries[2].ids for rollout in counted}) == len(counted) == 8
    assert "8 rollouts replayed, 0 of them differ" in run("replay", "r").output


def shortened(ledger: Ledger) -> Ledger:
    """As if the first tool had said less."""
    task, turn, tool, *rest = ledger
    return Ledger((task, turn, replace(tool, ids=tool.ids[:-1]), *rest))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda told: replace(told, stop=StopReason.LENGTH_TURN), "other stop"),
        (lambda told: replace(told, rewards={"feedback": 0.5}), "other rewards"),
        (lambda told: replace(told, ledger=shortened(told.ledger)), "other ids"),
    ],
)
def test_tampered_run_differs_from_its_replay(
    what: Callable[[Rollout], Rollout], words: str, recorded: Path, run: RunCommand
) -> None:
    first, *rest = list(Rollouts(recorded))
    (recorded / "rollouts.jsonl").unlink()
    with RolloutWriter(recorded) as writer:
        for rollout in (what(first), *rest):
            writer.add(rollout)
    told = run("replay", recorded, code=1).output
    assert words in told and "1 of them differ" in told


def written(*ids: int) -> Entry:
    return Entry(Author.POLICY, ids, logprobs=(-1.0,) * len(ids), finish_reason="stop")


async def test_long_recorded_rollout_is_read_once_and_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(written(number, 1), Entry(Author.TOOL, (number, 2, 3))) for number in range(200)]
    ledger = Ledger((Entry(Author.TASK, (7,)), *(entry for pair in pairs for entry in pair)))
    read: list[int] = []

    def count(code: str, ids: tuple[int, ...]) -> array[int]:
        read.append(len(ids))
        return array(code, ids)

    monkeypatch.setattr("trainer.replay_rollouts.array", count)
    policy = RecordedPolicy(Rollout("t", ledger, StopReason.DONE))
    assert sum(read) == len(ledger), "prompts are not kept or read anew for each turn"
    prompts = [ledger.ids[:start] for start, entry in zip(ledger.starts, ledger, strict=True) if entry.logprobs]
    said = [(await policy.generate(prompt, Sampling())).ids for prompt in prompts]
    assert said == [turn.ids for turn in ledger.turns]
    assert sum(read) == len(ledger) + sum(map(len, prompts)) and not policy.requests


async def test_turns_with_the_same_prompt_are_replayed_in_order_and_those_with_other_images_apart() -> None:
    def ledger(image: bytes, *ids: int) -> Ledger:
        return Ledger((Entry(Author.TASK, (1, 2), parts=(Image(image),), spans=((1, 2),)), written(*ids)))

    earlier = (ledger(b"cat", 3), ledger(b"dog", 4))
    policy = RecordedPolicy(Rollout("t", ledger(b"cat", 5), StopReason.DONE, earlier=earlier))
    for image, answer in ((b"dog", 4), (b"cat", 3), (b"cat", 5)):
        assert (await policy.generate((1, 2), Sampling(), images=(Image(image),))).ids == (answer,)
    for images in ((), (Image(b"cat"),)):
        with pytest.raises(EngineError, match="a prompt of 2 tokens was not sent in the recorded run"):
            await policy.generate((1, 2), Sampling(), images=images)
