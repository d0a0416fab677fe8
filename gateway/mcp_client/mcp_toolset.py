"""An MCP server as a toolset: connects, lists tools, reconnects when the server dies, and reports its status.

A server that is slow, dies or returns affects only the calls made meanwhile.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup
from mcp_types.version import LATEST_HANDSHAKE_VERSION

from gateway.config.models import Server
from gateway.config.rollout_variables import find_rollout_problem
from gateway.elicitation import ElicitationAnswers
from gateway.errors import ConfigError
from gateway.mcp_client.auth.credentials import Credentials
from gateway.mcp_client.auth.oauth_credentials import build_credentials
from gateway.mcp_client.catalog_tools import add_catalog_tools
from gateway.mcp_client.connection import Connection
from gateway.mcp_client.errors import CloseReason, UpstreamError
from gateway.mcp_client.http_client import HttpAccess
from gateway.mcp_client.listing import ToolListing, read_listing
from gateway.mcp_client.mcp_session import McpSession, ResultParser, ResultParsers
from gateway.mcp_client.pool import ConnectionPool, LeasedConnections, SharedConnection, unavailable_error
from gateway.mcp_client.protocol_version import NegotiatedProtocol
from gateway.mcp_client.rollout_folder import LISTING, RolloutIdentity, to_policy
from gateway.mcp_client.server_requests import with_answers
from gateway.mcp_client.server_status import RESTARTED_BY_HAND, ServerLog, ServerStatus, StateTracker
from gateway.mcp_client.transport import Services, Transport, TransportName, candidate_transports
from gateway.state.prepared_state import PreparedStates
from gateway.tool_table import Source
from gateway.toolset import Session
from gateway.types import DEFAULT_CONTEXT, Context, Task, ToolSpec

log = logging.getLogger(__name__)
MIN_RECONNECT_S, MAX_RECONNECT_S, STABLE_S = 0.2, 30.0, 10.0
MAX_INSTRUCTION_CHARS = 16_384
"""How much of a server's instructions a policy reads."""
_CLOSE_S = 4.0
_REASON_MARGIN_S = 0.4
"""Added to the connect timeout when entering, so that the status has its reason by then."""
_TOOLS_CHANGED = "notifications/tools/list_changed"

NotificationListener = Callable[[str, Mapping[str, Any]], None]


