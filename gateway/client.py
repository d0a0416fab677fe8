"""`RemoteGateway`: a gateway in another process, reached over HTTP, with the same interface as a local one.

Connection failures become outcomes: `unavailable` if the call was never sent, `unknown` if no answer came back.
Cancelling a call closes its request, which cancels the call on the server.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import anyio
import httpx2
from anyio import to_thread

from gateway.errors import GatewayError, ReplayError, SessionError, TooManySessions, Unavailable
from gateway.limits import unavailable_result
from gateway.session_protocols import Reward, open_session
from gateway.types import DEFAULT_CONTEXT, EMPTY, Context, Feedback, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec
from gateway.wire import dumps, feedback_from_json, result_from_json, spec_from_json, task_to_json

CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S, START_POLL_S = 300.0, 0.5
"""How long and how often a client asks whether the gateway's servers have started."""
RECONNECT_POLL_S = 0.5
"""How often a client tries again to open a session at a gateway that cannot be reached."""
CLOSE_TIMEOUT_S = 100.0
"""A little more than the server's own limit for closing a session, besides what its last rewards may take."""
ABANDON_TIMEOUT_S = 1.0
"""Time to send the request that closes a session whose opening was cancelled, or got no answer; the server completes
it without us."""
LIMITS = httpx2.Limits(max_connections=4096, max_keepalive_connections=512, keepalive_expiry=30.0)
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class RemoteGateway:
    """Enter it, then `open(task)` a session for each rollout, as on a gateway in this process.

    `timeout_s` bounds the wait for each response; the tools' own deadlines, which the server applies, should be
    shorter. A context's callbacks are not used. `reconnect_s` is how long opening a session waits for a gateway that
    cannot be reached, such as one that is being restarted.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout_s: float = 300.0, reconnect_s: float = 0.0
    ) -> None:
        self._reconnect_s = reconnect_s
        self.url = url.rstrip("/")
        self._headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout = httpx2.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        self._http: httpx2.AsyncClient | None = None
        self._specs: Sequence[ToolSpec] = ()

    async def __aenter__(self) -> Self:
        self._http = httpx2.AsyncClient(
            headers=self._headers,
            timeout=self._timeout,
            limits=LIMITS,
            verify=await _ssl_context(self.url),
            trust_env=False,
        )
        try:
            await self._wait_for_servers()
            await self.refresh()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        http, self._http = self._http, None
        if http is not None:
            with anyio.move_on_after(5, shield=True):
                await http.aclose()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools offered at the last `refresh`; entering the gateway refreshes too."""
        return self._specs

    async def _wait_for_servers(self) -> None:
        """Waits until no server of the gateway is starting, so that the tools are complete."""
        with anyio.move_on_after(START_TIMEOUT_S):
            while True:
                try:
                    health = await self.request_json("GET", "/healthz")
                except GatewayError:
                    return  # the next request fails in the same way, and says why
                if not health.get("starting"):
                    return
                await anyio.sleep(START_POLL_S)

    async def refresh(self) -> None:
        listed = await self.request_json("GET", "/v1/tools?audience=all&form=spec")
        self._specs = tuple(spec_from_json(value) for value in listed["data"])

    def open(self, task: Task = Task()) -> AbstractAsyncContextManager[RemoteSession]:  # noqa: B008 - frozen
        return open_session(partial(self.begin, task))

    async def begin(self, task: Task) -> RemoteSession:
        """Opens a session without a `with` block; the caller must close it, else it lives until it expires."""
        own_id = "" if task.session_id else secrets.token_urlsafe(24)
        body = task_to_json(replace(task, session_id=task.session_id or own_id)) | {"form": "spec"}
        deadline = anyio.current_time() + self._reconnect_s
        while True:
            try:
                return RemoteSession(self, await self.request_json("POST", "/v1/sessions", body))
            except (SessionError, TooManySessions, ReplayError):
                raise  # The gateway has opened none.
            except (Exception, anyio.get_cancelled_exc_class()) as error:
                was_sent = not isinstance(error.__cause__, _NEVER_SENT)
                if was_sent and own_id:  # The server may have opened it. One with the caller's id may be another's.
                    with anyio.move_on_after(ABANDON_TIMEOUT_S, shield=True), suppress(GatewayError):
                        await self.request_json("DELETE", f"/v1/sessions/{own_id}?abandoned=true")
                if was_sent or anyio.current_time() >= deadline:
                    raise
            await anyio.sleep(RECONNECT_POLL_S)
            await self._wait_for_servers()

    async def request_json(self, method: str, path: str, body: Any = None, within_s: float = 0.0) -> Any:
        """The response's JSON; raises the server's error message for an error response."""
        try:
            answer = await self.request(method, path, body, within_s)
        except httpx2.TransportError as error:
            raise Unavailable(f"the gateway at {self.url} cannot be reached: {_format_error(error)}") from error
        if not answer.is_success:
            raise _error_from_response(answer)
        try:
            return answer.json()
        except ValueError as error:
            raise GatewayError(f"what answers at {self.url} is no gateway: its answer is no JSON") from error

    async def request(self, method: str, path: str, body: Any = None, within_s: float = 0.0) -> httpx2.Response:
        """The response; the wait for one that the server needs `within_s` for is at least as long."""
        if self._http is None:
            raise GatewayError("the gateway is not entered: `async with RemoteGateway(url) as gateway`")
        timeout = httpx2.Timeout(self._http.timeout)
        timeout.read = max(timeout.read or 0.0, within_s)
        content = None if body is None else dumps(body)
        return await self._http.request(method, self.url + path, content=content, timeout=timeout)


