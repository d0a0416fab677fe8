"""Code in a model's folder: it never runs unless the settings trust it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_python import ForkedPopen
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.trainings import write_config
from trainer.pretrained import ModelCodeError, load_config, load_tokenizer, trust_code

CODE = """
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen2Tokenizer

Path({mark!r}).write_text("the folder's code ran")


class OwnConfig(Qwen3Config):
    model_type = "own"


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(Qwen2Tokenizer):
    pass
"""


def _change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def own_model(folder: Path) -> None:
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    _change(folder / "config.json", model_type="own", auto_map=classes)


def own_tokenizer(folder: Path) -> None:
    classes = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    _change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)


@pytest.fixture
def mark(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code writes; the code is in the folder of the model of `run.yaml`, which has been run."""
    from tests.trainer.model_folders import save_tiny_model

    mark = place / "mark"
    save_tiny_model(place / "model")
    (place / "model" / "own.py").write_text(CODE.format(mark=str(mark)))
    own_model(place / "model")
    own_tokenizer(place / "model")
    limits = {"rollout_tokens": 600, "turn_tokens": 8, "assistant_turns": 1}
    write_config(
        model=str(place / "model"), out=str(place / "run"), steps=1, limits=limits, trust_remote_code=True, record=True
    )
    monkeypatch.setenv("HF_MODULES_CACHE", str(place / "modules"))
    return mark


def test_no_command_runs_code_of_a_models_folder(run: RunCommand, mark: Path) -> None:
    trusting = [sys.executable, "-m", "trainer.cli", "--config", "run.yaml"]
    with ForkedPopen(trusting, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ) as process:
        output = process.communicate(timeout=300)[0].decode()
    assert process.returncode == 0 and mark.exists(), output
    mark.unlink()
    for file in ("run.yaml", "run/run.json"):
        untrusted = Path(file).read_text().replace('"trust_remote_code": true', '"trust_remote_code": false')
        Path(file).write_text(untrusted)

    data = "--data", "rows.jsonl"
    Path("rows.jsonl").write_text('{"prompt": "Who?", "ground_truth": "You."}\n')
    for code, *words in (
        (2, "--config", "run.yaml", "--dry-run"),
        (2, "--config", "run.yaml", "--out", "other"),
        (2, "eval", "run"),
        (2, "replay", "run", "1"),
        (2, "rollout", "--tools", "tools", "--model", "model", *data, "--out", "rolled"),
        (2, "export", "run", "--out", "exported"),
        (2, "--config", "run.yaml", "--resume"),
    ):
        output = " ".join(run(*words, code=code).output.split())
        assert not mark.exists(), words
        assert "auto_map" in output and "set `trust_remote_code: true`" in output, (words, output)


def test_trust_in_a_folder_is_trust_in_those_below_it_and_in_no_other(tmp_path: Path) -> None:
    from tests.trainer.model_folders import save_tiny_model

    for name in ("trusted/model", "other"):
        save_tiny_model(tmp_path / name)
        (tmp_path / name / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
        own_model(tmp_path / name)
        own_tokenizer(tmp_path / name)
    trust_code(tmp_path / "trusted")
    for read in (load_config, load_tokenizer):
        with pytest.raises(ModelCodeError, match=r"own\.Own"):
            read(tmp_path / "other")
    assert not (tmp_path / "mark").exists()
    assert load_config(tmp_path / "trusted" / "model").model_type == "own" and (tmp_path / "mark").exists()
