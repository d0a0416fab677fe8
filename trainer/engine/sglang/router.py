"""A router says which server writes, and knows nothing of weights: those go to each of the servers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.engine.base import EngineError
from trainer.engine.sglang.wire import Refused, Wire


async def behind(wire: Wire) -> tuple[str, ...]:
    """The addresses of those behind a router; nothing where there is none."""
    try:
        told = await wire.get("/workers")
    except Refused:
        return ()
    if not isinstance(told, Mapping) or "workers" not in told:
        return ()
    if not told["workers"]:
        raise EngineError(f"the router at {wire.url} has no servers: name them to it by --worker-urls")
    return tuple(_address(wire, worker) for worker in told["workers"])


def _address(wire: Wire, worker: Mapping[str, Any]) -> str:
    url = str(worker.get("url", ""))
    problem = ""
    if not url.startswith(("http://", "https://")):
        problem = "is not spoken to over HTTP; start it without --grpc-mode"
    elif worker.get("worker_type", "regular") != "regular":
        problem = f"does {worker['worker_type']} alone; use servers that do all of it"
    elif "@" in url:
        problem = "is a part of a server; start the router without --dp-aware, and a server for each replica"
    if problem:
        raise EngineError(f"weights cannot be given to {url}, which the router at {wire.url} has: it {problem}")
    return url
