"""What a run stands on, opened in the order in which mistakes cost least: files, servers, template, memory, weights."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from anyio import to_thread

from gateway.errors import ConfigError, ConfigErrors
from gateway.session import AnyGateway
from gateway.tape import recorded
from gateway.types import ToolSpec
from trainer.config import ServingSettings
from trainer.data.check import check
from trainer.data.curriculum import Course
from trainer.data.tasks import load
from trainer.engine.base import Engine
from trainer.engines import Publisher, Told, engine_of
from trainer.learn.rounds import Weigh, reading, weigh_of
from trainer.play import Player, Watch
from trainer.reward.scorer import Scorer
from trainer.stage import down, gateway_of, sampling_of, stepper_of, template_of
from trainer.steps import Stepper
from trainer.swift.importing import standing_in
from trainer.task import Task
from trainer.train.settings import DEMOS, TrainSettings

if TYPE_CHECKING:
    from trainer.demo.problem import Split
    from trainer.template import Cause, Template

Warming = Callable[[int, int, float], None]
"""Told step, steps in all, and loss."""
DRAWN = 4096
"""Of the demo's tasks, which have no end: so many are trained on."""
HELD_OUT = 10**6
"""The demo's evaluation has tasks of its own, whatever the run's seed."""
SPOKEN = ("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*")
SHOWN = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model that are neither its weights nor their configuration: how it is spoken to, and shown pictures."""
LOOKED_AT = 20
"""Of the demo's tasks, which are all alike, so many are looked at."""


@dataclass(frozen=True)
class Tasks:
    train: Mapping[str | None, Sequence[Task]]
    """By the name that a stage of the curriculum gives them."""
    held_out: Sequence[Task]
    apart: bool
    """False where nothing but the training tasks was there to evaluate on."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know of an evaluation."""
        return () if self.apart else ("no tasks are held out: success is looked at on those that are trained on",)


def tasks_of(settings: TrainSettings) -> Tasks:
    named = {stage.data for stage in settings.curriculum.stages}
    train = {name: _source(name or settings.data, settings) for name in named}
    if settings.evaluation.data is not None:
        held_out = load(
            settings.evaluation.data, system=settings.system, split=settings.evaluation.split, columns=settings.columns
        )
        return Tasks(train, held_out, apart=True)
    if settings.data in DEMOS:
        return Tasks(train, _drawn(settings, settings.data, HELD_OUT, settings.evaluation.rows, "held_out"), apart=True)
    return Tasks(train, next(iter(train.values())), apart=False)


def _source(name: str, settings: TrainSettings) -> Sequence[Task]:
    if name not in DEMOS:
        return load(name, system=settings.system, columns=settings.columns)
    return _drawn(settings, name, settings.seed, DRAWN, "train")


def _drawn(settings: TrainSettings, name: str, seed: int, rows: int, split: Split) -> Sequence[Task]:
    from trainer.demo.data import Drawn
    from trainer.demo.demos import demo

    return Drawn(demo(name), seed, rows, split, settings.kinds)


def mistakes(settings: TrainSettings, tasks: Tasks, gateway: AnyGateway) -> list[ConfigError]:
    """All that is wrong with what the rows and the curriculum ask of the gateway."""
    found = [ConfigError(one.problem, remedy=one.remedy) for one in down(gateway) if not one.optional]
    for source in [*tasks.train.values(), tasks.held_out]:
        found += check(source[:LOOKED_AT] if settings.data in DEMOS else source, gateway.specs)
    if found and settings.data in DEMOS:
        found.append(ConfigError("the demo's tasks need the shipped tools", remedy="name tasks of yours with --data"))
    return found + settings.curriculum.check(gateway.specs)


