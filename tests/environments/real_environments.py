"""Plays many scripted episodes of the real frameworks, up to 64 at once, and the same with each one's own runner."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns
from tests.trainer.verifiers.verifiers_runs import EnvironmentRuns
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.parse.choose import load_parser
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.setup import make_stepper

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES = HERE / "samples"
"""Environments that the tests bring along."""
EPISODES, AT_ONCE = 200, 64
REFERENCE_S = 900
"""How long a framework's own runner may take for all episodes."""


def python_of(name: str) -> str:
    """The Python that has a framework: `.environments/NAME`, or what the variable MTRL_PYTHON_NAME says."""
    default = ROOT / ".environments" / name / "bin/python"
    python = os.environ.get(f"MTRL_PYTHON_{name.upper().replace('-', '_')}") or str(default)
    assert Path(python).exists(), f"{python} is missing: run `make environments`"
    return python


async def run_reference(framework: str, script: Path, *words: str, job: Any) -> Any:
    """What a framework's own runner prints for a job, in its own interpreter."""
    with anyio.fail_after(REFERENCE_S):
        done = await anyio.run_process([python_of(framework), str(script), *words], input=json.dumps(job).encode(),
                                       check=False)  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)


async def play_all(runs: EnvironmentRuns, scripts: Sequence[tuple[int, Sequence[str]]]) -> list[Rollout]:
    """Plays a script on each row, up to 64 of them at once."""
    rollouts: dict[int, Rollout] = {}
    limit = anyio.CapacityLimiter(AT_ONCE)

    async def play(index: int, row: int, turns: Sequence[str]) -> None:
        async with limit:
            rollouts[index] = await runs.run(*turns, row=row, index=index)

    with anyio.fail_after(REFERENCE_S):
        async with anyio.create_task_group() as tasks:
            for index, (row, turns) in enumerate(scripts):
                tasks.start_soon(play, index, row, turns)
    return [rollouts[index] for index in range(len(scripts))]


async def play_on(runs: EnvironmentRuns, turn: str, index: int, on_turn: Callable[[int], None]) -> Rollout:
    """A rollout in which the policy writes the same turn for ever; `on_turn` is told of each one before."""
    template = make_template(HERMES, parser=load_parser("hermes"))
    answer = encode_turns(template, turn)[0]

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        on_turn(index)
        return answer

    async with ScriptedEngine(script) as engine:
        runner = RolloutRunner(engine, template, runs.gateway, runs.limits, stepper=make_stepper(runs.settings))
        return await runner.run(runs.tasks[0], group="g", index=index)
