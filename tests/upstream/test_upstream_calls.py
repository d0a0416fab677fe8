"""A call to a server that is wrong in every way: one outcome each, and nothing else is lost."""

from __future__ import annotations

import json

import anyio
import pytest

from gateway.types import Audio, Context, Image, Outcome, Resource, Task, Text, ToolCall
from tests.upstream.reach import TRANSPORTS, WAYS, call, eventually, reached

everywhere = pytest.mark.parametrize("transport", TRANSPORTS)


@everywhere
async def test_a_tool_answers(transport: str) -> None:
    async with reached(transport) as server:
        result = await call(server, "echo", text="hello")
        assert (result.outcome, result.text) == (Outcome.OK, "hello")
        assert set(result.timing) == {"connect", "upstream", "parse"}
        status = server.status
        assert (status.state, status.transport, status.protocol_version) == ("up", WAYS[transport], "2025-11-25")
        assert status.tools == len(server.specs) > 20
        assert len(status.children) == (transport == "stdio")


@everywhere
async def test_every_kind_of_part_arrives_in_order(transport: str) -> None:
    async with reached(transport) as server:
        result = await call(server, "mixed")
        assert [type(part) for part in result.parts] == [Text, Image, Audio, Resource, Resource, Text]
        assert result.parts[0] == Text("before") and result.parts[-1] == Text("after")


@everywhere
async def test_an_error_of_the_tool_is_its_own_word(transport: str) -> None:
    async with reached(transport) as server:
        failed = await call(server, "fail", message="no such city")
        assert (failed.outcome, failed.text) == (Outcome.ERROR, "no such city")
        refused = await call(server, "rpc_error", code=-32000, message="Connection closed for cleaning")
        assert (refused.outcome, refused.text) == (Outcome.ERROR, "Connection closed for cleaning")


@everywhere
async def test_a_crash_in_the_middle_of_a_call_is_unknown_and_says_why(transport: str) -> None:
    async with reached(transport) as server:
        result = await call(server, "crash", code=7)
        assert result.outcome is Outcome.UNKNOWN
        assert result.reason
        if transport == "stdio":
            assert "exited with 7" in result.reason and "told to crash" in result.reason


async def test_a_lost_connection_fails_only_its_own_calls_and_comes_back() -> None:
    async with reached("stdio") as one, reached("stdio") as other:
        results: dict[str, Outcome] = {}

        async def keep(name: str, server: object, tool: str, **arguments: object) -> None:
            results[name] = (await call(server, tool, **arguments)).outcome  # type: ignore[arg-type]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: keep("hanging", one, "hang"))
            tasks.start_soon(lambda: keep("elsewhere", other, "slow", seconds=0.3))
            await eventually(lambda: any(connection.flights for connection in one.supply.connections))
            tasks.start_soon(lambda: keep("crashing", one, "crash"))
        assert results == {"hanging": Outcome.UNKNOWN, "crashing": Outcome.UNKNOWN, "elsewhere": Outcome.OK}
        assert (await call(one, "echo", text="back")).text == "back"
        assert one.status.reconnects == 1


@everywhere
async def test_garbage_between_messages_is_no_answer_and_no_harm(transport: str) -> None:
    async with reached(transport, "--garbage-first") as server:
        assert (await call(server, "garbage")).text == "after the garbage"
        assert (await call(server, "echo", text="still here")).text == "still here"


@everywhere
async def test_an_answer_that_is_too_large_is_refused_and_hurts_nobody(transport: str) -> None:
    async with reached(transport, result_bytes=300_000) as server:
        result = await call(server, "huge", mb=1)
        assert result.outcome is Outcome.ERROR and "too large" in result.text
        assert (await call(server, "echo", text="x" * 1000)).outcome is Outcome.OK


async def test_an_answer_that_is_too_large_in_one_body_is_refused() -> None:
    async with reached("http", "--json-answers", result_bytes=300_000) as server:
        result = await call(server, "huge", mb=1)
        assert result.outcome is Outcome.ERROR and "too large" in result.text
        assert (await call(server, "echo", text="small")).text == "small"


@everywhere
async def test_a_large_answer_within_the_limit_arrives_whole(transport: str) -> None:
    async with reached(transport) as server:
        assert len((await call(server, "huge", mb=4)).text) == 4 * 1024 * 1024


@everywhere
async def test_a_second_answer_is_nobodys(transport: str) -> None:
    async with reached(transport) as server:
        assert (await call(server, "twice")).text == "first"
        assert (await call(server, "echo", text="third")).text == "third"


@everywhere
async def test_an_answer_with_a_wrong_id_leaves_the_call_to_its_deadline(transport: str) -> None:
    async with reached(transport) as server:
        with anyio.move_on_after(0.5) as scope:
            await call(server, "wrong_id")
        assert scope.cancelled_caught
        assert (await call(server, "echo", text="alive")).text == "alive"


@everywhere
async def test_cancelling_a_call_cancels_it_upstream(transport: str) -> None:
    under_way = anyio.Event()

    async def progress(done: float, total: float | None, message: str | None) -> None:
        under_way.set()

    async with reached(transport) as server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, server, "hang", Context(progress=progress))
            await under_way.wait()
            tasks.cancel_scope.cancel()
        # Over HTTP a cancelled call is a closed connection, which the server notices in its own time.
        with anyio.fail_after(15):
            while (await call(server, "was_cancelled")).structured["tools"] != ["hang"]:
                pass


@everywhere
async def test_progress_reaches_the_one_who_called(transport: str) -> None:
    heard: list[float] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        heard.append(done)

    async with reached(transport) as server:
        await call(server, "slow", Context(progress=progress), seconds=0.05)
        await eventually(lambda: len(heard) == 2)
    assert sorted(heard) == [0, 1]


@everywhere
async def test_many_calls_at_once_each_get_their_own_answer(transport: str) -> None:
    answers: dict[int, str] = {}

    async with reached(transport) as server, server.open(Task()) as session:

        async def ask(number: int) -> None:
            made = ToolCall(str(number), "echo", json.dumps({"text": f"answer {number}"}))
            answers[number] = (await session.call(made)).text

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(ask, number)
    assert answers == {number: f"answer {number}" for number in range(200)}


@pytest.mark.parametrize(
    "arguments",
    ['{"text": 1e999}', '{"text": "\\ud800"}', '{"text": NaN}', "[]", "{", "[" * 100_000],
    ids=["infinite", "half a character", "no number", "no object", "cut off", "deep"],
)
async def test_arguments_that_would_break_the_connection_of_all_are_the_callers_mistake(arguments: str) -> None:
    async with reached("stdio") as server, server.open(Task()) as session:
        result = await session.call(ToolCall("1", "echo", arguments))
        assert result.outcome is Outcome.INVALID and result.text
        assert (await call(server, "echo", text="fine")).text == "fine"


async def test_a_tool_that_was_never_listed_is_the_callers_mistake() -> None:
    async with reached("stdio") as server:
        result = await call(server, "no_such_tool")
        assert result.outcome is Outcome.INVALID and "echo" in result.text


@pytest.mark.parametrize(
    "kind", ["unknown_type", "invalid_base64", "missing_field", "string", "null", "structured_list"]
)
async def test_a_result_that_the_protocol_forbids_is_read_as_far_as_it_goes(kind: str) -> None:
    async with reached("stdio") as server:
        assert (await call(server, "bad_content", kind=kind)).outcome is Outcome.OK
