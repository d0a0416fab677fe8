"""A row may name only what the gateway offers; a name that nobody knows is found before the first rollout begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gateway.config.mistakes import nearest
from gateway.errors import ConfigError
from gateway.types import Task as Asked
from gateway.types import ToolSpec
from trainer.task import Task

INTERACTION = "feedback_"
"""Interactions are offered to the loop under this prefix."""
DEFAULT = "gsm8k"
Named = tuple[str, str]
"""A field, and the name that stands there."""


def check(tasks: Iterable[Task], specs: Sequence[ToolSpec]) -> list[ConfigError]:
    """One mistake for each unknown name: where it first stands, and in how many rows."""
    offered = Offered(specs)
    first: dict[Named, str] = {}
    rows: dict[Named, int] = {}
    for task in tasks:
        for named in offered.unknown(task.asked):
            first.setdefault(named, task.place)
            rows[named] = rows.get(named, 0) + 1
    return [offered.mistake(named, place, rows[named]) for named, place in first.items()]


class Offered:
    """The names that a gateway knows."""

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        self.tools = tuple(spec.name for spec in specs if spec.audience == "policy")
        loop = (spec.name for spec in specs if spec.audience == "loop")
        self.interactions = tuple(name.removeprefix(INTERACTION) for name in loop if name.startswith(INTERACTION))

    def unknown(self, asked: Asked) -> Iterator[Named]:
        for name in asked.tools or ():
            if name not in self.tools:
                yield "tools", name
        for name in asked.create:
            if name not in self.tools:
                yield "tools_kwargs", name
        if asked.feedback is not None and asked.feedback not in self.interactions:
            yield "interaction_kwargs.name", asked.feedback
        elif asked.feedback is None and asked.feedback_args and not self.default:
            yield "interaction_kwargs.name", ""

    @property
    def default(self) -> bool:
        """Whether somebody answers who asks for an interaction without a name."""
        return DEFAULT in self.interactions or len(self.interactions) == 1

    def mistake(self, named: Named, place: str, rows: int) -> ConfigError:
        field, name = named
        kind, known = ("tool", self.tools) if field.startswith("tools") else ("interaction", self.interactions)
        problem = f"the gateway offers no {kind} {name!r:.80}" if name else f"is missing, and there is no {DEFAULT!r}"
        others = rows - 1
        more = f" ({others} more row{'s name' if others > 1 else ' names'} it)" if others else ""
        near = nearest(name, known)
        remedy = f"did you mean {near!r}?" if near else f"known are: {', '.join(sorted(known)) or 'none'}"
        return ConfigError(problem + more, file=place, field=field, remedy=remedy)
