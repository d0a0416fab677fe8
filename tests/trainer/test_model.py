"""A model's folder: its weight files are whole before they are loaded, and its code runs only if it is trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.errors import ConfigError, OperatorError
from tests.forked_python import ForkedPopen
from tests.trainer import tiny_models
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.trainings import write_config
from trainer.model import load_model
from trainer.pretrained import ModelCodeError, load_config, load_tokenizer, trust_code
from trainer.train.job import prepare_model
from trainer.train.settings import TrainSettings
from trainer.weight_files import INDEX_FILE, read_weight_files


@pytest.mark.parametrize(("config", "method"), [({"quant_method": "fp8"}, "fp8"), ({"bits": 4}, "unknown")])
async def test_quantised_weights_are_refused_by_name(config: dict[str, object], method: str, tmp_path: Path) -> None:
    tiny_models.load_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    refusal = rf"its weights are quantised \({method}\) and cannot be trained; name the folder"
    with pytest.raises(OperatorError, match=refusal):
        load_model(tmp_path)
    with pytest.raises(OperatorError, match=refusal):  # Of ranks, of which each reads a part of the files.
        await prepare_model(TrainSettings.model_validate({"model": str(tmp_path), "data": "rows.jsonl"}))


def write_weights(file: Path, shape: tuple[int, int] = (3, 4)) -> None:
    size = 4 * shape[0] * shape[1]
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}, "__metadata__": {}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        write_weights(tmp_path / name)
    index = {"weight_map": {f"layer{number}": name for number, name in enumerate(names)}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    return tmp_path


def test_a_configuration_of_other_sizes_is_refused_but_a_transposed_or_renamed_tensor_is_not(model: Path) -> None:
    weights = read_weight_files(model)
    weights.require_shapes(model, {"w": (4, 3), "renamed": (7, 7)})
    with pytest.raises(ConfigError, match=r"config\.json: model: w is 3 x 8 by it, but 3 x 4 in the weight files"):
        weights.require_shapes(model, {"w": (3, 8)})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-7]), "is cut off or damaged"),
        (lambda file: file.write_bytes(b"<!doctype html> not found, or not signed in"), "header does not fit"),
        (lambda file: file.write_bytes((5).to_bytes(8, "little") + b"[1,2]"), "its header cannot be read"),
        (lambda file: file.unlink(), "is missing, but model.safetensors.index.json names it"),
    ],
)
def test_a_file_that_is_not_whole_is_named_with_its_remedy(
    model: Path, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(model / "model-2.safetensors")
    with pytest.raises(ConfigError) as raised:
        read_weight_files(model)
    assert (
        "model-2.safetensors" in str(raised.value) and says in str(raised.value) and "remedy: copy" in str(raised.value)
    )


def test_an_index_that_cannot_be_read_and_a_folder_without_weights_are_told(model: Path) -> None:
    (model / INDEX_FILE).write_text("{")
    with pytest.raises(ConfigError, match=rf"{INDEX_FILE}.*cannot be read"):
        read_weight_files(model)
    for file in model.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        read_weight_files(model)
    (model / "pytorch_model.bin").write_bytes(b"")
    assert read_weight_files(model).parameters == 0, "other formats are not read"


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
