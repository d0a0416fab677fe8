"""Tries again, with growing pauses, what fails because another process is away."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from gateway.errors import ConfigError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Pauses between attempts: each is twice the one before."""

Result = TypeVar("Result")


class AwayError(ConfigError):
    """Another process does not answer, and may come back: the training process, or a gateway or its server."""


async def retry_while_away(
    attempt: Callable[[], Awaitable[Result]], within_s: float, on_away: Callable[[str], None]
) -> Result:
    """The result of `attempt`, which is made again while it raises AwayError, until `within_s` have passed.

    `on_away` is told of the first failure, and of each that has another reason than the one before.
    """
    deadline, pause_s, reported = anyio.current_time() + within_s, FIRST_PAUSE_S, ""
    while True:
        try:
            return await attempt()
        except AwayError as error:
            left_s = deadline - anyio.current_time()
            if left_s <= 0:
                raise
            if error.problem != reported:
                reported = error.problem
                on_away(f"{reported}; it is tried again for up to {left_s:.0f} s")
        await anyio.sleep(min(left_s, pause_s * random.uniform(0.7, 1.0)))  # noqa: S311 - spreads many workers
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
