"""Replay of recorded runs, and `show` of their tokens."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainer.collect_rollouts
from gateway.types import Image
from tests.trainer.cli_data import FEEDBACK_ROW, PLAIN_ROW, TOOLS, RunCommand, write_rows
from tests.trainer.policy_scripts import render_calls
from tests.trainer.scripted_train import make_scripted_engine
from trainer.cli import app
from trainer.engine.base import EngineError, Sampling
from trainer.ledger import Author, Entry, Ledger
from trainer.replay_rollouts import RecordedPolicy
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import Rollouts, RolloutWriter

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


@pytest.mark.anyio
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


@pytest.mark.anyio
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
