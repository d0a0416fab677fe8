"""A turn while it is sampled: ids become text, text the parts that an agent can be given, and these become events.

A client that hangs up ends the generation.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import anyio
from starlette.types import Receive, Scope, Send

from gateway.http.endpoint import DisconnectWatcher
from gateway.http.exchange import ClientDisconnected, Response
from gateway.wire import dumps
from mtrl_plugins.agents.reply_stream import ReplyStream
from mtrl_plugins.agents.requests import PolicyAnswer, PolicyProblem, PolicyRequest, TurnDelta, TurnStart
from trainer.parse.base import Reply
from trainer.template import Template

UNFINISHED = "\ufffd"
"""What the bytes of an unfinished character are decoded as."""


class TurnListener(Protocol):
    """Who is given a turn as it comes."""

    def on_start(self, start: TurnStart) -> None:
        """The engine sampled the first id. Until then an answer may still be an error."""

    def on_delta(self, delta: TurnDelta) -> None: ...


class TurnStream:
    """Reads a turn's ids as they come. What is sent begins the final answer, whatever the policy writes."""

    def __init__(self, template: Template, stops: Sequence[str], start: TurnStart, listener: TurnListener) -> None:
        self._stops, self._start, self._listener = stops, start, listener
        self._has_started = False
        self._text = _TextStream(template)
        self._reply = ReplyStream(template.parser, template.closing)
        self._reply.feed(template.prefill)
        self.sent = TurnDelta()
        """Everything that was sent."""

    def feed(self, ids: Sequence[int]) -> None:
        """Reads sampled ids, and sends what no later ones can change."""
        self._begin()
        self._reply.feed(self._text.feed(ids))
        self._send_up_to(self._before_stop(self._reply.content), self._reply.reasoning)

    def finish(self, reply: Reply) -> Reply:
        """The turn as the agent is given it. Text that a lone closing tag makes reasoning stays what it was sent as."""
        self._begin()
        content, reasoning = reply.content, reply.reasoning
        if not (content.startswith(self.sent.content) and reasoning.startswith(self.sent.reasoning)):
            content, reasoning = self.sent.content + content, self.sent.reasoning
        return replace(reply, content=content, reasoning=reasoning)

    def _begin(self) -> None:
        if not self._has_started:
            self._has_started = True
            self._listener.on_start(self._start)

    def _before_stop(self, content: str) -> str:
        """The content without a stop string, or what can become one."""
        ends = [content.find(stop) for stop in self._stops if stop in content]
        longest = max(map(len, self._stops), default=1)
        return content[: min(ends)] if ends else content[: len(content) - longest + 1]

    def _send_up_to(self, content: str, reasoning: str) -> None:
        delta = TurnDelta(content[len(self.sent.content) :], reasoning[len(self.sent.reasoning) :])
        if delta.content or delta.reasoning:
            self.sent = TurnDelta(self.sent.content + delta.content, self.sent.reasoning + delta.reasoning)
            self._listener.on_delta(delta)


class _TextStream:
    """Decodes ids piece by piece: only the latest are decoded again, and never half a character is given."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._ids: list[int] = []
        """Those whose text was given last, as decoders look at what is before an id, and those that come next."""
        self._given = 0
        self._start: str | None = ""
        """The text so far, while it may be the white space that the template writes before an answer."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that ids add."""
        self._ids += [id for id in ids if id not in self._template.stop_ids]
        decode = self._template.tokenizer.decode
        before, text = decode(self._ids[: self._given]), decode(self._ids)
        if text.endswith(UNFINISHED) or not text.startswith(before):
            return ""
        self._ids, new = self._ids[self._given :], text[len(before) :]
        self._given = len(self._ids)
        return self._without_lead(new)

    def _without_lead(self, text: str) -> str:
        lead = self._template.lead
        if self._start is None:
            return text
        self._start = start = self._start + text
        if len(start) < len(lead) and lead.startswith(start):
            return ""
        self._start = None
        return start.removeprefix(lead)


