"""Schemas and arguments whose check would take for ever: they are refused, or end at a limit, and stop nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest

from gateway.argument_checks import MAX_LENGTH
from gateway.elicitation import DECLINE, ElicitationAnswers
from gateway.mcp_client.listing import ListingParser
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.schema import ArgumentChecker, SchemaError
from gateway.tool_table import Source
from gateway.types import Outcome, ToolSpec
from tests.hostile.injector import call_beside
from tests.waiting import PATIENCE_S

Schema = dict[str, Any]


def leveled(levels: int, above: Callable[[Schema], Any]) -> Schema:
    """Levels of definitions, each made from a reference to the one below."""
    defs: Schema = {"l0": {"type": "string"}}
    for level in range(1, levels):
        defs[f"l{level}"] = above({"$ref": f"#/$defs/l{level - 1}"})
    return {"type": "object", "$defs": defs, "properties": {"s": {"$ref": f"#/$defs/l{levels - 1}"}}}


def of(schema: Schema) -> Schema:
    return {"type": "object", "properties": {"s": schema}}


DOUBLING: dict[str, Callable[[Schema], Schema]] = {
    "anyOf": lambda below: {"anyOf": [below] * 2},
    "allOf": lambda below: {"allOf": [below] * 2},
    "oneOf": lambda below: {"oneOf": [below] * 2},
    "dependentSchemas": lambda below: {"dependentSchemas": {"a": below, "b": below}},
    "if, then and else": lambda below: {"if": below, "then": below, "else": {"not": below}},
}
REFUSED: dict[str, tuple[Callable[[], Schema], str]] = {
    "18 doubling levels": (lambda: leveled(18, DOUBLING["anyOf"]), "subschemas apply to one value"),
    **{
        f"40 levels that double by {words}": (partial(leveled, 40, above), "subschemas apply to one value")
        for words, above in DOUBLING.items()
    },
    "a chain of references": (lambda: leveled(1000, lambda below: below), "one inside the other"),
    "many values": (lambda: of({"enum": list(range(20_000))}), "values"),
    "many patterns": (lambda: of({"allOf": [{"pattern": f"a{n}"} for n in range(200)]}), "patterns"),
    "a long pattern": (lambda: of({"pattern": "a|" * 9_000}), "patterns"),
    "a pattern that compiles to much": (lambda: of({"pattern": "(a{1000}){1000}"}), "not a usable JSON Schema"),
}


@pytest.mark.parametrize("trick", REFUSED)
def test_schema_over_its_budget_is_quarantined_with_the_reason(trick: str) -> None:
    build, reason = REFUSED[trick]
    schema = build()
    parser = ListingParser("it", modern=False)
    parser.add_page([{"name": "bad", "inputSchema": schema}, {"name": "good", "inputSchema": of({})}])
    listing = parser.listing
    assert [spec.name for spec in listing.specs] == ["good"]
    assert reason in listing.quarantined["bad"]
    with pytest.raises(SchemaError, match=reason):
        ArgumentChecker(schema)


def tree() -> Schema:
    """Recursive, so that a deep value takes two to the power of its depth of steps."""
    branch = {"properties": {"a": {"$ref": "#/$defs/node"}}}
    node = {"type": "object", "anyOf": [{**branch, "required": ["x"]}, {**branch, "required": ["y"]}]}
    return {"type": "object", "$defs": {"node": node}, "properties": {"s": {"$ref": "#/$defs/node"}}}


def deep(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return {"s": value}


def anchored() -> Schema:
    """Doubles by references that are no JSON pointers."""
    defs: Schema = {"l0": {"$anchor": "l0", "type": "string"}}
    for level in range(1, 30):
        defs[f"l{level}"] = {"$anchor": f"l{level}", "anyOf": [{"$ref": f"#l{level - 1}"}] * 2}
    return {"type": "object", "$defs": defs, "properties": {"s": {"$ref": "#l29"}}}


SLOW: dict[str, tuple[Callable[[], Schema], Callable[[], dict[str, Any]]]] = {
    "a recursive schema and a deep value": (tree, lambda: deep(40)),
    "references by anchor": (anchored, lambda: {"s": 5}),
    "a pattern that backtracks": (lambda: of({"pattern": r"(?=(a+))\1+b"}), lambda: {"s": "a" * 60_000}),
    "patterns on many values": (lambda: of({"items": {"pattern": r"^(a|a)*\1x$"}}), lambda: {"s": ["a" * 60] * 5_000}),
}
"""What misbehaves, with the arguments for which a check takes long: it runs in a child process, up to a limit."""


def source_of(schema: Schema) -> Source:
    function = {"name": "trap", "description": "", "parameters": {"type": "object", "properties": {}}}

    class Trap(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return "ran"

    tool = ClassTool(Trap({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})))
    tool.spec = ToolSpec("trap", parameters=schema)
    return Source("trap", NativeToolset([tool]))


@pytest.mark.parametrize("trick", [*SLOW][1:])  # The first one ends alike, and is what other tests cut short.
async def test_slow_check_ends_and_disturbs_no_healthy_caller(trick: str) -> None:
    build_schema, build_arguments = SLOW[trick]
    schema, arguments = build_schema(), build_arguments()
    result, meanwhile = await call_beside([source_of(schema)], "trap", arguments)
    assert result.outcome is Outcome.INVALID
    limits = ("3 s of processor time", "limit for backtracking")  # never time that a busy machine takes
    assert any(limit in str(result.parts) for limit in limits)
    meanwhile.assert_undisturbed()


async def test_large_arguments_that_fit_are_called_after_a_check_in_a_child() -> None:
    schema = of({"type": "array", "items": {"type": "string"}})
    result, meanwhile = await call_beside([source_of(schema)], "trap", {"s": ["a" * 60] * 2_000})
    assert result.outcome is Outcome.OK
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"s": "' + "a" * MAX_LENGTH + '"}', "Write shorter ones"),
        ('{"s": [' + "1," * 60_000 + "1]}", "more than 50000 values"),
        ('{"s": ' + "[" * 40_000 + "]" * 40_000 + "}", "nested deeper"),
    ],
)
async def test_oversized_arguments_are_refused(arguments: str, words: str) -> None:
    result, meanwhile = await call_beside([source_of(of({}))], "trap", arguments)
    assert result.outcome is Outcome.INVALID and words in str(result.parts)
    meanwhile.assert_undisturbed()


async def test_question_with_a_costly_schema_is_answered_at_once() -> None:
    schema = anchored() | {
        "properties": {"s": {"$ref": "#l29", "default": 5}, "t": {"pattern": "(a|a)*$", "default": "b"}}
    }
    with anyio.fail_after(PATIENCE_S):
        answer = await ElicitationAnswers("it", "defaults").answer("elicitation/create", {"requestedSchema": schema})
    assert answer == {"action": "accept", "content": {"s": 5, "t": "b"}}
    huge = {"properties": {"s": {"enum": ["x" * 70_000], "default": "x"}}}
    assert await ElicitationAnswers("it", "defaults").answer("elicitation/create", {"requestedSchema": huge}) == DECLINE
