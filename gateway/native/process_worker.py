"""The child process of a tool with `run_in: process`: runs calls of one function, one at a time, in its main thread.

What the function prints goes to standard error. If the gateway ends, a supervisor kills this process with all processes
that the function started.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from gateway.config.load_object import load_object
from gateway.import_hook import add_to_sys_path
from gateway.native.function import FunctionTool
from gateway.native.result_json import encode_result
from gateway.native.tool_results import exception_result, invalid_arguments_result, to_tool_result
from gateway.process.child_entry import MAX_BODY_BYTES, Wire
from gateway.types import ToolResult
from gateway.user_code import run_contained


def serve() -> None:
    """Loads the function that the first message names, and answers calls until the gateway is gone."""
    wire = Wire.claim()
    if (message := wire.receive()) is None:
        return
    start = json.loads(message[1])
    add_to_sys_path(Path(folder) for folder in start["path"])
    file = Path(start["file"]) if start["file"] else None
    tool = FunctionTool(load_object(start["function"], file), name=start["name"])
    while (message := wire.receive()) is not None:
        body = _encoded_call(tool, json.loads(message[1]))
        if len(body) > MAX_BODY_BYTES:
            problem = ValueError(f"it returned {len(body) >> 20} MB; {MAX_BODY_BYTES >> 20} MB are the most")
            body = encode_result(exception_result(tool.spec.name, problem))
        wire.send(message[0], body)


def _encoded_call(tool: FunctionTool, arguments: dict[str, Any]) -> bytes:
    """The result of a call as JSON; exceptions, and values that cannot be written as JSON, are errors of the tool."""
    try:
        return encode_result(_call(tool, arguments))
    except Exception as error:  # user code: its exceptions are results, and it may have returned anything
        return encode_result(exception_result(tool.spec.name, error))


def _call(tool: FunctionTool, arguments: dict[str, Any]) -> ToolResult:
    try:
        kwargs = tool.bind(arguments)
    except ValueError as error:
        return invalid_arguments_result(error)
    return to_tool_result(run_contained(_run, tool.function, kwargs))


def _run(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    value = function(**kwargs)
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return anyio.run(wait)
