"""Episodes of an OpenEnv server, which keeps an environment for each WebSocket."""

from __future__ import annotations

import binascii
import json
import os
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, cast
from urllib.request import ProxyHandler, Request, build_opener

import anyio
from anyio import to_thread
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from gateway.errors import ConfigError, format_error
from gateway.types import Image, Part, Text
from mtrl_plugins.environments.episodes import MAX_PARTS, Episode, EpisodeAnswer, cut_text, read_reward
from mtrl_plugins.environments.host_process import EnvironmentFailed
from mtrl_plugins.environments.settings import OpenEnvSettings

FAILURES = ("transport_error", "timeout")
"""Errors of a call that are the environment's failure."""
MISTAKES = ("invalid_args", "tool_not_found")
"""Errors of a call that are the policy's."""


class CallRefused(Exception):
    """The call did not fit a tool; the text is for the policy."""


def read_tools(listed: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
    """The tools that an environment lists."""
    return [
        {
            "name": str(tool["name"]),
            "description": str(tool.get("description") or ""),
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in listed
        if isinstance(tool, Mapping) and tool.get("name")
    ]


def read_call(observation: Any, owner: str) -> tuple[Part, ...] | None:
    """What a tool answered; None if the observation is no answer of a tool. Raises CallRefused or EnvironmentFailed."""
    if not isinstance(observation, Mapping) or "tool_name" not in observation:
        return None
    error = observation.get("error")
    if isinstance(error, Mapping):
        kind, text = error.get("error_type"), str(error.get("message") or error.get("error_type"))
        if kind in FAILURES:
            raise EnvironmentFailed(f"{owner}: {text}")
        if kind in MISTAKES:
            raise CallRefused(text)
        return (Text(cut_text(f"Error: {text}")),)
    result = observation.get("result")
    content = result.get("content") if isinstance(result, Mapping) else None
    if isinstance(content, list):
        return tuple(_read_block(block, owner) for block in content[:MAX_PARTS])
    return (Text(cut_text(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))),)


def _read_block(block: Any, owner: str) -> Part:
    """A block of MCP content: a text, an image, or anything else as JSON."""
    if isinstance(block, Mapping) and block.get("type") == "text":
        return Text(cut_text(str(block.get("text", ""))))
    if isinstance(block, Mapping) and block.get("type") == "image":
        try:
            return Image(b64decode(block["data"], validate=True), str(block.get("mimeType") or "image/png"))
        except (KeyError, TypeError, binascii.Error) as error:
            raise EnvironmentFailed(f"{owner} sent an image that is not base64 ({error})") from error
    return Text(cut_text(json.dumps(block, ensure_ascii=False)))


CONNECT_S = 10.0
CLOSE_S = 2.0
"""How long the last messages of an episode may take."""
MAX_MESSAGE_BYTES = 64 * 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Pauses between attempts to open an episode, while the server is full or restarts."""
DIRECT = build_opener(ProxyHandler({}))
"""Opens addresses without a proxy, as the WebSockets do."""
MAX_SCHEMA_BYTES = 2**24
FULL = "CAPACITY_REACHED"
UNPLAYED = ("metadata",)
"""Fields of every action that say nothing to the environment."""


class OpenEnvEpisodes:
    """The environment of one server."""

    def __init__(self, settings: OpenEnvSettings) -> None:
        self.settings, self.name = settings, settings.title
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.is_mcp = False
        """The environment has tools of its own, which are called by their names."""
        self.text_field = ""
        """The only field of an action, if it is a text: in `actions: text`, it is the policy's turn."""

    async def __aenter__(self) -> Self:
        schema = await to_thread.run_sync(self._fetch_schema)
        kind = schema.get("properties", {}).get("type")
        self.is_mcp = isinstance(kind, Mapping) and (kind.get("const") or kind.get("default")) == "call_tool"
        self.tools = await self._list_tools() if self.is_mcp else (_step_tool(schema),)
        fields = self.tools[0]["parameters"].get("properties") or {}
        if not self.is_mcp and [field.get("type") for field in fields.values()] == ["string"]:
            self.text_field = next(iter(fields))
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Every episode has closed its own connection."""

    @asynccontextmanager
    async def open(self, seed: int, options: Mapping[str, Any]) -> AsyncIterator[tuple[Episode, EpisodeAnswer]]:
        """Connects and resets; waits while the server is full or away, up to `timeout_s`."""
        reset = {"type": "reset", "data": {"seed": seed, **self.settings.args, **(options.get("args") or {})}}
        socket, answer = await self._begin(reset)
        try:
            yield _OpenEnvEpisode(self, socket), self.read(answer)
        finally:
            await _close(socket)

    async def _begin(self, message: Mapping[str, Any]) -> tuple[ClientConnection, Any]:
        """A new connection, and the answer to its first message."""
        pause, deadline = FIRST_PAUSE_S, anyio.current_time() + self.settings.timeout_s
        while True:
            socket: ClientConnection | None = None
            try:
                socket = await self._connect()
                answer = await self.ask(socket, message)
                if _code(answer) != FULL:
                    return socket, answer
                problem: Exception | str = f"{self.name} is full: {_message(answer)}"
                remedy = "raise the server's `max_concurrent_envs`, or lower `environment.sessions`"
            except EnvironmentFailed as error:
                problem, remedy = error, "start the server, or correct its address"
            except BaseException:
                if socket is not None:
                    await _close(socket)
                raise
            if socket is not None:
                await _close(socket)
            if anyio.current_time() + pause > deadline:
                raise EnvironmentFailed(f"{problem}\n  remedy: {remedy}")
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _connect(self) -> ClientConnection:
        base = self.settings.id.rstrip("/")
        url = f"{base.replace('http', 'ws', 1) if base.startswith('http') else base}/ws"
        try:
            return await connect(
                url,
                additional_headers=self._headers,
                open_timeout=min(CONNECT_S, self.settings.timeout_s),
                close_timeout=CLOSE_S,
                ping_interval=None,  # An environment may think for as long as `timeout_s`.
                max_size=MAX_MESSAGE_BYTES,
                proxy=None,
            )
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailed(f"{url} cannot be reached: {format_error(error)}") from error

    async def ask(self, socket: ClientConnection, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The server's answer to a message. Raises EnvironmentFailed if none came."""
        try:
            with anyio.fail_after(self.settings.timeout_s):
                with suppress(ConnectionClosed):  # What the server said before it ended the connection can be read.
                    await socket.send(json.dumps(message))
                answer = json.loads(await socket.recv())
        except ConnectionClosed as error:
            raise EnvironmentFailed(f"{self.name}: the connection was closed: {error}") from error
        except (ValueError, RecursionError) as error:
            raise EnvironmentFailed(f"{self.name} sent something else than JSON ({error})") from error
        except TimeoutError as error:
            problem = f"{self.name} did not answer {message['type']!r} within {self.settings.timeout_s:g} s"
            raise EnvironmentFailed(f"{problem}\n  remedy: raise `environment.timeout_s`") from error
        if not isinstance(answer, Mapping) or not isinstance(answer.get("data"), Mapping):
            raise EnvironmentFailed(f"{self.name} sent {answer!r:.80}")
        return answer

    def read(self, answer: Mapping[str, Any]) -> EpisodeAnswer:
        """An observation. Errors of the environment are no failures of the policy, but a refused action is."""
        if _code(answer) == "VALIDATION_ERROR":
            return EpisodeAnswer((), invalid=f"This is no action: {_message(answer)}")
        if answer.get("type") != "observation":
            raise EnvironmentFailed(f"{self.name}: {_message(answer)}")
        data = answer["data"]
        metadata = data.get("metadata") if isinstance(data.get("metadata"), Mapping) else {}
        truncated = bool(data.get("done")) and bool(metadata.get("truncated"))
        terminated = bool(data.get("done")) and not truncated
        try:
            called = read_call(data.get("observation"), self.name) if self.is_mcp else None
        except CallRefused as error:
            return EpisodeAnswer((), invalid=f"This is no action: {error}")
        parts = called if called is not None else (Text(cut_text(_to_text(data.get("observation")))),)
        return EpisodeAnswer(parts, read_reward(data.get("reward"), self.name), terminated, truncated)

    async def _list_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools of an environment that is an MCP server inside."""
        socket, answer = await self._begin({"type": "step", "data": {"type": "list_tools"}})
        await _close(socket)
        listed = (answer["data"].get("observation") or {}).get("tools")
        if not isinstance(listed, list) or not listed:
            raise EnvironmentFailed(f"{self.name} lists no tools: {_message(answer)}")
        return read_tools(listed)

    def _fetch_schema(self) -> Mapping[str, Any]:
        """The JSON schema of the environment's actions. Raises ConfigError if the server has none."""
        base = self.settings.id.rstrip("/")
        url = f"{base.replace('ws', 'http', 1) if base.startswith('ws') else base}/schema"
        try:
            request = Request(url, headers=dict(self._headers))  # noqa: S310 - its scheme is checked by the settings
            with DIRECT.open(request, timeout=CONNECT_S) as response:
                schema = json.loads(response.read(MAX_SCHEMA_BYTES))["action"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"{url} does not answer as an OpenEnv server ({error or type(error).__name__})"
            remedy = "start it, such as with `python -m uvicorn server:app`, or correct its address"
            raise ConfigError(problem, field="environment.name", remedy=remedy) from error
        if not isinstance(schema, Mapping):
            raise ConfigError(f"{url} has no schema of actions", field="environment.name")
        return schema

    @property
    def _headers(self) -> Mapping[str, str]:
        variable = self.settings.token_variable
        if not variable:
            return {}
        if variable not in os.environ:
            problem, remedy = f"{variable} is not set", f"export {variable}, or correct `environment.token_variable`"
            raise ConfigError(problem, field="environment.token_variable", remedy=remedy)
        return {"Authorization": f"Bearer {os.environ[variable]}"}


class _OpenEnvEpisode:
    def __init__(self, owner: OpenEnvEpisodes, socket: ClientConnection) -> None:
        self._owner, self._socket = owner, socket

    async def step(self, tool: str, action: Mapping[str, Any]) -> EpisodeAnswer:
        data = dict(action) if tool else self._read_text(action["text"])
        if data is None:
            return EpisodeAnswer((), invalid="This is no action: write a JSON object, alone in the last line.")
        if self._owner.is_mcp and tool:
            data = {"type": "call_tool", "tool_name": tool, "arguments": data}
        return self._owner.read(await self._owner.ask(self._socket, {"type": "step", "data": data}))

    def _read_text(self, text: str) -> dict[str, Any] | None:
        """The action in a turn: the turn itself, or JSON in its last line."""
        if self._owner.text_field:
            return {self._owner.text_field: text.strip()}
        try:
            action = json.loads(text.strip().rpartition("\n")[2].strip().strip("`"))
        except (ValueError, RecursionError):
            return None
        return cast("dict[str, Any]", action) if isinstance(action, dict) else None


async def _close(socket: ClientConnection) -> None:
    """Ends the server's session and closes the connection, whatever the other side does."""
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(CLOSE_S), suppress(WebSocketException, OSError):
            await socket.send('{"type": "close"}')
        await socket.close()


def _step_tool(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool that an action is: its fields are the arguments."""
    properties = {name: field for name, field in schema.get("properties", {}).items() if name not in UNPLAYED}
    parameters = {name: value for name, value in schema.items() if name not in ("title", "description", "properties")}
    description = str(schema.get("description") or "Acts in the environment, and returns what happens.")
    return {"name": "step", "description": description, "parameters": {**parameters, "properties": properties}}


def _code(answer: Mapping[str, Any]) -> str:
    return str(answer["data"].get("code", "")) if answer.get("type") == "error" else ""


def _message(answer: Mapping[str, Any]) -> str:
    """What an error says, with the fields that were refused."""
    data = answer["data"]
    errors = [
        f"{'.'.join(map(str, error.get('loc') or ()))}: {error.get('msg')}"
        for error in data.get("errors") or ()
        if isinstance(error, Mapping)
    ]
    return "; ".join([str(data.get("message") or f"it sent {answer.get('type')!r:.40}"), *errors])[:600]


def _to_text(observation: Any) -> str:
    """An observation's fields; one that has a single text is that text."""
    fields = (
        {name: value for name, value in observation.items() if name not in UNPLAYED and value is not None}
        if (isinstance(observation, Mapping))
        else observation
    )
    if isinstance(fields, Mapping) and len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    if fields is None or fields == {}:
        return ""
    return fields if isinstance(fields, str) else json.dumps(fields, ensure_ascii=False)
