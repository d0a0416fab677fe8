"""What is done on several servers at once fails as it would on one: by the first error, not by a group of them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio

from gateway.errors import innermost


async def first(waits: Iterable[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    """Until one of them is over; the others are left."""
    async with anyio.create_task_group() as tasks:

        async def over(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(over, wait)


async def together(acts: Iterable[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    try:
        async with anyio.create_task_group() as tasks:
            for act in acts:
                tasks.start_soon(act)
    except ExceptionGroup as group:
        raise innermost(group) from group