class RemoteSession:
    """A session of a `RemoteGateway`; created by its `begin`."""

    def __init__(self, gateway: RemoteGateway, opened: Mapping[str, Any]) -> None:
        self.id: str = opened["id"]
        self.name: str | None = opened["feedback"]
        """The name of the session's interaction."""
        self.specs: Sequence[ToolSpec] = tuple(spec_from_json(value) for value in opened["tools"])
        self.rewards: list[Reward] = []
        """The rewards received so far; once the session is finished, the server's list."""
        self.states: Mapping[str, str] = EMPTY
        """The hashes of its states, once it is finished, for a task that wants them."""
        self._gateway = gateway
        self._path = f"/v1/sessions/{self.id}"
        self._finish_s = float(opened.get("finish_s", 0.0))
        self._finished: dict[str, float] | None = None

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        return (await self.calls([call], context))[0]

    async def calls(self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT) -> list[ToolResult]:
        """Sends all calls of one message in one request; the results keep the order of the calls."""
        sent = [call for call in calls if _is_unicode(call)]
        results = iter(await self._send_calls(sent, context) if sent else ())
        return [next(results) if _is_unicode(call) else _NOT_UNICODE for call in calls]

    async def _send_calls(self, calls: Sequence[ToolCall], context: Context) -> list[ToolResult]:
        body = {"tool_calls": [_call_to_json(call) for call in calls], "layout": "parts", "audience": context.audience}
        answer = await self._post("/calls", body)
        if isinstance(answer, ToolResult):
            return [answer] * len(calls)
        results = [result_from_json(value) for value in answer["results"]]
        kind: Literal["call", "feedback"] = "feedback" if context.audience == "loop" else "call"
        for call, result in zip(calls, results, strict=True):
            if result.reward is not None:
                self.rewards.append(Reward(call.name, result.reward, kind, call.id))
        return results

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        body = {"messages": [dict(message) for message in messages], "layout": "parts"}
        answer = await self._post("/feedback", body)
        if isinstance(answer, ToolResult):
            return Feedback(answer.parts, outcome=answer.outcome, reason=answer.reason)
        feedback = feedback_from_json(answer)
        if not feedback.outcome.is_infrastructure:
            self.rewards.append(Reward(self.name or "feedback", feedback.score, "feedback"))
        return feedback

    async def finish(self) -> Mapping[str, float]:
        """Closes the session on the server, and returns the rewards that tools give at the end."""
        if self._finished is None:
            await self._delete("")
        return self._finished or {}

    async def _delete(self, query: str) -> None:
        within_s = CLOSE_TIMEOUT_S + self._finish_s if self._finish_s else 0.0
        closed = await self._gateway.request_json("DELETE", self._path + query, within_s=within_s)
        self.rewards[:] = [Reward(**reward) for reward in closed["rewards"]]
        self.states = closed.get("states", EMPTY)
        self._finished = {reward.source: reward.value for reward in self.rewards if reward.kind == "end"}

    async def close(self, *, is_abandoned: bool = False) -> None:
        """Closes the session; safe to call again. If the server cannot be reached, the session expires by itself.

        An abandoned session is not graded, and a grade that runs is ended.
        """
        if self._finished is not None:
            return
        with anyio.move_on_after(CLOSE_TIMEOUT_S + (0.0 if is_abandoned else self._finish_s), shield=True):
            try:
                await self._delete("?abandoned=true" if is_abandoned else "")
            except (SessionError, Unavailable):
                self._finished = {}

    async def _post(self, path: str, body: Any) -> Any:
        """The response's JSON, or a result that says why there is none."""
        if self._finished is not None:
            raise SessionError("the session is closed")
        try:
            answer = await self._gateway.request("POST", self._path + path, body)
        except _NEVER_SENT as error:
            return unavailable_result(f"the gateway cannot be reached: {_format_error(error)}")
        except httpx2.TimeoutException:
            text = "The tool did not answer in time."
            return ToolResult((Text(text),), Outcome.TIMEOUT, reason="no answer from the gateway in time")
        except httpx2.TransportError as error:
            return _unknown_result(f"the gateway gave no answer: {_format_error(error)}")
        if answer.is_success:
            return answer.json()
        return _result_from_error(answer)


