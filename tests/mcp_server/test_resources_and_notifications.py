"""Resources, prompts, progress, logs and notifications pass through, for every pair of protocol versions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import mcp_types as types
import pytest
from mcp import MCPError
from mcp.client import Client

from gateway.gateway import Gateway
from tests.conftest import Write
from tests.mcp_server.clients import (
    ELICITING_SERVER,
    TIMEOUT_S,
    connect_client,
    connect_to_eliciting_server,
    crossed_protocols,
    text_of,
)
from tests.servers.forked_server import forked_command


@crossed_protocols
async def test_resources_prompts_and_completions_pass_through(upstream: str, protocol: str) -> None:
    async with connect_to_eliciting_server(protocol, upstream) as (client, _):
        resources = (await client.list_resources()).resources
        assert [resource.uri for resource in resources] == ["asker://one", "asker://two", "all://same"]
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "asker://by/{id}"
        (contents,) = (await client.read_resource("asker://by/7")).contents
        assert isinstance(contents, types.TextResourceContents) and contents.text == "asker has asker://by/7"
        with pytest.raises(MCPError, match="asker has no far://away") as error_info:
            await client.read_resource("far://away")
        assert (error_info.value.code, error_info.value.error.data) == (types.INVALID_PARAMS, {"uri": "far://away"})
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.name == "greet" and prompt.arguments
        (message,) = (await client.get_prompt("greet", {"word": "you"})).messages
        assert isinstance(message.content, types.TextContent) and message.content.text == "asker greets you"
        reference = types.PromptReference(name="greet")
        completed = await client.complete(reference, {"name": "word", "value": "a"})
        assert completed.completion.values == ["a-asker"]


async def test_two_servers_are_one_catalog_and_the_second_prompt_of_a_name_has_its_servers(write: Write) -> None:
    servers = {}
    for name in ("left", "right"):
        command, args = forked_command(write(f"{name}.py", ELICITING_SERVER.read_text().replace("asker", name)))
        servers[name] = {"command": command, "args": args}
    file = write("servers.json", json.dumps({"mcpServers": servers}))
    owners = {"left://one": "left", "all://same": "left", "right://one": "right", "right://by/1": "right"}
    greet = types.PromptReference(name="right_greet")
    with anyio.fail_after(TIMEOUT_S):
        async with Gateway.load(None, file) as gateway, connect_client("2025", gateway) as client:
            uris = [resource.uri for resource in (await client.list_resources()).resources]
            assert uris == ["left://one", "left://two", "all://same", "right://one", "right://two"]
            for uri, owner in owners.items():
                (contents,) = (await client.read_resource(uri)).contents
                assert isinstance(contents, types.TextResourceContents) and contents.text == f"{owner} has {uri}"
            with pytest.raises(MCPError, match="left has no far://away"):
                await client.read_resource("far://away")
            prompts = {prompt.name: prompt.description for prompt in (await client.list_prompts()).prompts}
            assert prompts == {"greet": "left", "right_greet": "right"}
            (message,) = (await client.get_prompt("right_greet", {"word": "you"})).messages
            assert isinstance(message.content, types.TextContent) and message.content.text == "right greets you"
            completed = await client.complete(greet, {"name": "word", "value": "a"})
            assert completed.completion.values == ["a-right"]
            with pytest.raises(MCPError, match="Unknown prompt: other"):
                await client.get_prompt("other")


@crossed_protocols
async def test_progress_and_log_messages_arrive_in_order(upstream: str, protocol: str) -> None:
    progress: list[tuple[float, float | None, str | None]] = []
    logged: list[Any] = []
    all_logged = anyio.Event()

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append((done, total, message))

    async def on_log(params: types.LoggingMessageNotificationParams) -> None:
        logged.append(params.data)
        if len(logged) == 2:
            all_logged.set()

    async with connect_to_eliciting_server(protocol, upstream, logging_callback=on_log) as (client, _):
        meta: Any = None
        if protocol == "2025":
            level = types.SetLevelRequest(params=types.SetLevelRequestParams(level="warning"))
            await client.session.send_request(level, types.EmptyResult)
        else:
            meta = {types.LOG_LEVEL_META_KEY: "warning"}
        assert text_of(await client.call_tool("steps", {}, progress_callback=on_progress, meta=meta)) == "stepped"
        await all_logged.wait()
    assert progress == [(1, 2, "step 1"), (2, 2, "step 2")]
    assert logged == ["warning 1", "warning 2"]


class ReceivedNotifications:
    """The change notifications that a client received, with any protocol version."""

    def __init__(self) -> None:
        self.received: set[str] = set()
        self._changed = anyio.Event()

    def add(self, names: str) -> None:
        self.received.add(names)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def message(self, message: Any) -> None:
        match message:
            case types.ResourceUpdatedNotification():
                self.add(str(message.params.uri))
            case types.PromptListChangedNotification():
                self.add("prompts")

    async def wait_for(self, *names: str) -> None:
        while not self.received >= set(names):
            await self._changed.wait()

    @asynccontextmanager
    async def following(self, client: Client, uri: str) -> AsyncIterator[None]:
        """Subscribes to a resource and to prompt changes for the length of a block."""
        if client.protocol_version < "2026":
            request = types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uri))
            await client.session.send_request(request, types.EmptyResult)
            yield
            request = types.UnsubscribeRequest(params=types.UnsubscribeRequestParams(uri=uri))
            await client.session.send_request(request, types.EmptyResult)
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


@crossed_protocols
async def test_subscriber_is_notified_of_resource_changes(upstream: str, protocol: str) -> None:
    received = ReceivedNotifications()
    async with connect_to_eliciting_server(protocol, upstream, message_handler=received.message) as (client, _):
        async with received.following(client, "asker://one"):
            while "asker://one" not in received.received:
                # A modern server gets the subscription a moment after the gateway does.
                await client.call_tool("touch", {"uri": "asker://two"})
                await client.call_tool("touch", {"uri": "asker://one"})
            await client.call_tool("change_prompts", {})
            await received.wait_for("asker://one", "prompts")
        assert "asker://two" not in received.received
        if upstream == "2025":
            while "followed: []" not in text_of(await client.call_tool("counts", {})):
                await anyio.lowlevel.checkpoint()
