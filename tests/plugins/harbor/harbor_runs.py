"""Plays rollouts of a scripted policy in Harbor tasks, as a run does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from mtrl_plugins.harbor.settings import REWARD
from tests.plugins.agents.agent_harness import TEMPLATE, Policy, check_laws, script
from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.trainer.policy_scripts import render_calls
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.setup import load_data, make_gateway
from trainer.train.settings import TrainSettings

LIMITS = {"memory_mb": 256, "processes": 40, "disk_mb": 16, "files": 1000}


def make_settings(folder: Path, *, agent: Mapping[str, Any] | None = None, **options: Any) -> TrainSettings:
    """The settings of a run file with `environment: harbor:FOLDER`, and an agent that plays it."""
    sandbox = {**LIMITS, **options.pop("sandbox", {})}
    reward = {"function": REWARD, "batched": True, "args": {"missing": options.pop("missing", None)}}
    values = {"name": f"harbor:{folder}", "timeout_s": 30, "sandbox": sandbox, **options}
    run = {"model": "mine", "environment": values, "reward": {"components": {"environment": reward}}}
    return TrainSettings.model_validate({**run, "agent": agent} if agent else run)


@asynccontextmanager
async def open_tasks(folder: Path, **options: Any) -> AsyncIterator[EnvironmentRuns]:
    """The tasks of a folder, opened as a run does."""
    settings = make_settings(folder, **options)
    tasks = load_data(settings, settings.data)
    with anyio.fail_after(240):
        async with make_gateway(settings) as gateway:
            yield EnvironmentRuns(
                settings, tasks, gateway, settings.limits.model_copy(update={"rollout_tokens": 100_000})
            )


@dataclass
class AgentRuns(EnvironmentRuns):
    """An open environment that an agent plays."""

    runner: RolloutRunner = field(kw_only=True)
    engine: ScriptedEngine = field(kw_only=True)

    async def play(self, name: str) -> tuple[Rollout, float | None]:
        """A rollout of a task, with the laws that hold for each, and its reward if it is scored."""
        (row,) = (number for number, task in enumerate(self.tasks) if task.id == name)
        rollout = await self.runner.run(self.tasks[row], group="g")
        check_laws(rollout, self.engine)
        group = await self.score(rollout, row=row)
        return rollout, group.scored[0].reward if group.scored else None


@asynccontextmanager
async def open_agent(
    folder: Path, agent: Mapping[str, Any], policy: Policy | Sequence[str], *, limits: Any = None, **options: Any
) -> AsyncIterator[AgentRuns]:
    """The tasks of a folder with an agent, opened as a run does, and what the policy writes."""
    settings = make_settings(folder, agent=agent, **options)
    (player,) = (player for part in settings.parts if (player := part.make_player(settings)))
    engine = ScriptedEngine(script(policy))
    with anyio.fail_after(400):
        async with make_gateway(settings) as gateway, player:
            given = settings.limits.model_copy(update={"rollout_tokens": 200_000, **(limits or {})})
            runner = player.wrap(RolloutRunner(engine, TEMPLATE, gateway, given))
            tasks = load_data(settings, settings.data)
            yield AgentRuns(settings, tasks, gateway, runner=runner, engine=engine)


def write_turns(commands: Sequence[str]) -> list[str]:
    """The policy's turns: a command, and the end of its step."""
    return [turn for command in commands for turn in (render_calls(("shell", {"command": command})), "Done.")]


async def play(runs: EnvironmentRuns, name: str, commands: Sequence[str]) -> tuple[Rollout, float | None]:
    """A rollout of a task, and its reward if it is scored."""
    (row,) = (number for number, task in enumerate(runs.tasks) if task.id == name)
    rollout = await runs.run(*write_turns(commands), row=row)
    group = await runs.score(rollout, row=row)
    return rollout, group.scored[0].reward if group.scored else None


IMAGE = 'schema_version = "1.4"\n[environment]\ndocker_image = "busybox"\n'
PASSES = '#!/bin/sh\nif [ "$(cat /app/answer)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
RIGHT, WRONG = "echo 42 > /app/answer", "echo 41 > /app/answer"


@dataclass(frozen=True)
class Sample:
    """A task, and the commands of policies, each a list with a command for each step."""

    name: str
    config: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    policies: Sequence[Sequence[str]] = ((RIGHT,), (WRONG,), ("true",))


def step(name: str, tests: str, **files: str) -> dict[str, str]:
    """The files of a step."""
    inner = {"instruction.md": f"Do {name}.", "tests/test.sh": tests, **files}
    return {f"steps/{name}/{path}": text for path, text in inner.items()}


