"""The curriculum: stages that change tasks, tools or interaction during a run, and the stream of tasks that steps draw.

Which stage is active depends only on the steps and success rates so far, so that a run can be resumed and replayed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from gateway.config.base import FrozenModel
from gateway.errors import ConfigError
from gateway.types import EMPTY, ToolSpec
from trainer.data.tasks import OfferedNames, TaskSampler, suggest_name
from trainer.rollout.task import Task

RECENT_STEPS = 20
"""The number of a stage's latest steps over which its success is averaged."""


class Until(FrozenModel):
    """When a stage ends: at a step of the run, or at a success rate; the last stage has no end."""

    step: PositiveInt | None = None
    """The stage covers the steps before this one; the run's first step is 0."""
    success: Annotated[float, Field(gt=0, le=1)] | None = None
    """The mean success rate of the latest 20 steps that ends the stage."""

    @model_validator(mode="after")
    def _check_one_kind(self) -> Self:
        if (self.step is None) == (self.success is None):
            raise ValueError("set either `step` or `success`: when the stage ends")
        return self


class Stage(FrozenModel):
    """The stages in order; only the last one has no `until`. What a stage leaves out is as in the run's settings
    and rows."""

    until: Until | None = None
    data: str | None = None
    """The tasks of this stage, named as in `--data`."""
    tools: tuple[str, ...] | None = None
    """The tools that may be used; a row that names its own tools keeps those that are listed here."""
    interaction: str | Literal[False] | None = None
    """The interaction that answers; false means none. It gets the row's arguments, or else the row's ground truth."""

    def apply(self, task: Task) -> Task:
        """The task as it is in this stage."""
        session_task = task.session_task
        if self.tools is not None:
            in_row = session_task.tools
            tools = self.tools if in_row is None else tuple(name for name in in_row if name in self.tools)
            create = {name: kwargs for name, kwargs in session_task.create.items() if name in tools}
            session_task = replace(session_task, tools=tools, create=create)
        if self.interaction is False:
            session_task = replace(session_task, feedback=None, feedback_args=EMPTY)
        elif self.interaction is not None:
            truth = {} if task.truth is None else {"ground_truth": task.truth}
            args = session_task.feedback_args or truth
            session_task = replace(session_task, feedback=self.interaction, feedback_args=args)
        return replace(task, session_task=session_task)


@dataclass(frozen=True, slots=True)
class CurriculumProgress:
    """The stage that a run is in."""

    stage: int = 0
    recent: tuple[float, ...] = ()
    """The success rates of this stage's latest steps."""


class Curriculum(FrozenModel):
    """The stages of a run, and the order of rows."""

    stages: Annotated[tuple[Stage, ...], Field(min_length=1)] = (Stage(),)
    shuffle: bool = True
    """Shuffles rows again in each epoch; otherwise they come in the order of the data."""
    prefer_learnable: bool = False
    """Passes over most tasks that the policy nearly always or never solves, by its latest tries of them."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for index, stage in enumerate(self.stages):
            if (stage.until is None) != (index == len(self.stages) - 1):
                raise ValueError(f"stage {index + 1} of {len(self.stages)}: all stages but the last need an `until`")
        steps = [stage.until.step for stage in self.stages if stage.until and stage.until.step is not None]
        if steps != sorted(set(steps)):
            raise ValueError(f"stages end at steps {steps}, which must increase")
        return self

    def advance(self, progress: CurriculumProgress, step: int, success: float | None) -> CurriculumProgress:
        """The progress after a step; `success` is from 0 to 1, or None if nothing was scored."""
        until = self.stages[progress.stage].until
        if until is None:
            return progress
        recent = progress.recent if success is None else (*progress.recent, success)[-RECENT_STEPS:]
        if until.success is not None and len(recent) == RECENT_STEPS and sum(recent) >= until.success * RECENT_STEPS:
            progress, recent = CurriculumProgress(progress.stage + 1), ()
        while (until := self.stages[progress.stage].until) and until.step is not None and step + 1 >= until.step:
            progress, recent = CurriculumProgress(progress.stage + 1), ()
        return CurriculumProgress(progress.stage, recent)

    def check_names(self, specs: Sequence[ToolSpec]) -> list[ConfigError]:
        """Errors for the names in stages that the gateway does not offer."""
        offered, errors = OfferedNames(specs), []
        for index, stage in enumerate(self.stages):
            names = [("tools", name, offered.tools) for name in stage.tools or ()]
            names += [("interaction", stage.interaction, offered.interactions)] if stage.interaction else []
            for field, name, known in names:
                if name not in known:
                    setting, remedy = f"curriculum.stages[{index}].{field}", suggest_name(name, known)
                    errors.append(ConfigError(f"the gateway offers no {name!r}", field=setting, remedy=remedy))
        return errors


LEARNABLE = 0.5
"""Tasks that teach at least so much of what an untried one does, count as learnable."""
LEAST_DRAWN = 0.1
"""The chance at which a task is drawn from which nothing seems to be learned: the policy changes."""


class TaskOutcomes:
    """What the tries of each task lead to expect: a Beta posterior, in which each group counts half of the next one."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[float, float]] = {}
        """The successes and failures of each task that was tried, by its key."""

    def record(self, task: str, succeeded: int, tried: int) -> None:
        """Counts a group's tries."""
        before = self.counts.get(task, (0.0, 0.0))
        self.counts[task] = before[0] / 2 + succeeded, before[1] / 2 + tried - succeeded

    def learnability(self, task: str) -> float:
        """The expected variance of the task's success, as a share of an untried one's; at most 1."""
        successes, failures = (1 + count for count in self.counts.get(task, (0.0, 0.0)))
        total = successes + failures
        return min(1.0, 6 * successes * failures / (total * (total + 1)))

    @property
    def metrics(self) -> dict[str, float]:
        """How many tried tasks are of each kind."""
        kinds = Counter(map(self._classify, self.counts))
        return {f"tasks/{kind}": float(kinds[kind]) for kind in ("learnable", "solved", "hopeless")}

    def _classify(self, task: str) -> str:
        if self.learnability(task) >= LEARNABLE:
            return "learnable"
        successes, failures = self.counts[task]
        return "solved" if successes > failures else "hopeless"


