"""An OpenEnv server with the real package: a vault whose number is guessed by fields of an action, or by tools.

    python openenv_vault.py PORT [tools]

It prints `ready` once it answers. /open tells how many sessions are open.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 64
LONGEST = 30


class Guess(Action):
    number: int
    loudly: bool = False


class Hint(Observation):
    hint: str
    tries: int


class Vault(Environment):
    """Says whether the number is higher or lower; the reward falls with each try, and with the noise."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self.tries, self.random = 0, 0, Random()

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 20, **_: Any) -> Hint:
        self.random = Random(seed)
        self.secret, self.tries = self.random.randint(1, highest), 0
        return Hint(hint=f"1 to {highest}", tries=0)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        return Hint(**self.guess(action.number, action.loudly))

    def guess(self, number: int, loudly: bool) -> dict[str, Any]:
        self.tries += 1
        done = number == self.secret or self.tries == LONGEST
        noise = self.random.random() if loudly else 0.0
        reward = 1.0 if number == self.secret else -0.1 - noise / 3
        hint = "open" if number == self.secret else "higher" if number < self.secret else "lower"
        return {"hint": hint, "tries": self.tries, "reward": reward, "done": done}

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


class ToolVault(MCPEnvironment):
    """The same vault with a tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("vault")
        self.vault, self.last = Vault(), dict[str, Any]()

        @server.tool
        def guess(number: int) -> str:
            """Tries a number."""
            self.last = self.vault.guess(number, loudly=True)
            return f"{self.last['hint']} after {self.last['tries']}"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        self.vault.reset(seed)
        return Observation(metadata={"begun": True})

    def step(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._with_reward(super().step(action, timeout_s, **options))

    async def step_async(self, action: Action, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._with_reward(await super().step_async(action, timeout_s, **options))

    def _with_reward(self, observation: Observation) -> Observation:
        if isinstance(observation, CallToolObservation) and self.last:
            observation.reward, observation.done = self.last["reward"], self.last["done"]
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("call the tool")

    @property
    def state(self) -> State:
        return self.vault.state


def main() -> None:
    """Serves until it is killed."""
    port, has_tools = int(sys.argv[1]), "tools" in sys.argv[2:]
    kinds = (ToolVault, CallToolAction, CallToolObservation) if has_tools else (Vault, Guess, Hint)
    app = create_fastapi_app(*kinds, max_concurrent_envs=SESSIONS)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws_ping_interval=5))
    server.run()


if __name__ == "__main__":
    main()
