"""Dry run: checks settings, tools, data, template and memory, and plays scripted rollouts. Nothing is trained."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress

from rich.console import Console
from rich.text import Text

from gateway.errors import ConfigError
from trainer.check import check_parts, describe_images, example_rollout
from trainer.data.traces import TraceTask
from trainer.engine.scripted import ScriptedEngine
from trainer.finding import Finding, print_finding
from trainer.policy.memory_parts import GIB
from trainer.policy.optimizers import describe_rates
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.trace_player import play_trace
from trainer.template.errors import TemplateError
from trainer.train import modes
from trainer.train.job import Job, open_job
from trainer.train.preflight import find_problems, find_warnings, plan_job
from trainer.train.rehearsal import rehearse
from trainer.train.reporters import import_packages
from trainer.train.run_folder import require_own_folder
from trainer.train.settings import TrainSettings
from trainer.view.progress import show_warm_start
from trainer.view.show import print_rollouts


async def dry_run(settings: TrainSettings, console: Console) -> bool:
    """Returns True if the run could start. A demo model that does not exist yet is built, since the checks need it."""
    import_packages(settings.report)
    if settings.out is not None:
        require_own_folder(settings.out)
    async with AsyncExitStack() as stack:
        with show_warm_start(console) as on_progress:
            job = await stack.enter_async_context(open_job(settings, on_warm_start=on_progress))
        console.print_json(job.settings.model_dump_json())
        placement = plan_job(job)
        plan = placement.plan
        console.print(Text(str(placement)), soft_wrap=True)
        if plan.taken:
            floor = f"{plan.taken / GIB:.2f} GiB of it are the interpreter and its libraries"
            console.print(
                Text(f"the process is expected to take {plan.peak / GIB:.2f} GiB at its peak; {floor}"), soft_wrap=True
            )
        if not plan.fits:
            console.print(Text(f"  it does not fit\n  remedy: {plan.remedy}"), soft_wrap=True)
        task_counts = {name or settings.data: len(source) for name, source in job.tasks.train.items()}
        for name, count in task_counts.items():
            size = f"{settings.prompts} x {settings.n} rollouts a step"
            console.print(Text(f"{count} tasks of {name}; {size}"), soft_wrap=True)
        console.print(Text(modes.describe_mode(settings)), soft_wrap=True)
        console.print(Text(describe_images(job.template)), soft_wrap=True)
        for part in settings.parts:
            if about := part.describe():
                trial = "; `mtrl-train check --config` lets it play" if part.find_trial() else ""
                console.print(Text(about + trial), soft_wrap=True)
        for note in (*job.tasks.notes, describe_rates(job.given_update, job.settings.update, job.parameters)):
            console.print(Text(note), soft_wrap=True)
        console.print()
        print_rollouts(
            [await _play_example(job)],
            console,
            rollout=0,
            decode=job.template.tokenizer.decode,
        )
        findings = [*await check_parts(job.settings, job.gateway), *find_problems(job), *find_warnings(job)]
        try:
            findings += await _rehearse(job)
        except TemplateError as error:
            findings.append(Finding("wrong", error.problem, error.remedy))
        console.print()
        for finding in findings:
            print_finding(finding, console)
        problems = sum(finding.grade == "wrong" for finding in findings) + (not plan.fits)
        console.print(Text(f"\n{problems} problem{'s'[: problems > 1]} to fix" if problems else "\nno problems found"))
        return not problems


async def _play_example(job: Job) -> Rollout:
    """What is shown token by token: the first trace of SFT, else a rollout that is not played."""
    traces = [*next(iter(job.tasks.train.values()))[:1]] if job.settings.sft is not None else []
    if traces and isinstance(task := traces[0], TraceTask):
        runner = RolloutRunner(ScriptedEngine({}), job.template, job.gateway, job.settings.limits)
        with suppress(ConfigError):  # Among the findings.
            return await play_trace(runner, task)
    return example_rollout(job.template, job.gateway.specs, job.settings.system)


async def _rehearse(job: Job) -> list[Finding]:
    """Scripted rollouts, unless an agent or an environment plays them in its own way."""
    if job.settings.sft is not None or any(part.acts_unseen for part in job.settings.parts):
        return []
    return await rehearse(job)
