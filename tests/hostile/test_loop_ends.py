"""Calls end as what happened, and when their deadline says, whatever a server does with its pipes."""

from __future__ import annotations

import json

import anyio
import anyio.lowlevel
import pytest

from gateway.config.models import Limits
from gateway.limits import LimitedToolset
from gateway.tool_table import Source
from gateway.types import Outcome, ToolCall, ToolResult
from tests.hostile.injector import PATIENCE_S, Entered, answering_toolset, call_answering, gateway_beside, healthy_calls
from tests.hostile.test_loop_schemas import SLOW, source_of

DEADLINE_S = 1.0


LATEST_END_S = 1.1 * DEADLINE_S + 0.1
"""When a call must have ended, by a clock that stands while the loop does: the machine of a test may stop any process
for a while, and a bare timer of the same loop is as late as a call then."""


async def test_server_that_exits_while_a_daemon_holds_its_pipes_is_unknown_not_a_timeout() -> None:
    result, meanwhile = await call_answering("stdio", "daemon", timeout_s=PATIENCE_S)
    assert result.outcome is Outcome.UNKNOWN
    assert "exited with 3" in (result.reason or "")
    meanwhile.assert_undisturbed()


@pytest.mark.parametrize("padding", [0, 100_000])
async def test_server_that_stops_reading_delays_no_deadline(padding: int) -> None:
    results: list[tuple[ToolResult, float]] = []
    async with answering_toolset("stdio") as toolset:
        limited = LimitedToolset(Entered(toolset), Limits(timeout_s=DEADLINE_S, at_once=200))
        async with (
            gateway_beside(Source("hostile", limited)) as gateway,
            gateway.open() as session,
            healthy_calls(gateway) as meanwhile,
        ):
            arguments = json.dumps({"padding": "x" * padding})

            async def call() -> None:
                started_s = meanwhile.clock.now_s
                result = await session.call(ToolCall("1", "stuck", arguments))
                results.append((result, meanwhile.clock.now_s - started_s))

            async with anyio.create_task_group() as tasks:
                for _ in range(150):
                    tasks.start_soon(call)
                    await anyio.lowlevel.checkpoint()  # Together, their own work would hold the loop of a slow machine.
    assert {result.outcome for result, _ in results} == {Outcome.TIMEOUT}
    late_s = max(elapsed_s for _, elapsed_s in results) - DEADLINE_S
    assert late_s < (LATEST_END_S - DEADLINE_S) * meanwhile.slowness  # The loop ends all of them at one moment.
    meanwhile.assert_undisturbed()


async def test_slow_check_of_arguments_counts_towards_the_deadline_of_the_call() -> None:
    build_schema, build_arguments = SLOW["a recursive schema and a deep value"]
    source = source_of(build_schema())
    limited = Source("trap", LimitedToolset(source.toolset, Limits(timeout_s=DEADLINE_S)))
    async with gateway_beside(limited) as gateway, gateway.open() as session, healthy_calls(gateway) as meanwhile:
        arguments, started_s = json.dumps(build_arguments()), meanwhile.clock.now_s
        result = await session.call(ToolCall("1", "trap", arguments))
        elapsed_s = meanwhile.clock.now_s - started_s
    assert result.outcome is Outcome.TIMEOUT and "Write simpler ones" in result.text
    assert elapsed_s < LATEST_END_S


async def test_broken_answers_are_held_against_the_calls_that_nothing_else_answers() -> None:
    async with answering_toolset("stdio") as toolset:
        outcomes: dict[str, list[Outcome]] = {"no_id_torn": [], "fine": []}
        async with (
            gateway_beside(Source("hostile", Entered(toolset))) as gateway,
            gateway.open() as session,
            anyio.create_task_group() as tasks,
        ):

            async def call(tool: str) -> None:
                outcomes[tool].append((await session.call(ToolCall("1", tool, "{}"))).outcome)

            for tool in ("no_id_torn", "fine", "fine", "no_id_torn", "fine"):
                tasks.start_soon(call, tool)
    assert outcomes == {"no_id_torn": [Outcome.ERROR] * 2, "fine": [Outcome.OK] * 3}
