"""Whatever is wrong with a training is told in words that mend it, and costs no more than it must."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROOT, SMALL, model
from typer.testing import CliRunner

import trainer.policy.memory
from trainer.cli import app
from trainer.policy.policy import Policy
from trainer.run.file import Rollouts, Writer
from trainer.run.history import history
from trainer.train.metrics import Metrics

Run = Callable[..., str]
TINY: dict[str, Any] = {
    **SMALL, "tools": "tools", "kinds": ["fact"], "prompts": 2, "n": 2, "steps": 4, "record": False,
    "evaluation": {"every": 0},
}  # fmt: skip
MACHINE = ("time/", "engine/")
NUMBERS = count()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Path) -> Run:
    """`mtrl-train` with these words; what it said."""

    def run(*words: object, code: int = 0) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
        return done.output

    return run


NATIVE = {
    "tools/calculator.py": 'def calculate(expression: str) -> str:\n    """Works out a sum."""\n    return "0"\n',
    "tools/tools.yaml": "tools:\n  - class_name: trainer.demo.lookup.LookUp\n  - function: calculator:calculate\n",
}
"""Facts need no server, and none has to be started for each of these tests."""


def config(**changes: Any) -> str:
    Path("tools").mkdir(exist_ok=True)
    for file, text in NATIVE.items():
        Path(file).write_text(text)
    Path("run.yaml").write_text(json.dumps({**TINY, "model": str(model()), **changes}))
    return "run.yaml"


def mine(body: str, **more: Any) -> dict[str, Any]:
    """A reward function of the user's own."""
    name = f"rewards_{next(NUMBERS)}.py"  # Of a module's name there is one in a process.
    Path(name).write_text(f"import math, time\n\n\ndef mine(attempt):\n    {body}\n")
    return {"components": {"mine": {"function": f"{name}:mine", **more}}}


def measured(out: str | Path) -> list[dict[str, float]]:
    lines = history(Path(out) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in lines]


def checkpoints(out: str | Path) -> list[str]:
    return sorted(folder.name for folder in (Path(out) / "checkpoints").glob("*"))


# Numbers that are none.


@pytest.mark.parametrize(
    ("body", "more", "says"),
    [
        ("raise ValueError('no such column')", {}, "raised ValueError: no such column"),
        ("return '0.5'", {}, "gave '0.5', which is no number"),
        ("return math.nan", {}, "gave nan, which is no number"),
        ("time.sleep(20)", {"timeout_s": 0.05}, "gave nothing within 0.05 s"),
    ],
)
def test_where_nothing_can_be_scored_the_run_ends_after_three_steps_with_its_reasons(
    run: Run, caplog: pytest.LogCaptureFixture, body: str, more: dict[str, Any], says: str
) -> None:
    told = run("--config", config(reward=mine(body, **more)), "--out", "r", code=2)
    assert "4 of 4 rollouts have no reward, 4 of them by: component 'mine'" in told
    assert "nothing of the last 3 steps could be scored; of the last one:\n  4 x component 'mine'" in told
    assert says in told and "go on with --resume" in told and "Traceback" not in told
    assert [line["rollout/lost"] for line in measured("r")] == [4, 4, 4]
    assert all(rollout.reward is None for rollout in Rollouts(Path("r"))), "lost, and not a reward of 0"
    assert caplog.text.count("not scored: ") == 3, "examples, not all of them"


def test_what_one_rollout_lacks_costs_that_rollout(run: Run) -> None:
    body = "if attempt.rollout.name.endswith('/0'): raise KeyError('x')\n    return float(len(attempt.answer) % 3)"
    run("--config", config(reward=mine(body), steps=2), "--out", "r")
    assert [(line["rollout/lost"], line["rollout/count"]) for line in measured("r")] == [(2, 2)] * 2
    assert len(Rollouts(Path("r"))) == 8


def poisoned(weights: Any) -> None:
    with torch.no_grad():
        next(weights.parameters()).fill_(math.nan)


def test_weights_that_are_no_numbers_end_the_run_and_take_no_checkpoint_s_place(run: Run, place: Path) -> None:
    from trainer.model import load_model

    shutil.copytree(model(), "poisoned")
    weights = load_model("poisoned")
    poisoned(weights)
    weights.save_pretrained("poisoned")
    told = run("--config", config(model="poisoned"), "--out", "r", code=2)
    assert "12 x engine_failed: the model's logits are not finite" in told and "`update.lr`" in told
    assert checkpoints("r") == []


