"""Runs that were recorded: read token by token, and replayed to the last id."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainer.roll
from tests.trainer.scripted_train import scripted
from tests.trainer.scripts import calling
from tests.trainer.typed import HEARD, PLAIN, TOOLS, Run, write
from trainer.cli import app
from trainer.ledger import Author, Ledger
from trainer.run.file import Rollouts, Writer
from trainer.run.rollout import Rollout, StopReason

SAYS = {
    "both": [
        "I add and note.\n" + calling(("add", {"a": 3, "b": 4}), ("write_note", {"text": "the sum"})),
        calling(("read_notes", {"containing": "sum"})),
        "It is #### 8",
        "Then #### 7",
    ],
    "wrong": [calling(("nope", {})), "done"],
}
ROWS = ({**HEARD, "id": "both"}, {**PLAIN, "id": "wrong"})


@pytest.fixture(scope="module")
def tape(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recorded run: a native tool, a server over stdio, and an interaction in one rollout."""
    folder = tmp_path_factory.mktemp("tape")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("says.json").write_text(json.dumps(SAYS))
        patch.setattr(trainer.roll, "engine_of", scripted(Path("says.json")))
        words = ("rollout", "--tools", TOOLS, "--model", model, "--data", write("t.jsonl", *ROWS), "--out", "runs/rec")
        done = CliRunner().invoke(app, [*map(str, words), "--n", "2", "--record"])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def recorded(tape: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(tape, place, dirs_exist_ok=True)
    return Path("runs/rec")


def test_a_native_tool_a_stdio_server_and_feedback_meet_in_one_rollout(recorded: Path) -> None:
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


def test_a_recorded_run_is_replayed_to_the_last_id(recorded: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.roll.gateway_of", None)
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


def test_what_was_made_anew_and_siblings_that_were_answered_otherwise_are_replayed_each_as_it_was(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("odd").mkdir()
    Path("odd/draws.py").write_text(ODD)
    Path("odd/tools.yaml").write_text("tools:\n  - function: draws:draw\n")
    Path("says.json").write_text(json.dumps({"*": [calling(("draw", {})), "done"]}))
    monkeypatch.setattr(trainer.roll, "engine_of", scripted(Path("says.json")))
    data = write("t.jsonl", {**PLAIN, "id": "a"}, {**PLAIN, "id": "b"})
    words = ("--tools", "odd", "--model", model, "--data", data, "--out", "r", "--n", 4, "--record")
    told = run("rollout", *words).output
    assert "tool_failed: tool 'draw' raised ConnectionResetError" in told
    counted = [rollout for rollout in Rollouts(Path("r")) if not rollout.stop.infrastructure]
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
def test_a_run_that_was_tampered_with_differs_from_its_replay(
    what: Callable[[Rollout], Rollout], words: str, recorded: Path, run: Run
) -> None:
    first, *rest = list(Rollouts(recorded))
    (recorded / "rollouts.jsonl").unlink()
    with Writer(recorded) as writer:
        for rollout in (what(first), *rest):
            writer.add(rollout)
    told = run("replay", recorded, code=1).output
    assert words in told and "1 of them differ" in told


def test_a_replay_needs_the_data_and_the_tape_it_was_made_with(recorded: Path, run: Run) -> None:
    write("t.jsonl", PLAIN)
    assert "is no longer there" in run("replay", recorded, code=2).output
    shutil.rmtree(recorded / "tape")
    told = run("replay", recorded, code=2).output
    assert "has no tape" in told and "--record" in told


def test_a_run_is_shown_and_each_token_says_who_wrote_it(recorded: Path, run: Run) -> None:
    table = run("show", recorded).output
    assert "both" in table and "feedback_done" in table and "4 rollouts" in table
    number = next(place for place, rollout in enumerate(Rollouts(recorded)) if rollout.task == "both")
    shown = run("show", recorded, number).output
    assert "Note 1 is written." in shown and "the sum" in shown and "reward 1" in shown
    ledger = Rollouts(recorded)[number].ledger
    for author, says in (("policy", "trained"), ("tool", "not trained"), ("feedback", "not trained")):
        token = next(start for start, entry in zip(ledger.starts, ledger, strict=True) if entry.author == author)
        told = run("why", recorded, number, token + 1).output
        assert author in told and says in told
    assert "no token 99999" in run("why", recorded, number, 99999, code=2).output
    assert "no rollout 99" in run("show", recorded, 99, code=2).output
    assert "name the folder of a run" in run("show", "nowhere", code=2).output


def test_a_run_whose_model_is_gone_is_shown_without_text(recorded: Path, run: Run) -> None:
    about = json.loads((recorded / "run.json").read_text())
    about["settings"]["model"] = "gone"
    (recorded / "run.json").write_text(json.dumps(about))
    told = run("show", recorded, 0).output
    assert "shown without text: 'gone' is no folder" in told and "turn 0: policy" in told
