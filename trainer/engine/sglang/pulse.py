"""Who hangs says nothing of it: a server that is to write is asked now and then whether it is there at all."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from trainer.engine.base import EngineError
from trainer.engine.sglang.replica import Replica
from trainer.engine.sglang.wire import Gone, Refused

PULSE_S = 5.0
"""Between two questions."""
QUIET_S = 60.0
"""For an answer: the process that computes gives it, and reads what is to be continued before."""


async def pulse(replica: Replica, wanted: Callable[[], bool], lost: Callable[[Replica, EngineError], None]) -> None:
    """As long as it is `wanted`, somebody waits for it; and not while it takes in weights, which has a limit of its
    own."""
    while True:
        await anyio.sleep(PULSE_S)
        if not (replica.up and wanted()):
            continue
        try:
            await replica.wire.get("/server_info", within=QUIET_S)
        except Refused:
            continue  # It is there.
        except Gone as error:
            if replica.up and wanted():
                lost(replica, error)