def test_a_loss_that_is_no_number_names_its_rollout_and_moves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--config", config(steps=2, reward=mine("return float(attempt.rollout.index)")), "--out", "r")
    load = Policy.load

    def spoilt(*given: Any) -> Policy:
        policy = load(*given)
        resume = policy.resume
        monkeypatch.setattr(policy, "resume", lambda folder: (resume(folder), poisoned(policy.model)))
        return policy

    monkeypatch.setattr(Policy, "load", spoilt)
    monkeypatch.setattr("trainer.engine.torch.engine.TorchEngine.publish", published)
    told = run("--resume", "--out", "r", "--steps", 3, code=2)
    assert "rollout 3-0-0/" in told and "nan" in told and "lower `update.lr`" in told and "Traceback" not in told
    assert checkpoints("r") == ["000001", "000002"] and len(measured("r")) == 2


async def published(*_: Any) -> None:
    """The engine keeps the weights that it began with."""


def test_a_learning_rate_that_leaves_no_numbers_is_refused(run: Run) -> None:
    told = run("--config", config(update={"lr": 1e30}), "--out", "r", code=2)
    assert "run.yaml: update.lr: expected less than or equal to 10, found 1e+30" in told


def test_groups_without_a_lesson_are_told_of_and_the_run_goes_on(run: Run) -> None:
    told = run("--config", config(reward=mine("return 1.0"), steps=2), "--out", "r")
    assert "no group teaches: within each, all rewards are the same" in told
    assert [line["groups/teaching"] for line in measured("r")] == [0, 0]
    assert checkpoints("r") == ["000001", "000002"]


def test_where_everything_is_cut_off_the_limit_is_named(run: Run) -> None:
    told = run("--config", config(limits={"turn_tokens": 3, "rollout_tokens": 160}, steps=1), "--out", "r")
    assert "100% of the rollouts are cut off, 100% by length_turn" in told and "raise `limits.turn_tokens`" in told


# What cannot begin.


def test_a_tokenizer_that_is_not_the_model_s_is_refused(run: Run) -> None:
    from trainer.model import load_model

    shutil.copytree(model(), "other")
    weights = load_model("other")
    weights.resize_token_embeddings(weights.config.vocab_size - 40)
    weights.save_pretrained("other")
    told = run("--config", config(model="other"), "--out", "r", code=2)
    assert "the tokenizer of 'other' has ids up to" in told and "copy the tokenizer" in told
    assert not Path("r").exists(), "nothing began, and nothing is left"


def test_a_template_that_rewrites_what_was_said_is_refused(run: Run) -> None:
    shutil.copytree(model(), "other")
    template = Path("other/chat_template.jinja")
    template.write_text(f"{{{{ messages | length }}}}{template.read_text()}")
    for words in ((), ("--dry-run",)):
        told = run("--config", config(model="other"), "--out", "r", *words, code=2)
        assert "the chat template cannot be trusted" in told and "`template.chat_template`" in told


