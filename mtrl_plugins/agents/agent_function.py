"""Calls an agent that is a Python function, with the base URL, the task and the session."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import ConfigError, safe_repr
from gateway.native.thread_pool import shared_threads
from gateway.session import AnySession
from mtrl_plugins.agents.agent_session import AgentSession
from mtrl_plugins.agents.settings import AgentSettings
from trainer.load_plugin import load_plugin
from trainer.rollout.task import Task


@dataclass(frozen=True)
class AgentHandle:
    """What an agent's function has besides the base URL: the key, the rollout's tools, and where rewards go."""

    _session: AgentSession
    tools: AnySession
    """The gateway's session of this rollout: `await session.tools.call(...)`."""
    description: Mapping[str, Any]

    @property
    def api_key(self) -> str:
        """The key for the endpoint."""
        return self._session.api_key

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for clients of Anthropic."""
        return str(self.description["anthropic_base_url"])

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.description["model"])

    def reward(self, value: float, name: str = "agent") -> None:
        """Gives the rollout a reward."""
        self._session.rewards[name] = _check_reward(value)


def load_agent(settings: AgentSettings) -> Any:
    """The function that the settings name."""
    function = load_plugin(str(settings.function), "agent.function")
    if not callable(function):
        raise ConfigError("is no function", field="agent.function", remedy="name `my_agent.py:run`")
    return function


async def call_agent(
    settings: AgentSettings, function: Any, base_url: str, task: Task, session: AgentHandle
) -> float | None:
    """The reward that the function returns, or None. One that is not async runs in a thread."""
    result = await shared_threads().run(function, base_url, task, session, **settings.args)
    return None if result is None else _check_reward(result)


def _check_reward(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"a reward must be a finite number, not {safe_repr(value)}")
    return float(value)
