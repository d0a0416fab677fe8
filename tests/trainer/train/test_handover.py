"""Runs that are handed over: another folder, with the copies of the files that the run was started with."""

from __future__ import annotations

import json
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.train.jobs import demo_model
from tests.trainer.train.trainings import Run, list_checkpoints, write_config
from trainer.train.data_fingerprint import DATA_FILE
from trainer.train.hidden_secrets import hide_in_config, hide_in_words, may_hold_secrets
from trainer.train.origin import read_origin

REWARD = "from {helper} import VALUE\n\n\ndef mine(attempt):\n    return VALUE\n"
SECRET = "sk-7f3a9b21"
NUMBERS = count()


def write_rows(rows: int = 6, *, changed: int = -1) -> None:
    lines = [
        {"id": f"t{number}", "prompt": f"{number + 10 * (number == changed)} + 1", "ground_truth": str(number + 1)}
        for number in range(rows)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def start_run(run: Run, out: str = "../handed", **changes: Any) -> tuple[Path, str]:
    """A run of one step on rows and a reward of one's own, which imports another module; and the reward's module."""
    number = next(NUMBERS)  # Of a module's name there is one in a process.
    reward, helper = f"reward_of_mine_{number}", f"helper_of_mine_{number}"
    write_rows()
    Path(f"{reward}.py").write_text(REWARD.format(helper=helper))
    Path(f"{helper}.py").write_text("VALUE = 0.5\n")
    components = {"mine": {"function": f"{reward}.py:mine"}}
    settings = {"steps": 1, "data": "rows.jsonl", "demo": {}, "reward": {"components": components}, **changes}
    run("--config", write_config(**settings), "--out", out)
    return Path(out).resolve(), reward


@pytest.fixture
def first(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which runs are started."""
    folder = place / "first"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def forget_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unloads the modules of a folder, as they are in another process."""
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(str(folder))])


def want_steps(folder: Path, steps: int) -> None:
    about = json.loads((folder / "run.json").read_text())
    about["settings"]["steps"] = steps
    (folder / "run.json").write_text(json.dumps(about))


