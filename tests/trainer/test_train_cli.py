"""The trainer's commands on the shipped configuration, with a tiny model whose weights are chance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import tiny_model
from scripted_train import scripted
from scripts import calling
from tokenizers_for_tests import BROKEN, folder_for
from typer.testing import CliRunner, Result

import trainer.policy.memory
import trainer.roll
from trainer.cli import app
from trainer.ledger import Author, Ledger
from trainer.run.file import Rollouts, Writer
from trainer.run.rollout import Rollout, StopReason

ROOT = Path(__file__).parents[2]
TOOLS = str(ROOT / "tool_configs")
SMALL = {"limits": {"turn_tokens": 24, "rollout_tokens": 3000}, "admission": {"writing": 8}}
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def run(place: Path) -> Run:
    def run(*words: object, code: int = 0) -> Result:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
        return done

    return run


def write(file: str, *rows: Any) -> str:
    Path(file).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


HEARD = {"prompt": "What is 3 + 4?", "ground_truth": "7", "interaction_kwargs": {"name": "gsm8k"}}
PLAIN = {"prompt": "Note the word gnu."}


def test_check_finds_the_shipped_configuration_in_order_and_shows_a_masked_rollout(run: Run, model: Path) -> None:
    told = run("check", "--tools", TOOLS, "--model", model, "--data", write("t.jsonl", HEARD, PLAIN)).output
    assert "everything is in order" in told and "FAIL" not in told
    for words in (
        "look_up, add",
        "calculate, write_note",
        "interactions: gsm8k, judge",
        "2 rows of t.jsonl",
        "parser hermes",
        "memory: weights",
    ):
        assert words in told
    assert "server atlas is down" in told and "remedy: start it: python tool_configs/servers/atlas.py" in told
    assert "turn 0: policy" in told and "── tool look_up" in told and '{"name": "look_up"' in told


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def numbered(folder: Path) -> None:
    folder_for(BROKEN["broken_numbered"], folder)


def no_weights(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "words", "remedy"),
    [
        (no_template, "has no chat template", "give one by the setting `template.chat_template`, or put a chat_template"),
        (
            numbered,
            "what a turn appends is not what the template writes",
            "give another by the setting",
        ),
        (no_weights, "holds no causal language model", "give a model's folder"),
    ],
)
def test_a_model_that_cannot_be_used_is_told_with_its_remedy_and_not_rolled_out(
    spoil: Callable[[Path], None], words: str, remedy: str, run: Run, model: Path
) -> None:
    spoil(shutil.copytree(model, spoilt := Path("spoilt")))
    told = run("check", "--tools", TOOLS, "--model", spoilt, code=1).output
    assert "FAIL" in told and words in told and f"remedy: {remedy}" in told
    told = run("rollout", "--tools", TOOLS, "--model", spoilt, "--data", write("t.jsonl", PLAIN), "--out", "r", code=2)
    assert "mtrl-train: " in told.output and not Path("r", "rollouts.jsonl").exists()


def test_check_says_when_a_model_does_not_fit(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.policy.memory, "free", lambda: 1000)
    told = run("check", "--tools", TOOLS, "--model", model, code=1).output
    assert "FAIL memory:" in told and "remedy: lower `admission.writing`" in told


WRONG = (
    ({"prompt": "?", "tools": ["ad"]}, "wrong.jsonl:1: tools: the gateway offers no tool 'ad'", "did you mean 'add'?"),
    (
        {"prompt": "?", "interaction_kwargs": {"name": "gsm8"}},
        "wrong.jsonl:1: interaction_kwargs.name: the gateway offers no interaction 'gsm8'",
        "did you mean 'gsm8k'?",
    ),
    ({"promt": "?"}, "wrong.jsonl:1: prompt: is missing", "did you mean `prompt`?"),
    ("not json", "wrong.jsonl:1: is no JSON", "write one JSON object on each line"),
)


@pytest.mark.parametrize(("row", "problem", "remedy"), WRONG)
def test_a_wrong_row_is_told_by_file_and_line_before_anything_starts(
    row: Any, problem: str, remedy: str, run: Run, model: Path
) -> None:
    data = write("wrong.jsonl", row)
    told = run("check", "--tools", TOOLS, "--data", data, code=1).output
    assert f"FAIL {problem}" in told and f"remedy: {remedy}" in told and "1 to mend" in told
    words = ("rollout", "--tools", TOOLS, "--model", model, "--data", data, "--out", "r", "--record")
    told = run(*words, code=2).output
    assert problem in told and f"remedy: {remedy}" in told and not Path("r", "rollouts.jsonl").exists()
    write("wrong.jsonl", PLAIN)
    Path("small.yaml").write_text(json.dumps(SMALL))
    run(*words, "--config", "small.yaml", "--n", 1)
    assert len(Rollouts(Path("r"))) == 1, "what the first attempt left does not stand in the way of the second"


def test_a_required_server_that_is_down_is_a_mistake_and_an_optional_one_is_not(run: Run, model: Path) -> None:
    Path("some").mkdir()
    Path("some/maths.py").write_text((ROOT / "tool_configs/maths.py").read_text())
    Path("some/tools.yaml").write_text("tools:\n  - server: gone\n  - function: maths:add\n")
    data = write("t.jsonl", PLAIN)
    Path("small.yaml").write_text(json.dumps(SMALL))
    words = ("--tools", "some", "--mcp", "servers.json", "--model", model, "--data", data)
    for optional, code in ((False, 1), (True, 0)):
        server = {"command": "/nowhere/server", "optional": optional}
        Path("servers.json").write_text(json.dumps({"mcpServers": {"gone": server}}))
        told = run("check", *words, code=code).output
        assert f"{'note' if optional else 'FAIL'} server gone is down: cannot start '/nowhere/server'" in told
        rolled = run("rollout", *words, "--out", "r", "--n", 1, "--config", "small.yaml", code=2 * code)
        assert ("server gone is down" in rolled.output) is not optional


def test_unknown_settings_are_told_with_what_was_probably_meant(run: Run, model: Path) -> None:
    Path("run.yaml").write_text(
        f"model: {model}\ndata: t.jsonl\nout: r\nlimit: {{}}\nsampling: {{temprature: 1}}\nadmission: {{open: 0}}\n"
    )
    told = run("rollout", "--config", "run.yaml", code=2).output
    assert "run.yaml: limit: unknown key\n  remedy: did you mean `limits`?" in told
    assert "run.yaml: sampling.temprature: unknown key\n  remedy: did you mean `temperature`?" in told
    assert "run.yaml: admission.open: expected" in told
    assert "model: is missing" in run("rollout", "--data", "t.jsonl", "--out", "r", code=2).output
    assert "no such file" in run("rollout", "--config", "other.yaml", code=2).output


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"stepper": "nowhere:Step"}, "there is no module 'nowhere'"),
        ({"template": {"chat_template": "gone.jinja"}}, "gone.jinja: chat_template: cannot be read"),
        ({"template": {"parser": "hermse"}}, "did you mean 'hermes'?"),
    ],
)
def test_a_setting_that_names_nothing_is_told_before_weights_are_loaded(
    setting: dict[str, Any], words: str, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.roll, "engine_of", None)
    Path("run.yaml").write_text(json.dumps(setting))
    data = write("t.jsonl", PLAIN)
    told = run(
        *("rollout", "--config", "run.yaml", "--tools", TOOLS, "--model", model, "--data", data, "--out", "r"), code=2
    )
    assert words in told.output


def test_a_rollout_run_leaves_files_that_say_how_it_was_made(run: Run, model: Path) -> None:
    Path("run.yaml").write_text(
        json.dumps({**SMALL, "tools": TOOLS, "model": str(model), "n": 3, "data": write("t.jsonl", HEARD, PLAIN)})
    )
    told = run("rollout", "--config", "run.yaml", "--out", "runs/a", "--n", 2, "--seed", 5).output
    assert "2 tasks x 2 rollouts: torch engine, hermes parser" in told
    assert "4 of 4 rollouts" in told and "read it with: mtrl-train show runs/a" in told
    about = json.loads(Path("runs/a/run.json").read_text())
    assert about["engine"] == "torch" and about["settings"]["n"] == 2 and about["settings"]["seed"] == 5
    metrics = json.loads(Path("runs/a/metrics.json").read_text())
    rollouts = list(Rollouts(Path("runs/a")))
    assert metrics["rollouts/ended"] == len(rollouts) == 4
    assert metrics["tokens/written"] == sum(sum(rollout.ledger.mask) for rollout in rollouts)
    assert not any(rollout.stop.infrastructure for rollout in rollouts)
    assert not Path("runs/a/tape").exists()
    told = run("rollout", "--config", "run.yaml", "--out", "runs/a", code=2).output
    assert "runs/a: there are rollouts already" in told and "--out" in told
    run("rollout", "--config", "run.yaml", "--out", "runs/b", "--n", 2, "--seed", 5)
    again = {(rollout.group, rollout.index): rollout.ledger.ids for rollout in Rollouts(Path("runs/b"))}
    assert again == {(rollout.group, rollout.index): rollout.ledger.ids for rollout in rollouts}


def test_a_model_that_runs_more_slowly_than_others_says_why(run: Run, model: Path) -> None:
    config = shutil.copytree(model, Path("other")) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_act": "gelu"}))
    Path("small.yaml").write_text(json.dumps(SMALL))
    data = write("t.jsonl", PLAIN)
    words = ("--config", "small.yaml", "--tools", TOOLS, "--model", "other", "--data", data, "--out", "r", "--n", 1)
    why = "runs through its own module, one row at a time, since its activation is gelu"
    assert f"note: the torch engine {why}" in run("rollout", *words).output
    assert json.loads(Path("r/run.json").read_text())["notes"] == [why]


def test_weights_that_are_torn_are_told_and_so_is_a_folder_that_cannot_be_made(run: Run, model: Path) -> None:
    weights = shutil.copytree(model, Path("torn")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    words = ("rollout", "--tools", TOOLS, "--data", write("t.jsonl", PLAIN))
    told = run(*words, "--model", "torn", "--out", "r", code=2).output
    assert "mtrl-train: torn: cannot be loaded as a causal language model" in told and "copy it anew" in told
    told = run(*words, "--model", model, "--out", "t.jsonl", code=2).output
    assert "t.jsonl: cannot be made (File exists)" in told and "name another folder with --out" in told


def test_a_gateway_that_does_not_answer_is_named(run: Run, model: Path) -> None:
    data = write("t.jsonl", PLAIN)
    told = run("rollout", "--tools", "http://127.0.0.1:9", "--model", model, "--data", data, "--out", "r", code=2)
    assert "the gateway at http://127.0.0.1:9 cannot be reached" in told.output


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


def test_a_run_of_which_nothing_counts_says_why_and_fails(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("says.json").write_text("{}")
    monkeypatch.setattr(trainer.roll, "engine_of", scripted(Path("says.json")))
    data = write("t.jsonl", {**PLAIN, "interaction_kwargs": {"name": "gsm8k"}})
    told = run("rollout", "--tools", TOOLS, "--model", model, "--data", data, "--out", "r", "--n", 2, code=1).output
    assert "6 x tool_failed: interaction 'gsm8k' could not start" in told
    assert "groups: 0 whole, 0 short of a rollout, 1 dropped" in told
    assert json.loads(Path("r/metrics.json").read_text())["groups/dropped"] == 1
    assert len(Rollouts(Path("r"))) == 6 and "saved in r" in told


def test_a_model_of_another_family_is_spoken_to_as_it_wants(run: Run, place: Path) -> None:
    folder = tiny_model(place / "qwen3", "qwen3")
    assert "everything is in order" in run("check", "--tools", TOOLS, "--model", folder).output