def reward(line: str) -> str:
    """Tests that write what a line prints as the reward."""
    return f"#!/bin/sh\n{line} > /logs/verifier/reward.txt\n"


COUNT = """#!/bin/sh
n=$(cat /app/log | wc -l)
echo "{\\"reward\\": $((n > 0)), \\"lines\\": $n}" > /logs/verifier/reward.json
"""
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
COLLECT = '[[verifier.collect]]\ncommand = "cp /app/answer /logs/artifacts/"\n'
PLANT = "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo exit > /tests/test.sh"
SAME = 'same() { [ "$(cat /app/$1)" = "$2" ]; echo $((1 - $?)) > /logs/verifier/reward.txt; }\n'
IN_APP = 'workdir = "/app"\n'
SAMPLES = (
    Sample("hello",
     files={"tests/test.sh": PASSES, "instruction.md": "<!-- canary GUID 1 -->\n\nWrite 42 to /app/answer."}),
    Sample(
        "workdir",
        '[agent]\ntimeout_sec = 60\n[verifier]\nuser = "root"\n',
        {
            "task.toml.environment": f'{IN_APP}memory_mb = 256\nenv = {{GREETING = "${{WORD:-hello}}"}}\n',
            "tests/test.sh": reward('[ "$(cat answer)" = hello ]; echo $((1 - $?))'),
        },
        (('echo "$GREETING" > answer',), ("echo bye > answer",)),
    ),
    Sample("several-rewards", files={"tests/test.sh": COUNT},
     policies=(("echo 1 > /app/log; echo 2 >> /app/log",), ("true",))),
    Sample(
        "verifier-env",
        '[verifier]\ntimeout_sec = 30.0\nenv = {EXPECTED = "seven"}\n',
        {"tests/test.sh": reward('[ "$(cat /app/answer)" = "$EXPECTED" ]; echo $((1 - $?))')},
        (("echo seven > /app/answer",), ("echo 7 > /app/answer",)),
    ),
    Sample("separate", f'artifacts = ["/app/answer"]\n{SEPARATE}', {"tests/test.sh": PASSES}, ((RIGHT,), (PLANT,))),
    Sample("published", SEPARATE + COLLECT, {"tests/test.sh": PASSES.replace("/app/answer", "/logs/artifacts/answer")}),
    Sample(
        "steps",
        '[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\n',
        {
            "tests/lib.sh": SAME,
            **step("one", "#!/bin/sh\n. /tests/lib.sh\nsame one 1\n"),
            **step("two", "#!/bin/sh\n. /tests/lib.sh\nsame two 12\n", **{"workdir/setup.sh": "echo 2 > /app/given\n"}),
        },
        (
            ("echo 1 > /app/one", 'echo "$(cat /app/one)$(cat /app/given)" > /app/two'),
            ("echo 0 > /app/one",),
            ("echo 1 > /app/one", "true"),
        ),
    ),
    Sample("final-step", 'multi_step_reward_strategy = "final"\n[[steps]]\nname = "a"\n[[steps]]\nname = "b"\n',
     {**step("a", reward("echo 0.25")), **step("b", PASSES)}, (("true", RIGHT), (RIGHT, "rm /app/answer"))),
    Sample(
        "no-reward",
        files={"tests/test.sh": "#!/bin/sh\n[ -f /app/answer ] && echo 1 > /logs/verifier/reward.txt\n"},
        policies=((RIGHT,), ("true",)),
    ),
    Sample(
        "uploaded",
        files={"environment/data.csv": "a,1\nb,41\n", "task.toml.environment": IN_APP, "tests/test.sh": PASSES},
        policies=(("cut -d, -f2 data.csv | paste -sd+ | bc > answer",), ("wc -l < data.csv > answer",)),
    ),
)  # fmt: skip


def write_task(folder: Path, sample: Sample) -> Path:
    """Writes a task's directory; returns it."""
    files = {"instruction.md": "Write 42 to /app/answer.", "solution/solve.sh": f"#!/bin/sh\n{sample.policies[0][0]}\n"}
    if "[[steps]]" in sample.config:
        del files["instruction.md"]
    files |= {"task.toml": make_config(sample), **sample.files}
    task = folder / sample.name
    for name, text in files.items():
        if name != "task.toml.environment":
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
    (task / "environment").mkdir(exist_ok=True)
    return task


def make_config(sample: Sample) -> str:
    """A `task.toml`: what is not in a table stands first."""
    top, table, rest = f"\n{sample.config}".partition("\n[")
    environment = IMAGE.partition("\n")[2] + sample.files.get("task.toml.environment", "")
    return f'schema_version = "1.4"\n{top}\n{environment}\n{table}{rest}'
