"""Data rows become tasks: every file format, the columns of other frameworks, and errors by file, line and field."""

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
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ConfigError, ConfigErrors
from gateway.types import ToolSpec
from trainer.data import check_task_names, load_rows
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


ASKED = {"prompt": "?"}
SPECS = [
    ToolSpec("calculate"),
    ToolSpec("search"),
    ToolSpec("feedback_gsm8k", audience="loop"),
    ToolSpec("feedback_code", audience="loop"),
    ToolSpec("internal", audience="loop"),
]


def mistake(row: Any) -> str:
    with pytest.raises(ConfigErrors) as caught:
        load_rows([row])
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "rows:1: prompt: is missing\n  remedy: write `prompt`: a text, or chat messages"),
        ({"promt": "?"}, "rows:1: prompt: is missing\n  remedy: rename the column `promt` to `prompt`"),
        ({"prompt": " "}, "prompt: is empty"),
        ({"prompt": 7}, "prompt: is a number, not a text or chat messages"),
        ({"messages": ["?"]}, "messages[0]: is a text, not a message"),
        ({"messages": [{"role": "human", "content": "?"}]}, "messages[0].role: is 'human'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is nothing"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content: is empty"),
        ({"messages": [{"role": "assistant", "content": "7"}]}, "messages: ends with an assistant's turn, which the"),
        (ASKED | {"system": 7}, "system: is a number, not a text"),
        (ASKED | {"tools": "search"}, "tools: is a text, not a list of tool names"),
        (ASKED | {"data_source": "mine", "agent_name": "my_loop"}, "agent_name: is 'my_loop', which is not a known"),
        (ASKED | {"tools_kwargs": []}, "tools_kwargs: is a list, not a mapping"),
        (ASKED | {"tools_kwargs": {"a": 7}}, "tools_kwargs.a: is not a mapping with `create_kwargs`"),
        (ASKED | {"tools_kwargs": {"a": {"act_kwargs": {"x": 1}}}}, "tools_kwargs.a.act_kwargs: is passed to no tool"),
        (ASKED | {"need_tools_kwargs": True}, "tools_kwargs: is missing, but `need_tools_kwargs` is true"),
        (ASKED | {"interaction_kwargs": "gsm8k"}, "interaction_kwargs: is a text, not a mapping"),
        (ASKED | {"extra_info": {"interaction_kwargs": {"messages": []}}}, "interaction_kwargs.messages: is an arg"),
        (ASKED | {"id": ""}, "id: is an empty text, not a text or a number"),
        ({"prompt": "\ud800"}, "rows:1: holds half of a surrogate pair"),
        ("?", "rows:1: is a text, not an object with columns"),
    ],
)
def test_invalid_row_is_reported_with_its_field(row: Any, told: str) -> None:
    text = mistake(row)
    assert told in text
    assert "  remedy: " in text


def test_damaged_lines_are_reported_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"prompt": "?"}\n\n{"prompt": \n[1]\n\xff\n{"prompt": ""}\n' + b"[" * 200_000 + b"\n")
    with pytest.raises(ConfigErrors) as caught:
        load_rows(file)
    told = [str(error).splitlines()[0] for error in caught.value.errors]
    assert [line.removeprefix(f"{file}:").split(": ", 1)[0] for line in told] == ["3", "4", "5", "6", "7"]
    assert "is not JSON" in told[0] and "is a list" in told[1] and "is not JSON" in told[2] and "prompt" in told[3]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_told_once_and_not_line_by_line(indent: int | None, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps([ASKED] * 3, indent=indent), encoding="utf-8-sig")
    with pytest.raises(ConfigError) as caught:
        load_rows(file)
    assert str(caught.value).startswith(f"{file}: is a JSON array, not a JSON object on each line\n  remedy: write its")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "./missing", "tasks.csv", "empty.jsonl", "bare"])
def test_unsupported_data_is_reported_with_supported_forms(name: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text("prompt\n?\n")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_rows(tmp_path / name if not name.startswith(".") else name)
    assert name in str(caught.value)
    assert "  remedy: " in str(caught.value)


def test_file_changed_during_a_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    tasks = load_rows(file)
    file.write_text('{"prompt": "a longer one"}\n{"prompt": "2"}\n')
    with pytest.raises(ConfigError, match="has changed since its rows were checked"):
        tasks[1]


COLUMNS = ("id", "prompt", "messages", "system", "tools", "tools_kwargs", "interaction_kwargs", "extra_info", "answer")
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(), max_size=5) | st.just("create_kwargs"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*COLUMNS, "role", "content", "create_kwargs", "name"]), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(COLUMNS), ANY, max_size=5))
def test_any_row_is_a_task_or_a_reported_error(row: dict[str, Any]) -> None:
    try:
        task = load_rows([row])[0]
    except ConfigErrors as wrong:
        assert all("remedy" in str(error) for error in wrong.errors)
    else:
        assert task.messages and task.id and json.dumps(task.messages)


def test_unknown_names_are_reported_once_with_a_suggestion_and_rows_are_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"tools": ["serch"], "tools_kwargs": {"calculater": {}}, "interaction_kwargs": {"name": "gsm8"}}
    rows = load_rows([ASKED, ASKED | row, ASKED | row])
    monkeypatch.delattr(type(rows), "_read")
    told = [str(error) for error in check_task_names(rows, SPECS)]
    assert told == [
        "rows:2: tools: the gateway offers no tool 'serch' (1 more row names it)\n  remedy: did you mean 'search'?",
        "rows:2: tools_kwargs: the gateway offers no tool 'calculater' (1 more row names it)\n"
        "  remedy: did you mean 'calculate'?",
        "rows:2: interaction_kwargs.name: the gateway offers no interaction 'gsm8' (1 more row names it)\n"
        "  remedy: did you mean 'gsm8k'?",
    ]
