"""Opens and checks the inputs of a training run, cheapest first: tasks, rewards, tool servers, model, chat template."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from anyio import to_thread

from gateway.errors import ConfigError, ConfigErrors
from gateway.plugins import enable_stand_ins
from gateway.session import AnyGateway
from gateway.tool_table import Source
from trainer.algorithms.token_weights import TokenWeightFn, bind_decoder, load_token_weight_fn
from trainer.data.curriculum import TaskStream
from trainer.data.tasks import (
    CHECKED_TASKS,
    WarmStartProgress,
    check_task_names,
    example_names,
    find_names,
    load_example,
    require_example,
)
from trainer.distributed.rank_environment import count_local_ranks
from trainer.engine.base import Engine
from trainer.engines import Log, leave_gpus, make_engine
from trainer.policy.optimizers import choose_rates
from trainer.policy.settings import UpdateSettings
from trainer.reward.scorer import GivenRewards, Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.observer import RolloutObserver
from trainer.rollout.run_part import Player
from trainer.rollout.settings import ServingSettings
from trainer.rollout.steppers import Stepper
from trainer.rollout.task import Task
from trainer.setup import (
    find_down_servers,
    find_unknown_tools,
    load_data,
    load_template,
    make_gateway,
    make_sampling,
    make_stepper,
    probe_for_job,
    trust_model,
)
from trainer.train.settings import TrainSettings
from trainer.weight_files import read_weight_files
from trainer.worker_thread import WorkerThread

if TYPE_CHECKING:
    from trainer.policy.policy import Policy
    from trainer.template import Cause, Template

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""With `TOKENIZER_FILES`: a model's files besides weights and configuration, which checkpoints need too."""


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copies a model's tokenizer, chat template and image processor, which checkpoints need too."""
    for pattern in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True)
class JobObjects:
    """Python objects that a job is given, where its settings have only names for them."""

    tasks: Mapping[str, Callable[[], Sequence[Task]]] = field(default_factory=dict)
    """Opens the tasks, by the name in `data` and `evaluation.data`."""
    make_sources: Callable[[], Sequence[Source]] = tuple
    """Makes toolsets that are offered beside those of the settings."""
    rewards: GivenRewards = field(default_factory=GivenRewards)
    make_stepper: Callable[[], Stepper] | None = None
    """Makes the stepper, within the run's event loop."""


NO_OBJECTS = JobObjects()


@dataclass(frozen=True)
class TrainTasks:
    """The tasks of a run, for training and for evaluation."""

    train: Mapping[str | None, Sequence[Task]]
    """By the name that a stage of the curriculum gives them."""
    held_out: Sequence[Task]
    """None for traces, which are no tasks."""
    is_held_out: bool
    """False if there are only the training tasks to evaluate on."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the operator should know about the evaluation."""
        return (
            ()
            if self.is_held_out or not self.held_out
            else ("no tasks are held out: success is measured on the training tasks",)
        )


def load_tasks(settings: TrainSettings, objects: JobObjects = NO_OBJECTS) -> TrainTasks:
    """Loads the tasks of all stages, and those for evaluation."""
    names = {stage.data for stage in settings.curriculum.stages}
    train = {name: _load_source(name or settings.data, settings, objects) for name in names}
    evaluation = settings.evaluation
    held_out: Sequence[Task]
    if evaluation.data is not None and evaluation.data in objects.tasks:
        return TrainTasks(train, objects.tasks[evaluation.data](), is_held_out=True)
    if evaluation.data is not None:
        held_out = load_data(settings, evaluation.data, "test")
        return TrainTasks(train, held_out, is_held_out=True)
    if settings.data in example_names():
        return TrainTasks(train, load_example(settings.data).make_tasks(settings, held_out=True), is_held_out=True)
    return TrainTasks(train, () if settings.sft is not None else next(iter(train.values())), is_held_out=False)


def _load_source(name: str, settings: TrainSettings, objects: JobObjects) -> Sequence[Task]:
    if name in objects.tasks:
        return objects.tasks[name]()
    if name in example_names():
        return load_example(name).make_tasks(settings, held_out=False)
    require_example(name, "data")
    if settings.sft is not None:
        from trainer.data.traces import TraceOptions, load_traces

        return load_traces(settings, name, TraceOptions(**settings.sft.model_dump()))
    return load_data(settings, name)


