"""What MCP servers hold and say passes through the front, whichever era each side is of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client

from tests.front.kit import ERAS, asking, words

PAIRS = [(upstream, era) for upstream in ERAS for era in ERAS]
pairs = pytest.mark.parametrize(("upstream", "era"), PAIRS, ids=[f"{u}-behind-{e}" for u, e in PAIRS])
TWO = ("2026 left", "2025 right")


@pairs
async def test_resources_prompts_and_completions_pass_through(upstream: str, era: str) -> None:
    async with asking(era, upstream) as (client, _):
        resources = (await client.list_resources()).resources
        assert [resource.uri for resource in resources] == ["asker://one", "asker://two", "all://same"]
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "asker://by/{id}"
        (contents,) = (await client.read_resource("asker://by/7")).contents
        assert isinstance(contents, types.TextResourceContents) and contents.text == "asker has asker://by/7"
        with pytest.raises(MCPError, match="asker has no far://away") as refused:
            await client.read_resource("far://away")
        assert (refused.value.code, refused.value.error.data) == (types.INVALID_PARAMS, {"uri": "far://away"})
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.name == "greet" and prompt.arguments
        (message,) = (await client.get_prompt("greet", {"word": "you"})).messages
        assert isinstance(message.content, types.TextContent) and message.content.text == "asker greets you"
        about = types.PromptReference(name="greet")
        completed = await client.complete(about, {"name": "word", "value": "a"})
        assert completed.completion.values == ["a-asker"]


async def test_two_servers_are_one_collection() -> None:
    async with asking("2025", *TWO) as (client, _):
        uris = [resource.uri for resource in (await client.list_resources()).resources]
        assert uris == ["left://one", "left://two", "all://same", "right://one", "right://two"]
        for uri, owner in {
            "left://one": "left",
            "right://two": "right",
            "all://same": "left",
            "right://by/1": "right",
        }.items():
            (contents,) = (await client.read_resource(uri)).contents
            assert isinstance(contents, types.TextResourceContents) and contents.text == f"{owner} has {uri}"
        with pytest.raises(MCPError, match="left has no far://away"):
            await client.read_resource("far://away")


async def test_of_two_prompts_with_one_name_the_later_bears_its_servers_name() -> None:
    async with asking("2026", *TWO) as (client, _):
        prompts = {prompt.name: prompt.description for prompt in (await client.list_prompts()).prompts}
        assert prompts == {"greet": "left", "right_greet": "right"}
        (message,) = (await client.get_prompt("right_greet", {"word": "you"})).messages
        assert isinstance(message.content, types.TextContent) and message.content.text == "right greets you"
        completed = await client.complete(types.PromptReference(name="right_greet"), {"name": "word", "value": "a"})
        assert completed.completion.values == ["a-right"]
        with pytest.raises(MCPError, match="Unknown prompt: other"):
            await client.get_prompt("other")


@pairs
async def test_progress_and_wanted_log_messages_arrive_in_order(upstream: str, era: str) -> None:
    progress: list[str | None] = []
    logged: list[Any] = []
    all_logged = anyio.Event()

    async def step(done: float, total: float | None, message: str | None) -> None:
        progress.append(message)

    async def log(params: types.LoggingMessageNotificationParams) -> None:
        logged.append(params.data)
        if len(logged) == 2:
            all_logged.set()

    async with asking(era, upstream, logging_callback=log) as (client, _):
        meta: Any = None
        if era == "2025":
            level = types.SetLevelRequest(params=types.SetLevelRequestParams(level="warning"))
            await client.session.send_request(level, types.EmptyResult)
        else:
            meta = {types.LOG_LEVEL_META_KEY: "warning"}
        assert words(await client.call_tool("steps", {}, progress_callback=step, meta=meta)) == "stepped"
        await all_logged.wait()
    assert progress == ["step 1", "step 2"]
    assert logged == ["warning 1", "warning 2"]


@pairs
async def test_giving_up_a_call_ends_it_at_the_server(upstream: str, era: str) -> None:
    hanging = anyio.Event()

    async def begun(*_: Any) -> None:
        hanging.set()

    async def call() -> None:
        await client.call_tool("hang", {}, progress_callback=begun)

    async with asking(era, upstream) as (client, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await hanging.wait()
            tasks.cancel_scope.cancel()
        while words(await client.call_tool("counts", {})) != "0 hang, 1 cancelled, followed: []":
            await anyio.lowlevel.checkpoint()


class Heard:
    """What a client is told, in either era."""

    def __init__(self) -> None:
        self.told: set[str] = set()
        self._news = anyio.Event()

    def add(self, what: str) -> None:
        self.told.add(what)
        news, self._news = self._news, anyio.Event()
        news.set()

    async def message(self, message: Any) -> None:
        match message:
            case types.ResourceUpdatedNotification():
                self.add(str(message.params.uri))
            case types.PromptListChangedNotification():
                self.add("prompts")

    async def until(self, *what: str) -> None:
        while not self.told >= set(what):
            await self._news.wait()

    @asynccontextmanager
    async def following(self, client: Client, uri: str) -> AsyncIterator[None]:
        """Told of a resource, and of changed prompts, for the length of a block."""
        if client.protocol_version < "2026":
            wanted = types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uri))
            await client.session.send_request(wanted, types.EmptyResult)
            yield
            enough = types.UnsubscribeRequest(params=types.UnsubscribeRequestParams(uri=uri))
            await client.session.send_request(enough, types.EmptyResult)
            return
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._listen, client, uri)
            yield
            tasks.cancel_scope.cancel()

    async def _listen(self, client: Client, uri: str, *, task_status: Any) -> None:
        async with client.listen(prompts_list_changed=True, resource_subscriptions=[uri]) as changes:
            task_status.started()
            async for change in changes:
                self.add(getattr(change, "uri", "prompts"))


@pairs
async def test_whoever_follows_a_resource_is_told_of_its_changes(upstream: str, era: str) -> None:
    heard = Heard()
    async with asking(era, upstream, message_handler=heard.message) as (client, _):
        async with heard.following(client, "asker://one"):
            while "asker://one" not in heard.told:
                # A server of the newer era learns what is wanted a moment after the gateway does.
                await client.call_tool("touch", {"uri": "asker://two"})
                await client.call_tool("touch", {"uri": "asker://one"})
            await client.call_tool("change_prompts", {})
            await heard.until("asker://one", "prompts")
        assert "asker://two" not in heard.told
        if upstream == "2025":
            while "followed: []" not in words(await client.call_tool("counts", {})):
                await anyio.lowlevel.checkpoint()