def test_what_does_not_fit_into_memory_is_refused_with_its_knob(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.policy.memory, "free", lambda: 30_000_000)
    large = {**SMALL["update"], "chunk": 65536}
    told = run("--config", config(update=large), "--out", "r", code=2)
    assert "this run does not fit: memory: weights" in told and "remedy: lower `update.chunk` (logits" in told
    told = run("--config", config(update=large), "--dry-run", code=1)
    assert "it does not fit\n  remedy: lower `update.chunk` (logits" in told
    assert not Path("r").exists() and not Path("runs").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"promts": 4}, "run.yaml: promts: unknown key\n  remedy: did you mean `prompts`?"),
        ({"update": {"lora": {"rnk": 3}}}, "run.yaml: update.lora.rnk: unknown key\n  remedy: did you mean `rank`?"),
        (
            {"reward": {"components": {"a": {"function": "answer", "wight": 2}}}},
            "run.yaml: reward.components.a.wight: unknown key\n  remedy: did you mean `weight`?",
        ),
        (
            {"curriculum": {"stages": [{"tols": ["add"]}]}},
            "run.yaml: curriculum.stages[0].tols: unknown key\n  remedy: did you mean `tools`?",
        ),
        (
            {"reward": {"components": {"a": {"function": "anser"}}}},
            "reward.components.a.function: there is no function 'anser'\n  remedy: did you mean 'answer'?",
        ),
        ({"curriculum": {"stages": [{"tools": ["calcluate"]}]}}, "did you mean 'calculate'?"),
        ({"evaluation": {"data": "nosuch.jsonl"}}, "nosuch.jsonl: cannot be read (No such file"),
        ({"algorithm": {"credit": {"kind": "gae"}}}, "needs a critic\n  remedy: add `update.critic: {}`"),
        ({"sampling": {"temperature": 0}}, "temperature 0 cannot be learned from\n  remedy: raise"),
    ],
)
def test_a_slip_in_the_run_file_names_file_field_and_what_was_meant(
    run: Run, changes: dict[str, Any], says: str
) -> None:
    assert says in run("--config", config(**changes), "--out", "r", code=2)
    assert not Path("r/run.json").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--config", "nosuch"), "remedy: name a YAML file, or one of default, gsm8k, gsm8k_feedback"),
        (("--data", "rows.jsonl"), "the demo's model knows no words but its own tasks'\n  remedy: name a model"),
        (("--engine", "vllm"), "mtrl-train: --engine: should be auto, torch, "),
        (("--steps", "0"), "mtrl-train: --steps: expected greater than 0, found 0"),
        (("--tools", "nowhere"), "nowhere: there is no such folder"),
        (("--resume",), "runs: there is no run to go on with\n  remedy: name its folder with --out"),
        (("--resume", "--out", "nowhere"), "nowhere: is no training run"),
        (("eval", "nowhere"), "nowhere: is no training run"),
        (("plot", "nowhere"), "name the folder of a training run"),
        (("show", "nowhere", "0"), "name the folder of a run"),
        (("replay", "nowhere", "2"), "nowhere: is no training run"),
    ],
)
def test_a_slip_on_the_command_line_is_told_with_its_remedy(run: Run, words: tuple[str, ...], says: str) -> None:
    assert says in run(*words, code=2)


