"""A server on the trainer's own GPU lends its memory while the trainer learns, and has it back part by part."""

from __future__ import annotations

from trainer.engine.sglang.replica import Replica

WEIGHTS, CACHE = "weights", "kv_cache"
MOVE_S = 120.0
"""To let go of memory, or to have it mapped again."""


async def lend(replica: Replica) -> None:
    """A server that were still writing would end over it: it is stopped, and what it writes goes back in line."""
    await replica.wire.post("/pause_generation", {"mode": "retract"})
    tags = [WEIGHTS, CACHE]
    await replica.wire.post("/release_memory_occupation", {"tags": tags}, within=MOVE_S)
    replica.lent = tags


async def regain(replica: Replica, tag: str) -> None:
    """Room alone: what was in it is gone. Asked for what it has not lent, a server would end."""
    if tag in replica.lent:
        await replica.wire.post("/resume_memory_occupation", {"tags": [tag]}, within=MOVE_S)
        replica.lent = [one for one in replica.lent if one != tag]
