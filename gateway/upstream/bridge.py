"""Since 2026 a server is listened to by one long request; what older fronts ask for singly is folded into it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import CONNECTION_CLOSED

from gateway.types import ALONE
from gateway.upstream.era import Era
from gateway.upstream.fault import Flight, flight_now

_PAUSES_S = (0.2, 30.0)
_LISTS = ("tools", "prompts", "resources")


class Bridge:
    """Keeps a subscription open on one connection, and answers the requests which that replaces."""

    def __init__(self, era: Era, dispatcher: JSONRPCDispatcher[TransportContext]) -> None:
        self._era, self._dispatcher = era, dispatcher
        self._uris: set[str] = set()
        self._changed = anyio.Event()
        self._lost = False

    def take(self, method: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a request that the newer era no longer has; None for every other."""
        if not self._era.modern:
            return None
        match method:
            case "resources/subscribe":
                self._uris.add(str(params.get("uri")))
            case "resources/unsubscribe":
                self._uris.discard(str(params.get("uri")))
            case "logging/setLevel":
                self._era.log_level = str(params.get("level"))
                return {}
            case "ping":
                return {}
            case _:
                return None
        self._changed.set()
        return {}

    async def listen(self) -> None:
        """Listens anew when the wish changes or the stream ends, until the connection does."""
        pause_s = _PAUSES_S[0]
        for number in count(1):
            wish, self._changed = self._wish(), anyio.Event()
            if not wish:
                await self._changed.wait()
                continue
            began = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._until_changed, tasks.cancel_scope)
                if not await self._once(wish, f"listen-{number}"):
                    tasks.cancel_scope.cancel()
                    return
                tasks.cancel_scope.cancel()
            if not self._changed.is_set():
                self._lost = True
                pause_s = _PAUSES_S[0] if anyio.current_time() - began > pause_s else min(2 * pause_s, _PAUSES_S[1])
                await anyio.sleep(pause_s)

    async def _until_changed(self, scope: anyio.CancelScope) -> None:
        await self._changed.wait()
        scope.cancel()

    async def _once(self, wish: dict[str, Any], number: str) -> bool:
        """Whether it is worth trying again."""
        params, options = self._era.stamp("subscriptions/listen", {"notifications": wish}, ALONE)
        options["request_id"] = number
        flight = Flight(ALONE)
        flight_now.set(flight)
        try:
            await self._dispatcher.send_raw_request("subscriptions/listen", params, options)
        except MCPError as error:
            return error.code == CONNECTION_CLOSED or flight.broken is not None or flight.unreachable
        return True

    def missed(self) -> bool:
        """Whether a subscription has begun that was lost before: nobody tells what changed meanwhile."""
        lost, self._lost = self._lost, False
        return lost

    def _wish(self) -> dict[str, Any]:
        wish: dict[str, Any] = {}
        for name in _LISTS:
            offered = self._era.capabilities.get(name)
            if isinstance(offered, Mapping) and offered.get("listChanged"):
                wish[f"{name}ListChanged"] = True
        if self._uris:
            wish["resourceSubscriptions"] = sorted(self._uris)
        return wish
