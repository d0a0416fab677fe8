"""Work that goes on beside its owner ends with it, whatever it is in the midst of."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import anyio


class Beside:
    """Entered and left by one task."""

    def __init__(self) -> None:
        self._stack, self._tasks = AsyncExitStack(), anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._tasks)
        self._stack.callback(self._tasks.cancel_scope.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)
