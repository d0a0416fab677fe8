"""An assistant's calls go in, tool messages come out: the same ids, the same order, nothing dropped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError
from starlette.types import ASGIApp

from gateway.content import content, messages, strict_messages
from gateway.errors import SessionError
from gateway.http.asked import Asked, parse
from gateway.http.desk import Desk, Opened
from gateway.http.reply import Problem, json_reply, no_session
from gateway.http.shapes import MOST_CALLS, Call, Calls, CallsRequest, FeedbackRequest
from gateway.types import ALONE, Context, Feedback, Task, Text, ToolCall, ToolResult
from gateway.wire import feedback_json, part_json, result_json

LOOP = Context(audience="loop")


async def call(desk: Desk, asked: Asked) -> ASGIApp:
    opened = desk.find(asked.path["id"])
    wanted, calls = _calls(await asked.body())
    opened.calls += len(calls)
    context = LOOP if wanted.audience == "loop" else ALONE
    try:
        results = await desk.watch.attend(asked.receive, partial(opened.session.calls, opened.meant(calls), context))
    except SessionError:
        raise no_session() from None  # it was closed while the request was on its way
    return _answer(wanted, calls, results)


async def call_pure(desk: Desk, asked: Asked) -> ASGIApp:
    """Without a session, for tools that need none."""
    wanted, calls = _calls(await asked.body())
    pure = {spec.name for spec in desk.gateway.specs if spec.hints.pure and spec.audience == "policy"}
    for place, one in enumerate(calls):
        if one.name not in pure:
            problem = f"{one.name[:200]!r} is not a tool that may be called without a session."
            remedy = "Open a session with POST /v1/sessions; or, if it keeps no state, declare the tool `pure`."
            raise Problem(409, "conflict", problem, remedy=remedy, param=f"tool_calls.{place}.function.name")
    return _answer(wanted, calls, await desk.watch.attend(asked.receive, partial(_alone, desk, calls)))


async def _alone(desk: Desk, calls: Sequence[ToolCall]) -> list[ToolResult]:
    async with desk.gateway.open(Task(tools=tuple({call.name for call in calls}))) as session:
        return await session.calls(calls)


async def feedback(desk: Desk, asked: Asked) -> ASGIApp:
    opened = desk.find(asked.path["id"])
    wanted = await asked.read(FeedbackRequest)
    heard = await desk.watch.attend(asked.receive, partial(_turn, opened, wanted))
    desk.metrics.turn(heard.outcome.value)
    value = feedback_json(heard)
    if wanted.layout == "parts":
        value["parts"] = [part_json(part) for part in heard.parts]
    elif not all(isinstance(part, Text) for part in heard.parts):
        value["content"] = content(heard.parts)
    return json_reply(value)


async def _turn(opened: Opened, wanted: FeedbackRequest) -> Feedback:
    try:
        return await opened.session.feedback(wanted.messages)
    except SessionError as error:
        if opened.session.closed:
            raise no_session() from None
        remedy = "Name an interaction when the session is opened (`feedback`)."
        raise Problem(409, "conflict", str(error), remedy=remedy) from None


def _calls(body: bytes) -> tuple[CallsRequest, Sequence[ToolCall]]:
    """A message with `tool_calls`, several messages, or the bare list of calls."""
    if body[:64].lstrip()[:1] == b"[":
        body = b'{"tool_calls":' + body + b"}"
    wanted = parse(CallsRequest, body)
    if wanted.tool_calls is not None:
        return wanted, [_call(one) for one in wanted.tool_calls]
    if not wanted.model_fields_set & {"tool_calls", "messages"}:
        remedy = "Send an assistant message, or `messages` that hold some."
        raise Problem(422, "invalid_request", "There are no tool calls.", remedy=remedy, param="tool_calls")
    calls = [call for place, one in enumerate(wanted.messages or ()) for call in _of_message(place, one)]
    if len(calls) > MOST_CALLS:
        raise Problem(422, "invalid_request", f"More than {MOST_CALLS} calls in one request.", param="messages")
    return wanted, calls


def _of_message(place: int, message: dict[str, Any]) -> list[ToolCall]:
    try:
        return [_call(one) for one in Calls.model_validate({"tool_calls": message.get("tool_calls") or []}).tool_calls]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in ("messages", place, *first["loc"]))
        raise Problem(422, "invalid_request", first["msg"], param=where) from None


def _call(one: Call) -> ToolCall:
    arguments = one.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(one.id, one.function.name, text)


def _answer(wanted: CallsRequest, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> ASGIApp:
    machine = [result_json(one, result) for one, result in zip(calls, results, strict=True)]
    if wanted.layout == "parts":
        for fields, result in zip(machine, results, strict=True):
            fields["parts"] = [part_json(part) for part in result.parts]
        return json_reply({"messages": [], "results": machine})
    layout = strict_messages if wanted.layout == "strict" else messages
    return json_reply({"messages": layout(calls, results), "results": machine})
