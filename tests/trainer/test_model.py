"""Loading a model from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.errors import OperatorError
from tests.trainer import tiny_models
from trainer.model import load_model
from trainer.train.job import prepare_model
from trainer.train.settings import TrainSettings


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
