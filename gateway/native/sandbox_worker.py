"""The process of a native tool with `isolation: sandbox`: serves one function, or one rollout's instance of a class.

It runs inside the sandbox. What the tool prints is dropped.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from gateway.config.load_object import load_object
from gateway.import_hook import add_to_sys_path
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import accepted_kwargs
from gateway.native.result_json import encode_result
from gateway.native.tool_results import exception_result, invalid_arguments_result, to_tool_result
from gateway.process.child_entry import Wire
from gateway.sandbox.command_server import reap_for_child
from gateway.sandbox.sandbox_layout import ROLLOUT
from gateway.sandbox.sandbox_state import MAX_BYTES
from gateway.sandbox.state_archive import pack
from gateway.types import EMPTY, ToolResult
from gateway.wire import dumps

Answer = Callable[[dict[str, Any]], Awaitable[ToolResult]]


async def call_function(tool: FunctionTool, message: dict[str, Any]) -> ToolResult:
    """Calls a function."""
    try:
        kwargs = tool.bind(message["arguments"])
    except ValueError as error:
        return invalid_arguments_result(error)
    return to_tool_result(await _awaited(tool.function(**kwargs)))


class InstanceServer:
    """Creates an instance of a class at the first call, and calls it."""

    def __init__(self, tool: BaseTool, start: dict[str, Any]) -> None:
        self.tool, self.kwargs, self.instance_id = tool, start["kwargs"], ""
        self.is_created = False

    async def call(self, message: dict[str, Any]) -> ToolResult:
        if message.get("do") == "release":
            if self.is_created:
                await _awaited(self.tool.release(self.instance_id, **self._kwargs("release")))
            return ToolResult()
        parts = () if self.is_created else await self._create(message["instance_id"])
        self.is_created = True
        done = self.tool.execute(self.instance_id, message["arguments"], **self._kwargs("execute"))
        result = to_tool_result(await _awaited(done), is_execute=True)
        return ToolResult((*parts, *result.parts), result.outcome, structured=result.structured, metrics=result.metrics)

    async def _create(self, instance_id: str) -> tuple[Any, ...]:
        """Parts that precede the first result."""
        self.instance_id, kwargs = instance_id, self._kwargs("create")
        accepted = accepted_kwargs(self.tool.create, kwargs | {"create_kwargs": kwargs})
        created = await _awaited(self.tool.create(instance_id, **accepted))
        own_id = created[0] if isinstance(created, tuple) else created
        self.instance_id = own_id if isinstance(own_id, str) else instance_id
        response = created[-1] if isinstance(created, tuple) else None
        has_parts = isinstance(response, ToolResponse) and not response.is_empty()
        return to_tool_result(response).parts if has_parts else ()

    def _kwargs(self, method: str) -> dict[str, Any]:
        return dict(self.kwargs.get(f"{method}_kwargs") or EMPTY)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _load(start: dict[str, Any]) -> Answer:
    add_to_sys_path(Path(folder) for folder in start["path"])
    target = load_object(start["object"])
    if not start["is_class"]:
        return partial(call_function, FunctionTool(target, name=start["name"]))
    schema = start["schema"] and OpenAIFunctionToolSchema.model_validate(start["schema"])
    return InstanceServer(target(start["config"], schema), start).call


def _pack() -> bytes:
    """What is left in the working folder as an archive, or as JSON why it cannot be packed."""
    try:
        with tempfile.TemporaryFile() as file:
            pack(ROLLOUT, file)
            length = file.tell()
            if length > MAX_BYTES:
                return dumps({"error": f"it has more than {MAX_BYTES // 2**20} MB"})
            file.seek(0)
            return file.read()
    except OSError as error:
        return dumps({"error": str(error)})


def serve() -> None:
    """Loads the tool that the first message names, and answers calls until the gateway is gone."""
    reap_for_child()
    anyio.run(_serve)


async def _serve() -> None:
    wire = Wire.claim(keeps_output=False)
    wire.send(0, b"{}")
    message = wire.receive()
    if message is None:
        return
    answer, body = _load(json.loads(message[1])), b"{}"
    while True:
        os.dup2(0, 2)  # Errors of the start are told, what the tool prints is not.
        wire.send(message[0], body)
        message = await to_thread.run_sync(wire.receive)
        if message is None:
            os._exit(0)
        request = json.loads(message[1])
        try:
            body = _pack() if request.get("do") == "pack" else encode_result(await answer(request))
        except Exception as error:  # user code: its exceptions are results, and it may have returned anything
            body = encode_result(exception_result(request.get("name", ""), error))
