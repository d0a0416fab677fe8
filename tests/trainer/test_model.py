"""A model comes from a folder or not at all, and a folder without one says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainer import tiny
from trainer.model import ModelError, load_model, settle


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_saved_model_comes_back(family: str, tmp_path: Path) -> None:
    model = tiny.model(family)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert not loaded.training
    ids = torch.tensor([tiny.prompt(9)])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert load_model(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_products_are_made_by_one_thread(one_thread: None) -> None:
    torch.set_num_threads(2)
    settle()
    assert torch.get_num_threads() == 1


def test_what_is_no_model_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toaster"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="float33"):
        load_model(tmp_path, dtype="float33")
