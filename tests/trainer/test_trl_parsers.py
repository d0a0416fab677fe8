"""Calls are read as TRL's own parser reads them, for every template of which TRL knows how to."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest

from gateway.types import ToolCall
from tests.trainer.conversations import calling_turn, text_turn
from tests.trainer.test_trl_templates import ADD, PARSED, QUESTION
from tests.trainer.trl_templates import FOLDER, load_trl_template, make_trl_tokenizer
from trainer.ledger import Message
from trainer.template import render_reply

UNKNOWN = [file for file in PARSED if file.endswith("_training") or file.startswith(("diffusion", "muse"))]
"""Templates for which TRL has no parser of its own."""
ROWS: tuple[dict[str, Any], ...] = (
    {"word": "a bc d", "count": -3, "share": 0.5, "flag": True, "rows": [{"k": 1}, {}]},
    {"word": "x", "more": {"list": ["y", "z z"]}, "flag": False},
    {"word": "\u00e9 7"},
)


@pytest.fixture(scope="module")
def trl() -> Iterator[ModuleType]:
    """TRL's functions for chat templates, from the wheel that `make peers` fetches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER.parents[1]))
        yield importlib.import_module("trl.chat_template_utils")
    for name in [name for name in sys.modules if name == "trl" or name.startswith("trl.")]:
        del sys.modules[name]


def _parse_with_trl(trl: ModuleType, file: str, turn: Message) -> Any:
    template, tokenizer = load_trl_template(file, tools=(ADD,)), deepcopy(make_trl_tokenizer(file))
    ids = render_reply(template, QUESTION, turn, [ADD])
    prompt = list(template.encode_prompt(QUESTION, [ADD]))
    return ids, trl.parse_response(trl.add_response_schema(tokenizer), list(ids), prompt, [ADD])


@pytest.mark.parametrize("file", [file for file in PARSED if file not in UNKNOWN])
def test_calls_are_read_as_trl_reads_them(file: str, trl: ModuleType) -> None:
    template = load_trl_template(file, tools=(ADD,))
    for rows in ((row,) for row in ROWS) if template.max_calls else [ROWS]:
        calls = [ToolCall(f"call0000{index}", "add_up", json.dumps(row)) for index, row in enumerate(rows)]
        ids, theirs = _parse_with_trl(trl, file, calling_turn(calls))
        ours = [(call.name, json.loads(call.arguments)) for call in template.parse_turn(ids).calls]
        assert ours == [("add_up", row) for row in rows]
        assert ours == [(call["function"]["name"], call["function"]["arguments"]) for call in theirs["tool_calls"]]


@pytest.mark.parametrize("file", [file for file in PARSED if file not in UNKNOWN])
def test_answers_are_read_as_trl_reads_them(file: str, trl: ModuleType) -> None:
    ids, theirs = _parse_with_trl(trl, file, text_turn("Two, I think."))
    ours = load_trl_template(file, tools=(ADD,)).parse_turn(ids)
    assert ours.content.strip() == theirs["content"].strip() == "Two, I think."
    assert not theirs.get("tool_calls") and not ours.calls
