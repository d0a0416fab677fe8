"""Change notifications of modern MCP servers (since 2026): one long `subscriptions/listen` request per connection.

Requests that it replaces, such as `resources/subscribe`, are answered here and change what is listened for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED

from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.errors import PendingRequest, current_request
from gateway.mcp_client.protocol_version import NegotiatedProtocol
from gateway.types import DEFAULT_CONTEXT

_RETRY_DELAYS_S = (0.2, 30.0)
_LIST_NAMES = ("tools", "prompts", "resources")


class Subscriptions:
    """Keeps the `subscriptions/listen` request of one connection open, and answers the requests that it replaces."""

    def __init__(self, protocol: NegotiatedProtocol, dispatcher: Dispatcher, cuts: Counter[str]) -> None:
        """`cuts` counts floods by reason."""
        self._protocol, self._dispatcher, self._cuts = protocol, dispatcher, cuts
        self._uris: set[str] = set()
        self._changed = anyio.Event()
        self._was_lost = False

    def answer_locally(self, method: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to a request that modern versions no longer have; None for all others."""
        if not self._protocol.is_modern:
            return None
        match method:
            case "resources/subscribe":
                self._uris.add(str(params.get("uri")))
            case "resources/unsubscribe":
                self._uris.discard(str(params.get("uri")))
            case "logging/setLevel":
                self._protocol.log_level = str(params.get("level"))
                return {}
            case "ping":
                return {}
            case _:
                return None
        self._changed.set()
        return {}

    async def listen(self) -> None:
        """Repeats the request when the filters change or its stream ends, until the connection closes."""
        delay_s = _RETRY_DELAYS_S[0]
        for number in count(1):
            filters, self._changed = self._build_filters(), anyio.Event()
            if not filters:
                await self._changed.wait()
                continue
            started_at = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_on_change, tasks.cancel_scope)
                if not await self._listen_once(filters, f"listen-{number}"):
                    tasks.cancel_scope.cancel()
                    return
                tasks.cancel_scope.cancel()
            if not self._changed.is_set():
                self._was_lost = True
                has_lasted = anyio.current_time() - started_at > delay_s
                delay_s = _RETRY_DELAYS_S[0] if has_lasted else min(2 * delay_s, _RETRY_DELAYS_S[1])
                await anyio.sleep(delay_s)

    async def _cancel_on_change(self, scope: anyio.CancelScope) -> None:
        await self._changed.wait()
        scope.cancel()

    async def _listen_once(self, filters: dict[str, Any], request_id: str) -> bool:
        """Listens until the stream ends; whether to try again."""
        params, options = self._protocol.prepare_request(
            "subscriptions/listen", {"notifications": filters}, DEFAULT_CONTEXT
        )
        options["request_id"] = request_id
        pending = PendingRequest(DEFAULT_CONTEXT, cuts=self._cuts)
        current_request.set(pending)
        try:
            await self._dispatcher.send_raw_request("subscriptions/listen", params, options)
        except MCPError as error:
            return error.code == CONNECTION_CLOSED or pending.lost_reason is not None or pending.unreachable
        return True

    def was_interrupted(self) -> bool:
        """Whether the stream was lost since the last call, so that changes may have been missed."""
        was_lost, self._was_lost = self._was_lost, False
        return was_lost

    def _build_filters(self) -> dict[str, Any]:
        filters: dict[str, Any] = {}
        for name in _LIST_NAMES:
            capability = self._protocol.capabilities.get(name)
            if isinstance(capability, Mapping) and capability.get("listChanged"):
                filters[f"{name}ListChanged"] = True
        if self._uris:
            filters["resourceSubscriptions"] = sorted(self._uris)
        return filters
