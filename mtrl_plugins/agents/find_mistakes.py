"""Finds mistakes in a run with an agent before anything starts: a program that is missing, rows with an interaction."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from gateway.errors import ConfigError
from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.settings import AgentSettings
from trainer.rollout.task import Task


def make_agent_host(settings: AgentSettings) -> AgentHost:
    """The endpoint for the run's agent. Raises ConfigError for an agent that cannot be started."""
    if settings.command is not None:
        _check_command(settings)
    return AgentHost(settings)


def find_agent_mistakes(tasks: Iterable[Task]) -> list[ConfigError]:
    """The first row that asks for an interaction, which agents do not have."""
    task = next((task for task in tasks if task.has_feedback), None)
    if task is None:
        return []
    remedy = "leave the row's interaction out, or `agent`: an agent talks to its users itself"
    return [ConfigError(f"the task {task.id!r} has an interaction, and an agent plays", remedy=remedy)]


def _check_command(settings: AgentSettings) -> None:
    """Looks for the program where it will be looked for; one among the rollout's own files is not checked."""
    words = shlex.split(settings.command) if isinstance(settings.command, str) else [*(settings.command or ())]
    remedy = "name an installed program, or its whole path"
    if not words:
        raise ConfigError("has no words", field="agent.command", remedy=remedy)
    program = words[0]
    if "{" in program or program.removeprefix("./") in settings.files:
        return
    if "/" in program and not Path(program).is_absolute():  # It is started in the rollout's own folder.
        remedy = "give its whole path, or set `agent.cwd` to the folder that has it"
        program = str(settings.cwd.absolute() / program) if settings.cwd else ""
    if shutil.which(program, path=settings.env.get("PATH")) is None:
        raise ConfigError(f"there is no program {words[0]!r}", field="agent.command", remedy=remedy)
