"""Routes for sessions, tool calls and feedback: /v1/sessions and /v1/calls.

A session may be bound to its connection (`hold=true`), so that it closes when the client dies. Results keep the ids
and the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.chat_messages import chat_content, strict_tool_messages, tool_messages
from gateway.errors import SessionError, Unavailable
from gateway.http.api_models import MAX_CALLS, Call, Calls, CallsRequest, FeedbackRequest, NamedFeedback, SessionRequest
from gateway.http.exchange import Problem, Request, built_response, json_response, parse_body, session_not_found
from gateway.http.state import AppState, HttpSession
from gateway.large_json import is_large
from gateway.limits import CallScope
from gateway.types import DEFAULT_CONTEXT, Context, Feedback, Task, ToolCall, ToolResult, ToolSpec, are_text
from gateway.wire import (
    dumps,
    feedback_to_json,
    is_large_answer,
    part_to_json,
    result_to_json,
    spec_to_json,
    tool_to_openai,
)

MAX_QUICK_TOOLS = 64
"""Longer lists of tools are encoded beside the event loop."""
NO_REWARDS = "the session is closed, but its rewards could not be collected; the gateway's log says why"
HEARTBEAT_S = 15.0
"""Interval of empty lines in the response of a held session, so that no proxy closes the connection."""


async def open_session(app: AppState, request: Request) -> ASGIApp:
    """POST /v1/sessions."""
    is_held = request.query_choice("hold", ("false", "true")) == "true"
    options = await request.read_model(SessionRequest)
    task = _task_from_request(options, None if is_held else app.settings.ttl_s)
    http_session = await app.open_session(task, request.receive, strict=options.strict)
    specs = http_session.session.specs

    def build() -> dict[str, Any]:
        return {
            "id": http_session.session.id,
            "tools": specs_to_json(specs, options.form, strict=options.strict),
            "feedback": http_session.session.feedback_name,
            "expires_at": http_session.expires_at,
            "finish_s": http_session.session.finish_s,
        }

    if is_held:
        return HeldSession(http_session, build)
    return await built_response(build, 201, is_large=are_large(specs))


def _task_from_request(options: SessionRequest, ttl_s: float | None) -> Task:
    args = dict(options.feedback_args)
    feedback = options.feedback
    if isinstance(feedback, NamedFeedback):
        args |= feedback.model_extra or {}
        feedback = feedback.name
    return Task(
        id=options.id or options.task_id,
        tools=None if options.tools is None else tuple(options.tools),
        create=options.create,
        feedback=feedback,
        feedback_args=args,
        ttl_s=options.ttl_s or ttl_s,
        state=options.state,
        hash_state=options.hash_state,
        session_id=options.session_id or "",
    )


def specs_to_json(specs: Sequence[ToolSpec], form: str, *, strict: bool = False) -> list[dict[str, Any]]:
    """Tools as OpenAI function schemas (`openai`) or with all that is known of them (`spec`)."""
    return [spec_to_json(spec) if form == "spec" else tool_to_openai(spec, strict=strict) for spec in specs]


def are_large(specs: Sequence[ToolSpec]) -> bool:
    """Whether listing the tools takes long."""
    return len(specs) > MAX_QUICK_TOOLS or is_large(
        [(spec.description, spec.parameters, spec.output) for spec in specs]
    )


async def get_session(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/sessions/{id}; does not extend the session's life."""
    http_session = app.find_session(request.path_params["id"])
    session = http_session.session
    return json_response(
        {
            "id": session.id,
            "task_id": session.task.id,
            "tools": [spec.name for spec in session.specs],
            "feedback": http_session.session.feedback_name,
            "strict": http_session.is_strict,
            "calls": http_session.calls,
            "rewards": http_session.rewards,
            "expires_at": http_session.expires_at,
        }
    )


async def close_session(app: AppState, request: Request) -> ASGIApp:
    """DELETE /v1/sessions/{id}; completes even if the client disconnects."""
    is_abandoned, id = request.query_choice("abandoned", ("false", "true")) == "true", request.path_params["id"]
    if is_abandoned and app.cancel_opening(id):
        return json_response({"id": id, "rewards": []})
    http_session = app.find_session(id, is_closing=is_abandoned)
    await http_session.session.close(is_abandoned=is_abandoned)
    if not http_session.session.has_rewards and not is_abandoned:
        raise Unavailable(NO_REWARDS)
    return json_response(_closed_to_json(http_session))


def _closed_to_json(http_session: HttpSession) -> dict[str, Any]:
    session = http_session.session
    states = {"states": dict(session.states)} if session.states else {}
    return {"id": session.id, "rewards": http_session.rewards, **states}


class HeldSession:
    """A response that lasts as long as its session: the session first, empty lines as heartbeats, the rewards last."""

    def __init__(self, http_session: HttpSession, build: Callable[[], dict[str, Any]]) -> None:
        """`build` makes the first line."""
        self.http_session, self._build = http_session, build
        self._closed = http_session.closed = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store"))
        try:
            await send({"type": "http.response.start", "status": 201, "headers": headers})
            first = await built_response(self._build, is_large=are_large(self.http_session.session.specs))
            await _send_line(send, first.body)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._close_on_disconnect, receive)
                tasks.start_soon(_send_heartbeats, send)
                await self._closed.wait()
                tasks.cancel_scope.cancel()
        finally:
            await self.http_session.session.close()
        missing = {"error": dict(Problem(503, "unavailable", NO_REWARDS).error)}
        last = _closed_to_json(self.http_session) if self.http_session.session.has_rewards else missing
        await _send_line(send, dumps(last), more=False)

    async def _close_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self.http_session.session.close(is_abandoned=True)


