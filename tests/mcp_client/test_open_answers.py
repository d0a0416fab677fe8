"""Answers to a server that asks without end and takes none are bounded, whatever the transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import anyio
import pytest
from anyio.abc import TaskGroup
from mcp_types import JSONRPCNotification, JSONRPCResponse

from gateway.mcp_client.flood_limits import MAX_OPEN_ANSWERS
from gateway.mcp_client.sse import SSEWriter
from gateway.mcp_client.streamable_http import StreamableHttpWriter

MakeWriter = Callable[[TaskGroup], Any]
WRITERS: dict[str, tuple[MakeWriter, str]] = {
    "sse": (lambda tasks: SSEWriter("http://it", cast(Any, None), {}, cast(Any, None), tasks), "_post"),
    "http": (
        lambda tasks: StreamableHttpWriter("http://it", cast(Any, None), {}, cast(Any, None), tasks),
        "_post_message",
    ),
}


@pytest.mark.parametrize("transport", WRITERS)
async def test_answers_on_their_way_are_bounded(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, post = WRITERS[transport]
    posted: list[Any] = []

    async def hang(message: Any, *_: Any) -> None:
        posted.append(message)
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        writer = make(tasks)
        monkeypatch.setattr(writer, post, hang)
        for number in range(3 * MAX_OPEN_ANSWERS):
            answer = JSONRPCResponse(jsonrpc="2.0", id=number, result={})
            tasks.start_soon(writer.send, answer, {})
        await anyio.wait_all_tasks_blocked()
        assert len(posted) == MAX_OPEN_ANSWERS
        notice = JSONRPCNotification(jsonrpc="2.0", method="notifications/progress", params={})
        tasks.start_soon(writer.send, notice, {})
        await anyio.wait_all_tasks_blocked()
        assert posted[-1] is notice
        tasks.cancel_scope.cancel()
