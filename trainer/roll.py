"""Rolls out and saves: every rollout that is over is in the run's folder, whatever becomes of the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from anyio import to_thread
from rich.console import Console

from gateway.errors import ConfigError, ConfigErrors
from gateway.session import AnyGateway
from gateway.tape import recorded
from trainer.config import RolloutSettings
from trainer.data.check import check
from trainer.data.tasks import load
from trainer.groups import Groups
from trainer.play import Player
from trainer.run.file import NAME, Writer
from trainer.run.rollout import Rollout
from trainer.stage import engine_of, gateway_of, sampling_of, stepper_of, template_of
from trainer.task import Task
from trainer.template import probe
from trainer.view.progress import Progress

ABOUT = "run.json"
METRICS = "metrics.json"


async def roll(settings: RolloutSettings, console: Console) -> Path:
    """Everything that can be wrong is looked at before the weights are loaded."""
    if (settings.out / NAME).exists():
        raise ConfigError("there are rollouts already", file=settings.out, remedy="name another folder with --out")
    tasks = load(settings.data, system=settings.system)
    gateway = gateway_of(settings.tools, settings.mcp)
    if settings.record:
        gateway = recorded(gateway, settings.out / "tape")  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(gateway)
        if mistakes := check(tasks, gateway.specs):
            raise ConfigErrors(mistakes)
        await _rolled(settings, list(islice(tasks, settings.rows)), gateway, stack, console)
    return settings.out


async def _rolled(
    settings: RolloutSettings, tasks: Sequence[Task], gateway: AnyGateway, stack: AsyncExitStack, console: Console
) -> None:
    template = template_of(settings.model, settings.template, gateway.specs)
    probe(template).require()
    engine = engine_of(settings.model, template.tokens.decode, settings.admission.writing)
    await stack.enter_async_context(engine)
    _about(settings, engine.capabilities.name)
    used = f"{engine.capabilities.name} engine, {template.parser.name} parser"
    console.print(f"{len(tasks)} tasks x {settings.n} rollouts: {used}")
    writer = stack.enter_context(Writer(settings.out))
    progress = stack.enter_context(Progress(len(tasks) * settings.n, console=console))
    stack.callback(_metrics, settings.out, progress)
    player = Player(
        engine,
        template,
        gateway,
        settings.limits,
        sampling_of(settings),
        stepper_of(settings),
        progress,
        settings.seed,
    )

    async def keep(rollout: Rollout) -> None:
        await to_thread.run_sync(writer.add, rollout)

    groups = Groups(player, settings.n, admission=settings.admission, rules=settings.groups, keep=keep)
    async with groups.play(tasks) as done:
        async for _ in done:
            pass


def _about(settings: RolloutSettings, engine: str) -> None:
    settings.out.mkdir(parents=True, exist_ok=True)
    about = {"mtrl": version("mtrl"), "engine": engine, "settings": settings.model_dump(mode="json")}
    (settings.out / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _metrics(out: Path, progress: Progress) -> None:
    (out / METRICS).write_text(json.dumps(progress.snapshot(), indent=2) + "\n", encoding="utf-8")


def settings_of(run: Path) -> RolloutSettings:
    """What a run was made with."""
    try:
        about = json.loads((run / ABOUT).read_text(encoding="utf-8"))
        return RolloutSettings.model_validate(about["settings"])
    except (OSError, ValueError, KeyError) as error:
        remedy = "name a folder that `mtrl-train rollout --out` made"
        raise ConfigError(f"is no run ({type(error).__name__})", file=run, remedy=remedy) from error
