"""The stepper of environments with `reset` and `step`: shows the first observation, takes each turn as an action."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from gateway.chat_messages import chat_content
from gateway.types import Context, Outcome, ToolResult
from mtrl_plugins.environments.environment_messages import add_observation
from mtrl_plugins.environments.episode_toolset import reset_call, text_call
from mtrl_plugins.environments.host_process import EnvironmentFailed
from mtrl_plugins.environments.settings import EpisodeSettings
from trainer.ledger import Author
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import CALLS_INFO, RolloutEnd, RolloutStart, Step, ToolsAndFeedback, Turn
from trainer.rollout.task import Task

COLUMN = "environment"
"""The column of a row with its episode: `seed`, and `options` for the environment."""
INFO = "environment"
"""The key of a rollout's infos with how its episode ended."""
LOOP = Context(audience="loop")
MAX_SEED = 2**31


class EpisodeStepper:
    """Begins an episode for each rollout; siblings begin with the same seed."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self.settings = settings

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, EpisodeRollout]]:
        """Resets the environment. Raises EnvironmentFailed if it cannot be."""
        seed, options = read_episode(start.task)
        result = await start.session.call(reset_call(seed, options), LOOP)
        if result.outcome is not Outcome.OK:
            raise EnvironmentFailed(result.reason or result.text)
        history = add_observation(start.task.messages, chat_content(result.parts))
        yield Step(history=history), EpisodeRollout(self.settings, seed, result)

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


class EpisodeRollout(ToolsAndFeedback):
    """One rollout in its episode."""

    def __init__(self, settings: EpisodeSettings, seed: int, opening: ToolResult) -> None:
        self.settings = settings
        self.infos: dict[str, Any] = {"seed": seed, **opening.metrics}

    def check_finished(self, turn: Turn) -> bool | StopReason:
        """A turn without a call ends the rollout, unless turns themselves are actions."""
        if self.settings.actions == "text":
            return False
        return super().check_finished(turn)

    async def step(self, turn: Turn) -> Step:
        """Calls the environment's tool, or acts with the text."""
        if self.settings.actions == "tool":
            step = await super().step(turn)
            for call in step.info.get(CALLS_INFO, ()):
                self.infos.update(call.get("metrics") or {})
            return step
        result = await turn.session.call(text_call(turn.reply.content, turn.number), LOOP)
        self.infos.update(result.metrics)
        failed = result.outcome.is_infrastructure
        stop = StopReason.TOOL_FAILED if failed else StopReason.FEEDBACK_DONE if result.done else None
        return Step(
            Author.FEEDBACK,
            ({"role": "user", "content": chat_content(result.parts)},),
            parts=result.parts,
            outcomes=(result.outcome,),
            reward=result.reward,
            stop=stop,
            reason=result.reason or "" if failed else "",
            source=self.settings.framework,
        )

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """How the episode ended is passed on to reward functions and kept with the rollout."""
        return RolloutEnd({INFO: dict(self.infos)})


def read_episode(task: Task) -> tuple[int, Mapping[str, Any]]:
    """A task's seed, made from its id if the row has none, and its options. Raises EnvironmentFailed for bad rows."""
    episode = task.columns.get(COLUMN)
    episode = {} if episode is None else episode
    if not isinstance(episode, Mapping):
        problem = f"{task.location}: the column `{COLUMN}` is {episode!r:.60}"
        raise EnvironmentFailed(f"{problem}\n  remedy: write {{seed: 3, options: {{...}}}}")
    seed, options = episode.get("seed"), episode.get("options")
    if seed is None:
        seed = int.from_bytes(sha256(task.id.encode()).digest()[:8], "big") % MAX_SEED
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvironmentFailed(f"{task.location}: the seed {seed!r:.40} is no whole number from 0 on")
    return seed, options if isinstance(options, Mapping) else {}
