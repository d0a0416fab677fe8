"""One connection to one MCP server: its transport, handshake and requests, and its loss when the server dies.

One task opens and closes a connection; callers only send requests. If the server dies during a call, that call ends
as `unknown` if it was sent and as `unavailable` if not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from time import monotonic
from typing import Any, cast

import anyio
from mcp.shared.dispatcher import CallOptions, ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED

from gateway.limits import call_scope
from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.errors import (
    SDK_CLOSED_MESSAGE,
    CloseReason,
    PendingRequest,
    UpstreamError,
    close_reason_of_refusal,
    current_request,
    ended_by_policy,
    to_upstream_error,
)
from gateway.mcp_client.health import ConnectionHealth
from gateway.mcp_client.late_answers import LateAnswers
from gateway.mcp_client.protocol_version import NegotiatedProtocol, negotiate
from gateway.mcp_client.rollout_folder import FolderError
from gateway.mcp_client.server_requests import answer_server_request, give_inputs, refuses_to_ask
from gateway.mcp_client.subscriptions import Subscriptions
from gateway.mcp_client.tasks import await_task
from gateway.mcp_client.transport import Transport
from gateway.types import DEFAULT_CONTEXT, Context, Outcome

OnNotification = Callable[["Connection", str, Mapping[str, Any]], None]
_IGNORED_NOTIFICATIONS = (
    "notifications/progress",
    "notifications/cancelled",
    "notifications/subscriptions/acknowledged",
)
_METHODS_WITH_INPUT = ("tools/call", "prompts/get", "resources/read")
_CLOSE_REASON_S = 2.0
_START_REMEDY = "start the server, or correct its `url`"
_COMMAND_REMEDY = "run its `command` with its `args` by hand to see why"
_MCP_REMEDY = "check that it is an MCP server"


class Connection:
    """One connection to one server. `run` owns it; all other methods may be called from any task."""

    protocol: NegotiatedProtocol

    def __init__(
        self, transport: Transport, on_notification: OnNotification, *, shared: bool, cuts: Counter[str]
    ) -> None:
        """`cuts` counts floods by reason."""
        self._cuts = cuts
        self.transport, self._on_notification, self._shared = transport, on_notification, shared
        self.handshake_done = anyio.Event()
        """Set after the handshake, whether it succeeded or not."""
        self.closed = anyio.Event()
        """Set when the connection cannot be used any more."""
        self.released = anyio.Event()
        """Set when the transport, its process included, is gone."""
        self.on_refusal: Callable[[Connection], bool] = lambda connection: False
        """Called when the server refuses to ask the caller of a tool in this version of the protocol; returns whether
        another version is used from now on."""
        self.close_reason: CloseReason | None = None
        self.retire_reason: str | None = None
        self.pending, self.health = set[PendingRequest](), ConnectionHealth(transport.config, cuts)
        self.draining = anyio.Event()
        """Set when no new call should be made on this connection."""
        self._has_sent_calls, self.late_answers = False, LateAnswers()
        self._handshake_request = PendingRequest(DEFAULT_CONTEXT, cuts=cuts)
        self._refused_request: PendingRequest | None = None
        """Of the handshake. A server that wants a login may fail the next request in another way."""
        self._dispatcher = Dispatcher(self._handle_request, self._handle_notification)
        self._dispatcher.on_unreadable = self.health.record_answer

    async def run(self) -> None:
        """Opens the connection, serves it and closes it. Connecting has a deadline, serving has none."""
        timeout_s = self.transport.config.connect_timeout_s
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + timeout_s) as connect_scope:
                current_request.set(self._handshake_request)
                async with anyio.create_task_group() as tasks:
                    self._dispatcher.tasks = tasks
                    async with self.transport.open(self._dispatcher):
                        try:
                            await self._use(connect_scope)
                        finally:
                            if connect_scope.cancel_called:
                                self._set_close_reason(self._timeout_reason(timeout_s))
                            self._dispatcher.end()
                    tasks.cancel_scope.cancel()
            if connect_scope.cancelled_caught:
                self._set_close_reason(self._timeout_reason(timeout_s))
        except Exception as error:
            # Boundary: however a transport fails to open or to close, the failure becomes a close reason.
            self._set_close_reason(self._open_failure(error))
        finally:
            self._set_close_reason(CloseReason("closed"))
            self.released.set()

    async def _use(self, connect_scope: anyio.CancelScope) -> None:
        """Agrees on a protocol, and serves the connection until it is to be closed, or ends."""
        try:
            timeout_s = self.transport.config.connect_timeout_s
            self.protocol = await negotiate(
                self._send_handshake, self._dispatcher.notify, timeout_s, version=self.transport.version
            )
        except (MCPError, UpstreamError) as error:
            self._set_close_reason(await self._handshake_failure(error))
            return
        connect_scope.deadline = math.inf
        self.subscriptions = Subscriptions(self.protocol, self._dispatcher, self._cuts)
        async with anyio.create_task_group() as tasks:
            if self.protocol.is_modern:
                tasks.start_soon(self.subscriptions.listen)
            tasks.start_soon(self.health.watch, self, self._dispatcher)
            self.handshake_done.set()
            await self._dispatcher.ended.wait()
            if self.close_reason is None:
                self._set_close_reason(await self._loss_reason())
            tasks.cancel_scope.cancel()

    async def _send_handshake(self, method: str, params: dict[str, Any], options: CallOptions) -> dict[str, Any]:
        request = self._handshake_request = PendingRequest(DEFAULT_CONTEXT, cuts=self._cuts)
        current_request.set(request)
        try:
            return await self._dispatcher.send_raw_request(method, params, options)
        except MCPError as error:
            if request.unreachable:  # Tells nothing of the versions that it supports: it may be about to start.
                raise to_upstream_error(error, request, None) from error
            raise
        finally:
            if request.http_status in (401, 403):
                self._refused_request = request

    async def request(
        self,
        method: str,
        params: Mapping[str, Any],
        context: Context = DEFAULT_CONTEXT,
        *,
        follow: bool = True,
    ) -> dict[str, Any]:
        """Sends a request and returns its raw result; raises `UpstreamError`. Cancellation reaches the server.

        `follow`: a server that asks for inputs gets them, and one that answers with a task is polled.
        """
        if (answer := self.subscriptions.answer_locally(method, params)) is not None:
            return answer
        if self.close_reason is not None:
            if self.close_reason.policy_doing:
                raise ended_by_policy(self.close_reason)
            raise UpstreamError(Outcome.UNAVAILABLE, str(self.close_reason), code=CONNECTION_CLOSED)
        prepared, options = self.protocol.prepare_request(method, params, context)
        if context.on_progress is not None:
            options["on_progress"] = cast(ProgressFnT, context.on_progress)
        self._has_sent_calls = self._has_sent_calls or method == "tools/call"
        pending = PendingRequest(context, cuts=self._cuts)
        if (scope := call_scope.get()) is not None:
            scope.explain_silence = partial(self._dispatcher.explain_silence, monotonic())
        token = current_request.set(pending)
        self.pending.add(pending)
        sandbox, result = self.transport.sandbox, None
        late_answers = nullcontext() if sandbox is None else self.late_answers.request(pending, sandbox)
        try:
            with late_answers, self.health.watch_request(pending, self._dispatcher):
                result = await self._dispatcher.send_raw_request(method, prepared, options)
            if result is None:
                raise self.late_answers.late_error(pending)
        except MCPError as error:
            raise await self._to_upstream_error(error, pending) from None
        finally:
            current_request.reset(token)
            self.pending.discard(pending)
            self.health.record_end()
            if self.retire_reason is not None and not self.pending:
                self.close(self.retire_reason)
        if follow and self.protocol.is_modern and method in _METHODS_WITH_INPUT and "resultType" in result:
            return await self._follow_up(result, method, params, context)
        return result

    async def _follow_up(
        self, result: dict[str, Any], method: str, params: Mapping[str, Any], context: Context
    ) -> dict[str, Any]:
        """The final result of a request whose first one asks for inputs, or names a task."""
        result = await give_inputs(
            result, lambda more: self.request(method, more, context, follow=False), params, context
        )
        if context.answer_request is not None and refuses_to_ask(result) and self.on_refusal(self):
            reason = f"its server asks nobody in MCP {self.protocol.version}, and is used in an older version now"
            raise UpstreamError(Outcome.UNKNOWN, reason)
        if result.get("resultType") != "task":
            return result
        if context.on_task is not None:
            context.on_task()
        return await await_task(lambda name, more: self.request(name, more, context, follow=False), result, context)

    async def _to_upstream_error(self, error: MCPError, pending: PendingRequest) -> UpstreamError:
        if error.code == CONNECTION_CLOSED and error.message == SDK_CLOSED_MESSAGE:
            with anyio.move_on_after(_CLOSE_REASON_S):
                await self.closed.wait()
        explained = to_upstream_error(error, pending, self.close_reason)
        if pending.session_lost:
            self.close(explained.reason)
        elif pending.unreachable and self._shared:
            self.retire(explained.reason)
        return explained

    def retire(self, reason: str) -> None:
        """Takes no new calls. Those under way may finish: a server that refuses one may still answer others."""
        self.retire_reason = reason
        self.draining.set()

    @property
    def is_usable(self) -> bool:
        return self.close_reason is None and self.retire_reason is None and self.handshake_done.is_set()

    def close_hung(self, reason: str) -> None:
        """Closes the connection to a server that hangs: the doing of the policy that has called it in its own sandbox,
        unless the server waits for something outside."""
        is_policys = self._is_policys and not self.late_answers.excuses_hang
        self._set_close_reason(CloseReason(reason, policy_doing="it hangs" if is_policys else ""))
        self._dispatcher.end()

    @property
    def _is_policys(self) -> bool:
        """Whether the server is in a sandbox and has been called: before that, no policy has done anything there."""
        return self.transport.sandbox is not None and self._has_sent_calls

    def close(self, reason: str = "closed") -> None:
        self._set_close_reason(CloseReason(reason))
        self._dispatcher.end()

    def _set_close_reason(self, close_reason: CloseReason) -> None:
        """Stores the reason, unless there is one: the first is the cause of the others."""
        if self.close_reason is None:
            self.close_reason = close_reason
            self.handshake_done.set()
            self.closed.set()
            self.draining.set()

    async def _handle_request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        self.health.hear()
        related = self._related_request()
        with self.late_answers.questions.wait():
            return await answer_server_request(method, params, related, self.pending, is_shared=self._shared)

    async def _handle_notification(self, method: str, params: Mapping[str, Any]) -> None:
        self.health.hear()
        if method == "notifications/subscriptions/acknowledged" and self.subscriptions.was_interrupted():
            self._on_notification(self, "notifications/tools/list_changed", {})
        if method in _IGNORED_NOTIFICATIONS:
            return
        self._on_notification(self, method, params)
        related = self._related_request() or (next(iter(self.pending)) if len(self.pending) == 1 else None)
        if method == "notifications/message" and related is not None and related.context.on_log is not None:
            await related.context.on_log(method, params)

    def _related_request(self) -> PendingRequest | None:
        """The call that an incoming message belongs to, if the transport knows it."""
        return pending if (pending := current_request.get()) in self.pending else None

    async def _loss_reason(self) -> CloseReason:
        if (child := self.transport.child) is not None:
            reason, sandbox = await child.describe_exit(), self.transport.sandbox
            # Nothing in a sandbox can signal bubblewrap's outer process: then something else did.
            is_policy = self._is_policys and (child.exit_code is None or child.exit_code >= 0)
            doing = (sandbox.find_limit() or "its processes ended it") if sandbox is not None and is_policy else ""
            return CloseReason(reason, _COMMAND_REMEDY, policy_doing=doing)
        error = self._dispatcher.error
        return CloseReason(f"the connection was lost: {error}" if error else "the server closed the connection")

    async def _handshake_failure(self, error: MCPError | UpstreamError) -> CloseReason:
        if self._handshake_request.unreachable:
            return CloseReason(str(self._handshake_request.undelivered_reason), _START_REMEDY)
        if isinstance(error, UpstreamError):
            return CloseReason(error.reason)
        if error.code == CONNECTION_CLOSED and error.message == SDK_CLOSED_MESSAGE:
            with anyio.move_on_after(_CLOSE_REASON_S):
                await self._dispatcher.ended.wait()
            return await self._loss_reason()
        if self._refused_request is not None:
            return close_reason_of_refusal(self._refused_request)
        reason = to_upstream_error(error, self._handshake_request, None).reason
        return CloseReason(f"the handshake failed: {reason}", _MCP_REMEDY, try_other_transport=True)

    def _timeout_reason(self, timeout_s: float) -> CloseReason:
        if self.transport.name == "stdio" and self.transport.child is None:
            return CloseReason(f"no slot for another child process became free within {timeout_s:g} s")
        notes = self.transport.child.output_notes() if self.transport.child else ()
        why = self._dispatcher.explain_silence(-math.inf) or "nothing that could be an answer came"
        return CloseReason(f"no answer within {timeout_s:g} s: {why}", _MCP_REMEDY, notes=notes)

    def _open_failure(self, error: BaseException) -> CloseReason:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FolderError):
            return CloseReason(str(error), "see `state` and `keep_state`, and the space that is left")
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            return CloseReason(
                f"cannot start {self.transport.config.command!r}: {error.strerror}", "see `command` and `cwd`"
            )
        if self._handshake_request.http_status in (401, 403):
            return close_reason_of_refusal(self._handshake_request)
        if self._handshake_request.unreachable:
            return CloseReason(str(error), _START_REMEDY)
        return CloseReason(f"{type(error).__name__}: {error}", _MCP_REMEDY)