async def _send_heartbeats(send: Send) -> None:
    while True:
        await anyio.sleep(HEARTBEAT_S)
        await _send_line(send, b"")


async def _send_line(send: Send, text: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text + b"\n", "more_body": more})


LOOP_CONTEXT = Context(audience="loop")


async def call_tools(app: AppState, request: Request) -> ASGIApp:
    """POST /v1/sessions/{id}/calls."""
    http_session = app.find_session(request.path_params["id"])
    options, calls = _parse_calls(await request.read_body())
    http_session.calls += len(calls)
    context = LOOP_CONTEXT if options.audience == "loop" else DEFAULT_CONTEXT
    try:
        scope = CallScope()
        work = partial(http_session.session.calls, http_session.without_forced_nulls(calls), context, scope)
        results = await app.disconnects.cancel_on_disconnect(request.receive, scope.cancel, work)
    except SessionError:
        raise session_not_found() from None  # it was closed in the meantime
    return await _calls_response(options, calls, results)


async def call_pure_tools(app: AppState, request: Request) -> ASGIApp:
    """POST /v1/calls: calls of pure tools, without a session."""
    options, calls = _parse_calls(await request.read_body())
    wanted = {call.name for call in calls}
    await app.gateway.start.wait_for_tools(lambda: wanted <= app.gateway.table.tools.keys())
    pure = {spec.name for spec in app.gateway.specs if spec.hints.pure and spec.audience == "policy"}
    for index, call in enumerate(calls):
        if call.name not in pure:
            problem = f"{call.name[:200]!r} is not a tool that may be called without a session."
            remedy = "Open a session with POST /v1/sessions; or, if the tool keeps no state, declare it `pure`."
            raise Problem(409, "conflict", problem, remedy=remedy, param=f"tool_calls.{index}.function.name")
    work = partial(_call_in_new_session, app, calls)
    return await _calls_response(options, calls, await app.disconnects.run_until_disconnect(request.receive, work))


async def _call_in_new_session(app: AppState, calls: Sequence[ToolCall]) -> list[ToolResult]:
    async with app.gateway.open(Task(tools=tuple({call.name for call in calls}))) as session:
        return await session.calls(calls)


async def get_feedback(app: AppState, request: Request) -> ASGIApp:
    """POST /v1/sessions/{id}/feedback."""
    http_session = app.find_session(request.path_params["id"])
    options = await request.read_model(FeedbackRequest)
    feedback = await app.disconnects.run_until_disconnect(
        request.receive, partial(_run_feedback_turn, http_session, options)
    )
    app.metrics.count_feedback_turn(feedback.outcome.value)

    def build() -> dict[str, Any]:
        value = feedback_to_json(feedback)
        if options.layout == "parts":
            value["parts"] = [part_to_json(part) for part in feedback.parts]
        elif not are_text(feedback.parts):
            value["content"] = chat_content(feedback.parts)
        return value

    return await built_response(build, is_large=is_large_answer(feedback))


async def _run_feedback_turn(http_session: HttpSession, options: FeedbackRequest) -> Feedback:
    try:
        return await http_session.session.feedback(options.messages)
    except SessionError as error:
        if http_session.session.closed:
            raise session_not_found() from None
        remedy = "Name an interaction when you open the session (`feedback`)."
        raise Problem(409, "conflict", str(error), remedy=remedy) from None


def _parse_calls(body: bytes) -> tuple[CallsRequest, Sequence[ToolCall]]:
    """Reads an assistant message with `tool_calls`, several messages, or a bare list of calls."""
    if body[:64].lstrip()[:1] == b"[":
        body = b'{"tool_calls":' + body + b"}"
    options = parse_body(CallsRequest, body)
    if options.tool_calls is not None:
        return options, [_call_from_request(call) for call in options.tool_calls]
    if not options.model_fields_set & {"tool_calls", "messages"}:
        remedy = "Send an assistant message with `tool_calls`, or `messages` that contain such messages."
        raise Problem(422, "invalid_request", "There are no tool calls.", remedy=remedy, param="tool_calls")
    messages = enumerate(options.messages or ())
    calls = [call for index, message in messages for call in _calls_of_message(index, message)]
    if len(calls) > MAX_CALLS:
        raise Problem(422, "invalid_request", f"More than {MAX_CALLS} calls in one request.", param="messages")
    return options, calls


def _calls_of_message(index: int, message: dict[str, Any]) -> list[ToolCall]:
    try:
        message_calls = Calls.model_validate({"tool_calls": message.get("tool_calls") or []})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(str(step) for step in ("messages", index, *first["loc"]))
        raise Problem(422, "invalid_request", first["msg"], param=param) from None
    return [_call_from_request(call) for call in message_calls.tool_calls]


def _call_from_request(call: Call) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call.id, call.function.name, text)


async def _calls_response(options: CallsRequest, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> ASGIApp:
    is_large = any(map(is_large_answer, results))
    return await built_response(partial(_calls_to_json, options, calls, results), is_large=is_large)


def _calls_to_json(options: CallsRequest, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> dict[str, Any]:
    result_fields = [result_to_json(call, result) for call, result in zip(calls, results, strict=True)]
    if options.layout == "parts":
        for fields, result in zip(result_fields, results, strict=True):
            fields["parts"] = [part_to_json(part) for part in result.parts]
        return {"messages": [], "results": result_fields}
    layout = strict_tool_messages if options.layout == "strict" else tool_messages
    return {"messages": layout(calls, results), "results": result_fields}
