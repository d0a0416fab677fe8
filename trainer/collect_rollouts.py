"""`mtrl-train rollout`: collects rollouts without training and saves each one as soon as it ends."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from anyio import move_on_after, to_thread
from rich.console import Console

from gateway.errors import ConfigError, ConfigErrors
from gateway.plural import format_count
from gateway.session import AnyGateway
from gateway.tape import record_gateway
from gateway.version import installed_version
from trainer.data.state_names import check_state_names
from trainer.data.tasks import check_task_names
from trainer.engine.base import CountsTokens
from trainer.engines import engine_notes, make_engine
from trainer.rollout.admission import Admission
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.run_part import Player
from trainer.rollout.scheduler import GroupStatus, Scheduler
from trainer.rollout.settings import RolloutSettings
from trainer.rollout.steppers import Stepper
from trainer.rollout.task import Task
from trainer.setup import (
    find_down_servers,
    load_data,
    load_template,
    make_gateway,
    make_sampling,
    make_stepper,
    probe_for_job,
    trust_model,
)
from trainer.storage.rollout_file import RESTART, ROLLOUTS_FILE, RolloutWriter
from trainer.storage.run_files import RUN_INFO_FILE, write_json
from trainer.storage.run_status import StatusFile
from trainer.template import Template
from trainer.view.progress import RolloutProgress

METRICS_FILE = "metrics.json"
WRITE_TIMEOUT_S = 3.0
"""Timeout for writing one rollout to disk."""
REASONS_SHOWN = 5
"""How many of the most frequent infrastructure failures are listed at the end."""


async def collect_rollouts(settings: RolloutSettings, console: Console) -> int:
    """Collects and saves rollouts; returns how many count. Everything is checked before the weights are loaded."""
    create_run_folder(settings.out)
    recorders = [start for part in settings.parts if (start := part.record(is_on=settings.record))]
    tasks = load_data(settings, settings.data)
    stepper = make_stepper(settings)
    player = next((player for part in settings.parts if (player := part.make_player(settings))), None)
    gateway = make_gateway(settings, tells_start=True)
    if settings.record:
        tape = settings.out / "tape"
        shutil.rmtree(tape, ignore_errors=True)  # Of a run that found a mistake before it began.
        gateway = record_gateway(gateway, tape)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gateway)
        for start in recorders:
            start(settings.out / "tape")
        mistakes = check_task_names(tasks, gateway.specs) + check_state_names(tasks, gateway)
        mistakes += (mistake for part in settings.parts for mistake in part.find_mistakes(tasks))
        mistakes += find_down_servers(gateway)
        if mistakes:
            raise ConfigErrors(mistakes)
        trust_model(settings, settings.model)
        template = load_template(settings.model, settings.template, gateway.specs)
        probe_for_job(template, settings, gateway.specs, [tasks]).raise_if_failed()
        if player is not None:
            await stack.enter_async_context(player)
        stage = RolloutSetup(template, gateway, stepper, player)
        return await _collect(settings, list(islice(tasks, settings.rows)), stage, stack, console)


def create_run_folder(out: Path) -> None:
    """Makes the folder for rollouts. Raises if there are some already."""
    remedy = "name another folder with --out"
    if (out / ROLLOUTS_FILE).exists():
        raise ConfigError("there are rollouts already", file=out, remedy=remedy)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be made ({error.strerror})", file=out, remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """What rollouts need besides an engine, checked."""

    template: Template
    gateway: AnyGateway
    stepper: Stepper
    player: Player | None = None


async def _collect(
    settings: RolloutSettings, tasks: Sequence[Task], stage: RolloutSetup, stack: AsyncExitStack, console: Console
) -> int:
    template = stage.template
    starting = partial(console.print, markup=False, soft_wrap=True)
    engine = make_engine(settings, settings.model, template, settings.out, log=starting)
    await stack.enter_async_context(engine)
    about = {"mtrl": installed_version(), "engine": engine.capabilities.name, "notes": engine.capabilities.notes}
    write_json(settings.out / RUN_INFO_FILE, about | {"settings": settings.model_dump(mode="json")}, RESTART)
    used = f"{engine.capabilities.name} engine, {template.parser.name} parser"
    console.print(f"{format_count(len(tasks), 'task')} x {format_count(settings.n, 'rollout')}: {used}")
    for note in engine_notes(engine.capabilities):
        console.print(note, markup=False, soft_wrap=True)
    writer = stack.enter_context(RolloutWriter(settings.out))
    progress = RolloutProgress(len(tasks) * settings.n, phase="collecting rollouts", console=console)
    if isinstance(engine, CountsTokens):
        progress.read_sampled = partial(getattr, engine, "sampled_tokens")
    stack.enter_context(progress)
    stack.enter_context(StatusFile(settings.out, progress.status))
    fates: Counter[GroupStatus] = Counter({"whole": 0, "short": 0, "dropped": 0})
    stack.callback(_write_metrics, settings.out, progress, fates)
    runner = RolloutRunner(
        engine,
        template,
        stage.gateway,
        settings.limits,
        make_sampling(settings),
        stage.stepper,
        progress,
        settings.seed,
    )
    if stage.player is not None:
        runner = stage.player.wrap(runner)

    async def keep(rollout: Rollout) -> None:
        with move_on_after(WRITE_TIMEOUT_S, shield=True):  # Saved even if the run is stopped meanwhile.
            await to_thread.run_sync(writer.add, rollout)

    groups = Scheduler(
        runner, settings.n, admission=Admission(settings.concurrency), max_retries=settings.max_retries, sink=keep
    )
    reasons: Counter[str] = Counter()
    counted = 0
    async with groups.submit(tasks) as done:
        async for group in done:
            counted += len(group.rollouts)
            fates[group.status] += 1
            reasons.update(f"{rollout.stop}: {rollout.reason}" for rollout in group.failed)
    for line in _format_summary(reasons, fates, progress):
        console.print(line, soft_wrap=True, markup=False)
    return counted


def _format_summary(reasons: Counter[str], fates: Counter[GroupStatus], progress: RolloutProgress) -> Iterator[str]:
    """Lines about failures, incomplete groups and template drift, besides what the progress panel shows."""
    for reason, count in reasons.most_common(REASONS_SHOWN):
        yield f"{count} x {reason}"
    if fates["short"] or fates["dropped"]:
        yield f"groups: {fates['whole']} whole, {fates['short']} short of a rollout, {fates['dropped']} dropped"
    if drifts := progress.snapshot().drifts:
        causes = ", ".join(f"{count} {cause}" for cause, count in drifts.items())
        yield f"differences from the template's own rendering, by cause: {causes}"


def _write_metrics(out: Path, progress: RolloutProgress, fates: Counter[GroupStatus]) -> None:
    metrics = progress.metrics() | {f"groups/{fate}": count for fate, count in fates.items()}
    write_json(out / METRICS_FILE, metrics, RESTART)