def test_a_moved_run_is_resumed_evaluated_and_replayed_elsewhere_with_the_copies_of_its_files(
    first: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(demo_model(), "my_model")
    started, reward = start_run(run, record=True, model="my_model")
    forget_modules(first, monkeypatch)
    shutil.rmtree(first)
    other = first.with_name("other")
    other.mkdir()
    monkeypatch.chdir(other)
    folder = started.rename(other / "moved")
    (other / f"{reward}.py").write_text("raise SystemExit('the wrong file')\n")
    want_steps(folder, 2)
    told = run("--resume", "--out", "moved")
    assert f"{first} is gone, or may not be read: the run uses the copies in" in told
    assert list_checkpoints(folder) == ["000001", "000002"]
    kept = json.loads((folder / "run.json").read_text())["settings"]
    assert (kept["data"], kept["tools"], kept["model"]) == ("rows.jsonl", "tools", "my_model")
    loaded = sys.modules[reward].__file__
    assert loaded and Path(loaded).is_relative_to(folder / "origin")
    report = json.loads(run("eval", "moved", "--rows", 2, "--json").splitlines()[-1])
    assert report["tasks"] == 2
    assert "as recorded" in run("replay", "moved", 1)
    assert sorted(path.name for path in other.iterdir()) == ["moved", f"{reward}.py"]


def test_a_run_uses_its_own_files_from_any_folder_and_copies_only_of_those_that_are_gone(
    first: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = start_run(run)
    (first / "tools" / "calculator.py").write_text("def calculate(expression: str) -> str:\n    return '1'\n")
    monkeypatch.chdir(first.parent)
    want_steps(folder, 2)
    told = run("--resume", "--out", "handed")
    assert f"changed since the run was started: {first / 'tools' / 'calculator.py'}" in told
    assert f"the run uses the files in {first}, where it was started" in told and "copies" not in told
    monkeypatch.chdir(first)
    shutil.rmtree("tools")
    forget_modules(first, monkeypatch)
    want_steps(folder, 3)
    told = run("--resume", "--out", folder)
    assert f"{first / 'tools'} is gone, or may not be read" in told
    assert list_checkpoints(folder)[-1] == "000003"


def test_changed_rows_are_refused_by_line_unless_accepted_and_added_ones_told(first: Path, run: Run) -> None:
    folder, _ = start_run(run)
    write_rows(changed=2)
    told = run("--resume", "--out", folder, code=2)
    assert "1 row differs: rows.jsonl:3" in told and "--accept-data" in told
    write_rows(4)
    assert "there were 6 rows, and are now 4" in run("--resume", "--out", folder, code=2)
    write_rows(changed=2)
    assert "rows.jsonl: 1 row differs: rows.jsonl:3" in run("--resume", "--accept-data", "--out", folder)
    assert "differ" not in run("--resume", "--out", folder), "accepted once"
    assert "1 row differs" in json.loads((folder / DATA_FILE).read_text())["changes"][0]
    write_rows(8, changed=2)
    assert "2 rows were added since the run was started" in run("--resume", "--out", folder)
    assert "add --resume" in run("--accept-data", "--config", "run.yaml", code=2)


def test_a_missing_start_model_is_told_and_never_made_again(first: Path, run: Run) -> None:
    shutil.copytree(demo_model(), "my_model")
    folder, _ = start_run(run, model="my_model")
    shutil.rmtree("my_model")
    (folder / "origin" / "model").rename("elsewhere")
    told = run("eval", folder, code=2)
    assert "the model that the run started from is not at" in told and str(folder / "origin" / "model") in told


def test_runs_of_older_versions_are_resumed_without_origin_and_fingerprint(first: Path, run: Run) -> None:
    folder, _ = start_run(run)
    shutil.rmtree(folder / "origin")
    (folder / DATA_FILE).unlink()
    shutil.rmtree(folder / "checkpoints")
    run("--resume", "--out", folder)
    assert list_checkpoints(folder) == ["000001"] and not (folder / "origin").exists()


def test_only_files_of_settings_are_copied_and_what_is_left_out_is_told(
    first: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first / "outcome").mkdir()
    (first / "outcome" / "diary.txt").write_text("private")
    (first / "tools").mkdir()
    (first / "tools" / ".env").write_text(f"TOKEN={SECRET}")
    (first / "tools" / "deploy.pem").write_text(SECRET)
    (first / "mcp_servers.json").write_text(
        json.dumps({"mcpServers": {"x": {"command": "x", "env": {"X_TOKEN": SECRET}, "disabled": True}}})
    )
    (first / "tools" / "more").mkdir()
    (first / "tools" / "more" / "secrets.yaml").write_text("a: 1")
    (first / "tools" / "google.json").write_text(json.dumps({"api_key": SECRET}))
    (first / "mcp_servers.json").chmod(0o400)
    monkeypatch.setattr("trainer.train.origin_files.MAX_FILE_BYTES", 300)
    monkeypatch.setattr(sys, "argv", ["mtrl-train", "--tools", f"https://me:{SECRET}@host/", f"--api-key={SECRET}"])
    folder, reward = start_run(run, system="outcome")
    copies = folder / "origin" / "files"
    names = {str(file.relative_to(copies)) for file in copies.rglob("*") if file.is_file()}
    assert {f"{reward}.py", "tools/tools.yaml", "tools/calculator.py", "mcp_servers.json"} <= names
    assert not any("outcome" in name or ".env" in name or "deploy.pem" in name for name in names)
    everything = b"".join(file.read_bytes() for file in (folder / "origin").rglob("*") if file.is_file())
    assert SECRET.encode() not in everything
    left_out = read_origin(folder)["not_copied"]
    assert left_out[str(first / "rows.jsonl")] == "too large"
    for name in ("deploy.pem", "google.json", "more/secrets.yaml"):
        assert left_out[str(first / "tools" / name)] == "may hold secrets"
    assert (copies / "mcp_servers.json").stat().st_mode & 0o777 == 0o400
    shutil.rmtree(first / "tools")
    (first / "rows.jsonl").unlink()
    told = run("--resume", "--out", folder, code=2)
    assert f"(too large); put it, or a link to it, at {copies / 'rows.jsonl'}" in told


def test_secrets_are_hidden_in_configurations_and_commands(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_text(
        json.dumps(
            {
                "env": {"API_KEY": SECRET, "HOME_PAGE": "x"},
                "headers": {"Authorization": f"Bearer {SECRET}"},
                "args": ["--token", SECRET, "--verbose"],
                "url": f"https://a/?key={SECRET}",
            }
        )
    )
    text = hide_in_config(file)
    assert text is not None and SECRET not in text and "${API_KEY}" in text and "HOME_PAGE" in text
    file.write_text("{")
    assert hide_in_config(file) is None
    words = hide_in_words(["--out", "runs/a", "--token", SECRET, f"key={SECRET}", f"http://u:{SECRET}@h/"])
    assert SECRET not in " ".join(words) and words[:2] == ["--out", "runs/a"]
    assert may_hold_secrets(Path(".env")) and not may_hold_secrets(Path("secret_number.py"))
