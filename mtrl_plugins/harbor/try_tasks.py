"""Tries Harbor tasks before a run: all are read, and the solutions of some are played, which should be worth 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anyio import to_thread

from gateway.errors import ConfigError, ConfigErrors, GatewayError
from gateway.plural import format_count
from gateway.session import AnyGateway
from gateway.types import Task
from mtrl_plugins.harbor.boxes import TaskBoxes
from mtrl_plugins.harbor.harbor_rollout import call_task
from mtrl_plugins.harbor.harbor_toolset import BEGIN, END_STEP, SOLVE
from mtrl_plugins.harbor.settings import HarborSettings

SAMPLE, SHOWN = 5, 20
"""Tasks whose solutions are played, and tasks whose problems are shown."""


async def try_tasks(settings: HarborSettings, gateway: AnyGateway) -> str:
    """What the tasks are; raises ConfigErrors with all problems."""
    folders = {name: folder for split in settings.folders.values() for name, folder in split.items()}
    problems = await to_thread.run_sync(lambda: dict(_find_problems(settings, folders)))
    names = [name for name in folders if name not in problems]
    sample = names[:: max(1, -(-len(names) // SAMPLE))]
    for name in sample:
        if problem := await _try_solution(name, gateway):
            problems[name] = ConfigError(problem, file=folders[name], remedy="correct the solution or the tests")
    if problems:
        more = len(problems) - SHOWN
        errors = [*problems.values()][:SHOWN]
        raise ConfigErrors([*errors, ConfigError(f"{more} more tasks", file=settings.id)] if more > 0 else errors)
    hosts = ", ".join(settings.sandbox.hosts) or "none"
    found = f"{format_count(len(names), 'task')} of {settings.id}; public hosts: {hosts}"
    return f"{found}; the solutions of {', '.join(sample)} are worth 1"


def _find_problems(settings: HarborSettings, names: Iterable[str]) -> Iterator[tuple[str, ConfigError]]:
    for name in names:
        try:
            TaskBoxes(settings, settings.read(name))
        except ConfigError as error:
            yield name, error


async def _try_solution(name: str, gateway: AnyGateway) -> str:
    """Why a task's solution is not worth 1; empty if it is."""
    try:
        async with gateway.open(Task(name)) as session:
            answer = await call_task(session, BEGIN)
            while "instruction" in answer:
                solved = await call_task(session, SOLVE)
                answer = await call_task(session, END_STEP)
    except GatewayError as error:
        return str(error)
    rewards = answer["rewards"]
    if rewards and all(value == 1 for value in ([rewards["reward"]] if "reward" in rewards else rewards.values())):
        return ""
    worth = f"is worth {rewards}" if rewards else f"got no valid reward: {answer['problem']}"
    return f"its solution {worth}; solve.sh: {solved['output']}; the tests: {answer['output'][-500:] or 'no output'}"