def write_event(value: Mapping[str, Any], event: str = "") -> bytes:
    """A server-sent event with JSON."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + dumps(dict(value)) + b"\n\n"


class EventWriter(ABC):
    """The events of one answer: its beginning, what comes, and its end, with all that was not sent before."""

    keep_alive = b": keep-alive\n\n"
    """A comment, which clients skip."""

    def __init__(self, request: PolicyRequest) -> None:
        self.request = request
        self.sent = TurnDelta()
        """What was written of the turn."""

    @abstractmethod
    def begin(self, start: TurnStart) -> bytes:
        """The first events."""

    def add(self, delta: TurnDelta) -> bytes:
        """Reasoning, then content, that was added."""
        events = b""
        if delta.reasoning:
            events += self.write_reasoning(delta.reasoning)
        if delta.content:
            events += self.write_content(delta.content)
        self.sent = TurnDelta(self.sent.content + delta.content, self.sent.reasoning + delta.reasoning)
        return events

    def end(self, answer: PolicyAnswer) -> bytes:
        """The rest of the answer. Reasoning that came after content was begun follows it."""
        content = TurnDelta(content=answer.content[len(self.sent.content) :])
        reasoning = TurnDelta(reasoning=answer.reasoning[len(self.sent.reasoning) :])
        rest = (content, reasoning) if self.sent.content else (reasoning, content)
        return b"".join([*map(self.add, rest), self.write_end(answer)])

    @abstractmethod
    def write_reasoning(self, text: str) -> bytes:
        """More reasoning."""

    @abstractmethod
    def write_content(self, text: str) -> bytes:
        """More content."""

    @abstractmethod
    def write_end(self, answer: PolicyAnswer) -> bytes:
        """The calls and the last events."""

    @abstractmethod
    def fail(self, problem: PolicyProblem) -> bytes:
        """What went wrong after the answer had begun."""


log = logging.getLogger(__name__)
KEEP_ALIVE_S = 10.0
"""After so long without an event a comment is sent, so that neither side takes the connection for dead."""
STALLED_S = 60.0
"""A client that reads nothing for so long is taken for gone."""
FAILED = "the endpoint failed; the run's log says why"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)


class AnswerStream:
    """An answer as an ASGI application. Problems before the first event are answers with a status of their own."""

    def __init__(
        self,
        answer: Callable[[TurnListener], Awaitable[PolicyAnswer]],
        events: EventWriter,
        write_problem: Callable[[PolicyProblem], bytes],
        disconnects: DisconnectWatcher,
    ) -> None:
        self._answer, self._events, self._write_problem = answer, events, write_problem
        self._disconnects = disconnects
        self._waiting: list[TurnDelta] = []
        """What was not sent yet."""
        self._start: TurnStart | None = None
        self._news = anyio.Event()
        self._has_started = self._is_stalled = False

    def on_start(self, start: TurnStart) -> None:
        self._start = start
        self._news.set()

    def on_delta(self, delta: TurnDelta) -> None:
        self._waiting.append(delta)
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._disconnects.run_until_disconnect(receive, lambda: self._run(scope, receive, send))
        except ClientDisconnected:
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_news, send, tasks.cancel_scope)
            answer, problem = await self._await_answer()
            tasks.cancel_scope.cancel()
        if self._is_stalled:
            raise ClientDisconnected
        if problem is not None and not self._has_started:
            await Response(self._write_problem(problem), problem.status)(scope, receive, send)
            return
        await self._send(send, self._take_news())
        last = (
            self._events.end(answer) if answer else self._events.fail(problem or PolicyProblem("unavailable", FAILED))
        )
        await send({"type": "http.response.body", "body": last})

    async def _await_answer(self) -> tuple[PolicyAnswer | None, PolicyProblem | None]:
        try:
            return await self._answer(self), None
        except PolicyProblem as problem:
            return None, problem
        except Exception:  # boundary: one request must not end the run
            log.exception("a request of an agent failed")
            return None, PolicyProblem("unavailable", FAILED)

    async def _send_news(self, send: Send, work: anyio.CancelScope) -> None:
        while True:
            with anyio.move_on_after(KEEP_ALIVE_S):
                await self._news.wait()
            self._news = anyio.Event()
            # Half an event must not be lost at the end of the turn.
            with anyio.move_on_after(STALLED_S, shield=True) as sending:
                await self._send(send, self._take_news() or self._events.keep_alive)
            if sending.cancelled_caught:
                self._is_stalled = True
                work.cancel()

    def _take_news(self) -> bytes:
        deltas, self._waiting = self._waiting, []
        first, self._start = self._start, None
        events = [self._events.begin(first)] if first else []
        return b"".join([*events, *map(self._events.add, deltas)])

    async def _send(self, send: Send, events: bytes) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
