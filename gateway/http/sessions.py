"""A session over HTTP: begun, looked at, closed; or held, so that it dies with the connection of its holder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.asked import Asked
from gateway.http.desk import Desk, Opened
from gateway.http.reply import json_reply
from gateway.http.shapes import BeginRequest, NamedFeedback
from gateway.types import Task, ToolSpec
from gateway.wire import dumps, spec_json, tool_json

BEAT_S = 15.0
"""A held answer says this often that it is alive, so that no proxy in between cuts it."""


async def begin(desk: Desk, asked: Asked) -> ASGIApp:
    held = asked.choice("hold", ("false", "true")) == "true"
    wanted = await asked.read(BeginRequest)
    task = _task(wanted, None if held else desk.settings.ttl_s)
    opened = await desk.watch.attend(asked.receive, partial(desk.begin, task, strict=wanted.strict))
    value = {
        "id": opened.session.id,
        "tools": listed(opened.session.specs, wanted.form, strict=wanted.strict),
        "feedback": opened.feedback,
        "expires_at": opened.expires_at,
    }
    return Held(opened, value) if held else json_reply(value, 201)


def _task(wanted: BeginRequest, ttl_s: float | None) -> Task:
    args = dict(wanted.feedback_args)
    feedback = wanted.feedback
    if isinstance(feedback, NamedFeedback):
        args |= feedback.model_extra or {}
        feedback = feedback.name
    return Task(
        id=wanted.id or wanted.task_id,
        tools=None if wanted.tools is None else tuple(wanted.tools),
        create=wanted.create,
        feedback=feedback,
        feedback_args=args,
        ttl_s=wanted.ttl_s or ttl_s,
    )


def listed(specs: Sequence[ToolSpec], form: str, *, strict: bool = False) -> list[dict[str, Any]]:
    return [spec_json(spec) if form == "spec" else tool_json(spec, strict=strict) for spec in specs]


async def look(desk: Desk, asked: Asked) -> ASGIApp:
    """Looking is not using: it does not move the session's end."""
    opened = desk.find(asked.path["id"])
    session = opened.session
    return json_reply(
        {
            "id": session.id,
            "task_id": session.task.id,
            "tools": [spec.name for spec in session.specs],
            "feedback": opened.feedback,
            "strict": opened.is_strict,
            "calls": opened.calls,
            "rewards": opened.rewards,
            "expires_at": opened.expires_at,
        }
    )


async def close(desk: Desk, asked: Asked) -> ASGIApp:
    """Goes on to the end even if whoever asked hangs up: closing protects itself."""
    opened = desk.find(asked.path["id"])
    await opened.session.close()
    return json_reply({"id": opened.session.id, "rewards": opened.rewards})


class Held:
    """An answer without an end: the session in its first line, empty lines as heartbeats, its rewards in the last."""

    def __init__(self, opened: Opened, value: dict[str, Any]) -> None:
        self.opened, self.value = opened, value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = ((b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store"))
        try:
            await send({"type": "http.response.start", "status": 201, "headers": headers})
            await _line(send, dumps(self.value))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, receive)
                tasks.start_soon(_beat, send)
                await self.opened.closed.wait()
                tasks.cancel_scope.cancel()
        finally:
            await self.opened.session.close()
        rewards = {"id": self.opened.session.id, "rewards": self.opened.rewards}
        await _line(send, dumps(rewards), more=False)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self.opened.session.close()


async def _beat(send: Send) -> None:
    while True:
        await anyio.sleep(BEAT_S)
        await _line(send, b"")


async def _line(send: Send, text: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text + b"\n", "more_body": more})
