"""The command that the conformance suite starts as a client: waits for its turn, then runs the gateway.

The suite starts all scenarios at once, which would be more processes than a small machine can run in time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

SLOTS = int(os.environ.get("MTRL_CONFORMANCE_SLOTS", 0)) or 2 * (os.cpu_count() or 1)
"""How many clients run at once."""
_POLL_S = 0.1
WAIT_S = 1500.0
FOLDER = Path(__file__).parents[2] / ".conformance"
"""Where the suite is installed."""


def wait_for_slot(folder: Path) -> None:
    """Holds one of the slots until this process ends."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for number in range(SLOTS):
            descriptor = os.open(folder / f"mtrl-conformance-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return
        time.sleep(_POLL_S)
    sys.exit(f"no slot became free within {WAIT_S:g} s")


def start() -> str:
    """Runs the scenario; what went wrong, empty if nothing did."""
    wait_for_slot(FOLDER)
    import anyio
    from gateway_client import main

    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    return anyio.run(main, sys.argv[1], os.environ["MCP_CONFORMANCE_SCENARIO"], context)


if __name__ == "__main__":
    sys.exit(start() or 0)
