"""The run file's `delegate:`: a tool with which the policy gives tasks to sub-agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, PositiveInt

from gateway.errors import ConfigError
from trainer.rollout.run_part import OpenPlayer, RunPart

if TYPE_CHECKING:
    from gateway.session import AnyGateway
    from trainer.rollout.rollout import Rollout
    from trainer.rollout.settings import BaseRolloutSettings

DESCRIPTION = "Gives a task to a sub-agent, which has tools and sees nothing of this chat. Returns its answer."
SYSTEM = "You are a sub-agent. Do the task. Only your last message is read: it must hold all that was asked for."


class DelegateSettings(RunPart):
    """A tool with which the policy gives a task to a sub-agent: itself, in a chat of its own and in the rollout's
    session. Its last answer is the result. It has no sub-agents; with `record`, those of a turn play one by one."""

    key: ClassVar[str] = "delegate"

    name: Annotated[str, Field(min_length=1)] = "delegate"
    """The tool's name."""
    description: str = DESCRIPTION
    """What the policy reads about it."""
    system: str = SYSTEM
    """Their system prompt."""
    tools: tuple[str, ...] | None = None
    """Tools that they may use; by default all."""
    turns: PositiveInt = 8
    """Turns of each."""
    tokens: PositiveInt | None = None
    """Tokens of each chat; by default `limits.rollout_tokens`."""
    times: PositiveInt = 8
    """Sub-agents of a rollout."""

    def check(self, settings: BaseRolloutSettings) -> None:
        if any(part.key == "agent" for part in settings.parts):
            raise ValueError("`delegate` and `agent` exclude each other: an agent has sub-agents of its own")
        algorithm = getattr(settings, "algorithm", None)
        if algorithm is not None and (kind := algorithm.credit.kind) != "outcome":
            raise ValueError(
                f"`delegate` does not go with `algorithm.credit.kind: {kind}`, which needs turns in the order of time;"
                " sub-agents play beside their rollout: use `outcome`"
            )

    def describe(self) -> str:
        return f"the policy may give tasks to up to {self.times} sub-agents of {self.turns} turns by `{self.name}`"

    async def try_out(self, gateway: AnyGateway, settings: BaseRolloutSettings) -> str:
        """Looks for the tools that sub-agents may use."""
        known = {spec.name for spec in gateway.specs if spec.audience == "policy"}
        if unknown := sorted({*(self.tools or ())} - known):
            problem, remedy = f"there is no tool {unknown[0]!r}", f"name some of {', '.join(sorted(known)) or 'none'}"
            raise ConfigError(problem, field="delegate.tools", remedy=remedy)
        return ""

    def make_player(self, settings: BaseRolloutSettings) -> OpenPlayer:
        from mtrl_plugins.history.delegate import DelegatePlayer
        from trainer.rollout.steppers import Stepper, ToolsAndFeedback

        stepper: Stepper = ToolsAndFeedback()
        for part in settings.parts:
            stepper = part.wrap_stepper(stepper)
        return DelegatePlayer(self, stepper, in_order=settings.record)

    def compute_metrics(self, rollouts: Iterable[Rollout]) -> Mapping[str, float]:
        """How often tasks were given to sub-agents, what they wrote, and how many did not finish."""
        infos = [rollout.infos[self.key] for rollout in rollouts if isinstance(rollout.infos.get(self.key), Mapping)]
        if not infos:
            return {}
        counts = sum((Counter(info) for info in infos), Counter[str]())
        return {
            "delegate/calls": counts["calls"] / len(infos),
            "delegate/tokens": counts["tokens"] / max(1, counts["calls"]),
            "delegate/unfinished": counts["unfinished"] / max(1, counts["calls"]),
        }
