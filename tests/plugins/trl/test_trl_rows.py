"""Data sets of TRL: rows of any kind, columns that mean nothing here, images, and mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image as Pillow

from gateway.errors import ConfigError
from gateway.types import Image
from mtrl_plugins.trl.api import GRPO
from mtrl_plugins.trl.rows import DatasetTasks, open_dataset
from tests.plugins.trl.scripted_grpo import Recorder, make_trainer, price, script_policy

CHAT = [{"role": "user", "content": "What is it?"}]


def tasks(*rows: Any, **kwargs: Any) -> DatasetTasks:
    return DatasetTasks(open_dataset(rows, "train_dataset"), "train_dataset", **kwargs)


def test_columns_that_have_a_meaning_in_other_data_are_only_columns() -> None:
    row = {"prompt": CHAT, "id": 7, "tools": "[]", "answer": 3, "system": None, "messages": [], "extra_info": 1}
    first, second = tasks(row, row)
    assert first.messages == tuple(CHAT) and first.truth is None
    assert first.session_task.tools is None and dict(first.columns) == row
    assert second.id == f"{first.id}-2"


def test_a_data_set_of_datasets_is_read_row_by_row_with_its_images() -> None:
    picture = Pillow.new("RGB", (30, 30), "red")
    data = datasets.Dataset.from_dict({"prompt": [CHAT], "image": [picture], "note": [None]})
    (task,) = DatasetTasks(open_dataset(data.cast_column("image", datasets.Image()), "train_dataset"), "train_dataset")
    image, text = task.messages[0]["content"]
    assert isinstance(image["image"], Image) and text == {"type": "text", "text": "What is it?"}
    assert isinstance(task.columns["image"], Pillow.Image) and task.columns["note"] is None


def test_of_a_stream_as_many_rows_are_read_as_the_run_draws(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def stream() -> Iterator[dict[str, Any]]:
        for number in range(1000):
            drawn.append(number)
            yield {"prompt": CHAT, "number": number}

    script_policy(monkeypatch, [["done"]])
    trainer = make_trainer(model, stream(), Recorder(), args={"max_steps": 3})
    assert len(trainer._parts.train) == 3 and drawn == [0, 1, 2]
    with pytest.raises(ConfigError, match="set max_steps"):
        make_trainer(model, stream(), Recorder(), args={"max_steps": -1})


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "has no rows"),
        ([{"question": "?"}], r"train_dataset\[0\]: prompt: is missing"),
        ([{"prompt": 3}], "neither a text nor a list"),
        ([{"prompt": ["?"]}], "neither a text nor a list"),
        (["?"], "not a row with columns"),
        ([{"prompt": CHAT, "images": [b"no image"]}], r"train_dataset\[0\]: images\[0\]"),
        ([{"prompt": "half \ud83d"}], "surrogate"),
        ([{"prompt": "text"}, {"prompt": CHAT}], "some prompts are texts"),
        ({"train": []}, "several data sets"),
        ("org/name", "is a text"),
        (3, "is a int"),
    ],
)
def test_mistakes_in_data_are_named_with_their_row(rows: Any, problem: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_trainer(model, rows, Recorder())


def test_texts_have_no_place_for_tools_and_no_chat_template_applied(model: Path, place: Path) -> None:
    with pytest.raises(ConfigError, match="no place for tools"):
        make_trainer(model, [{"prompt": "The sky is"}], Recorder(), tools=[price])
    with pytest.raises(ConfigError, match=r"control token '<\|im_"):
        make_trainer(model, [{"prompt": "<|im_start|>user\nHi<|im_end|>"}], Recorder()).train()


@pytest.mark.parametrize(
    ("model", "problem"), [({}, "model: is a dict"), ("org/missing", "no hub is asked"), ("missing", "missing")]
)
def test_what_is_no_model_is_refused(model: Any, problem: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    trainer = GRPO(model, Recorder(), {"max_steps": 1}, [{"prompt": CHAT}])
    with pytest.raises(Exception, match=problem):
        trainer.train()
