"""Errors and failures of a training, and changed data: told with remedies as early as possible."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer.policy.memory_plan
import trainer.train.preflight
from tests.trainer.train.jobs import ROOT, SMALL, demo_model
from tests.trainer.train.trainings import Run, list_checkpoints, read_run_metrics, run_in, user_reward, write_config
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import read_run_info


def test_run_stops_with_reasons_after_a_step_without_a_scored_rollout(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = user_reward("time.sleep(20)", timeout_s=0.05)
    output = run("--config", write_config(reward=hangs), "--out", "r", code=2)
    assert "rollouts have no reward" not in output, "the error tells it"
    assert "no rollout of step 1 could be scored, so the run stops; the reasons:\n  4 x component 'mine'" in output
    assert (
        "returned nothing within 0.05 s" in output and "continue with --resume" in output and "Traceback" not in output
    )
    assert [line["rollout/lost"] for line in read_run_metrics("r")] == [4]
    assert all(rollout.reward is None for rollout in Rollouts(Path("r"))), "lost, and not a reward of 0"
    assert [record.levelname for record in caplog.records if "not scored: " in record.message] == ["WARNING"]


def test_steps_before_one_without_scores_are_saved_and_the_resumed_run_trains_as_an_undisturbed_one(run: Run) -> None:
    is_down = "attempt.rollout.group.startswith('3-') and not os.path.exists('mended')"
    body = f"import os\n    if {is_down}: raise OSError('down')\n    return float(len(attempt.answer) % 3)"
    file = write_config(reward=user_reward(body), checkpoint={"every": 100})
    output = run("--config", file, "--out", "r", code=2)
    assert "no rollout of step 3 could be scored" in output and "the steps before it are saved" in output
    assert list_checkpoints("r") == ["000002"]
    Path("mended").touch()
    assert "step 2 of 4" not in run("--resume", "--out", "r")
    run("--config", file, "--out", "undisturbed")
    assert read_run_metrics("r") == read_run_metrics("undisturbed")
    assert len(Rollouts(Path("r"))) == len(Rollouts(Path("undisturbed"))) == 16


def test_tokenizer_of_another_model_is_refused(run: Run) -> None:
    from trainer.model import load_model

    shutil.copytree(demo_model(), "other")
    weights = load_model("other")
    weights.resize_token_embeddings(weights.config.vocab_size - 40)
    weights.save_pretrained("other")
    output = run("--config", write_config(model="other"), "--out", "r", code=2)
    assert "the tokenizer of 'other' has ids up to" in output and "copy the tokenizer" in output
    assert not Path("r").exists(), "nothing began, and nothing is left"


def test_template_that_rewrites_history_is_refused(run: Run) -> None:
    shutil.copytree(demo_model(), "other")
    template = Path("other/chat_template.jinja")
    template.write_text(f"{{{{ messages | length }}}}{template.read_text()}")
    for words in ((), ("--dry-run",)):
        output = run("--config", write_config(model="other"), "--out", "r", *words, code=2)
        assert "the chat template cannot be trusted" in output and "`template.chat_template`" in output


def test_job_that_does_not_fit_into_memory_is_refused_with_the_setting_to_lower(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.policy.memory_plan, "free_memory", lambda: 30_000_000)
    large = {**SMALL["update"], "logits_chunk": 65536, "micro_batch_tokens": 8192}
    for words, code in ((("--out", "r"), 2), (("--dry-run",), 1)):
        output = run("--config", write_config(update=large), *words, code=code)
        for part in (
            "this run does not fit: memory: weights",
            "remedy: lower `update.micro_batch_tokens` or",
            "; lower `update.logits_chunk` (logits",
        ):
            assert part in output
    assert not Path("r").exists() and not Path("runs").exists()


def test_dry_run_shows_the_verdict_first_then_what_is_not_default_and_the_first_row_and_writes_nothing(
    run: Run,
) -> None:
    output = run("--config", write_config(), "--out", "r", "--dry-run")
    assert output.startswith("no problems found\n") and output.endswith("\nno problems found\n")
    in_order = ("  prompts: 2\n", "2 x 2 rollouts a step", "memory: at most", "── task ", "Tools: ", "turn 0: policy")
    places = [output.index(words) for words in in_order]
    assert places == sorted(places) and output.count("\n") < 60 and "max_retries" not in output
    output = run("--config", write_config(), "--out", "r", "--dry-run", "-v")
    assert '"max_retries": 2' in output and "memory: weights" in output and "it reads text only" in output
    assert not Path("r").exists() and not Path("runs").exists()


def test_dry_run_refuses_what_the_run_would_refuse_later(run: Run, whole: Path, free_tcp_port: int) -> None:
    job = write_config(**WHOLE)
    assert "the folder already has a run" in run("--config", job, "--out", whole / "r", "--dry-run", code=2)
    run("--resume", "--out", whole / "r", "--dry-run")
    changed = run("--resume", "--out", whole / "r", "seed=1", "--dry-run", code=2)
    assert "the run has other settings: seed" in changed
    assert "/proc: out: cannot be written in" in run("--config", job, "--out", "/proc/run", "--dry-run", code=2)
    words = ("--config", job, "--out", "a/b", "--dry-run", f"engine=http://127.0.0.1:{free_tcp_port}")
    output = run(*words, code=1)
    assert "cannot be reached" in output and "turn 0: policy" in output and not Path("a").exists()


def test_mistake_is_reported_before_heavy_imports(place: Path) -> None:
    code = (
        "import sys\nfrom trainer.cli import app\n"
        "try:\n    app(['--config', 'run.yaml'])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=write_config(promts=4), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "did you mean `prompts`?" in output.stderr and output.stdout == "heavy: []\n"


WHOLE: dict[str, Any] = {"steps": 3, "prompts": 4, "n": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and what made it."""
    return run_in(tmp_path_factory.mktemp("whole"), **WHOLE).parent