class TaskDraw(NamedTuple):
    """A drawn task, with its data and its number in the order of that data."""

    source: str | None
    number: int
    task: Task


class TaskStream(Iterator[Task]):
    """Draws tasks according to the curriculum. Stages with the same data continue where the previous one stopped.

    A draw stays open until it is marked as done; a resumed run draws open tasks again.
    """

    def __init__(self, curriculum: Curriculum, data: Mapping[str | None, Sequence[Task]], *, seed: int = 0) -> None:
        """`data` has the tasks that stages name, and under None those of stages that name none."""
        self.curriculum, self.progress = curriculum, CurriculumProgress()
        names = dict.fromkeys(stage.data for stage in curriculum.stages)
        self.outcomes, self._seed = TaskOutcomes(), seed
        shuffle_seed = seed if curriculum.shuffle else None
        self._samplers = {name: TaskSampler(data[name], seed=shuffle_seed) for name in names}
        self._open: dict[tuple[str | None, int], None] = {}
        self._repeated: deque[tuple[str | None, int]] = deque()

    @property
    def stage(self) -> Stage:
        return self.curriculum.stages[self.progress.stage]

    def __next__(self) -> Task:
        draw = self.draw()
        self.mark_done([draw])
        return draw.task

    def draw(self) -> TaskDraw:
        """Draws a task; first those that were open when the run was stopped, if the stage still has their data."""
        source = self.stage.data
        repeated = next((key for key in self._repeated if key[0] == source), None)
        if repeated is not None:
            self._repeated.remove(repeated)
            number, task = repeated[1], self._samplers[source].task_at(repeated[1])
        else:
            number, task = self._draw_next(source)
        self._open[source, number] = None
        return TaskDraw(source, number, self.stage.apply(task))

    def _draw_next(self, source: str | None) -> tuple[int, Task]:
        """The next task in order, of which some may be passed over; which ones depends on the seed and on outcomes."""
        sampler = self._samplers[source]
        while True:
            number, task = sampler.drawn, next(sampler)
            draw = Random(f"{self._seed}/{source}/{number}")  # noqa: S311 - not security-relevant
            if not self.curriculum.prefer_learnable or draw.random() < max(
                LEAST_DRAWN, self.outcomes.learnability(task.key)
            ):
                return number, task

    def mark_done(self, draws: Iterable[TaskDraw]) -> None:
        """Closes draws, which are then not repeated after a resume."""
        for draw in draws:
            self._open.pop((draw.source, draw.number), None)

    def finish_step(self, step: int, success: float | None) -> None:
        """Records a finished step, after which the next stage may begin."""
        self.progress = self.curriculum.advance(self.progress, step, success)

    @property
    def position(self) -> dict[str, Any]:
        """The stream's state as a JSON value, for `restore`."""
        drawn = [[name, sampler.drawn] for name, sampler in self._samplers.items()]
        open_draws = [*map(list, self._open), *map(list, self._repeated)]
        return {**asdict(self.progress), "drawn": drawn, "open": open_draws, "outcomes": self.outcomes.counts}

    def restore(self, position: Mapping[str, Any]) -> None:
        self.progress = CurriculumProgress(position["stage"], tuple(position["recent"]))
        self.outcomes.counts = {task: (yes, no) for task, (yes, no) in position.get("outcomes", {}).items()}
        for name, drawn in position["drawn"]:
            self._samplers[name].drawn = drawn
        self._repeated = deque((name, number) for name, number in position.get("open", ()))
