"""Health checks of an SGLang server while it generates: a hung server never answers by itself. Waits for lost ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from trainer.engine.base import EngineError, ServersLostError
from trainer.engine.sglang.http_client import RequestRefused, ServerUnavailable
from trainer.engine.sglang.replica import Replica, wait_for_any

CHECK_INTERVAL_S = 5.0
"""Time between two checks."""
CHECK_TIMEOUT_S = 60.0
"""Time for an answer, which comes from the process that computes, after the prefill under way."""


async def monitor_health(
    replica: Replica, is_needed: Callable[[], bool], on_lost: Callable[[Replica, EngineError], None]
) -> None:
    """Checks a replica while `is_needed` says that somebody waits for it. A weight update has its own timeout."""
    while True:
        await anyio.sleep(CHECK_INTERVAL_S)
        if not (replica.up and is_needed()):
            continue
        try:
            await replica.client.get("/server_info", within=CHECK_TIMEOUT_S)
        except RequestRefused:
            continue  # It answers.
        except ServerUnavailable as error:
            if replica.up and is_needed():
                on_lost(replica, error)


async def require_any(replicas: Sequence[Replica]) -> None:
    """Waits until a replica is up; raises ServersLostError if none comes back."""
    if not await wait_for_any(replicas):
        raise ServersLostError(f"no SGLang server is left: {replicas[0].error}")
