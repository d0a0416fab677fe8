"""Executes a chain again in fresh states: as it is, and without each of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtrl_plugins.task_maker.chain import Chain, Dropped, with_links, without_step
from mtrl_plugins.task_maker.server_sessions import CallResult, Server
from mtrl_plugins.task_maker.values import look_up


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