class McpToolset:
    """The tools of one MCP server. While the server is down its last listing is offered, if there was one."""

    def __init__(
        self,
        name: str,
        config: Server,
        *,
        services: Services,
        parse: Mapping[str, ResultParser] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`parse` maps tool names to result parsers; `*` stands for every other tool.

        `credentials` replace those of the configuration.
        """
        if (found := find_rollout_problem(config)) is not None:
            raise ConfigError(found.problem, file=f"mcp server {name!r}", field=found.field, remedy=found.remedy)
        HttpAccess.of(config).check()
        self.name, self.config, self.services = name, config, services
        self.answers = None if config.answers is None else ElicitationAnswers(name, config.answers)
        self.credentials = credentials or build_credentials(name, config, services.http_clients.for_server(config))
        self.prepared_states = PreparedStates(config.state, config.states, config.state_ignore)
        self.result_parsers = ResultParsers(parse or {})
        self.on_notification: list[NotificationListener] = []
        self.on_change: list[Callable[[], None]] = []
        self.connects_in_background = False
        """Whether entering does not wait for the first attempt to connect."""
        self.start_is_reported = False
        """Whether somebody else tells that it cannot be started, unless it is optional."""
        self.listing, self.log = ToolListing(), ServerLog()
        self._transport_name: TransportName | None = None
        self._probe, self._is_modern_only, self._was_refused = True, False, False
        self._protocol: tuple[str, Mapping[str, Any], str | None] = "", {}, None
        self._state = StateTracker(name, is_process=config.command is not None)
        self.cuts: Counter[str] = Counter()
        """Connections that were cut because the server sent without end, by reason."""

    @property
    def owner(self) -> str:
        return f"mcp server {self.name!r}"

    @property
    def is_shared(self) -> bool:
        return self.config.isolation == "shared"

    async def __aenter__(self) -> Self:
        self._first_attempt_done, self._listing_changed, self._restart_wanted = (anyio.Event() for _ in range(3))
        self._changed_by: Connection | None = None
        self._reconnect_scope = anyio.CancelScope()
        self._tasks: TaskGroup = anyio.create_task_group()
        await self._tasks.__aenter__()
        if self.credentials is not None:
            self.credentials.start(self._tasks)
        self.pool: ConnectionPool = (
            SharedConnection(self._start_connection, lambda: self._state.down_reason)
            if self.is_shared
            else LeasedConnections(self._start_connection, self.config, self._tasks)
        )
        self._state.enter("starting")
        self._tasks.start_soon(self._keep_connected)
        self._tasks.start_soon(self._refresh_listing)
        if not self.connects_in_background:
            try:
                await self.wait_started()
            except BaseException:
                await self.__aexit__(None, None, None)
                raise
        return self

    async def wait_started(self) -> None:
        """Returns when the first attempt to connect has ended, or takes too long."""
        with anyio.move_on_after(self.config.connect_timeout_s + _REASON_MARGIN_S):
            await self._first_attempt_done.wait()

    async def __aexit__(self, *_: object) -> None:
        self._reconnect_scope.cancel()  # first, or closing the connection would start a reconnect
        with anyio.move_on_after(_CLOSE_S, shield=True):
            connections = self.pool.connections
            for connection in connections:
                connection.close()
            for connection in connections:
                await connection.released.wait()
        self._tasks.cancel_scope.cancel()
        # The block's error is not passed on: the task group would wrap it into an exception group.
        await self._tasks.__aexit__(None, None, None)

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self.listing.specs

    @property
    def protocol_version(self) -> str:
        return self._protocol[0]

    @property
    def capabilities(self) -> Mapping[str, Any]:
        """The capabilities that the server declared in its last handshake."""
        return self._protocol[1]

    @property
    def instructions(self) -> str | None:
        """What the server tells its users about itself."""
        return self._protocol[2]

    @property
    def status(self) -> ServerStatus:
        children = (connection.transport.child for connection in self.pool.connections)
        doubt = self._doubt
        return ServerStatus(
            name=self.name,
            state="unresponsive" if doubt else self._state.state,
            reason=f"{doubt}; an answer to a ping is awaited" if doubt else str(self._state.close_reason or ""),
            remedy=self._remedy,
            tools=len(self.specs),
            quarantined=self.listing.quarantined,
            transport=self._transport_name or ("stdio" if self.config.command is not None else ""),
            protocol_version=self.protocol_version,
            children=tuple(child.pid for child in children if child is not None and child.pid is not None),
            reconnects=max(0, self._state.connect_count - 1),
            last_loss=self._state.last_loss,
            since=self._state.since,
            cuts=dict(self.cuts),
        )

    @property
    def _doubt(self) -> str | None:
        """Why a shared server that counts as up is being pinged."""
        if self._state.state != "up" or not self.is_shared:
            return None
        return next((one.health.doubt for one in self.pool.connections if one.health.doubt is not None), None)

    @property
    def _remedy(self) -> str:
        """The operator's own `start` hint, which helps more than our general remedy, else that remedy."""
        if self._state.close_reason is None:
            return ""
        return f"start it: {self.config.start}" if self.config.start else self._state.close_reason.remedy

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]:
        """A session without a connection yet, since many rollouts never call."""
        self.prepared_states.check(task, self.owner)
        return McpSession(self, LISTING if self.is_shared else RolloutIdentity.of_task(task))

    async def request(
        self, method: str, params: Mapping[str, Any], context: Context = DEFAULT_CONTEXT, *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Sends a request outside any session and returns the raw result; raises `UpstreamError` with its code."""
        with anyio.move_on_after(timeout_s):
            connection = await self.pool.acquire_any()
            return await connection.request(method, params, with_answers(context, self.answers))
        raise unavailable_error(f"no answer to {method} within {timeout_s:g} s")

    @property
    def _wanted_version(self) -> str | None:
        """The version that `protocol` asks for; else the handshake's, where a modern one was refused before."""
        if self.config.protocol != "auto":
            return self.config.protocol
        return None if self._probe else LATEST_HANDSHAKE_VERSION

    def _start_connection(self, rollout: RolloutIdentity) -> Connection:
        name = self._transport_name or candidate_transports(self.config)[0]
        transport = Transport(
            name, self.config, self.services, self.name, self._wanted_version, rollout, self.credentials, self.log
        )
        connection = Connection(transport, self._handle_notification, shared=self.is_shared, cuts=self.cuts)
        connection.on_refusal = self._note_refusal
        self._tasks.start_soon(self._run_connection, connection)
        return connection

    async def _run_connection(self, connection: Connection) -> None:
        await connection.run()
        if not self.is_shared and connection.health.failure is not None:
            log.warning("server %r: the connection of one session was closed: %s", self.name, connection.health.failure)

    def restart(self) -> None:
        """Ends every connection, one that is being made included, and connects again at once."""
        self._restart_wanted.set()
        self._state.record_restart()
        self.pool.close_all(str(RESTARTED_BY_HAND))

    async def _keep_connected(self) -> None:
        """Connects to the server, and reconnects whenever the connection is lost."""
        with self._reconnect_scope:
            delay_s = MIN_RECONNECT_S
            while True:
                self._restart_wanted = anyio.Event()
                connection = await self._connect()
                self._first_attempt_done.set()
                if connection is not None:
                    connected_at = anyio.current_time()
                    lost = await self.pool.use_until_lost(connection)
                    self._state.record_loss(RESTARTED_BY_HAND if self._restart_wanted.is_set() else lost)
                    if anyio.current_time() - connected_at > STABLE_S:
                        delay_s = MIN_RECONNECT_S
                        continue
                with anyio.move_on_after(delay_s * random.uniform(0.5, 1.0)):  # noqa: S311 (spreads load, guards nothing)
                    await self._restart_wanted.wait()
                delay_s = MIN_RECONNECT_S if self._restart_wanted.is_set() else min(2 * delay_s, MAX_RECONNECT_S)

    async def _connect(self) -> Connection | None:
        """A usable connection over the first transport that works, with its listing loaded; None if all fail."""
        deadline = anyio.current_time() + self.config.connect_timeout_s
        failures: list[tuple[TransportName, CloseReason]] = []
        for name in (self._transport_name,) if self._transport_name else candidate_transports(self.config):
            self._transport_name = name
            connection = await self._open_best_version()
            if connection.is_usable and await self._load_listing(connection, deadline):
                self._state.record_success()
                return connection
            self._transport_name, self._probe = None, True
            failures.append((name, connection.close_reason or CloseReason("it was lost at once")))
            if not failures[-1][1].try_other_transport:
                break
            self._state.record_attempt(failures[-1][1])
        self._set_down(failures)
        return None

    async def _open_best_version(self) -> Connection:
        """A connection in the version in which the server offers most.

        Some servers of both eras announce no changes in the modern one, or ask nobody, as a refusal may have told; the
        handshake is tried then.
        """
        connection = await self._open_connection()
        if not connection.is_usable or self.config.protocol != "auto" or self._is_modern_only:
            return connection
        protocol = connection.protocol
        if not protocol.is_modern or protocol.has_tasks or not self._is_lacking(protocol):
            return connection
        connection.close("the handshake is tried, since the server offers less in the modern version")
        await connection.released.wait()
        self._probe = False
        if (by_handshake := await self._open_connection()).is_usable:
            return by_handshake
        self._probe = self._is_modern_only = True
        await by_handshake.released.wait()
        return await self._open_connection()

    def _is_lacking(self, protocol: NegotiatedProtocol) -> bool:
        tools = protocol.capabilities.get("tools")
        return self._was_refused or (isinstance(tools, Mapping) and tools.get("listChanged") is not True)

    def _note_refusal(self, connection: Connection) -> bool:
        """Connects in an older version from now on, if that was not tried before; calls under way may finish."""
        if self.config.protocol != "auto" or self._is_modern_only or not self._probe:
            return False
        self._was_refused, self._probe = True, self.is_shared
        if self.is_shared:
            connection.retire("the server asks nobody in the modern version")
        return True

    async def _open_connection(self) -> Connection:
        connection = await self.pool.connect()
        await connection.handshake_done.wait()
        return connection

    async def _load_listing(self, connection: Connection, deadline: float) -> bool:
        try:
            with anyio.fail_after(max(0.5, deadline - anyio.current_time())):
                listing = await self._read_listing(connection)
        except UpstreamError as error:
            connection.close(f"its tools cannot be listed: {error.reason}")
            return False
        except TimeoutError:
            connection.close(f"its tools were not listed within {self.config.connect_timeout_s:g} s")
            return False
        protocol, folder = connection.protocol, connection.transport.folder
        self._protocol = protocol.version, protocol.capabilities, to_policy(protocol.instructions, folder)
        self._probe = protocol.is_modern
        self._state.connect_count += 1
        self._update_listing(listing, announced=self._state.connect_count == 1)
        return True

    async def _read_listing(self, connection: Connection) -> ToolListing:
        listing = await read_listing(connection, self.owner)
        return add_catalog_tools(listing, self.name, self.config, connection)

    def _set_down(self, failures: list[tuple[TransportName, CloseReason]]) -> None:
        close_reason = failures[-1][1]
        if len(failures) > 1:
            attempts = "; ".join(f"as {name}: {reason}" for name, reason in failures)
            close_reason = CloseReason(attempts, "check that `url` is the MCP endpoint, and set its `transport`")
        is_reported = self.start_is_reported and not self.config.optional
        self._state.record_failure(close_reason, has_tools=bool(self.specs), is_reported=is_reported)
        if isinstance(self.pool, SharedConnection):
            self.pool.wake_waiters()

    def _update_listing(self, listing: ToolListing, *, announced: bool = False) -> None:
        """Stores a new listing; unchanged specs stay the same object, because holders compare them by identity.

        `announced`: the server has joined or sent a notification, so listeners are called even if the specs are equal.
        """
        if self.config.instructions == "system" and self.instructions:
            text = self.instructions[:MAX_INSTRUCTION_CHARS]
            listing = replace(listing, specs=tuple(replace(spec, instructions=text) for spec in listing.specs))
        unchanged = listing.specs == self.listing.specs
        specs = self.listing.specs if unchanged else listing.specs
        self.listing = replace(listing, specs=specs)
        if announced or not unchanged:
            for callback in tuple(self.on_change):
                callback()

    def _handle_notification(self, connection: Connection, method: str, params: Mapping[str, Any]) -> None:
        if method == _TOOLS_CHANGED:
            self._changed_by = connection
            self._listing_changed.set()
        for callback in tuple(self.on_notification):
            callback(method, params)

    async def _refresh_listing(self) -> None:
        """Reloads the listing after change notifications; several at once lead to one reload."""
        while True:
            await self._listing_changed.wait()
            self._listing_changed, connection = anyio.Event(), self._changed_by
            if connection is None or not connection.is_usable:
                continue
            try:
                with anyio.fail_after(self.config.connect_timeout_s):
                    self._update_listing(await self._read_listing(connection), announced=True)
            except (UpstreamError, TimeoutError):
                # The old listing stays; a lost connection is handled by the reconnect loop.
                continue


def mcp_servers(sources: Iterable[Source]) -> list[McpToolset]:
    """The MCP servers behind a gateway's sources."""
    return [source.backend for source in sources if isinstance(source.backend, McpToolset)]
