"""A chain of calls that was executed: its steps, what they changed, and the value in its last result to ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtrl_plugins.task_maker.server_sessions import CallResult, Dropped, Server
from mtrl_plugins.task_maker.values import Path, Scalar, Value, look_up


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


async def execute(server: Server, chain: Chain) -> tuple[list[CallResult], Mapping[str, str]]:
    """Executes a chain in a fresh state: its results and the state at the end; raises Dropped if a call fails."""
    results: list[CallResult] = []
    async with server.open(chain.state) as session:
        for step in chain.steps:
            arguments = with_links(step, [result.value for result in results], look_up)
            if arguments is None:
                raise Dropped("a value that a step needs was not in the results again")
            result = await session.call(step.tool, arguments)
            if not result.ok:
                raise Dropped("a call failed when it was executed again")
            results.append(result)
        return results, await session.state()


async def check_again(server: Server, chain: Chain) -> None:
    """Executes a chain a second time; raises Dropped if its results or its end state differ."""
    results, end = await execute(server, chain)
    if [step.result for step in chain.steps] != [result.value for result in results]:
        raise Dropped("its results differ when it is executed again")
    if chain.end_state and chain.end_state != end:
        raise Dropped("its end state differs when it is executed again")


async def find_shorter(server: Server, chain: Chain) -> Chain | None:
    """The chain without a writing step that it does not need; None if all are needed. Each is left out and executed."""
    linked = {value.step for step in chain.steps for value in step.links.values()}
    for at, step in enumerate(chain.steps):
        if len(chain.steps) == 1 or at in linked or not step.writes:
            continue
        shorter = replace(chain, steps=without_step(chain.steps, at))
        try:
            results, end = await execute(server, shorter)
        except Dropped:
            continue
        answer = chain.answer
        if end == chain.end_state and (answer is None or look_up(results[-1].value, answer.path) == answer.value):
            return _with_results(shorter, results)
    return None


def _with_results(chain: Chain, results: Sequence[CallResult]) -> Chain:
    """The chain with other results; raises Dropped if values that its steps take from them are others."""
    for step in chain.steps:
        for value in step.links.values():
            if look_up(results[value.step or 0].value, value.path) != value.value:
                raise Dropped("one of its calls can be left out")
    steps = (replace(step, result=got.value, text=got.text) for step, got in zip(chain.steps, results, strict=True))
    return replace(chain, steps=tuple(steps))
