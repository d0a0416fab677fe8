"""Plays tasks with Harbor's own verifier, steps and rewards, in a copy of a root under bubblewrap instead of Docker.

Run by the Python that has Harbor: jobs are JSON on standard input, and so are the results.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harbor.models.task.config import TaskOS  # type: ignore[import-not-found]
from harbor.models.task.task import Task  # type: ignore[import-not-found]
from harbor.models.task.verifier_mode import (
    resolve_step_verifier_mode,  # type: ignore[import-not-found]
    resolve_task_verifier_mode,
)
from harbor.models.trial.paths import TrialPaths  # type: ignore[import-not-found]
from harbor.models.trial.result import ExceptionInfo, StepResult, TrialResult  # type: ignore[import-not-found]
from harbor.trial.multi_step import MultiStepTrial  # type: ignore[import-not-found]
from harbor.utils.env import resolve_env_vars  # type: ignore[import-not-found]
from harbor.verifier.verifier import Verifier  # type: ignore[import-not-found]


class Box:
    """What the verifier asks of an environment."""

    os = TaskOS.LINUX

    def __init__(self, root: Path, workdir: str, env: dict[str, str]) -> None:
        self.root, self.workdir, self.env = root, workdir, env
        for name in ("agent", "verifier", "artifacts"):
            (root / "logs" / name).mkdir(parents=True, exist_ok=True)

    async def exec(self, command: str, env: dict[str, str] | None = None, **_: Any) -> Any:
        given = [word for name, value in {**self.env, **(env or {})}.items() for word in ("--setenv", name, value)]
        words = ["bwrap", "--bind", str(self.root), "/", "--dev", "/dev", "--proc", "/proc", "--unshare-net", *given]
        words += ["--chdir", self.workdir, "/bin/sh", "-c", command]
        pipe = asyncio.subprocess.PIPE
        done = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
        stdout, stderr = await asyncio.wait_for(done.communicate(), 60)
        return SimpleNamespace(return_code=done.returncode, stdout=stdout.decode(), stderr=stderr.decode())

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self.root / target_dir.lstrip("/"), dirs_exist_ok=True)

    async def download_dir(self, source_dir: str, target_dir: Path) -> None:
        shutil.copytree(self.root / source_dir.lstrip("/"), target_dir, dirs_exist_ok=True)

    def is_path_mounted(self, *_: Any) -> bool:
        return False


async def play(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The rewards of a policy that runs a command in each step."""
    task, workdir, results = Task(job["task"]), job["workdir"], []
    env = resolve_env_vars(task.config.environment.env)
    box = Box(shutil.copytree(job["tree"], folder / "box", symlinks=True), workdir, env)
    if task.config.environment.docker_image and not (task.paths.environment_dir / "Dockerfile").exists():
        await box.upload_dir(task.paths.environment_dir, workdir)
    trial: Any = SimpleNamespace(
        task=task, logger=logging.getLogger(), config=SimpleNamespace(verifier=SimpleNamespace(disable=False)),
        _min_reward_failure=MultiStepTrial._min_reward_failure, result=SimpleNamespace(step_results=results),
    )  # fmt: skip
    trial._aggregate_step_rewards = lambda: MultiStepTrial._aggregate_step_rewards(trial)
    for number, (step, command) in enumerate(zip(task.config.steps or [None], job["commands"], strict=False)):
        result = StepResult(step_name=step.name if step else "only")
        results.append(result)
        if step is not None and task.paths.step_workdir_dir(step.name).exists():
            await box.upload_dir(task.paths.step_workdir_dir(step.name), workdir)
            if task.paths.step_setup_path(step.name).exists():
                await box.exec(f"sh {workdir}/setup.sh")
        await box.exec(command)
        try:
            result.verifier_result = await verify(task, step, box, job["tree"], folder / str(number))
        except Exception as error:
            result.exception_info = ExceptionInfo.from_exception(error)
        if step is None or MultiStepTrial._should_stop_after_step(trial, step, result):
            break
    end = results[0].verifier_result if not task.has_steps else MultiStepTrial._select_multi_step_reward(trial)
    errors = [result.exception_info for result in results if result.exception_info]
    seen = SimpleNamespace(verifier_result=end, recorded_exceptions=lambda: errors)
    is_valid = TrialResult.reward_valid.fget(seen)
    return {"rewards": end.rewards if is_valid else None, "errors": [error.exception_type for error in errors]}


async def verify(task: Task, step: Any, box: Box, tree: str, folder: Path) -> Any:
    """What the verifier finds, in the policy's box or in one of its own."""
    mode = resolve_step_verifier_mode(task.config, step) if step else resolve_task_verifier_mode(task.config)
    verifier_box = box
    if mode.value == "separate":
        for hook in (*task.config.verifier.collect, *(step.verifier.collect if step else ())):
            await box.exec(hook.command)
        verifier_box = Box(shutil.copytree(tree, folder / "box", symlinks=True), box.workdir, box.env)
        artifacts = [*task.config.artifacts, *(step.artifacts if step else ())]
        for source in ("/logs/artifacts", *(getattr(artifact, "source", artifact) for artifact in artifacts)):
            inner, target = box.root / source.lstrip("/"), verifier_box.root / source.lstrip("/")
            if inner.is_dir():
                shutil.copytree(inner, target, dirs_exist_ok=True)
            elif inner.exists():
                shutil.copy(inner, target)
    else:
        for name in ("tests", "logs/verifier"):  # As a trial does before a shared verifier.
            shutil.rmtree(box.root / name, ignore_errors=True)
            (box.root / name).mkdir()
    paths = TrialPaths(folder / "trial")
    paths.verifier_dir.mkdir(parents=True)
    env, name = (step.verifier.env or None, step.name) if step else (None, None)
    return await Verifier(task, paths, verifier_box, verifier_env=env, step_name=name).verify()


async def main() -> None:
    """Plays the jobs."""
    given = json.load(sys.stdin)
    folder = Path(given["folder"])
    results = [await play(job, folder / str(number)) for number, job in enumerate(given["jobs"])]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
