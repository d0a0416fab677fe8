"""The session of whoever asks without opening one: its chats go on from known ids, and old turns are forgotten."""

from __future__ import annotations

from dataclasses import dataclass

from mtrl_plugins.agents.agent_session import AgentSession
from mtrl_plugins.agents.policy_request import PolicyAnswer, PolicyRequest
from mtrl_plugins.agents.turn_stream import TurnListener
from trainer.rollout.rollout import StopReason

KEPT_TURNS = 1_000
"""Once there are twice as many turns, the oldest are forgotten. A chat that goes on from one is rendered anew."""


@dataclass
class SharedSession(AgentSession):
    """A session that never ends. An engine that failed once is asked again."""

    kept_turns: int = KEPT_TURNS

    async def answer(self, request: PolicyRequest, listener: TurnListener | None = None) -> PolicyAnswer:
        """The policy's turn in answer to a request. Raises PolicyProblem."""
        try:
            return await super().answer(request, listener)
        finally:
            if len(self.tree.turns) >= 2 * self.kept_turns:
                self.forget(self.kept_turns)

    def _stop(self, stop: StopReason, reason: str = "") -> None:
        """Nothing ends this session; the request that met the failure is told."""
