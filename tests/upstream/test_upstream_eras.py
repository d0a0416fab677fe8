"""Both eras of the protocol are spoken, and a tool that asks back reaches the one behind its call, or nobody."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.config.models import Server
from gateway.errors import Refused
from gateway.types import Context, Outcome
from gateway.upstream.fault import UpstreamError
from gateway.upstream.server import McpToolset
from tests.servers.start import end, free_port
from tests.upstream.reach import TRANSPORTS, call, eventually, reached, toolset

EVERYTHING = str(Path(__file__).parents[1] / "conformance" / "upstream.py")
newer = pytest.mark.parametrize("transport", ["stdio", "http"])
everywhere = pytest.mark.parametrize("transport", TRANSPORTS)


@asynccontextmanager
async def listening(port: int) -> AsyncIterator[str]:
    process = await anyio.open_process([sys.executable, EVERYTHING, "--port", str(port)], start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        await end(process)


@asynccontextmanager
async def everything(transport: str, **config: Any) -> AsyncIterator[McpToolset]:
    """A server of the SDK, which offers all there is in the newer era."""
    with anyio.fail_after(60):
        if transport == "stdio":
            async with toolset(Server(command=sys.executable, args=(EVERYTHING,), **config)) as server:
                yield server
            return
        async with listening(free_port()) as url, toolset(Server(url=url, **config)) as server:
            await eventually(lambda: server.status.state == "up", within_s=30)
            yield server


async def answering(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    if method == "elicitation/create":
        return {"action": "accept", "content": {"username": "ada", "email": "ada@example.org"}}
    return {"role": "assistant", "content": {"type": "text", "text": "forty-two"}, "model": "m"}


async def declining(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    raise Refused("nobody is at the desk")


@newer
async def test_the_newer_era_is_spoken_where_the_server_knows_it(transport: str) -> None:
    async with everything(transport) as server:
        assert server.protocol_version == "2026-07-28"
        assert server.instructions == "Offers one of everything."
        assert "tools" in server.capabilities
        assert (await call(server, "test_simple_text")).text == "Plain words."


@newer
async def test_a_question_of_the_newer_era_is_answered_by_the_one_behind_the_call(transport: str) -> None:
    async with everything(transport) as server:
        sampled = await call(server, "test_sampling", Context(ask=answering), prompt="What is it?")
        assert sampled.text == "LLM response: forty-two"
        asked = await call(server, "test_elicitation", Context(ask=answering), message="Who?")
        assert "action=accept" in asked.text and "ada" in asked.text


@newer
async def test_a_question_that_nobody_can_answer_ends_the_call_with_words(transport: str) -> None:
    async with everything(transport) as server:
        alone = await call(server, "test_elicitation", message="Who?")
        assert alone.outcome is Outcome.ERROR and "needs input that nobody here can give" in alone.text
        declined = await call(server, "test_elicitation", Context(ask=declining), message="Who?")
        assert declined.outcome is Outcome.ERROR and "nobody is at the desk" in declined.text


@newer
async def test_abilities_are_declared_only_for_calls_behind_which_somebody_stands(transport: str) -> None:
    async with everything(transport) as server:
        assert (await call(server, "test_missing_capability")).outcome is Outcome.ERROR
        assert (await call(server, "test_missing_capability", Context(ask=answering))).outcome is Outcome.OK


@newer
async def test_progress_and_log_messages_reach_the_call_that_caused_them(transport: str) -> None:
    progress: list[tuple[float, float | None, str | None]] = []
    logged: list[Any] = []

    async def progressed(done: float, total: float | None, message: str | None) -> None:
        progress.append((done, total, message))

    async def noticed(method: str, params: Mapping[str, Any]) -> None:
        logged.append(params["data"])

    async with everything(transport) as server:
        await call(server, "test_tool_with_progress", Context(progress=progressed))
        await eventually(lambda: len(progress) == 3)
        assert (100, 100, "100 of 100") in progress
        assert await server.request("logging/setLevel", {"level": "info"}) == {}
        await call(server, "test_tool_with_logging", Context(notice=noticed))
        await eventually(lambda: len(logged) == 3)


@newer
async def test_changes_are_listened_to_in_the_newer_era(transport: str) -> None:
    heard: list[str] = []
    async with everything(transport) as server:
        server.on_notice.append(lambda method, params: heard.append(method))

        async def change_until_heard() -> None:
            while "notifications/tools/list_changed" not in heard:
                await call(server, "test_trigger_tool_change")
                await anyio.sleep(0.05)

        with anyio.fail_after(15):
            await change_until_heard()


async def test_what_changed_while_a_subscription_was_lost_is_read_again() -> None:
    heard: list[str] = []
    port = free_port()
    with anyio.fail_after(60):
        first, second = listening(port), listening(port)
        url = await first.__aenter__()
        async with toolset(Server(url=url)) as server:
            await eventually(lambda: server.status.state == "up", within_s=30)
            server.on_notice.append(lambda method, params: heard.append(method))
            await first.__aexit__(None, None, None)
            async with second:
                await eventually(lambda: "notifications/tools/list_changed" in heard, within_s=30)
                assert server.status.reconnects == 0


@newer
async def test_other_requests_pass_raw_and_fail_with_their_code(transport: str) -> None:
    async with everything(transport) as server:
        read = await server.request("resources/read", {"uri": "test://static-text"})
        assert read["contents"][0]["text"] == "Words that never change."
        with pytest.raises(UpstreamError) as caught:
            await server.request("resources/read", {"uri": "test://none"})
        assert caught.value.code == -32602 and caught.value.outcome is Outcome.ERROR
        prompt = await server.request(
            "prompts/get", {"name": "test_input_required_result_prompt"}, Context(ask=declare)
        )
        assert "of work" in str(prompt)
        for method in ("resources/subscribe", "resources/unsubscribe"):
            assert await server.request(method, {"uri": "test://watched-resource"}) == {}


async def declare(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"action": "accept", "content": {"context": "of work"}}


async def test_an_argument_that_travels_as_a_header_is_sent_as_one() -> None:
    async with everything("http") as server:
        assert (await call(server, "test_x_mcp_header", region="north")).text == "region=north"


@everywhere
async def test_a_question_of_the_older_era_is_answered_by_the_one_behind_the_call(transport: str) -> None:
    async with reached(transport) as server:
        answer = await call(server, "ask", Context(ask=answering), method="sampling/createMessage")
        assert "forty-two" in answer.text
        alone = await call(server, "ask", method="sampling/createMessage")
        assert "nobody behind this call can answer" in alone.text
        declined = await call(server, "ask", Context(ask=declining), method="elicitation/create")
        assert "nobody is at the desk" in declined.text
        assert (await call(server, "ask", method="ping")).text == "{}"
        assert "Method not found" in (await call(server, "ask", method="tasks/none")).text


@everywhere
async def test_a_question_that_could_be_meant_for_several_goes_to_none_of_them(transport: str) -> None:
    async with reached(transport) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: call(server, "hang", Context(ask=declining)))
        await eventually(lambda: any(connection.flights for connection in server.supply.connections))
        answer = await call(server, "ask", Context(ask=answering), method="elicitation/create")
        if transport == "http":
            assert "ada" in answer.text, "the stream that a question comes on says whose it is"
        else:
            assert "isolation: session" in answer.text
        tasks.cancel_scope.cancel()
