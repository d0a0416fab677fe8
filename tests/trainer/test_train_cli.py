"""The trainer's commands on the shipped configuration, with a tiny model whose weights are chance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trainer.policy.memory
import trainer.roll
from tests.trainer.models import tiny_model
from tests.trainer.scripted_train import scripted
from tests.trainer.tokenizers_for_tests import BROKEN, folder_for
from tests.trainer.typed import HEARD, PLAIN, ROOT, SMALL, TOOLS, Run, write
from trainer.run.file import Rollouts


def test_check_finds_the_shipped_configuration_in_order_and_shows_a_masked_rollout(run: Run, model: Path) -> None:
    told = run("check", "--tools", TOOLS, "--model", model, "--data", write("t.jsonl", HEARD, PLAIN)).output
    assert "everything is in order" in told and "FAIL" not in told
    for words in (
        "look_up, look, add",
        "calculate, zoom, write_note",
        "interactions: gsm8k, judge",
        "2 rows of t.jsonl",
        "parser hermes",
        "it reads text alone, and pictures are told of in words",
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
        (
            no_template,
            "has no chat template",
            "give one by the setting `template.chat_template`, or put a chat_template",
        ),
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
    assert "run.yaml:4: limit: unknown key\n  remedy: did you mean `limits`?" in told
    assert "run.yaml:5: sampling.temprature: unknown key\n  remedy: did you mean `temperature`?" in told
    assert "run.yaml:6: admission.open: expected" in told
    assert "model: is missing" in run("rollout", "--data", "t.jsonl", "--out", "r", code=2).output
    assert "no such file" in run("rollout", "--config", "other.yaml", code=2).output


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"stepper": "nowhere:Step"}, "there is no module 'nowhere'"),
        ({"template": {"chat_template": "gone.jinja"}}, "chat_template: cannot be read"),
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
