"""Errors of a training: reported with remedies, as early as possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainer.policy.lora
import trainer.policy.memory_plan
from tests.trainer.train.jobs import ROOT, SMALL, demo_model
from tests.trainer.train.trainings import Run, list_checkpoints, read_run_metrics, user_reward, write_config
from trainer.storage.rollout_file import Rollouts

# Numbers that are none.


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


# What cannot begin.


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
