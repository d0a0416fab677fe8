"""Dry run: checks settings, tools, data, template and memory, and plays scripted rollouts. Nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import groupby

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError
from gateway.plural import format_count
from trainer.check import check_parts, describe_images, example_rollout
from trainer.data.traces import TraceTask
from trainer.engine.scripted import ScriptedEngine
from trainer.finding import Finding, Grade, count_problems, print_finding
from trainer.policy.memory_parts import GIB
from trainer.policy.optimizers import describe_rates
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import flatten_settings
from trainer.rollout.trace_player import play_trace
from trainer.template.errors import TemplateError
from trainer.train import modes
from trainer.train.job import Job, open_job
from trainer.train.preflight import find_problems, offered_specs, plan_job
from trainer.train.rehearsal import rehearse
from trainer.train.reporters import import_packages
from trainer.train.run_folder import require_own_folder
from trainer.train.settings import TrainSettings
from trainer.view.progress import show_warm_start
from trainer.view.show import print_rollouts

GRADES: tuple[Grade, ...] = ("wrong", "note", "ok")
"""In the order in which findings are printed."""
ROLLOUT_HEADING = "the first row as the policy sees it; of what follows, only the policy's tokens are trained"


async def dry_run(settings: TrainSettings, console: Console, *, verbose: bool = False) -> bool:
    """Returns True if the run could start. A demo model that does not exist yet is built, since the checks need it."""
    import_packages(settings.report)
    if settings.out is not None:
        require_own_folder(settings.out)
    show = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    async with AsyncExitStack() as stack:
        with show_warm_start(console) as on_progress:
            job = await stack.enter_async_context(open_job(settings, on_warm_start=on_progress))
        findings = await check_parts(job.settings, job.gateway)
        findings = [*findings, *await to_thread.run_sync(lambda: list(find_problems(job)))]
        rehearsed, rollout = await _rehearse(job, is_in_order=all(finding.grade != "wrong" for finding in findings))
        findings += rehearsed
        verdict = count_problems(findings, "no problems found")
        show(verdict + "\n" * bool(findings))
        for finding in sorted(findings, key=lambda finding: GRADES.index(finding.grade)):
            print_finding(finding, console)
        show("\nsettings that are not the defaults")
        for line in _describe_settings(settings):
            show(f"  {line}")
        show("\nthe run")
        for line in _describe_run(job, settings, is_long=verbose):
            show(f"  {line}")
        if verbose:
            console.print_json(job.settings.model_dump_json())
        if rollout is not None:
            show(f"\n{ROLLOUT_HEADING}")
            print_rollouts([rollout], console, rollout=0, decode=job.template.tokenizer.decode)
        show(f"\n{verdict}")
        return verdict == "no problems found"


def _describe_settings(settings: TrainSettings) -> Iterator[str]:
    """A line for each setting, or section, that has other values than the defaults."""
    changed = flatten_settings(settings.model_dump(mode="json", exclude_defaults=True))
    for section, names in groupby(changed, key=lambda name: name.partition(".")[0]):
        inner = {name.removeprefix(f"{section}."): json.dumps(changed[name], ensure_ascii=False) for name in names}
        yield f"{section}: {inner.get(section) or ', '.join(f'{name} {value}' for name, value in inner.items())}"


def _describe_run(job: Job, settings: TrainSettings, *, is_long: bool) -> Iterator[str]:
    for name, source in job.tasks.train.items():
        tasks = f"{format_count(len(source), 'task')} of {name or settings.data}"
        yield f"{tasks}; {settings.prompts} x {settings.n} rollouts a step, {format_count(settings.steps, 'step')}"
    yield from job.tasks.notes
    yield describe_rates(job.given_update, job.settings.update, job.parameters)
    for part in settings.parts:
        if about := part.describe():
            yield about + ("; `mtrl-train check --config` lets it play" if part.find_trial() else "")
    if is_long or settings.sft is not None or settings.mode != "synchronous":
        yield modes.describe_mode(settings)
    placement = plan_job(job)
    plan = placement.plan
    if not is_long:
        yield f"memory: {plan.summary}"
        return
    yield from str(placement).splitlines()
    if plan.taken:
        floor = f"{plan.taken / GIB:.2f} GiB of it are the interpreter and its libraries"
        yield f"the process is expected to take {plan.peak / GIB:.2f} GiB at its peak; {floor}"
    yield describe_images(job.template)


async def _rehearse(job: Job, *, is_in_order: bool) -> tuple[list[Finding], Rollout | None]:
    """What scripted rollouts show, and what is shown token by token: the first row as it is played, if all is in order.

    A trace of SFT is replayed; what an agent or an environment plays in its own way is only rendered.
    """
    tasks = next(iter(job.tasks.train.values()))
    if not is_in_order and job.settings.sft is None:
        return [], None
    try:
        if isinstance(tasks[0], TraceTask):
            runner = RolloutRunner(ScriptedEngine({}), job.template, job.gateway, job.settings.limits)
            with suppress(ConfigError):  # Among the findings.
                return [], await play_trace(runner, tasks[0])
            return [], None
        if not any(part.acts_unseen for part in job.settings.parts):
            return await rehearse(job)
        specs = offered_specs(job.gateway.specs, tasks[0])
        return [], example_rollout(job.template, specs, tasks[0].messages)
    except TemplateError as error:
        return [Finding("wrong", error.problem, error.remedy)], None
