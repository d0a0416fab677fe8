"""The child process of a tool with `run_in: process`: runs calls of one function, one at a time, in its main thread.

Standard input and output carry the messages; what the function prints goes to standard error. If the gateway ends, the
input ends, and the child kills itself with all processes that the function started.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

import anyio

from gateway.config.load_object import load_object
from gateway.import_hook import add_to_sys_path
from gateway.native.function import FunctionTool
from gateway.native.process_protocol import HEADER_BYTES, body_length, encode_result
from gateway.native.tool_results import exception_result, invalid_arguments_result, to_tool_result
from gateway.types import ToolResult
from gateway.user_code import run_contained


def main() -> None:
    """Serves calls until standard input ends."""
    requests, answers = _claim_streams()
    messages: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read_messages, args=(requests, messages), daemon=True).start()
    start = messages.get()
    add_to_sys_path(Path(folder) for folder in start["path"])
    file = Path(start["file"]) if start["file"] else None
    tool = FunctionTool(load_object(start["function"], file), name=start["name"])
    while True:
        answers.write(_encoded_call(tool, messages.get()["arguments"]))
        answers.flush()


def _claim_streams() -> tuple[BinaryIO, BinaryIO]:
    """The streams of messages. The function itself gets an empty input, and its output goes to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    return requests, answers


def _read_messages(stream: BinaryIO, messages: SimpleQueue[Any]) -> None:
    """Reads in a thread, so that the end of the input ends the process in the middle of a call too."""
    for message in _messages(stream):
        messages.put(message)
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)


def _messages(stream: BinaryIO) -> Iterator[Any]:
    while len(header := stream.read(HEADER_BYTES)) == HEADER_BYTES:
        body = stream.read(body_length(header))
        yield json.loads(body)


def _encoded_call(tool: FunctionTool, arguments: dict[str, Any]) -> bytes:
    """The message with the result of a call; values that cannot be written as JSON are an error of the tool."""
    try:
        return encode_result(_call(tool, arguments))
    except Exception as error:  # user code: it may have returned anything
        return encode_result(exception_result(tool.spec.name, error))


def _call(tool: FunctionTool, arguments: dict[str, Any]) -> ToolResult:
    try:
        kwargs = tool.bind(arguments)
    except ValueError as error:
        return invalid_arguments_result(error)
    try:
        return to_tool_result(run_contained(_run, tool.function, kwargs))
    except Exception as error:  # user code: its exceptions are results
        return exception_result(tool.spec.name, error)


def _run(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    value = function(**kwargs)
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return anyio.run(wait)


if __name__ == "__main__":
    main()