def test_a_slip_is_told_before_anything_heavy_is_imported(place: Path) -> None:
    code = (
        "import sys\nfrom trainer.cli import app\n"
        "try:\n    app(['--config', 'run.yaml'])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=config(promts=4), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "did you mean `prompts`?" in told.stderr and told.stdout == "heavy: []\n"


# What happens on the way.


WHOLE: dict[str, Any] = {"steps": 3, "prompts": 4, "n": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and what made it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["--config", config(**WHOLE), "--out", "r"])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def begun(whole: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(whole, place, dirs_exist_ok=True)
    return Path("r")


def test_a_broken_checkpoint_costs_a_step_and_the_numbers_are_the_same(run: Run, begun: Path) -> None:
    before = measured(begun)
    weights = begun / "checkpoints/000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    told = run("--resume", "--out", "r")
    assert "000003/model.safetensors is not what was written; going on from the one before it" in told
    assert "step 3 of 3" in told and "step 2 of 3" not in told
    assert measured(begun) == before


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew(run: Run, begun: Path) -> None:
    for state in begun.glob("checkpoints/*/state.json"):
        state.write_text("{")
    before = measured(begun)
    assert "none of 2 checkpoints is whole\n  remedy: restore" in run("--resume", "--out", "r", code=2)
    assert measured(begun) == before


def test_going_on_with_other_settings_is_refused_and_with_more_steps_is_not(run: Run, begun: Path) -> None:
    told = run("--resume", "--out", "r", "--seed", 7, code=2)
    assert "r: was begun with other settings: seed was 0, and is 7\n  remedy: leave that out" in told
    assert "there is a run already\n  remedy: go on with it by --resume" in run(
        "--config", "run.yaml", "--out", "r", code=2
    )
    assert "--steps: expected greater than 0, found 0" in run("--resume", "--out", "r", "--steps", 0, code=2)
    run("--resume", "--out", "r", "--steps", 4)
    assert [line["step"] for line in measured(begun)] == [1, 2, 3, 4]


def test_a_folder_that_another_process_writes_is_left_alone(run: Run, begun: Path) -> None:
    with (begun / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = run("--resume", "--out", "r", "--steps", 4, code=2)
    assert "r: another process trains here" in told and len(measured(begun)) == 3


def test_disks_that_fill_up_in_the_midst_of_weights_and_before_anything_began(run: Run) -> None:
    from test_train_metrics import no_file_larger_than

    run_file = config(steps=1)
    with no_file_larger_than(400_000):
        told = run("--config", run_file, "--out", "r", code=2)
    assert "the checkpoint of step 1 cannot be written (" in told and "there is none yet\n  remedy: look at" in told
    with no_file_larger_than(1000):
        told = run("--config", run_file, "--out", "s", code=2)
    assert "the disk: cannot be written (File too large)" in told and "--out" in told


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int) -> Iterator[None]:
    """A disk without room, from a method's so-manieth call on."""
    calls, real = 0, getattr(owner, name)

    def refuse(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        yield


@pytest.mark.parametrize(
    ("owner", "name", "after", "says"),
    [
        (Policy, "save", 1, "the checkpoint of step 2 cannot be written (No space left on device); that of step 1"),
        (Writer, "_add", 20, "r/rollouts.jsonl: cannot be written (No space left on device)"),
    ],
)
def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int, says: str
) -> None:
    config(**WHOLE)
    with full(monkeypatch, owner, name, after):
        told = run("--config", "run.yaml", "--out", "r", code=2)
    assert says in told and "remedy: make room" in told and "Traceback" not in told
    run("--resume", "--out", "r")
    assert measured("r") == measured(whole / "r")


def test_a_full_disk_where_metrics_are_written_is_told_as_well(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(**WHOLE)
    Path("r").mkdir()
    Path("r/metrics.jsonl").symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "cut", lambda *_: [])
        told = run("--config", "run.yaml", "--out", "r", code=2)
    assert "metrics.jsonl: cannot be written (No space left on device)" in told and "go on with --resume" in told
    Path("r/metrics.jsonl").unlink()
    run("--resume", "--out", "r")
    assert measured("r") == measured(whole / "r")


DYING = '''
import os, runpy, sys
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")

@server.tool()
def calculate(expression: str) -> str:
    """Works out a sum."""
    calls = Path(sys.argv[1])
    with calls.open("a") as told:
        told.write(".")
    if calls.stat().st_size == 3:
        os._exit(1)
    return str(eval(expression, {"__builtins__": {}}))

server.run()
'''


def test_a_tool_server_that_dies_on_the_way_costs_its_rollouts_and_no_score(run: Run, place: Path) -> None:
    shutil.copytree(ROOT / "tool_configs", "tool_configs")
    Path("dying.py").write_text(DYING)
    servers = json.loads((ROOT / "mcp_servers.json").read_text())
    servers["mcpServers"]["calculator"] = {"command": sys.executable, "args": [str(place / "dying.py"), "calls"]}
    servers["mcpServers"]["notebook"]["cwd"] = "."
    Path("mcp_servers.json").write_text(json.dumps(servers))
    told = run("--config", config(tools="tool_configs", kinds=["sum"], steps=2, n=4), "--out", "r")
    lost = [rollout for rollout in Rollouts(Path("r")) if rollout.stop.infrastructure]
    assert lost and all(rollout.reward is None for rollout in lost), told
    assert sum(line["rollout/lost"] for line in measured("r")) == len(lost)
    assert [line["rollout/count"] for line in measured("r")] == [8, 8], "each was made anew"


# Where to go from here.


def test_the_end_says_where_things_are_and_what_to_ask_them(run: Run, begun: Path) -> None:
    told = run("--resume", "--out", "r", "--steps", 4)
    assert "4 steps are over; the model is r/checkpoints/000004" in told
    for words in ("plot r", "eval r", "show r"):
        assert f"mtrl-train {words} " in told
    shown = run("show", "r", 0)
    assert "turn 0: policy" in shown and "look_up" in shown and "without text" not in shown
    assert "trained" in run("why", "r", 0, 30)
    kept = Path("r/checkpoints/000004")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in kept.iterdir()
    }
    assert "step 1 of 1" in run("--config", config(model=str(kept), steps=1), "--out", "again")
