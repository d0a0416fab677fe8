"""Dry run: checks settings, tools, data, template and memory, and plays scripted rollouts. Nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError, ConfigErrors, GatewayError
from gateway.finding import Finding, Grade, print_finding
from gateway.plural import format_count
from trainer.data.traces import TraceTask
from trainer.engine.base import EngineError
from trainer.engine.scripted import ScriptedEngine
from trainer.ledger import Author, Entry, Ledger
from trainer.policy.memory_parts import GIB
from trainer.policy.optimizers import describe_rates
from trainer.rollout.loop import RolloutRunner, add_instructions
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import flatten_settings
from trainer.rollout.trace_player import play_trace
from trainer.template import Template, TemplateError
from trainer.train import modes
from trainer.train.job import Job, open_job
from trainer.train.preflight import choose_micro_batch, find_problems, offered_specs, plan_job
from trainer.train.rehearsal import rehearse
from trainer.train.reporters import import_packages
from trainer.train.run_folder import RunFolder, require_own_folder, require_writable
from trainer.train.settings import TrainSettings
from trainer.train.start import find_checkpoint
from trainer.view.progress import show_warm_start
from trainer.view.show import print_rollout

GRADES: tuple[Grade, ...] = ("wrong", "note", "ok")
"""In the order in which findings are printed."""
ROLLOUT_HEADING = "the first row as the policy sees it; of what follows, only the policy's tokens are trained"


async def dry_run(
    settings: TrainSettings, path: Path, console: Console, *, resume: bool = False, verbose: bool = False
) -> bool:
    """Returns True if the run could start. A demo model that does not exist yet is built, since the checks need it."""
    import_packages(settings.report)
    require_own_folder(path)
    require_writable(path)
    find_checkpoint(RunFolder(path), settings, console, resume=resume)
    show = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    async with AsyncExitStack() as stack:
        with show_warm_start(console) as on_progress:
            job = await stack.enter_async_context(open_job(settings, on_warm_start=on_progress))
        await to_thread.run_sync(choose_micro_batch, job)
        findings = await _try_parts(job)
        findings = [*findings, *await to_thread.run_sync(lambda: list(find_problems(job)))]
        rehearsed, rollout = await _rehearse(job, is_in_order=all(finding.grade != "wrong" for finding in findings))
        findings += [*rehearsed, *[await _try_server(url) for url in settings.engine_urls]]
        wrong = sum(finding.grade == "wrong" for finding in findings)
        verdict = f"{format_count(wrong, 'problem')} to fix" if wrong else "no problems found"
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
            print_rollout(rollout, 0, console, job.template.tokenizer.decode)
        show(f"\n{verdict}")
        return not wrong


async def _try_parts(job: Job) -> list[Finding]:
    """What the sections of plug-ins say when they are tried, such as how an environment's episode begins."""
    findings = []
    for part in job.settings.parts:
        try:
            if answer := await part.try_out(job.gateway, job.settings):
                findings.append(Finding("ok", answer))
        except GatewayError as error:
            for one in error.errors if isinstance(error, ConfigErrors) else (error,):
                problem, _, remedy = str(one).partition("\n  remedy: ")
                findings.append(Finding("wrong", problem, remedy))
    return findings


async def _try_server(url: str) -> Finding:
    """Whether an SGLang server that runs already, or each behind a router, can be used."""
    from trainer.engine.sglang.http_client import ServerUnavailable, SGLangClient
    from trainer.engine.sglang.routing import router_backends
    from trainer.engine.sglang.server_features import read_server_info

    try:
        async with SGLangClient(url) as client:
            backends = await router_backends(client)
        for address in backends or (url,):
            async with SGLangClient(address) as server:
                release = (await read_server_info(server))["version"]
    except EngineError as error:
        is_away = isinstance(error, ServerUnavailable)
        remedy = "start the server, or name the address of one that runs" if is_away else "name another server"
        return Finding("wrong", f"`engine`: {error}", remedy)
    behind = f", a router of {format_count(len(backends), 'server')}" if backends else ""
    return Finding("ok", f"SGLang {release} answers at {url}{behind}")


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
            yield about
    if is_long or settings.sft is not None or settings.mode != "synchronous":
        yield modes.describe_mode(settings)
    placement = plan_job(job)
    plan = placement.plan
    if not is_long:
        yield f"memory: {plan.summary}, with micro-batches of {job.settings.update.pass_tokens} tokens"
        return
    yield from str(placement).splitlines()
    if plan.taken:
        floor = f"{plan.taken / GIB:.2f} GiB of it are the interpreter and its libraries"
        yield f"the process is expected to take {plan.peak / GIB:.2f} GiB at its peak; {floor}"
    yield _describe_images(job.template)


def _describe_images(template: Template) -> str:
    """What happens to images with this model."""
    if template.image_processor is None:
        from trainer.vision.family import FAMILIES

        return f"it reads text only: images become notes; vision models are {', '.join(FAMILIES)}"
    names = {id: token for token, id in template.tokenizer.control_ids.items()}
    where = "in its message" if template.image_layout == "in_tool_message" else "in a user's message behind it"
    barred = ", ".join(names.get(id, str(id)) for id in template.banned_ids)
    return f"it reads images: those of tools are {where}; it never samples {barred}"


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
        asked = tuple(add_instructions(tasks[0].messages, specs))
        prompt = Entry(Author.TASK, job.template.encode_prompt(asked, specs), asked)
        return [], Rollout("shown, not played", Ledger((prompt,)), StopReason.DONE)
    except TemplateError as error:
        return [Finding("wrong", error.problem, error.remedy)], None
