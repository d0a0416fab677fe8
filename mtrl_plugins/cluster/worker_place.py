"""Where the rollout workers of a cluster job connect, and with which token."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from mtrl_plugins.workers.handshake import MIN_TOKEN_LENGTH, TOKEN_VARIABLE
from mtrl_plugins.workers.line_channel import Address
from mtrl_plugins.workers.placed_workers import PLACED_VARIABLE

WAIT_S = 1800
"""How long a worker waits for rank 0, which loads the model and waits for servers first."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where the workers of one start of the ranks connect."""

    address: Address
    token: str

    @property
    def leader_variables(self) -> dict[str, str]:
        """Those of rank 0, which listens there."""
        return {PLACED_VARIABLE: str(self.address), **self.variables}

    @property
    def variables(self) -> dict[str, str]:
        """Those of each worker. The token is in no command line, which every user of a node can read."""
        return {TOKEN_VARIABLE: self.token}

    def arguments(self, name: str) -> tuple[str, ...]:
        """Those of the command of a worker."""
        return ("--connect", str(self.address), "--name", name, "--wait", str(WAIT_S))


def choose_worker_place(host: str, port: int, variables: Mapping[str, str] = os.environ) -> WorkerPlace:
    """A place on rank 0's node, with the user's token if there is one, since other workers may have it."""
    given = variables.get(TOKEN_VARIABLE, "")
    return WorkerPlace(Address(host, port), given if len(given) >= MIN_TOKEN_LENGTH else secrets.token_urlsafe(24))
