"""Models and data sets by the names of the Hugging Face hub: fetched, pushed, and refused with the reason.

The hub's own client asks a server on this machine, in processes of their own: it reads its address when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.servers.hub_stand_in import SHA, TOKEN, Hub, running_hub
from trainer.cli import app

ROWS = [{"prompt": f"{number} + 1?", "ground_truth": str(number + 1)} for number in range(3)]
CODE = """
import sys
from gateway.errors import ConfigError
from trainer.data.dataset import open_rows
from trainer.hub import find_model
for name in sys.argv[1:]:
    try:
        if name.startswith("data:"):
            rows = open_rows(name.removeprefix("data:"), "train")
            print(len(rows), rows[2]["prompt"], rows.location(2))
        else:
            folder = find_model(name)
            print(folder, sorted(file.name for file in folder.iterdir()))
    except ConfigError as error:
        print(" ".join(str(error).split()))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    files = {"config.json": b"{}", "model.safetensors": b"0" * 100_000}
    rows = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    card = b"---\nconfigs:\n- config_name: main\n  data_files: rows.jsonl\n---\n"
    repos = {
        "models/org/tiny": {**files, "evil.py": b"raise SystemExit"},
        "datasets/org/sums": {"README.md": card, "rows.jsonl": rows},
    }
    with running_hub(repos) as hub:
        yield hub


def ask(hub: Hub, home: Path, *names: str, **environment: str) -> tuple[list[str], str]:
    """What a process prints that asks for these names, line by line, and what it says on standard error."""
    words = [sys.executable, "-c", CODE, *names]
    return run(words, hub, home, environment)


def run(words: list[str], hub: Hub, home: Path, environment: dict[str, str], code: int = 0) -> tuple[list[str], str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_model_is_fetched_by_its_name_told_before_and_found_again_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.asked.clear()
    (line,), told = ask(hub, tmp_path, "org/tiny@v2")
    assert f"snapshots/{SHA} [" in line and "model.safetensors" in line and "evil.py" not in line
    assert f"mtrl-train: fetching org/tiny@v2 from {hub.url} (" in told and "MB, kept in" in told
    assert any("resolve" in request for request in hub.asked) and not any("evil.py" in request for request in hub.asked)
    (again,), told = ask(hub, tmp_path, "org/tiny@v2", HF_ENDPOINT="http://127.0.0.1:9")
    assert again == line and "fetching" not in told


def test_a_data_set_is_read_and_what_the_hub_does_not_give_refused_with_the_way_to_it(hub: Hub, tmp_path: Path) -> None:
    names = ("data:org/sums@v2:main", "org/gated", "org/missing", "org/tiny@v9", "data:org/missing")
    (read, gated, missing, revision, data), told = ask(hub, tmp_path, *names)
    assert read == "3 2 + 1? org/sums@v2:main:3"
    assert f"mtrl-train: data set org/sums@v2:main: from {hub.url}, unless it was fetched before" in told
    assert "org/gated is no folder here, and its owners give access on request" in gated
    assert f"ask for it at {hub.url}/org/gated, then: `hf auth login`" in gated
    assert "org/missing is no folder here, and the hub has none of this name that you may read" in missing
    assert "the hub has no such revision of it" in revision
    assert "org/missing: is not a file or folder here, and no data set of this name can be loaded" in data


def test_without_a_network_names_are_refused_by_name(hub: Hub, tmp_path: Path) -> None:
    lines, _ = ask(hub, tmp_path, "org/tiny", "data:org/sums", HF_HUB_OFFLINE="1")
    assert "model: org/tiny is no folder here, and no hub is asked, since HF_HUB_OFFLINE is set" in lines[0]
    assert "org/sums: is not a file or folder here" in lines[1] and "(HF_HUB_OFFLINE is set)" in lines[1]
    (line,), _ = ask(hub, tmp_path, "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub (http://127.0.0.1:9) did not give it (ConnectError)" in line


@pytest.mark.parametrize("command", ["", "rollout", "sft"])
@pytest.mark.parametrize(("model", "is_asked"), [("org/missing@v2", True), ("./models/mine", False)])
def test_commands_ask_the_hub_for_a_model_unless_it_is_written_as_a_folder(
    command: str, model: str, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("tools").mkdir()
    more = {"": ["--tools", "tools", "--dry-run"], "rollout": ["--out", "o"], "sft": ["--steps", "1", "--dry-run"]}
    done = CliRunner().invoke(app, [*command.split(), "--model", model, "--data", "d", *more[command]])
    assert done.exit_code in (1, 2), done.output
    assert (f"model: {model} is no folder here, and no hub is asked" in done.output) is is_asked, done.output


def test_an_export_is_pushed_into_a_private_repository_with_a_token(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    code = "from pathlib import Path; from trainer.hub import *; check_push('org/mine'); "
    code += "print(push_model(Path(sys.argv[1]), 'org/mine'))"
    words = [sys.executable, "-c", code, str(tmp_path / "mine")]
    for token, problem in (("", "--push: there is no token"), ("hf_bad", "--push: org/mine cannot be pushed to")):
        _, told = run(words, hub, tmp_path, {"HF_TOKEN": token}, code=1)
        assert problem in told and "hf auth login" in told and not hub.made
    lines, _ = run(words, hub, tmp_path, {"HF_TOKEN": TOKEN})
    assert lines == [f"{hub.url}/org/mine"]
    assert [wanted["visibility"] for wanted in hub.made] == ["private"]
    assert hub.repos["models/org/mine"]["config.json"] == b"{}"


def test_nothing_is_pushed_where_everybody_can_read_it(hub: Hub, tmp_path: Path) -> None:
    code = "from trainer.hub import check_push; check_push('org/new'); check_push('org/tiny')"
    _, told = run([sys.executable, "-c", code], hub, tmp_path, {"HF_TOKEN": TOKEN}, code=1)
    assert "org/tiny is there already, and everybody can read it" in told and "org/new" not in hub.repos


def test_a_push_without_a_token_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    words = ["export", str(tmp_path), "--out", str(tmp_path / "mine"), "--push", "org/mine"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "--push: there is no token for the hub" in done.output
    assert not (tmp_path / "mine").exists()
