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
from trainer.data.check import check
from trainer.data.curriculum import Course
from trainer.data.tasks import load
from trainer.engine.base import Engine
from trainer.engines import Finds, Told, engine_of
from trainer.learn.rounds import Weigh, weigh_of
from trainer.play import Player, Watch
from trainer.reward.scorer import Scorer
from trainer.stage import down, gateway_of, sampling_of, stepper_of, template_of
from trainer.steps import Stepper
from trainer.task import Task
from trainer.train.settings import DEMO, TrainSettings

if TYPE_CHECKING:
    from trainer.template import Cause, Template

Warming = Callable[[int, int, float], None]
"""Told step, steps in all, and loss."""
DRAWN = 4096
"""Of the demo's tasks, which have no end: so many are trained on."""
HELD_OUT = 10**6
"""The demo's evaluation has tasks of its own, whatever the run's seed."""
SPOKEN = ("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*")
"""Files of a model that are neither its weights nor their configuration."""
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
        held_out = load(settings.evaluation.data, system=settings.system, split=settings.evaluation.split)
        return Tasks(train, held_out, apart=True)
    if settings.data == DEMO:
        from trainer.demo.data import Drawn

        return Tasks(train, Drawn(HELD_OUT, settings.evaluation.rows, "held_out", settings.kinds), apart=True)
    return Tasks(train, next(iter(train.values())), apart=False)


def _source(name: str, settings: TrainSettings) -> Sequence[Task]:
    if name != DEMO:
        return load(name, system=settings.system)
    from trainer.demo.data import Drawn

    return Drawn(settings.seed, DRAWN, "train", settings.kinds)


def mistakes(settings: TrainSettings, tasks: Tasks, gateway: AnyGateway) -> list[ConfigError]:
    """All that is wrong with what the rows and the curriculum ask of the gateway."""
    found = [ConfigError(one.problem, remedy=one.remedy) for one in down(gateway) if not one.optional]
    for source in [*tasks.train.values(), tasks.held_out]:
        found += check(source[:LOOKED_AT] if settings.data == DEMO else source, gateway.specs)
    if found and settings.data == DEMO:
        found.append(ConfigError("the demo's tasks need the shipped tools", remedy="name tasks of yours with --data"))
    return found + settings.curriculum.check(gateway.specs)


async def model_of(settings: TrainSettings, progress: Warming = lambda *_: None) -> Path:
    """The model's folder; the demo's is made where it is not there yet."""
    from trainer.model import settle

    settle()
    if settings.model != DEMO:
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
    from trainer.demo.folder import made
    from trainer.demo.warm import PLAIN, Recipe

    recipe = PLAIN if settings.warm == "plain" else Recipe()
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
        limits, seed = self.settings.limits, self.settings.seed
        return Player(engine, self.template, self.gateway, limits, chosen, self.stepper, watch, seed, shown=self.shown)

    def greedy(self, player: Player) -> Player:
        return replace(player, sampling=replace(player.sampling, temperature=0.0))

    def spoken(self, folder: Path) -> None:
        """Puts beside weights what they are spoken to with."""
        for pattern in SPOKEN:
            for file in self.model.glob(pattern):
                shutil.copyfile(file, folder / file.name)

    def engine(self, folder: Path, finds: Finds, told: Told) -> Engine:
        """`folder` is where servers log, `finds` the policy's reading, and `told` hears how servers start."""
        return engine_of(self.settings, self.model, self.template, folder, finds=finds, told=told)


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
    scorer = Scorer(settings.reward)
    async with AsyncExitStack() as stack:
        used = gateway or gateway_of(settings.tools, settings.mcp)
        if tape is not None:
            used = recorded(used, tape)  # type: ignore[arg-type]
        await stack.enter_async_context(used)
        if gateway is None and (found := mistakes(settings, tasks, used)):
            raise ConfigErrors(found)
        model = await model_of(settings, warming)
        template = _template(settings, model, used.specs)
        course = Course(settings.curriculum, tasks.train, seed=settings.seed)
        yield Job(settings, tasks, course, used, stepper, template, scorer, rounds, model)


def _template(settings: TrainSettings, model: Path, specs: Sequence[ToolSpec]) -> Template:
    from trainer.template import probe

    template = template_of(model, settings.template, specs)
    probe(template).require()
    return template
