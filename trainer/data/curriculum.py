"""A curriculum is a list of stages; which one holds is a function of what was told, and can be told again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, PositiveInt, model_validator

from gateway.config.mistakes import nearest
from gateway.config.models import Frozen
from gateway.errors import ConfigError
from gateway.types import EMPTY, ToolSpec
from trainer.data.check import Offered
from trainer.data.sampler import Sampler
from trainer.task import Task


class Until(Frozen):
    """When a stage is over: at a step of the run, or with success."""

    step: PositiveInt | None = None
    """The stage holds for the steps before this one; the run's first step is 0."""
    success: Annotated[float, Field(gt=0, le=1)] | None = None
    """The mean success that ends it,"""
    over: PositiveInt = 20
    """over so many of its steps, the latest ones."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.step is None) == (self.success is None):
            raise ValueError("a stage is over at a `step` or with `success`")
        return self


class Stage(Frozen):
    """What holds for a while. What it leaves out is as the run and its rows say."""

    until: Until | None = None
    """When the next stage begins; the last stage has no end."""
    data: str | None = None
    """The tasks that are drawn, as `--data` names them."""
    tools: tuple[str, ...] | None = None
    """The tools that may be used; a row that chooses its own keeps those of them that are among these."""
    interaction: str | Literal[False] | None = None
    """The interaction that answers; false is none. It is given the row's arguments, or else the row's truth."""

    def of(self, task: Task) -> Task:
        """The task as this stage asks for it."""
        asked = task.asked
        if self.tools is not None:
            own = self.tools if asked.tools is None else tuple(name for name in asked.tools if name in self.tools)
            create = {name: kwargs for name, kwargs in asked.create.items() if name in own}
            asked = replace(asked, tools=own, create=create)
        if self.interaction is False:
            asked = replace(asked, feedback=None, feedback_args=EMPTY)
        elif self.interaction is not None:
            args = asked.feedback_args or ({} if task.truth is None else {"ground_truth": task.truth})
            asked = replace(asked, feedback=self.interaction, feedback_args=args)
        return replace(task, asked=asked)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run is in its curriculum."""

    stage: int = 0
    recent: tuple[float, ...] = ()
    """The success of this stage's latest steps."""


class Curriculum(Frozen):
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)] = (Stage(),)
    """In order; only the last one has no `until`."""
    shuffled: bool = True
    """Rows come in another order in each epoch; without it, as they stand."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for place, stage in enumerate(self.stages):
            if (stage.until is None) != (place == len(self.stages) - 1):
                raise ValueError(f"stage {place + 1} of {len(self.stages)}: all but the last stage have an `until`")
        steps = [stage.until.step for stage in self.stages if stage.until and stage.until.step is not None]
        if steps != sorted(set(steps)):
            raise ValueError(f"stages are over at steps {steps}, which do not rise")
        return self

    def after(self, standing: Standing, step: int, success: float | None) -> Standing:
        """Where the run stands when `step` is done; `success` from 0 to 1, None where nothing of it was scored."""
        until = self.stages[standing.stage].until
        if until is None:
            return standing
        recent = standing.recent if success is None else (*standing.recent, success)[-until.over :]
        if until.success is not None and len(recent) == until.over and sum(recent) >= until.success * until.over:
            standing, recent = Standing(standing.stage + 1), ()
        while (ends := self.stages[standing.stage].until) and ends.step is not None and step + 1 >= ends.step:
            standing, recent = Standing(standing.stage + 1), ()
        return Standing(standing.stage, recent)

    def check(self, specs: Sequence[ToolSpec]) -> list[ConfigError]:
        """The names in stages that a gateway does not offer."""
        offered, mistakes = Offered(specs), []
        for place, stage in enumerate(self.stages):
            named = [("tools", name, offered.tools) for name in stage.tools or ()]
            named += [("interaction", stage.interaction, offered.interactions)] if stage.interaction else []
            for field, name, known in named:
                if name not in known:
                    near = nearest(name, known)
                    remedy = f"did you mean {near!r}?" if near else f"known are: {', '.join(sorted(known)) or 'none'}"
                    where = f"curriculum.stages[{place}].{field}"
                    mistakes.append(ConfigError(f"the gateway offers no {name!r}", field=where, remedy=remedy))
        return mistakes


class Draw(NamedTuple):
    """A task, and its place in the order of its source."""

    source: str | None
    number: int
    task: Task


class Course(Iterator[Task]):
    """Draws tasks as a curriculum goes. Stages on the same data go on where the stage before them stopped.

    A draw is open until somebody settles it: whoever goes on from a position that it was open at is given it again.
    """

    def __init__(self, curriculum: Curriculum, data: Mapping[str | None, Sequence[Task]], *, seed: int = 0) -> None:
        """`data` has the tasks that each stage names, and under None those of stages that name none."""
        self.curriculum, self.standing = curriculum, Standing()
        names = dict.fromkeys(stage.data for stage in curriculum.stages)
        drawn_by = seed if curriculum.shuffled else None
        self._samplers = {name: Sampler(data[name], seed=drawn_by) for name in names}
        self._open: dict[tuple[str | None, int], None] = {}
        self._again: deque[tuple[str | None, int]] = deque()

    @property
    def stage(self) -> Stage:
        return self.curriculum.stages[self.standing.stage]

    def __next__(self) -> Task:
        drawn = self.draw()
        self.settle([drawn])
        return drawn.task

    def draw(self) -> Draw:
        """What was open comes first, unless its stage's data are no longer drawn from."""
        source = self.stage.data
        again = next((place for place in self._again if place[0] == source), None)
        if again is not None:
            self._again.remove(again)
            number, task = again[1], self._samplers[source].at(again[1])
        else:
            number, task = self._samplers[source].drawn, next(self._samplers[source])
        self._open[source, number] = None
        return Draw(source, number, self.stage.of(task))

    def settle(self, draws: Iterable[Draw]) -> None:
        """Nobody needs them again."""
        for draw in draws:
            self._open.pop((draw.source, draw.number), None)

    def tell(self, step: int, success: float | None) -> None:
        """A step is done; the next task drawn may be another stage's."""
        self.standing = self.curriculum.after(self.standing, step, success)

    @property
    def position(self) -> dict[str, Any]:
        """A JSON value, with which `resume` goes on exactly here."""
        drawn = [[name, sampler.drawn] for name, sampler in self._samplers.items()]
        return {**asdict(self.standing), "drawn": drawn, "open": [*map(list, self._open), *map(list, self._again)]}

    def resume(self, position: Mapping[str, Any]) -> None:
        self.standing = Standing(position["stage"], tuple(position["recent"]))
        for name, drawn in position["drawn"]:
            self._samplers[name].drawn = drawn
        self._again = deque((name, number) for name, number in position.get("open", ()))
