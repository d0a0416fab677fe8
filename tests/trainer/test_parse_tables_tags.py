"""Tool-call parsers: valid, invalid and hostile turns of all families, and the tables of those with tags."""

from __future__ import annotations

import json

import pytest

from tests.trainer import test_parse_tables_families, test_parse_tables_marks
from trainer.parse.choose import load_parser

SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "number"},
            "note": {"type": "string"},
            "flag": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "rows": {"$ref": "#/$defs/Rows"},
            "any": {},
            "size": {"enum": [1, 2]},
            "loop": {"$ref": "#/properties/loop"},
        },
        "$defs": {"Rows": {"type": "array"}},
    }
}

GOOD = [
    (
        "hermes",
        'I look.\n<tool_call>{"arguments": {}, "name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
        [("a", "{}"), ("b", "{}")],
        "I look.",
    ),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"x": "</tool_call><think>\\"}"}}</tool_call> done ',
        [("say", '{"x": "</tool_call><think>\\"}"}')],
        "done ",
    ),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [("now", "{}")], ""),
    (
        "glm",
        "<tool_call>add<arg_key>note</arg_key><arg_value> 1 </arg_value></tool_call>",
        [("add", '{"note": " 1 "}')],
        "",
    ),
]


@pytest.mark.parametrize(
    ("family", "text", "calls", "content"), [*GOOD, *test_parse_tables_families.GOOD, *test_parse_tables_marks.GOOD]
)
def test_valid_turn_is_parsed_into_calls_and_text(
    family: str, text: str, calls: list[tuple[str, str]], content: str
) -> None:
    reply = load_parser(family, SCHEMAS).parse(text)
    assert [(call.name, call.arguments) for call in reply.calls] == calls
    assert (reply.content, reply.problems, reply.reasoning) == (content, (), "")


BAD = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "its JSON ends too early"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', "</tool_call> is missing"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "',' or '}' is missing"),
    ("hermes", '<tool_call>{"name": "add", "parameters": {}}</tool_call>', 'it has no "arguments"'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'it has no "name"'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "its name is no string"),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "needs the name of a tool"),
    ("hermes", '<tool_call>{"name": "a\nb", "arguments": {}}</tool_call>', "raw line break"),
    ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', "<function= is missing"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "</parameter> is missing"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>", "<parameter= or </function> is missing"),
    ("qwen3_coder", "<tool_call><function=add></function>", "</tool_call> is missing"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>", "needs the name of a tool"),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "the parameter 'a' is given twice",
    ),
    ("glm", "<tool_call>add", "</tool_call> is missing"),
    ("glm", "<tool_call>\n<arg_key>a</arg_key>", "needs the name of a tool"),
    ("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call>", "<arg_value> is missing"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1", "</arg_value> is missing"),
    (
        "glm",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key>"
        "<arg_value>2</arg_value></tool_call>",
        "the argument 'a' is given twice",
    ),
    # Hostile ones.
    ("hermes", '<tool_call>{"name": "add", "name": "rm", "arguments": {}}</tool_call>', '"name" is given twice'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "a number is too large"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {"9" * 5000}}}</tool_call>', "a number is too large"),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {"[" * 90_000}', "nested deeper than"),
    ("hermes", "<tool_call>__import__('os').system('id')</tool_call>", "a JSON object is missing"),
]


@pytest.mark.parametrize(
    ("family", "text", "reason"), [*BAD, *test_parse_tables_families.BAD, *test_parse_tables_marks.BAD]
)
def test_invalid_turn_has_no_call_and_an_explanation_for_the_policy(family: str, text: str, reason: str) -> None:
    parser = load_parser(family, SCHEMAS)
    reply = parser.parse(text)
    assert reply.calls == () and reason in reply.problems[0]
    assert all("Write a call so:\n" in problem and len(problem) < 600 for problem in reply.problems)
    shown = reply.problems[0].partition("Write a call so:\n")[2]
    assert [(call.name, call.arguments) for call in parser.parse(shown).calls] == [("NAME", '{"KEY": "VALUE"}')]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm"])
def test_malformed_call_stays_in_the_text_beside_valid_calls(family: str) -> None:
    parser = load_parser(family)
    good = parser.parse("<tool_call>{").problems[0].partition("so:\n")[2]
    reply = parser.parse(f"<tool_call><oops></tool_call>{good}<tool_call>{{</tool_call>")
    assert [call.name for call in reply.calls] == ["NAME"]
    assert reply.content == "<tool_call><oops></tool_call>\n<tool_call>{</tool_call>"
    assert len(reply.problems) == 2


VALUES = [
    ("a", "7", 7),
    ("a", "seven", "seven"),
    ("a", '"7"', '"7"'),
    ("b", "2", 2),
    ("note", "7", "7"),
    ("flag", "True", True),
    ("maybe", "None", None),
    ("maybe", "3", 3),
    ("rows", "[1, {}]", [1, {}]),
    ("rows", "[" * 90_000, "[" * 90_000),
    ("any", "5", 5),
    ("size", "2", 2),
    ("loop", "{}", {}),
    ("stranger", "5", "5"),
]


@pytest.mark.parametrize("family", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_a_field_is_what_the_schema_says_it_is(family: str, key: str, text: str, value: object) -> None:
    turn = f"<tool_call>add\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    if family == "qwen3_coder":
        turn = f"<tool_call>\n<function=add>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = load_parser(family, SCHEMAS).parse(turn).calls
    assert json.loads(call.arguments) == {key: value}
    (untyped,) = load_parser(family).parse(turn).calls
    assert json.loads(untyped.arguments) == {key: text}


def test_a_field_may_be_described_by_the_additional_properties() -> None:
    schemas = {"put": {"type": "object", "additionalProperties": {"type": "integer"}}}
    turn = "<tool_call>put<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert load_parser("glm", schemas).parse(turn).calls[0].arguments == '{"x": 1}'