def _result_from_error(answer: httpx2.Response) -> ToolResult:
    problem = _error_from_response(answer)
    if answer.status_code in (400, 413):
        text = f"The call cannot be sent: {problem}"
        return ToolResult((Text(text),), Outcome.INVALID, reason=f"the gateway answered {answer.status_code}")
    if isinstance(problem, Unavailable | TooManySessions):
        return unavailable_result(str(problem))
    if answer.status_code >= 500:
        return _unknown_result(f"the gateway answered {answer.status_code}")
    raise problem


def _unknown_result(reason: str) -> ToolResult:
    text = "The tool was called, but no answer came back; it may have done its work."
    return ToolResult((Text(text),), Outcome.UNKNOWN, reason=reason)


def _error_from_response(answer: httpx2.Response) -> GatewayError:
    """The server's message as the exception that a gateway in this process would raise."""
    try:
        error = answer.json()["error"]
        kind, message = error["type"], " ".join(filter(None, (error["message"], error.get("remedy"))))
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"status {answer.status_code} without an error message in the gateway's format"
    exceptions = {
        "too_many_sessions": TooManySessions,
        "unavailable": Unavailable,
        "not_found": SessionError,
        "conflict": SessionError,
        "not_recorded": ReplayError,
        "invalid_request": SessionError,
    }
    return exceptions.get(kind, GatewayError)(message)


_NOT_UNICODE = ToolResult(
    (Text("The arguments contain half of a character (a lone surrogate). Write them again."),),
    Outcome.INVALID,
    reason="the call is not Unicode",
)


def _is_unicode(call: ToolCall) -> bool:
    """Whether a call can be encoded; one that cannot must not keep the others from being sent."""
    try:
        f"{call.id}{call.name}{call.arguments}".encode()
    except UnicodeEncodeError:
        return False
    return True


def _call_to_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _format_error(error: Exception) -> str:
    # The message of a LocalProtocolError quotes the request, including the token.
    message = "" if isinstance(error, httpx2.LocalProtocolError) else str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


async def _ssl_context(url: str) -> ssl.SSLContext:
    """Reads the trust store, which costs a tenth of a second of CPU, only for https."""
    if url.lower().startswith("https:"):
        return await to_thread.run_sync(ssl.create_default_context)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
