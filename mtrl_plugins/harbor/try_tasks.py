"""Tries Harbor tasks before a run: all are read, and the solutions of some are played, which should be worth 1."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from gateway.errors import ConfigError, ConfigErrors, GatewayError
from gateway.plural import format_count
from gateway.session import AnyGateway
from gateway.types import Task
from mtrl_plugins.harbor.boxes import TaskBoxes
from mtrl_plugins.harbor.harbor_toolset import BEGIN, END_STEP, SOLVE, call_task
from mtrl_plugins.harbor.settings import HarborSettings

if TYPE_CHECKING:
    from mtrl_plugins.agents.settings import AgentSettings

SAMPLE, SHOWN = 5, 20
"""Tasks whose solutions are played, and tasks whose problems are shown."""
TRY_S = 1200.0
"""What a solution and its tests have, which is what both have by default."""


async def try_tasks(
    settings: HarborSettings, gateway: AnyGateway, agent: AgentSettings | None = None, timeout_s: float = inf
) -> str:
    """What the tasks are; raises ConfigErrors with all problems, also for an agent that is to play them within the
    time of a rollout."""
    folders = {name: folder for split in settings.folders.values() for name, folder in split.items()}
    problems, n_shared, times = await to_thread.run_sync(_read_tasks, settings, folders, agent)
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
    cheats = (
        f"; shared tests of {format_count(n_shared, 'task')} run the policy's programs, which may write a reward "
        "(`separate` tests do not) or void it (`missing: 0` makes that 0)"
    )
    late = [time_s for time_s in times if time_s >= timeout_s]
    stopped = (
        f"; `limits.timeout_s` ({timeout_s:g} s) ends agents before the time of {format_count(len(late), 'task')} is "
        f"over, and what it ends is not graded: make it more than {max(late, default=0):g}"
    )
    end = f"{cheats if n_shared else ''}{stopped if late else ''}"
    return f"{found}; the solutions of {', '.join(sample)} are worth 1{end}"


def _read_tasks(
    settings: HarborSettings, names: Iterable[str], agent: AgentSettings | None
) -> tuple[dict[str, ConfigError], int, list[float]]:
    """What is wrong with tasks, by name; how many others have tests in the policy's box; the times that they give an
    agent, its end included."""
    problems, n_shared, times = dict[str, ConfigError](), 0, list[float]()
    if agent is not None:
        from mtrl_plugins.agents.agent_box import find_program
    for name in names:
        try:
            boxes = TaskBoxes(settings, settings.read(name))
            task = boxes.task
            if agent is not None:
                find_program(agent, boxes.policy_boxes[0], [f"{server}_..." for server, _ in boxes.servers])
                times.append(sum(time + agent.stop_s for step in task.steps if (time := task.agent_time_of(step))))
            n_shared += not all(task.is_separate(step) for step in task.steps)
        except ConfigError as error:
            problems[name] = error
    return problems, n_shared, times


async def _try_solution(name: str, gateway: AnyGateway) -> str:
    """Why a task's solution is not worth 1; empty if it is."""
    try:
        with anyio.fail_after(TRY_S):
            async with gateway.open(Task(name)) as session:
                answer = await call_task(session, BEGIN)
                while "instruction" in answer:
                    solved = await call_task(session, SOLVE)
                    answer = await call_task(session, END_STEP)
    except GatewayError as error:
        return str(error)
    except TimeoutError:
        return f"its solution and tests took more than {TRY_S:g} seconds"
    rewards = answer["rewards"]
    if rewards and all(value == 1 for value in ([rewards["reward"]] if "reward" in rewards else rewards.values())):
        return ""
    worth = f"is worth {rewards}" if rewards else "got no valid reward"
    worth += f": {answer['problem']}" if answer["problem"] else ""
    return f"its solution {worth}; solve.sh: {solved['output']}; the tests: {answer['output'][-500:] or 'no output'}"
