"""Late answers from sandboxes: the policy's error where it hung them, and not where the call's time went elsewhere."""

from __future__ import annotations

import time

import pytest

from gateway.limits import CallScope, call_scope
from gateway.mcp_client.connection import Connection
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.rollout_folder import LISTING
from gateway.sandbox import outside_waits
from gateway.sandbox.outside_waits import OutsideWaits
from gateway.types import Outcome
from tests.mcp_client.test_rollout_folder import notes_toolset
from tests.sandbox.test_sandboxed_servers import limited_session

LIMIT_S = 2.0
HOSTS = {"isolation": "sandbox", "sandbox": {"network": ["pypi.org"]}}


@pytest.fixture
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of these quick tests count as slow ones."""
    monkeypatch.setattr(outside_waits, "SLOW_S", 0.1)


def leased(server: McpToolset) -> Connection:
    """The connection of the rollout."""
    return max(server.pool.connections, key=lambda connection: connection.transport.rollout is not LISTING)


async def test_policy_that_hangs_its_server_with_a_connection_open_is_to_blame(brief_waits: None) -> None:
    async with notes_toolset(**HOSTS) as server, limited_session(server, LIMIT_S) as (session, hanging):
        sandbox = leased(server).transport.sandbox
        assert sandbox is not None and sandbox.proxy is not None
        sandbox.proxy.connections = 1
        late = await session.call(hanging)
    assert late.outcome is Outcome.ERROR, late


async def test_server_is_not_blamed_where_the_calls_time_went_into_a_queue() -> None:
    scope = CallScope(time.monotonic() - 0.6 * LIMIT_S)
    scope.is_taken = True  # by the session, as in a gateway
    async with notes_toolset(isolation="sandbox") as server, limited_session(server, LIMIT_S) as (session, hanging):
        token = call_scope.set(scope)
        late = await session.call(hanging)
        call_scope.reset(token)
    assert late.outcome is Outcome.TIMEOUT and "most of the call's time was over" in str(late.reason), late


@pytest.mark.parametrize("waits_for", ["a host", "an answer"])
async def test_server_that_waits_for_something_outside_is_a_timeout_that_is_not_scored(
    waits_for: str, brief_waits: None
) -> None:
    async with notes_toolset(**HOSTS) as server, limited_session(server, LIMIT_S) as (session, hanging):
        connection = leased(server)
        sandbox = connection.transport.sandbox
        assert sandbox is not None and sandbox.waits is not None
        waits = sandbox.waits if waits_for == "a host" else connection.late_answers.questions
        with waits.wait():
            late = await session.call(hanging)
            assert connection.late_answers.excuses_hang
    assert late.outcome is Outcome.TIMEOUT and "outside of its sandbox" in str(late.reason), late


def test_many_quick_waits_are_no_excuse_and_slow_ones_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(outside_waits.time, "monotonic", lambda: now)
    waits = OutsideWaits()
    for _ in range(20):
        with waits.wait():
            now += 0.9
    assert waits.seconds_since(100.0) == 0 and not waits.is_slow
    with waits.wait(), waits.wait():
        now += 3
        assert waits.is_slow and waits.seconds_since(100.0) == pytest.approx(3)
    assert waits.seconds_since(100.0) == pytest.approx(3) and waits.seconds_since(now - 1) == pytest.approx(1)
    assert not waits.is_slow
