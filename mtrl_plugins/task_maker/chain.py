"""A chain of calls that was executed: its steps, what they changed, and the value in its last result to ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtrl_plugins.task_maker.values import Path, Scalar, Value


class Dropped(Exception):
    """A chain that makes no task, and why."""


@dataclass(frozen=True, slots=True)
class Step:
    """A call with the result that it had."""

    tool: str
    arguments: Mapping[str, Any]
    links: Mapping[Path, Value]
    """Where arguments have values of earlier results: a value names its step and its place there."""
    literals: tuple[Scalar, ...]
    result: Any = None
    writes: bool = False
    """Whether it changed the state."""
    text: str = ""
    """The result as the policy reads it."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of calls from a prepared state."""

    steps: tuple[Step, ...]
    split: str
    state: str = ""
    answer: Value | None = None
    """The value to ask for, with its place in the last result."""
    end_state: Mapping[str, str] = field(default_factory=dict)
    """The hashes to end with; empty if no step writes."""

    @property
    def level(self) -> int:
        return len(self.steps)

    @property
    def literals(self) -> tuple[Scalar, ...]:
        """The values that the question tells."""
        linked = {value.value for step in self.steps for value in step.links.values()}
        return tuple(value for step in self.steps for value in step.literals if value not in linked)

    @property
    def values(self) -> frozenset[str]:
        """All values of the task that may not be in a task of the other split."""
        found = {str(value) for step in self.steps for value in step.literals}
        return frozenset(found | ({self.answer.text} if self.answer else set()))

    @property
    def key(self) -> str:
        """Equal for chains that make the same task."""
        calls = [(step.tool, dict(step.arguments)) for step in self.steps]
        return repr((calls, self.state, self.answer and self.answer.path))


def prune(steps: Sequence[Step], *, keeps_last: bool) -> tuple[Step, ...]:
    """The steps without those that change nothing and whose results nobody uses; links are renumbered."""
    needed: set[int] = set()
    for at in reversed(range(len(steps))):
        if steps[at].writes or (keeps_last and at == len(steps) - 1) or at in needed:
            needed.add(at)
            needed.update(value.step for value in steps[at].links.values() if value.step is not None)
    numbers = {old: new for new, old in enumerate(sorted(needed))}
    return tuple(replace(steps[at], links=dict(_renumbered(steps[at], numbers))) for at in sorted(needed))


def without_step(steps: Sequence[Step], at: int) -> tuple[Step, ...]:
    """The steps without one that no link needs; links are renumbered."""
    left = [number for number in range(len(steps)) if number != at]
    numbers = {old: new for new, old in enumerate(left)}
    return tuple(replace(steps[number], links=dict(_renumbered(steps[number], numbers))) for number in left)


def _renumbered(step: Step, numbers: Mapping[int, int]) -> Iterator[tuple[Path, Value]]:
    for path, value in step.links.items():
        if value.step is not None:
            yield path, replace(value, step=numbers[value.step])


def with_links(step: Step, results: Sequence[Any], look_up: Any) -> dict[str, Any] | None:
    """The arguments of a step with the values that earlier results have now; None if one is missing."""
    arguments: dict[str, Any] = _copy(step.arguments)
    for path, value in step.links.items():
        current = look_up(results[value.step or 0], value.path)
        if current is None:
            return None
        place: Any = arguments
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = current
    return arguments


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
