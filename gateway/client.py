"""A gateway in another process is the same toolset: what a call ends in is an outcome, even when the line breaks.

Never sent is `unavailable`, sent without an answer is `unknown`; cancelling a call hangs up, which cancels it there.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

import anyio
import httpx2
from anyio import to_thread

from gateway.errors import GatewayError, ReplayError, SessionError, TooManySessions, Unavailable
from gateway.limit import refusal
from gateway.session import Reward
from gateway.types import ALONE, Context, Feedback, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from gateway.wire import dumps, feedback_of, result_of, spec_of, task_json

CONNECT_S = 10.0
CLOSE_S = 100.0
"""A little more than the other side gives a session to close."""
LIMITS = httpx2.Limits(max_connections=4096, max_keepalive_connections=512, keepalive_expiry=30.0)
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class RemoteGateway:
    """Enter it, then `open(task)` a session for each rollout, as on a gateway in this process.

    `timeout_s` bounds the wait for any one answer; the tools' own deadlines, kept over there, should be shorter.
    A context's `progress` and `ask` stay on this side.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        self._http: httpx2.AsyncClient | None = None
        self._specs: Sequence[ToolSpec] = ()

    async def __aenter__(self) -> Self:
        self._http = httpx2.AsyncClient(
            headers=self._headers,
            timeout=self._timeout,
            limits=LIMITS,
            verify=await _tls(self.url),
            trust_env=False,
        )
        try:
            await self.refresh()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        http, self._http = self._http, None
        if http is not None:
            with anyio.move_on_after(5, shield=True):
                await http.aclose()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """What was offered at the last `refresh`, which entering is."""
        return self._specs

    async def refresh(self) -> None:
        listed = await self.ask("GET", "/v1/tools?audience=all&form=spec")
        self._specs = tuple(spec_of(value) for value in listed["data"])

    @asynccontextmanager
    async def open(self, task: Task = Task()) -> AsyncIterator[RemoteSession]:  # noqa: B008 - frozen
        session = await self.begin(task)
        try:
            yield session
        finally:
            await session.close()

    async def begin(self, task: Task) -> RemoteSession:
        """A session without a block around it: whoever begins it must close it, or it lives as long as it may."""
        return RemoteSession(self, await self.ask("POST", "/v1/sessions", task_json(task) | {"form": "spec"}))

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """An answer's JSON; a refusal is raised with the other side's words."""
        try:
            answer = await self.send(method, path, body)
        except httpx2.TransportError as error:
            raise Unavailable(f"the gateway at {self.url} cannot be reached: {_told(error)}") from error
        if answer.is_success:
            return answer.json()
        raise _refused(answer)

    async def send(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        if self._http is None:
            raise GatewayError("the gateway is not entered: `async with RemoteGateway(url) as gateway`")
        return await self._http.request(method, self.url + path, content=None if body is None else dumps(body))


class RemoteSession:
    """Made by `RemoteGateway.begin`."""

    def __init__(self, gateway: RemoteGateway, begun: Mapping[str, Any]) -> None:
        self.id: str = begun["id"]
        self.name: str | None = begun["feedback"]
        """The interaction that answers here."""
        self.specs: Sequence[ToolSpec] = tuple(spec_of(value) for value in begun["tools"])
        self.rewards: list[Reward] = []
        """As far as this side has seen them; the other side's own list once the session is finished."""
        self._gateway = gateway
        self._path = f"/v1/sessions/{self.id}"
        self._finished: dict[str, float] | None = None

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        return (await self.calls([call], context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = ALONE) -> list[ToolResult]:
        """All calls of one message in one request; the answers keep the order of the calls."""
        sent = [call for call in calls if _is_unicode(call)]
        results = iter(await self._sent(sent, context) if sent else ())
        return [next(results) if _is_unicode(call) else _NOT_UNICODE for call in calls]

    async def _sent(self, calls: Sequence[ToolCall], context: Context) -> list[ToolResult]:
        body = {"tool_calls": [_written(call) for call in calls], "layout": "parts", "audience": context.audience}
        answer = await self._answer("/calls", body)
        if isinstance(answer, ToolResult):
            return [answer] * len(calls)
        results = [result_of(value) for value in answer["results"]]
        kind: Literal["call", "feedback"] = "feedback" if context.audience == "loop" else "call"
        for call, result in zip(calls, results, strict=True):
            if result.reward is not None:
                self.rewards.append(Reward(call.name, result.reward, kind, call.id))
        return results

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        body = {"messages": [dict(message) for message in messages], "layout": "parts"}
        answer = await self._answer("/feedback", body)
        if isinstance(answer, ToolResult):
            return Feedback(answer.parts, outcome=answer.outcome, reason=answer.reason)
        heard = feedback_of(answer)
        if not heard.outcome.infrastructure:
            self.rewards.append(Reward(self.name or "feedback", heard.score, "feedback"))
        return heard

    async def finish(self) -> Mapping[str, float]:
        """The rewards that tools give at the end; it ends the session over there, so nothing can be called after it."""
        if self._finished is None:
            closed = await self._gateway.ask("DELETE", self._path)
            self.rewards[:] = [Reward(**reward) for reward in closed["rewards"]]
            self._finished = {reward.source: reward.value for reward in self.rewards if reward.kind == "end"}
        return self._finished

    async def close(self) -> None:
        """Safe to call again. A session that can't be reached any more closes by itself when its time is up."""
        if self._finished is not None:
            return
        with anyio.move_on_after(CLOSE_S, shield=True):
            try:
                await self.finish()
            except (SessionError, Unavailable):
                self._finished = {}

    async def _answer(self, path: str, body: Any) -> Any:
        """The answer's JSON, or how the call ended without one."""
        if self._finished is not None:
            raise SessionError("the session is closed")
        try:
            answer = await self._gateway.send("POST", self._path + path, body)
        except _NEVER_SENT as error:
            return refusal(f"the gateway cannot be reached: {_told(error)}")
        except httpx2.TimeoutException:
            text = "The tool did not answer in time."
            return ToolResult((Text(text),), Outcome.TIMEOUT, reason="no answer from the gateway in time")
        except httpx2.TransportError as error:
            return _unknown(f"the gateway gave no answer: {_told(error)}")
        if answer.is_success:
            return answer.json()
        return _without_answer(answer)


def _without_answer(answer: httpx2.Response) -> ToolResult:
    problem = _refused(answer)
    if answer.status_code in (400, 413):
        text = f"The call cannot be sent: {problem}"
        return ToolResult((Text(text),), Outcome.INVALID, reason=f"the gateway answered {answer.status_code}")
    if isinstance(problem, Unavailable | TooManySessions):
        return refusal(str(problem))
    if answer.status_code >= 500:
        return _unknown(f"the gateway answered {answer.status_code}")
    raise problem


def _unknown(reason: str) -> ToolResult:
    text = "The tool was called, but no answer came back; it may have done its work."
    return ToolResult((Text(text),), Outcome.UNKNOWN, reason=reason)


def _refused(answer: httpx2.Response) -> GatewayError:
    """The other side's words, as the error that a gateway in this process would raise."""
    try:
        error = answer.json()["error"]
        kind, told = error["type"], " ".join(filter(None, (error["message"], error.get("remedy"))))
    except (ValueError, KeyError, TypeError):
        kind, told = "", f"status {answer.status_code}, and no reason in a form that we know"
    kinds = {
        "too_many_sessions": TooManySessions,
        "unavailable": Unavailable,
        "not_found": SessionError,
        "conflict": SessionError,
        "not_recorded": ReplayError,
        "invalid_request": SessionError,
    }
    return kinds.get(kind, GatewayError)(told)


_NOT_UNICODE = ToolResult(
    (Text("The arguments hold half a character, which no tool can read. Write them anew."),),
    Outcome.INVALID,
    reason="the call is not Unicode",
)


def _is_unicode(call: ToolCall) -> bool:
    """One call that cannot be written down must not keep its neighbours from being sent."""
    try:
        f"{call.id}{call.name}{call.arguments}".encode()
    except UnicodeEncodeError:
        return False
    return True


def _written(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told(error: Exception) -> str:
    # The words of a request that could not be written quote it, the token included.
    told = "" if isinstance(error, httpx2.LocalProtocolError) else str(error)
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


async def _tls(url: str) -> ssl.SSLContext:
    """Reading the trust store costs a tenth of a second of CPU: once for https, never for http."""
    if url.lower().startswith("https:"):
        return await to_thread.run_sync(ssl.create_default_context)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