@pytest.fixture
def begun(whole: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(whole, place, dirs_exist_ok=True)
    return Path("r")


def test_micro_batches_are_as_large_as_memory_allows_and_stay_so_in_a_resumed_run_unless_it_says_otherwise(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(name: str = "r") -> Any:
        return read_run_info(Path(name))["settings"]["update"]["micro_batch_tokens"]

    run("--config", write_config(steps=1), "--out", "r")
    assert chosen() == 8192
    with monkeypatch.context() as patch:
        patch.setattr(trainer.train.preflight, "total_memory", lambda: 110_000_000)
        run("--config", write_config(steps=1), "--out", "smaller")
        assert chosen("smaller") in (1024, 2048)
        run("--resume", "--out", "r", "--steps", "2")
    assert chosen() == 8192, "sums are made in the order in which they were made"
    lower = write_config(update={**SMALL["update"], "micro_batch_tokens": 512})
    run("--resume", "--out", "r", "--steps", "3", "--config", lower)
    assert chosen() == 512, "what a message says to lower may be lower when the run goes on"


def test_resuming_with_other_settings_is_refused_and_with_more_steps_goes_on_from_the_last_whole_checkpoint(
    run: Run, begun: Path
) -> None:
    output = run("--resume", "--out", "r", "--seed", 7, code=2)
    assert "r: the run has other settings: seed was 0, and is now 7\n  remedy: undo these changes" in output
    assert "the folder already has a run\n  remedy: continue it with --resume" in run(
        "--config", "run.yaml", "--out", "r", code=2
    )
    assert "--steps: expected greater than 0, found 0" in run("--resume", "--out", "r", "--steps", 0, code=2)
    before, weights = read_run_metrics(begun), begun / "checkpoints/000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    output = run("--resume", "--out", "r", "--steps", 4)
    assert "000003/model.safetensors has changed since it was written; using the previous checkpoint" in output
    after = read_run_metrics(begun)
    assert after[:3] == before and [line["step"] for line in after] == [1, 2, 3, 4]


def test_folder_of_another_training_process_is_refused(run: Run, begun: Path) -> None:
    with (begun / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        output = run("--resume", "--out", "r", "--steps", 4, code=2)
    assert "r: another process is training in this folder" in output and len(read_run_metrics(begun)) == 3


def test_end_of_a_run_names_its_model_and_next_commands(run: Run, begun: Path) -> None:
    output = run("--resume", "--out", "r", "--steps", 4)
    assert "4 steps are finished; the model is in r/checkpoints/000004" in output
    for words in ("eval r", "show r"):
        assert f"mtrl-train {words} " in output
    assert "r: is a training run\n  remedy: name the step" in run("replay", "r", code=2)
    shown = run("show", "r", 0)
    assert "turn 0: policy" in shown and "look_up" in shown and "without text" not in shown
    assert "trained" in run("why", "r", 0, 30)
    kept = Path("r/checkpoints/000004")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in kept.iterdir()
    }
    assert "step 1 of 1" in run("--config", write_config(model=str(kept), steps=1), "--out", "again")


@pytest.mark.parametrize("name", ["rollouts.jsonl", "metrics.jsonl", "checkpoints"])
def test_a_folder_with_files_that_a_run_would_write_over_is_refused(run: Run, name: str) -> None:
    file = Path("own", name)
    file.parent.mkdir()
    file.mkdir() if name == "checkpoints" else file.write_text("mine")
    for words in (("--dry-run",), ()):
        output = run("--config", write_config(), "--out", "own", *words, code=2)
        assert f"own: out: has no run, but {name}, which a run would write over" in output
    assert file.is_dir() or file.read_text() == "mine"
    assert os.listdir("own") == [name]


def test_a_folder_with_logs_of_a_launcher_or_a_start_that_was_killed_is_no_foreign_one(run: Run) -> None:
    Path("r/logs").mkdir(parents=True)
    Path("r/logs/rank-0.log").write_text("starting\n")
    Path("r/job.sh").write_text("mtrl-train\n")
    run("--config", write_config(steps=1), "--out", "r", "--auto-resume")
    Path("r/run.json").unlink()
    Path("r/.lock").unlink()
    assert "which a run would write over" in run("--config", "run.yaml", "--out", "r", code=2)
    Path("r/.lock").touch()  # As of a process that was killed before it wrote run.json.
    run("--config", "run.yaml", "--out", "r", "--auto-resume")


def write_rows(rows: int = 6, *, changed: int = -1) -> None:
    lines = [{"id": f"t{number}", "prompt": f"{number + 10 * (number == changed)} + 1"} for number in range(rows)]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def kept(steps: int) -> dict[str, Any]:
    """What the run keeps; it is to go on until this step."""
    about: dict[str, Any] = json.loads(Path("r/run.json").read_text())
    about["settings"]["steps"] = steps
    Path("r/run.json").write_text(json.dumps(about))
    return about


def test_a_resumed_run_names_data_that_has_changed_and_keeps_which_steps_trained_on_which(run: Run) -> None:
    write_rows()
    config = write_config(steps=1, data="rows.jsonl", demo={}, reward=user_reward("return 0.5"))
    run("--config", config, "--out", "r")
    first = kept(2)["data"]["1"]
    assert "has changed" not in run("--resume", "--out", "r")
    write_rows(changed=2)
    kept(3)
    assert "rows.jsonl has changed since the run was started: steps from 3 on" in run("--resume", "--out", "r")
    data = kept(4)["data"]
    assert data["1"] == data["2"] == first != data["3"]
    assert "has changed" not in run("--resume", "--out", "r"), "the rows of step 3"
    write_rows(7, changed=2)
    kept(5)
    assert "has changed" in run("--resume", "--out", "r")


def test_a_run_in_a_repository_keeps_the_commit(run: Run) -> None:
    import subprocess

    run("--config", write_config(steps=1), "--out", "plain")
    assert json.loads(Path("plain/run.json").read_text())["git"] is None
    author = ("-c", "user.name=me", "-c", "user.email=me@host")
    for words in (["init", "-q"], ["add", "run.yaml"], [*author, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], check=True)
    run("--config", write_config(steps=1, seed=2), "--out", "r")
    git = json.loads(Path("r/run.json").read_text())["git"]
    assert len(git["commit"]) == 40 and git["has_changes"]
