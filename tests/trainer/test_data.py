"""Data rows become tasks: every file format, and the column names of verl, ms-swift and TRL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gateway.errors import ConfigError
from gateway.types import Image
from tests.sample_images import png
from trainer.data import load_rows
from trainer.rollout.task import Task

Rows = list[dict[str, Any]]

VERL: Rows = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}},
            "tool_selection": ["calc_gsm8k_reward"],
            "interaction_kwargs": {"query": "1 + 1?", "ground_truth": "2"},
        },
    },
    {
        "data_source": "sandbox",
        "prompt": [{"role": "user", "content": "Run it."}],
        "reward_model": {"style": "rule", "ground_truth": "ok"},
        "extra_info": {"index": 1, "tools_kwargs": {"code": {"create_kwargs": {"memory": 64}}}},
    },
]


def jsonl(folder: Path, rows: Rows) -> Any:
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def parquet(folder: Path, rows: Rows) -> Any:
    file = folder / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


def saved(folder: Path, rows: Rows) -> Any:
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def split(folder: Path, rows: Rows) -> Any:
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(folder / "split"))
    return folder / "split"


def dataset(folder: Path, rows: Rows) -> Any:
    return datasets.Dataset.from_list(rows)


def held(folder: Path, rows: Rows) -> Any:
    return iter(rows)


Form = Callable[[Path, Rows], Any]
FORMS: list[Form] = [jsonl, parquet, saved, split, dataset, held]


def one(row: dict[str, Any], **options: Any) -> Task:
    return load_rows([row], **options)[0]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_row_is_the_same_task_in_every_format(form: Form, tmp_path: Path) -> None:
    tasks, meant = load_rows(form(tmp_path, VERL)), load_rows(VERL)
    assert len(tasks) == 2
    assert [(t.id, t.messages, t.truth, t.session_task) for t in tasks] == [
        (t.id, t.messages, t.truth, t.session_task) for t in meant
    ]


def test_interaction_gets_the_rows_truth_by_default() -> None:
    heard = {"interaction_kwargs": {"name": "gsm8k"}}
    assert one({"prompt": "?", "ground_truth": "7", **heard}).session_task.feedback_args == {"ground_truth": "7"}
    assert one({"prompt": "?", "answer": "3 + 4 = 7", **heard}).session_task.feedback_args == {}
    assert one({"prompt": "?", "ground_truth": "7"}).session_task.feedback_args == {}
    told = {"interaction_kwargs": {"ground_truth": "8"}}
    assert one({"prompt": "?", "ground_truth": "7", **told}).session_task.feedback_args == {"ground_truth": "8"}


@pytest.mark.parametrize(
    "row",
    [
        {"answer": "7"},
        {"ground_truth": "7", "answer": "3 + 4 = 7"},
        {"reward_model": {"ground_truth": "7"}, "ground_truth": "8"},
        {"solution": "7"},
        {"solution": "3 + 4", "answer": "7"},
        {"answer": None, "solution": "7"},
        {"interaction_kwargs": {"ground_truth": "7"}},
    ],
)
def test_truth_has_several_column_names(row: dict[str, Any]) -> None:
    assert one({"prompt": "3 + 4?", **row}).truth == "7"


def test_system_prompt_is_added_to_chats_without_one() -> None:
    told = {"role": "system", "content": "Be brief."}
    asked = {"role": "user", "content": "Why?"}
    own = {"role": "system", "content": "Be long."}
    assert one({"prompt": "Why?"}, system="Be brief.").messages == (told, asked)
    assert one({"messages": [own, asked]}, system="Be brief.").messages == (own, asked)
    assert one({"messages": [asked], "system": "Be long."}, system="Be brief.").messages == (own, asked)


def test_given_id_is_kept_and_generated_ids_depend_on_the_row() -> None:
    assert one({"id": 7, "prompt": "?"}).id == "7"
    assert one({"prompt": "?"}).id == one({"prompt": "?", "answer": None}, system="Be brief.").id
    assert one({"prompt": "?"}).id != one({"prompt": "!"}).id
    assert one({"id": "x", "prompt": "?"}).session_task.id == "x"


def test_wrapped_values_are_unwrapped() -> None:
    row = {
        "prompt": np.array([{"role": "user", "content": "?"}], dtype=object),
        "answer": np.int64(7),
        "x": np.float64(0.5),
        "y": (np.bool_(True), pyarrow.scalar([1, None])),
        "z": np.arange(4).reshape(2, 2),
        "image": b"bytes",
    }
    task = one(row)
    kinds = {type(value) for value in (task.truth, task.columns["x"], *task.columns["y"], task.columns["image"])}
    assert kinds == {int, float, bool, list, bytes}
    assert task.columns["z"] == [[0, 1], [2, 3]]
    assert task.messages == ({"role": "user", "content": "?"},)


def test_images_stay_in_their_columns() -> None:
    row = {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
        "pictures": [b"1"],
        "images": [png()],
    }
    task = one(row)
    shown = [{"type": "image", "image": Image(png())}, {"type": "text", "text": "?"}]
    assert task.messages == ({"role": "user", "content": shown},)
    assert (task.columns["pictures"], task.columns["images"]) == ([b"1"], [png()])


def test_large_file_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = load_rows(jsonl(tmp_path, [{"id": number, "prompt": "x" * 100} for number in range(3000)]))
    read: list[str] = []
    monkeypatch.setattr("trainer.data.tasks.row_to_task", lambda row, place, shown, system: read.append(place))
    tasks[2500]
    assert read == [f"{tmp_path}/tasks.jsonl:2501"]


def test_hub_dataset_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(VERL)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("openai/gsm8k:main", split="test")[1].location == "openai/gsm8k:main:2"
    assert len(load_rows("squad")) == 2
    assert asked == [("openai/gsm8k", "main", "test"), ("squad", None, "train")]


def test_several_files_are_read_in_order_with_locations(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "deep" / "two.jsonl"
    two.parent.mkdir()
    one.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    two.write_text(json.dumps({"prompt": "c"}) + "\n")
    tasks = load_rows(f"{one}, {two}")
    assert [task.messages[0]["content"] for task in tasks] == ["a", "b", "c"]
    assert [task.location for task in tasks] == [f"{one}:1", f"{one}:2", f"{two}:1"]
    two.write_text(json.dumps({"promt": "c"}) + "\n")
    with pytest.raises(ConfigError, match=r"two\.jsonl:1: prompt: is missing"):
        load_rows(f"{one},{two}")
