"""A pool of real worker processes with a scripted engine, and tools that write down what they were asked to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil

from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_job import WorkerJob, make_worker_job
from mtrl_plugins.workers.worker_pool import WorkerPool
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_tasks, render_calls
from tests.trainer.tokenizer_families import save_tokenizer_folder
from trainer.engine.base import Generation, Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.rollout.task import Task
from trainer.setup import load_template, make_gateway

TOOLS = '''
from pathlib import Path

def safe(text: str) -> str:
    """Repeats a text."""
    return text

def act(text: str) -> str:
    """Does something that must not be done twice."""
    with (Path(__file__).parent / "acts.txt").open("a") as file:
        file.write(text + "\\n")
    return text
'''
CONFIG = "tools: [{function: actions:safe, pure: true}, {function: actions:act}]\n"
MARK = "turn: "
"""In every turn of the policy, so that the script knows how many there were."""


class GatedEngine(ScriptedEngine):
    """Calls the tool that the task is named for, and answers; the second turn waits for the gate."""

    def __init__(self) -> None:
        super().__init__(self._script)
        self._template = make_template(HERMES)
        self.gate = anyio.Event()
        self.at_gate: Counter[str] = Counter()
        """How many requests wait, by task."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, key: str = "", **more: Any) -> Generation:
        if self._count_turns(ids):
            task = key.split("/")[1]
            self.at_gate[task] += 1
            try:
                await self.gate.wait()
            finally:
                self.at_gate[task] -= 1
        return await super().generate(ids, sampling, key=key, **more)

    def _count_turns(self, ids: Sequence[int]) -> int:
        return self._template.tokenizer.decode(tuple(ids)).count(MARK)

    def _script(self, ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        task = key.split("/")[1]
        call = render_calls((task.partition("-")[0], {"text": task}))
        text = f"{MARK}done" if self._count_turns(ids) else f"{MARK}I ask.\n{call}"
        return encode_turns(self._template, text)[0]


def write_tools(folder: Path) -> Path:
    """A folder with tools and a model without weights."""
    (folder / "tools").mkdir(parents=True)
    (folder / "tools/actions.py").write_text(TOOLS)
    (folder / "tools/tools.yaml").write_text(CONFIG)
    (folder / "model").mkdir()
    save_tokenizer_folder(HERMES, folder / "model")
    return folder


def read_acts(folder: Path) -> list[str]:
    file = folder / "tools/acts.txt"
    return sorted(file.read_text().split()) if file.exists() else []


def make_settings(folder: Path) -> BaseRolloutSettings:
    return BaseRolloutSettings(tools=str(folder / "tools"), limits=RolloutLimits(timeout_s=120), seed=3)


def make_job(folder: Path, engine: ScriptedEngine, silent_s: float) -> WorkerJob:
    settings, model = make_settings(folder), folder / "model"
    template = load_template(model, settings.template)
    return make_worker_job(settings, model, template, engine, silent_s)


def make_pool(folder: Path, engine: ScriptedEngine, **settings: Any) -> WorkerPool:
    chosen = WorkerSettings(**settings)
    return WorkerPool(chosen, make_job(folder, engine, chosen.heartbeat_timeout_s), engine, folder, print)


def make_runner(folder: Path, engine: ScriptedEngine, pool: WorkerPool | None = None) -> RolloutRunner:
    """Plays in the pool, or else in this process, where the gateway must be entered."""
    settings = make_settings(folder)
    gateway = make_gateway(settings)
    template = load_template(folder / "model", settings.template)
    runner = RolloutRunner(engine, template, gateway, settings.limits, seed=settings.seed)
    return runner if pool is None else pool.wrap(runner)


def tasks(*names: str) -> list[Task]:
    return make_tasks(*names)


def find_workers(name: str = "") -> list[psutil.Process]:
    """The worker processes below this one, without their supervisors."""
    return list_workers(psutil.Process(), name)


def list_workers(parent: psutil.Process, name: str = "") -> list[psutil.Process]:
    found = []
    for process in parent.children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        is_worker = "worker" in words and not any("supervisor_process" in word for word in words)
        if is_worker and (not name or name in words):
            found.append(process)
    return found
