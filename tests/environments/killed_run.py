"""A run that kills itself while its sessions are open: `python -m tests.environments.killed_run CASE [URL]`.

It prints how many processes it had.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import anyio
import psutil

from tests.environments.real_environments import AT_ONCE, REFERENCE_S, open_held, python_of
from tests.plugins.environments.environment_runs import act, open_run
from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.trainer.policy_scripts import render_calls


@dataclass(frozen=True)
class Case:
    """An environment, and a turn of the policy that does not end it."""

    environment: str
    turn: str
    options: dict[str, Any] = field(default_factory=dict)
    python: str = ""
    sessions: int = AT_ONCE

    def open(self, url: str = "") -> AbstractAsyncContextManager[EnvironmentRuns]:
        """Opens the environment; a server's address stands for `URL`."""
        python = {"python": python_of(self.python)} if self.python else {}
        name = self.environment.replace("URL", url)
        return open_run(name, REFERENCE_S, timeout_s=300, **python, **self.options)


CASES = {
    "gymnasium": Case("gymnasium:FrozenLake-v1", act("left"), {"args": {"is_slippery": False}}, "gymnasium"),
    "textarena": Case("textarena:GuessTheNumber-v0", "[1]", {}, "textarena"),
    "openenv": Case("openenv:URL", render_calls(("step", {"number": 99}))),
    "verifiers-v0": Case("verifiers:guess_env", "1", {}, "verifiers-v0"),
    "verifiers": Case("verifiers:market_taskset", render_calls(("price", {"item": "fig"})), {}, "verifiers"),
    "verifiers-servers": Case(
        "verifiers:fruit_taskset", render_calls(("shop_price", {"item": "apple"})), {}, "verifiers", sessions=4
    ),
}
"""Sixty-four sessions of each; but four where each one has a tool server of its own."""


async def main() -> None:
    """Opens the sessions and kills itself."""
    case = CASES[sys.argv[1]]
    async with case.open(*sys.argv[2:]) as runs, open_held(runs, case.turn, case.sessions) as rollouts:
        count = len(psutil.Process().children(recursive=True))
        sys.stdout.write(f"{count} {len(rollouts)}\n")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)


if __name__ == "__main__":
    anyio.run(main)
