"""Values in results, arguments for schemas, and the questions that are made of them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gateway.types import ToolSpec
from trainer.task_maker.arguments import ArgumentWriter, SourceStatistics
from trainer.task_maker.chain import Chain, Step, prune, with_links, without_step
from trainer.task_maker.questions import missing_values, tells_answer, write_question
from trainer.task_maker.values import Value, derived_value, key_fit, leaves, look_up, parse_result, split_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ("[{'name': 'x'}]", [{"name": "x"}]),
        ("owner: Ann\ncode: 12", {"owner": "Ann", "code": "12"}),
        ("[FILE] a.txt\n[DIR] docs", {"file": ["a.txt"], "directory": ["docs"]}),
        ("one\ntwo", ["one", "two"]),
        ("plain", "plain"),
        ("[" * 5000, "[" * 5000),
        ("__import__('os').getcwd()", "__import__('os').getcwd()"),
    ],
)
def test_results_are_read_as_values(text: str, value: Any) -> None:
    assert parse_result(text) == value


def test_leaves_have_their_nearest_keys_and_paths() -> None:
    result = {"people": [{"name": "Ann", "age": 7, "alive": True}], "text": "x" * 500}
    found = list(leaves(result))
    assert found == [("name", ("people", 0, "name"), "Ann"), ("age", ("people", 0, "age"), 7)]
    assert all(look_up(result, path) == value for _, path, value in found)
    assert look_up(result, ("people", 3, "name")) is None


def test_keys_of_one_meaning_fit() -> None:
    assert key_fit("entityName", "name") == key_fit("path", "directory") == 1
    assert key_fit("name", "Name") == 2
    assert key_fit("city", "age") == 0


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


def test_arguments_of_examples_are_filled() -> None:
    known = [Value("Ann", "name"), Value("Bob", "name"), Value("Cid", "name"), Value("Dora", "name")]
    examples = [{"query": "SELECT {x y} FROM t WHERE a='{name}' AND b={#count} AND c='{+word}'"}]
    written = ArgumentWriter(SourceStatistics(), known, "train", Random(1), explores=False).write("q", {}, examples)
    name, count, word = written.literals
    assert written.arguments["query"] == f"SELECT {{x y}} FROM t WHERE a='{name}' AND b={count} AND c='{word}'"


def test_derived_paths_stay_in_their_folder() -> None:
    assert derived_value("/rollout/docs/a.txt", "train", Random(0)).startswith("/rollout/docs/")
    assert derived_value("/rollout/docs/a.txt", "train", Random(0)).endswith(".txt")


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


def test_question_tells_given_values_and_names_linked_ones_by_their_place() -> None:
    chain = Chain(prune([Step("count", {}, {}, ()), FIND, MOVE], keeps_last=False), "train", end_state={"a": "b"})
    question = write_question(chain, SPECS, Random(0))
    assert "Find the box of an item: item 412." in question
    assert "Move a box to a shelf: box (the box in the result of step 1), shelf 5." in question
    assert "77" not in question and missing_values(question, chain) == []
    assert missing_values("Move it to shelf 5.", chain) == ["412"]


def test_question_for_an_answer_says_where_it_is_and_not_what() -> None:
    chain = Chain((FIND,), "train", answer=Value(77, "box", None, ("box",)))
    question = write_question(chain, SPECS, Random(0))
    assert "What is the box? Answer with #### and the value." in question
    assert chain.answer is not None and not tells_answer(question, chain.answer)
    assert tells_answer("The box is 77.", Value(77, "box")) and not tells_answer("It is 177.", Value(77, "box"))
