"""Routing: decides which server gets a request, and lists the servers behind an sglang-router.

A rollout goes back to the replica that has its prefix cached, its siblings to the one with their prompt. Weights are
sent to each server behind a router, as the router itself handles none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.engine.base import EngineError
from trainer.engine.sglang.http_client import RequestRefused, SGLangClient
from trainer.engine.sglang.server_features import describe_half


async def router_backends(client: SGLangClient) -> tuple[str, ...]:
    """The addresses of the servers behind a router; empty if it is no router."""
    try:
        workers = await client.get("/workers")
    except RequestRefused:
        return ()
    if not isinstance(workers, Mapping) or "workers" not in workers:
        return ()
    if not workers["workers"]:
        raise EngineError(f"the router at {client.url} has no servers: start it with --worker-urls")
    return tuple(_backend_url(client, worker) for worker in workers["workers"])


def _backend_url(client: SGLangClient, worker: Mapping[str, Any]) -> str:
    url = str(worker.get("url", ""))
    problem = ""
    if not url.startswith(("http://", "https://")):
        problem = "is served over gRPC, not HTTP; start it without --grpc-mode"
    elif worker.get("worker_type", "regular") != "regular":
        problem = describe_half(worker["worker_type"])
    elif "@" in url:
        problem = "is a part of a server; start the router without --dp-aware, and a server for each replica"
    if problem:
        raise EngineError(f"{url} behind the router at {client.url} cannot be used: it {problem}")
    return url


MAX_EXTRA_REQUESTS = 32
"""A replica may have this many more requests than the least loaded one and keep its rollouts. The load swings by
dozens, as servers answer in batches, and moving a rollout costs a prefill."""
MAX_LOAD_RATIO = 1.5
"""And this many times as many."""


class Routing:
    """Chooses a replica for each request; `counts` has the reasons, `chosen` the replicas."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter({"placed": 0, "kept": 0, "crowded": 0, "lost": 0})
        self.chosen: Counter[int] = Counter()
        self._homes: dict[str, int] = {}

    def choose(self, key: str, group: str, loads: Sequence[int], up: Sequence[int]) -> int:
        """Chooses among the replicas `up`, by the `loads` of all. Raises ValueError if none is up."""
        idlest = min(up, key=lambda index: (loads[index], index))
        names = [name for name in (f"rollout {key}" if key else "", f"group {group}" if group else "") if name]
        known = [self._homes[name] for name in names if name in self._homes]
        home = next((index for index in known if index in up), known[0] if known else None)
        if home is None:
            why, chosen = "placed", idlest
        elif home not in up:
            why, chosen = "lost", idlest
        elif loads[home] > loads[idlest] + MAX_EXTRA_REQUESTS and loads[home] > MAX_LOAD_RATIO * loads[idlest]:
            why, chosen = "crowded", idlest
        else:
            why, chosen = "kept", home
        self.counts[why] += 1
        self.chosen[chosen] += 1
        for name in names:
            if name.startswith("rollout ") or why != "kept":
                self._homes[name] = chosen
        return chosen

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of reasons and of requests by server. The choices of an sglang-router are not known here."""
        names = ("placed", "kept", "crowded", "lost")
        why = {f"routes/{name}": float(self.counts[name]) for name in names}
        return why | {f"routes/server_{index}": float(count) for index, count in sorted(self.chosen.items())}

    def knows(self, key: str) -> bool:
        """Whether the rollout was routed before, with these weights."""
        return f"rollout {key}" in self._homes

    def forget(self) -> None:
        """Forgets where rollouts and groups are cached: new weights invalidate it."""
        self._homes.clear()
