"""Values in results, arguments for schemas, and the questions that are made of them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from gateway.types import ToolSpec
from mtrl_plugins.task_maker.chain import Chain, Step, prune, with_links, without_step
from mtrl_plugins.task_maker.questions import write_question
from mtrl_plugins.task_maker.values import (
    ArgumentWriter,
    SourceStatistics,
    Value,
    key_fit,
    leaves,
    look_up,
    parse_result,
    reports_error,
    split_of,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ("[{'name': 'x'}]", [{"name": "x"}]),
        ("owner: Ann\ncode: 12", {"owner": "Ann", "code": "12"}),
        ("[FILE] a.txt\n[DIR] docs", {"[FILE] names": ["a.txt"], "[DIR] names": ["docs"]}),
        ("one\ntwo", ["one", "two"]),
        ("plain", "plain"),
        ("[" * 5000, "[" * 5000),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
    ],
)
def test_results_are_read_as_values(text: str, value: Any) -> None:
    assert parse_result(text) == value


def test_structured_results_that_wrap_the_text_are_read_as_the_text() -> None:
    text = "owner: Ann\ncode: 12\n"
    assert (
        parse_result(text, {"content": text}) == parse_result(text, {"result": text}) == {"owner": "Ann", "code": "12"}
    )
    assert parse_result(text, {"content": "Ann"}) == {"content": "Ann"}
    assert parse_result("Ann", {"name": "Ann", "age": 7}) == {"name": "Ann", "age": 7}


@pytest.mark.parametrize(
    "value", [{"status": "error"}, {"error": "none"}, {"success": False}, "Error: none", ["error: x", "y"]]
)
def test_results_that_tell_of_an_error_are_failures(value: Any) -> None:
    assert reports_error(value)


@pytest.mark.parametrize("value", [{"status": "ok", "error": None}, {"success": True}, "no error", [], [{"a": 1}], 7])
def test_other_results_are_none(value: Any) -> None:
    assert not reports_error(value)


def test_values_inside_texts_are_found_by_their_labels_and_heads() -> None:
    table = "Open requests:\n| Request ID | Title |\n|---|---|\n| req-1 | Fence |\n| req-2 | Roof |\n"
    result = {"message": table, "notes": ["code: 12", "see https://example.com"]}
    found = {(key, value): path for key, path, value in leaves(result)}
    assert found["Request ID", "req-2"] == ("message", 1, "Request ID") and found["code", "12"] == ("notes", 0, "code")
    assert all(look_up(result, path) == value for (_, value), path in found.items())
    assert look_up(result, ("message", 9, "Title")) is None and look_up("plain", ("message",)) is None
    assert key_fit("requestId", "Request ID") == 2


SCHEMA = {
    "type": "object",
    "properties": {
        "entities": {"type": "array", "items": {"$ref": "#/$defs/Entity"}},
        "mode": {"enum": ["a", "b"]},
        "count": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 5, "maximum": 6}]},
    },
    "required": ["entities", "mode", "count"],
    "$defs": {"Entity": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_arguments_match_the_schema_and_have_values_of_one_split(split: str) -> None:
    known = [Value(f"Name{number}", "name") for number in range(40)]
    for seed in range(30):
        writer = ArgumentWriter(SourceStatistics(), known, split, Random(seed), explores=True)
        written = writer.write("create", SCHEMA)
        assert written.arguments["mode"] in ("a", "b") and written.arguments["count"] in (5, 6)
        names = [entity["name"] for entity in written.arguments["entities"]]
        assert names and all(split_of(name) == split for name in names)


def test_new_values_are_like_those_of_the_kind_that_the_tool_names() -> None:
    known = [Value(f"/rollout/{number}", "directory") for number in range(9)]
    known += [Value(f"/rollout/{number}.txt", "file") for number in range(9)]
    schema = {"properties": {"path": {"type": "string"}}, "required": ["path"]}
    sources: dict[str, set[str]] = {}
    for tool in ("create_directory", "writeFiles", "find"):
        writers = (
            ArgumentWriter(SourceStatistics(), known, "train", Random(seed), explores=True) for seed in range(60)
        )
        sources[tool] = {writer.write(tool, schema).sources["path"] for writer in writers}
    assert sources["find"] == {"fresh", "known:directory", "known:file", "derived:directory", "derived:file"}
    assert sources["create_directory"] == sources["find"] - {"derived:file"}
    assert sources["writeFiles"] == sources["find"] - {"derived:directory"}


def test_arguments_of_examples_are_filled() -> None:
    known = [Value("Ann", "name"), Value("Bob", "name"), Value("Cid", "name"), Value("Dora", "name")]
    examples = [{"query": "SELECT {x y} FROM t WHERE a='{name}' AND b={#count} AND c='{+word}'"}]
    written = ArgumentWriter(SourceStatistics(), known, "train", Random(1), explores=False).write("q", {}, examples)
    name, count, word = written.literals
    assert written.arguments["query"] == f"SELECT {{x y}} FROM t WHERE a='{name}' AND b={count} AND c='{word}'"


FIND = Step("find", {"item": 412}, {}, (412,), {"box": 77})
MOVE = Step("move", {"box": 77, "shelf": 5}, {("box",): Value(77, "box", 1, ("box",))}, (77, 5), {"done": 1}, True)
SPECS = {
    "find": ToolSpec("find", "Find the box of an item. Fast."),
    "move": ToolSpec("move", "Move a box to a shelf"),
    "count": ToolSpec("count"),
}


def test_steps_that_nobody_needs_are_removed_and_links_renumbered() -> None:
    other = Step("find", {"item": 9}, {}, (9,), {"box": 3})
    pruned = prune([other, FIND, MOVE], keeps_last=False)
    assert [step.tool for step in pruned] == ["find", "move"]
    assert with_links(pruned[1], [{"box": 78}], look_up) == {"box": 78, "shelf": 5}
    assert with_links(pruned[1], [{}], look_up) is None
    assert without_step((other, FIND, MOVE), 0)[1].links["box",].step == 0


@pytest.mark.parametrize(
    ("result", "path", "words"),
    [
        ({"people": [{"name": "Ann"}, {"name": "Bob"}]}, ("people", 1, "name"), "the name of item 2 of people"),
        ({"people": [{"name": "Ann"}]}, ("people", 0, "name"), "the name"),
        (["one", "", "two"], (2,), "line 3"),
        ({"[FILE] names": ["a.txt", "b.txt"]}, ("[FILE] names", 1), "item 2 of [FILE] names"),
        (["[FILE] a.txt", "size: 3"], (0,), "line 1"),
        ([7, 8], (0,), "item 1"),
        ("plain", (), "the result"),
        ({"to": "Ann"}, ("to",), 'the "to"'),
        ({"links": [{"from": "Ann"}, {"from": "Bob"}]}, ("links", 1, "from"), 'the "from" of item 2 of links'),
    ],
)
def test_places_of_answers_are_counted_from_one(result: Any, path: tuple[str | int, ...], words: str) -> None:
    value = look_up(result, path)
    text = "\n".join(map(str, result)) if isinstance(result, list) else json.dumps(result)
    chain = Chain((Step("count", {}, {}, (), result, text=text),), "train", answer=Value(value, "", None, path))
    assert f"What is {words}? " in write_question(chain, SPECS, Random(0))


@pytest.mark.parametrize("value", ["Allowed directories:", "false", "None", " ", "x" * 99])
def test_headings_and_words_for_yes_and_no_are_no_values(value: str) -> None:
    assert list(leaves({"key": [value, "Ann"]})) == [("key", ("key", 1), "Ann")]
