"""Rolls out and saves: every rollout that is over is in the run's folder, whatever becomes of the others."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from anyio import move_on_after, to_thread
from rich.console import Console

from gateway.errors import ConfigError, ConfigErrors
from gateway.session import AnyGateway
from gateway.tape import recorded
from trainer.config import RolloutSettings
from trainer.data.check import check
from trainer.data.tasks import load
from trainer.engine.base import Capabilities
from trainer.engines import engine_of, notes
from trainer.groups import Fate, Groups
from trainer.play import Player
from trainer.run.about import ABOUT
from trainer.run.file import NAME, Writer
from trainer.run.rollout import Rollout
from trainer.stage import down, gateway_of, sampling_of, stepper_of, template_of
from trainer.steps import Stepper
from trainer.task import Task
from trainer.template import Template, probe
from trainer.view.progress import Progress

METRICS = "metrics.json"
KEEP_S = 3.0
"""To write one rollout to the disk."""
REASONS = 5
"""Of what infrastructure did, so many of the commonest are told at the end."""


async def roll(settings: RolloutSettings, console: Console) -> int:
    """How many rollouts count. Everything that can be wrong is looked at before the weights are loaded."""
    _begin(settings.out)
    tasks = load(settings.data, system=settings.system, columns=settings.columns)
    stepper = stepper_of(settings)
    gateway = gateway_of(settings)
    if settings.record:
        tape = settings.out / "tape"
        shutil.rmtree(tape, ignore_errors=True)  # Of a run that found a mistake before it began.
        gateway = recorded(gateway, tape)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gateway)
        mistakes = check(tasks, gateway.specs)
        mistakes += [ConfigError(one.problem, remedy=one.remedy) for one in down(gateway) if not one.optional]
        if mistakes:
            raise ConfigErrors(mistakes)
        template = template_of(settings.model, settings.template, gateway.specs)
        probe(template).require()
        stage = Stage(template, gateway, stepper)
        return await _rolled(settings, list(islice(tasks, settings.rows)), stage, stack, console)


def _begin(out: Path) -> None:
    remedy = "name another folder with --out"
    if (out / NAME).exists():
        raise ConfigError("there are rollouts already", file=out, remedy=remedy)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be made ({error.strerror})", file=out, remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class Stage:
    """What was found in order."""

    template: Template
    gateway: AnyGateway
    stepper: Stepper


async def _rolled(
    settings: RolloutSettings, tasks: Sequence[Task], stage: Stage, stack: AsyncExitStack, console: Console
) -> int:
    template = stage.template
    starting = partial(console.print, markup=False, soft_wrap=True)
    engine = engine_of(settings, settings.model, template, settings.out, told=starting)
    await stack.enter_async_context(engine)
    _about(settings, engine.capabilities)
    used = f"{engine.capabilities.name} engine, {template.parser.name} parser"
    console.print(f"{len(tasks)} tasks x {settings.n} rollouts: {used}")
    for note in notes(engine.capabilities):
        console.print(note, markup=False, soft_wrap=True)
    writer = stack.enter_context(Writer(settings.out))
    progress = stack.enter_context(Progress(len(tasks) * settings.n, console=console))
    fates: Counter[Fate] = Counter({"whole": 0, "short": 0, "dropped": 0})
    stack.callback(_metrics, settings.out, progress, fates)
    player = Player(
        engine,
        template,
        stage.gateway,
        settings.limits,
        sampling_of(settings),
        stage.stepper,
        progress,
        settings.seed,
    )

    async def keep(rollout: Rollout) -> None:
        with move_on_after(KEEP_S, shield=True):  # It is over: whoever is stopped meanwhile still has it.
            await to_thread.run_sync(writer.add, rollout)

    groups = Groups(player, settings.n, admission=settings.admission, rules=settings.groups, keep=keep)
    reasons: Counter[str] = Counter()
    counted = 0
    async with groups.play(tasks) as done:
        async for group in done:
            counted += len(group.rollouts)
            fates[group.fate] += 1
            reasons.update(f"{rollout.stop}: {rollout.reason}" for rollout in group.failed)
    for said in _said(reasons, fates, progress):
        console.print(said, soft_wrap=True, markup=False)
    return counted


def _said(reasons: Counter[str], fates: Counter[Fate], progress: Progress) -> Iterator[str]:
    """What somebody should know of a run that is over, beside what progress shows."""
    for reason, count in reasons.most_common(REASONS):
        yield f"{count} x {reason}"
    if fates["short"] or fates["dropped"]:
        yield f"groups: {fates['whole']} whole, {fates['short']} short of a rollout, {fates['dropped']} dropped"
    if drifts := progress.seen().drifts:
        causes = ", ".join(f"{count} {cause}" for cause, count in drifts.items())
        yield f"differences from the template's own rendering, by cause: {causes}"


def _about(settings: RolloutSettings, engine: Capabilities) -> None:
    used = {"engine": engine.name, "notes": engine.notes}
    about = {"mtrl": version("mtrl"), **used, "settings": settings.model_dump(mode="json")}
    (settings.out / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _metrics(out: Path, progress: Progress, fates: Counter[Fate]) -> None:
    told = progress.snapshot() | {f"groups/{fate}": count for fate, count in fates.items()}
    (out / METRICS).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def settings_of(run: Path) -> RolloutSettings:
    """What a run was made with."""
    try:
        about = json.loads((run / ABOUT).read_text(encoding="utf-8"))
        return RolloutSettings.model_validate(about["settings"])
    except (OSError, ValueError, KeyError) as error:
        remedy = "name a folder that `mtrl-train rollout --out` made"
        raise ConfigError(f"is no run ({type(error).__name__})", file=run, remedy=remedy) from error
