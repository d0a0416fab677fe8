"""Weights of a model's folder: each file is there and whole before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.errors import ConfigError, OperatorError
from tests.trainer import tiny_models
from trainer.model import load_model
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