def require_tasks(settings: TrainSettings) -> None:
    """Raises ConfigError if there are only traces to evaluate on."""
    if settings.sft is not None and settings.evaluation.data is None:
        raise ConfigError("the run learns traces, which are no tasks to evaluate on", remedy="name tasks with --data")


def find_mistakes(settings: TrainSettings, tasks: TrainTasks, gateway: AnyGateway) -> list[ConfigError]:
    """Tool servers that are down, and tools and interactions in rows and curriculum that the gateway does not offer."""
    mistakes = [*find_down_servers(gateway), *find_unknown_tools(gateway)]
    for source in [*tasks.train.values(), tasks.held_out]:
        checked = source[:CHECKED_TASKS] if settings.data in example_names() else source
        mistakes += check_task_names(checked, gateway.specs)
        if any(names.state for names in find_names(checked)):
            from trainer.data.state_names import check_state_names  # few jobs have states

            mistakes += check_state_names(checked, gateway)
        mistakes += (mistake for part in settings.parts for mistake in part.find_mistakes(checked))
    if mistakes and settings.data in example_names():
        remedy = "pass `--tools tool_configs/`, or name your own tasks with --data"
        mistakes.append(ConfigError("the demo's tasks need the tools that come with mtrl", remedy=remedy))
    mistakes += settings.curriculum.check_names(gateway.specs)
    return list({str(mistake): mistake for mistake in mistakes}.values())  # The same rows may be held out.


async def prepare_model(settings: TrainSettings, on_warm_start: WarmStartProgress = lambda *_: None) -> Path:
    """The model's folder. A demo's model is built if it does not exist yet."""
    from trainer.model import configure_torch

    configure_torch()
    if settings.model not in example_names():
        require_example(settings.model, "model")
        return _check_complete(Path(settings.model))
    is_cancelled = Event()

    def report(step: int, steps: int, loss: float) -> None:
        if is_cancelled.is_set():  # Ends the thread, and removes the unfinished model.
            raise SystemExit
        on_warm_start(step, steps, loss)

    prepare = partial(load_example(settings.model).prepare_model, settings, report)
    with WorkerThread("demo model") as thread:  # Ctrl-C waits for it, so that no unfinished folder is left.
        return await thread.run(prepare, on_cancel=is_cancelled.set)


def _check_complete(folder: Path) -> Path:
    from trainer.model import require_plain_weights, require_whole_model

    require_whole_model(folder)
    require_plain_weights(folder)
    return folder


def _count_parameters(model: Path) -> int:
    """How many parameters the model has. Raises ConfigError for weight files that are missing, cut off or another's."""
    from trainer.policy.export_model import require_matching_weights
    from trainer.policy.memory_parts import load_meta_model
    from trainer.policy.memory_plan import weight_bytes

    weights, skeleton = read_weight_files(model), load_meta_model(model)
    require_matching_weights(model, weights, skeleton)
    return weights.parameters or weight_bytes(skeleton) // 4


