"""Files and folders that are not what a command takes: each is told once, with what to do."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from gateway.disk_errors import describe_write_error
from tests.trainer.train.jobs import demo_model
from tests.trainer.train.trainings import Run, write_config


def test_a_missing_file_beside_the_run_file_is_named_there(run: Run) -> None:
    Path("job").mkdir()
    for setting in ("mcp", "tools", "model", "data"):
        Path("job/run.yaml").write_text(json.dumps({"model": "demo", "data": "demo", setting: "./missing.json"}))
        assert "job/missing.json" in run("--config", "job/run.yaml", "--dry-run", code=2)
    changes = {"out": "./new", "system": "./ is where you are"}
    output = run("--config", write_config(**changes), "--dry-run")
    assert '"out": "new"' in output and '"system": "./ is where you are"' in output


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


def test_a_server_that_cannot_start_is_told_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    servers = {"dead": {"command": "/no/server"}, "spare": {"command": "/no/spare", "optional": True}}
    Path("mcp_servers.json").write_text(json.dumps({"mcpServers": servers}))
    assert run("--config", write_config(), "--out", "r", code=2).count("/no/server") == 1
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "server 'spare' cannot be started" in warnings[0], "nothing else tells of that one"


def test_a_folder_of_tools_without_yaml_is_told_how_to_name_them(run: Run) -> None:
    Path("plain").mkdir()
    Path("plain/mine.py").write_text("")
    assert "remedy: plain has no YAML file: write one that names each tool" in run("check", "--tools", "plain")


def test_a_model_of_an_unknown_type_is_told_with_what_knows_more(run: Run) -> None:
    shutil.copytree(demo_model(), "newer")
    config = json.loads(Path("newer/config.json").read_text())
    Path("newer/config.json").write_text(json.dumps(config | {"model_type": "newfangled"}))
    output = run("--config", write_config(model="newer"), "--dry-run", code=2)
    assert "has a model of type 'newfangled', which transformers" in output and "pip install -U transformers" in output
    assert "git+https" not in output


def test_the_example_of_a_dry_run_has_the_system_message_of_the_run(run: Run) -> None:
    output = run("--config", write_config(system="Talk like a pirate."), "--dry-run")
    assert output.count("Talk like a pirate.") == 2, "in the settings and in the rollout"


def test_a_disk_that_is_full_while_a_folder_is_copied_is_told_in_few_words(tmp_path: Path) -> None:
    texts = [f"[Errno 28] No space left on device: '{name}' -> '{tmp_path / name}'" for name in ("a", "b")]
    error = shutil.Error([(name, str(tmp_path / name), text) for name, text in zip("ab", texts, strict=True)])
    text = describe_write_error(tmp_path, error, "then go on")
    assert text.startswith(f"{tmp_path}: cannot be written (No space left on device)\n  remedy: make room on ")