async def model_of(settings: TrainSettings, progress: Warming = lambda *_: None) -> Path:
    """The model's folder; the demo's is made where it is not there yet."""
    from trainer.model import settle

    settle()
    if settings.model not in DEMOS:
        return _whole(Path(settings.model))
    stopped = Event()

    def told(step: int, steps: int, loss: float) -> None:
        if stopped.is_set():  # Whoever waited has gone: the thread lets go as well, of what it has half made too.
            raise SystemExit
        progress(step, steps, loss)

    try:
        return await to_thread.run_sync(_demo, settings, told)
    finally:
        stopped.set()


def _whole(folder: Path) -> Path:
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        remedy = "merge them into their model (peft's `merge_and_unload`), save it whole, and name that folder"
        raise ConfigError("holds adapters alone", file=folder, field="model", remedy=remedy)
    return folder


def _demo(settings: TrainSettings, told: Warming) -> Path:
    from trainer.demo.demos import demo
    from trainer.demo.folder import made

    recipe = demo(settings.model).recipes[settings.warm]
    return made(replace(recipe, seed=settings.seed), told=told)


@dataclass
class Job:
    """What a run is made with, all of it found in order."""

    settings: TrainSettings
    tasks: Tasks
    course: Course
    gateway: AnyGateway
    stepper: Stepper
    template: Template
    scorer: Scorer
    rounds: Weigh
    model: Path
    shown: set[Cause] = field(default_factory=set)
    """The causes of drift that an example was shown of, by whatever player."""

    def held_out(self, most: int) -> list[Task]:
        """As the last stage of the curriculum asks for them: what the run is to learn in the end."""
        return [self.settings.curriculum.stages[-1].of(task) for task in islice(self.tasks.held_out, most)]

    def player(self, engine: Engine, watch: Watch) -> Player:
        chosen = sampling_of(self.settings)
        limits, seed, kind = self.settings.limits, self.settings.seed, self.settings.evaluation.kind
        fixed = (self.template, self.gateway, limits, chosen, self.stepper, watch, seed, self.shown, kind)
        return Player(engine, *fixed)

    def greedy(self, player: Player) -> Player:
        return replace(player, sampling=replace(player.sampling, temperature=0.0))

    def spoken(self, folder: Path) -> None:
        """Puts beside weights what they are spoken to with, and shown pictures."""
        for pattern in (*SPOKEN, *SHOWN):
            for file in self.model.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    def engine(self, folder: Path, policy: Publisher, told: Told, serving: ServingSettings | None = None) -> Engine:
        """`folder` is where servers log, `policy` what publishes, `told` hears how servers start, and `serving` is
        as it was planned, where it was."""
        settings = self.settings.model_copy(update={"serving": serving}) if serving else self.settings
        return engine_of(settings, self.model, self.template, folder, policy=policy, told=told)


@asynccontextmanager
async def opened(
    settings: TrainSettings,
    *,
    tape: Path | None = None,
    gateway: AnyGateway | None = None,
    warming: Warming = lambda *_: None,
) -> AsyncIterator[Job]:
    """`tape` is where to record; a `gateway` that is given, as a tape's, takes the place of the tools."""
    tasks = tasks_of(settings)
    stepper, rounds = stepper_of(settings), weigh_of(settings.algorithm.credit.rounds)
    with standing_in(folders=[Path.cwd()]):
        scorer = Scorer(settings.reward)
    async with AsyncExitStack() as stack:
        used = gateway or gateway_of(settings)
        if tape is not None:
            used = recorded(used, tape)  # type: ignore[arg-type]
        await stack.enter_async_context(used)
        if gateway is None and (found := mistakes(settings, tasks, used)):
            raise ConfigErrors(found)
        model = await model_of(settings, warming)
        template = _template(settings, model, used.specs)
        course = Course(settings.curriculum, tasks.train, seed=settings.seed)
        yield Job(settings, tasks, course, used, stepper, template, scorer, reading(rounds, template.words), model)


def _template(settings: TrainSettings, model: Path, specs: Sequence[ToolSpec]) -> Template:
    from trainer.template import probe

    template = template_of(model, settings.template, specs)
    probe(template).require()
    return template
