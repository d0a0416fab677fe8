"""Tool-call parsers read what their family's template renders."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.types import ToolCall
from tests.trainer.tokenizer_families import FAMILIES
from trainer.parse.choose import choose_parser

SCHEMAS = {"add": {"properties": {"a": {"type": "integer"}, "list": {"type": "array"}, "word": {"type": "string"}}}}
ARGUMENTS: dict[str, Any] = {"a": 1, "list": [1, {"b": None}], "word": 'so "he"\nsaid: é \\'}
USER = {"role": "user", "content": "Add."}


def _written(name: str, calls: list[ToolCall], reasoning: str = "") -> str:
    """What the template writes after its generation prompt."""

    def refuse(reason: str) -> None:
        raise ValueError(reason)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    template = environment.from_string(FAMILIES[name].template)
    objects = name != "deepseek"
    rows = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments) if objects else call.arguments},
        }
        for call in calls
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": rows, "reasoning_content": reasoning}
    given = {"bos_token": "", "eos_token": "", "tools": None, "raise_exception": refuse}
    before = template.render(messages=[USER], add_generation_prompt=True, **given)
    return template.render(messages=[USER, turn], add_generation_prompt=False, **given).removeprefix(before)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_calls_as_the_template_writes_them_are_read_as_the_same_calls(name: str) -> None:
    parser = choose_parser(FAMILIES[name].template, SCHEMAS)
    count = 2 if FAMILIES[name].several_calls else 1
    calls = [
        ToolCall(f"functions.add:{place}" if name == "kimi" else f"call0000{place}", "add", json.dumps(ARGUMENTS))
        for place in range(count)
    ]
    reply = parser.parse(_written(name, calls))
    assert reply.problems == ()
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("add", ARGUMENTS)] * count
    if name in ("kimi", "mistral"):
        assert [call.id for call in reply.calls] == [call.id for call in calls]


@pytest.mark.parametrize("name", ["qwen3", "harmony"])
def test_reasoning_as_the_template_writes_it_is_read_as_reasoning(name: str) -> None:
    call = ToolCall("call00000", "add", json.dumps(ARGUMENTS))
    reply = choose_parser(FAMILIES[name].template, SCHEMAS).parse(_written(name, [call], "Let me see."))
    assert (reply.reasoning, len(reply.calls), reply.problems) == ("Let me see.", 1, ())
