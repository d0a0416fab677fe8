"""Calls each native tool of a task once before a run, with made-up arguments, to find those that fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import anyio

from gateway.errors import GatewayError
from gateway.session import AnyGateway
from gateway.types import Outcome, ToolCall, ToolResult, ToolSpec
from trainer.finding import Finding
from trainer.rollout.task import Task
from trainer.setup import is_native_tool

MAX_CALLS = 32
"""Tools that are called at most."""
CALLS_S = 60.0
"""Seconds for all calls; each has its tool's own limit, too."""
MAX_TEXT = 300
NOT_CALLED = ToolResult(outcome=Outcome.CANCELLED, reason="there was no time for it")
UNREADABLE = re.compile(r'"<[\w.]+ object>"')
"""How an object that is no JSON value is written for a policy."""
MISTAKES = re.compile(r" raised ((Attribute|Import|ModuleNotFound|NotImplemented|Type|Name|UnboundLocal)Error)\b")
"""Exceptions that tools do not raise to say that an argument is wrong: these fit the schema."""


Results = list[tuple[ToolCall, ToolResult]]


async def call_native_tools(gateway: AnyGateway, task: Task, specs: Sequence[ToolSpec]) -> Results:
    """The calls and their results; none if no session can be opened, of which the scripted rollouts tell.

    MCP servers and remote gateways are not asked: their tools may have effects that the operator does not know.
    """
    native = [spec for spec in specs if is_native_tool(gateway, spec.name) and spec.hints.destructive is not True]
    calls = [ToolCall("call00000", spec.name, json.dumps(make_arguments(spec.parameters))) for spec in native]
    results: Results = []
    try:
        async with gateway.open(task.session_task) as session:
            with anyio.move_on_after(CALLS_S):
                for call in calls[:MAX_CALLS]:
                    results.append((call, await session.call(call)))
    except GatewayError:
        return []
    return results + [(call, NOT_CALLED) for call in calls[len(results) :]]


def check_results(results: Results) -> Iterator[Finding]:
    """What the calls say about their tools."""
    called = [call.name for call, result in results if result is not NOT_CALLED]
    for call, result in results:
        if result is not NOT_CALLED:
            yield from _check_result(call, result)
    if called:
        yield Finding("ok", f"native tools were called with made-up arguments: {', '.join(called)}")
    if left := [call.name for call, result in results if result is NOT_CALLED]:
        problem = f"after {len(called)} calls, or {CALLS_S:g} s, these tools were not called: {', '.join(left)}"
        yield Finding("note", problem, "if the first of them hangs, give it a shorter `timeout`")


def _check_result(call: ToolCall, result: ToolResult) -> Iterator[Finding]:
    """What a call says about its tool; errors that it may have because the arguments are made up are only noted."""
    called = f"`{call.name}` called with {call.arguments}"
    if result.outcome is Outcome.OK:
        if not result.parts:
            remedy = "return a text, a number, a dict or an image, if the policy is to know what came of it"
            yield Finding("note", f"{called} returned nothing that the policy could read", remedy)
        elif UNREADABLE.search(result.text):
            problem = f"{called} returned an object, of which the policy reads {result.text[:MAX_TEXT]}"
            yield Finding("wrong", problem, "return a text, a number, a dict, a list, an image or a ToolResponse")
        return
    reason = result.reason or result.text
    problem = f"{called} ended as {result.outcome}: {reason[:MAX_TEXT]}"
    if result.outcome.is_infrastructure:
        yield Finding("wrong", problem, "mend what the reason names; a rollout that ends so is never trained on")
    elif MISTAKES.search(reason):
        yield Finding("wrong", problem, "correct the tool there, or its schema: arguments that fit it must not end so")
    else:
        yield Finding("note", problem, "nothing, if these made-up arguments are to blame; else correct the tool there")


def choose_tool(specs: Sequence[ToolSpec]) -> ToolSpec | None:
    """The first tool that says it changes nothing, or else the first that does not say it destroys something."""
    harmless = [spec for spec in specs if spec.hints.read_only or not spec.hints.destructive]
    return next((spec for spec in harmless if spec.hints.read_only), harmless[0] if harmless else None)


def make_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the required parameters of a tool."""
    properties = schema.get("properties") or {}
    return {name: _make_value(properties.get(name)) for name in schema.get("required") or ()}


def _make_value(schema: Any) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _make_value(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        return make_arguments(schema)
    if kind == "array":
        return [_make_value(schema.get("items"))] * int(schema.get("minItems", 0))
    numbers = {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1), "boolean": True, "null": None}
    return numbers[kind] if kind in numbers else "1".ljust(int(schema.get("minLength", 1)), "1")