@dataclass
class Job:
    """What a run needs, opened and checked."""

    settings: TrainSettings
    tasks: TrainTasks
    task_stream: TaskStream
    gateway: AnyGateway
    stepper: Stepper
    template: Template
    scorer: Scorer
    token_weight_fn: TokenWeightFn
    model: Path
    parameters: int = 0
    """How many the model has."""
    given_update: UpdateSettings = field(default_factory=UpdateSettings)
    """The settings of the update as they were given; those of the job have the learning rates that were chosen."""
    player: Player | None = None
    """What plays the rollouts instead of the rollout loop, if something does."""
    engine_player: Player | None = None
    """What plays them while an engine is up, such as rollout workers; it goes before `player`."""
    shown_drift_causes: set[Cause] = field(default_factory=set)
    """Causes of template drift of which an example was printed, by any runner."""

    def held_out(self, count: int) -> list[Task]:
        """Evaluation tasks, as the last stage of the curriculum changes them."""
        last_stage = self.settings.curriculum.stages[-1]
        return [last_stage.apply(task) for task in islice(self.tasks.held_out, count)]

    def make_runner(self, engine: Engine, observer: RolloutObserver) -> RolloutRunner:
        runner = RolloutRunner(
            engine,
            self.template,
            self.gateway,
            self.settings.limits,
            make_sampling(self.settings),
            self.stepper,
            observer,
            self.settings.seed,
            self.shown_drift_causes,
        )
        player = self.engine_player or self.player
        return runner if player is None else player.wrap(runner)

    @asynccontextmanager
    async def open_player(self, engine: Engine, folder: Path, log: Log, *, is_last: bool = True) -> AsyncIterator[None]:
        """Has plug-ins such as rollout workers play the rollouts of an engine; they log to `folder`."""
        async with AsyncExitStack() as stack:
            for part in self.settings.parts:
                opening = part.open_player(self, engine, folder, log, is_last=is_last)
                self.engine_player = await stack.enter_async_context(opening) or self.engine_player
            try:
                yield
            finally:
                self.engine_player = None

    def make_greedy(self, runner: RolloutRunner) -> RolloutRunner:
        return replace(runner, sampling=replace(runner.sampling, temperature=0.0))

    def make_engine(
        self, folder: Path, policy: Policy | None, log: Log, serving: ServingSettings | None = None
    ) -> Engine:
        """Makes the engine. Servers log to `folder`; `serving` overrides the settings with the planned placement."""
        serving = leave_gpus(serving or self.settings.serving, count_local_ranks(self.settings.distributed))
        settings = self.settings.model_copy(update={"serving": serving})
        return make_engine(settings, self.model, self.template, folder, policy=policy, log=log)


@asynccontextmanager
async def open_job(
    settings: TrainSettings,
    *,
    tape: Path | None = None,
    gateway: AnyGateway | None = None,
    on_warm_start: WarmStartProgress = lambda *_: None,
    objects: JobObjects | None = None,
) -> AsyncIterator[Job]:
    """Opens a job. `tape` is where calls are recorded; a given `gateway`, such as a tape's, replaces the tools."""
    if objects is None and settings.objects:
        problem = f"the run uses Python objects ({', '.join(settings.objects)}), which its settings cannot hold"
        raise ConfigError(problem, remedy="continue or evaluate it in the script that made it: docs/migration-trl.md")
    objects = objects or NO_OBJECTS
    for part in settings.parts:
        await to_thread.run_sync(part.require_ready)  # It may ask other machines.
    recorders = [start for part in settings.parts if (start := part.record(is_on=tape is not None))]
    tasks = load_tasks(settings, objects)
    stepper = make_stepper(settings, objects.make_stepper() if objects.make_stepper else None)
    player = next((player for part in settings.parts if (player := part.make_player(settings))), None)
    token_weight_fn = load_token_weight_fn(settings.algorithm.credit.trained_turns)
    with enable_stand_ins(folders=[Path.cwd()]):
        scorer = Scorer(settings.reward, given=objects.rewards)
    async with AsyncExitStack() as stack:
        used_gateway = gateway or make_gateway(settings, objects.make_sources(), tells_start=True)
        if tape is not None:
            from gateway.tape import record_gateway

            used_gateway = record_gateway(used_gateway, tape)  # type: ignore[arg-type]
        await stack.enter_async_context(used_gateway)
        if tape is not None:
            for start in recorders:
                start(tape)
        if gateway is None and (mistakes := find_mistakes(settings, tasks, used_gateway)):
            raise ConfigErrors(mistakes)
        model = await prepare_model(settings, on_warm_start)
        trust_model(settings, model)
        parameters = _count_parameters(model)
        update = choose_rates(settings.update, parameters, settings.steps)
        template = load_template(model, settings.template, used_gateway.specs)
        sources = [*tasks.train.values(), tasks.held_out]
        probe_for_job(template, settings, used_gateway.specs, sources).raise_if_failed()
        scorer.decoder = template
        if player is not None:
            await stack.enter_async_context(player)
        yield Job(
            settings.model_copy(update={"update": update}),
            tasks,
            TaskStream(settings.curriculum, tasks.train, seed=settings.seed),
            used_gateway,
            stepper,
            template,
            scorer,
            bind_decoder(token_weight_fn, template.decode_turn),
            model,
            parameters,
            settings.update,
            player,
        )
