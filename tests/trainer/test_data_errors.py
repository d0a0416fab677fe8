"""Errors in data rows: reported by file, line and field, all at once, with remedies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ConfigError, ConfigErrors
from gateway.types import ToolSpec
from trainer.data import check_task_names, load_rows

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
