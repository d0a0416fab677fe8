"""Every kind of text that mtrl itself writes for a policy, as JSON on standard output, from a process of its own.

python -m tests.hostile.policy_texts
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from gateway.config.models import Limits, Server
from gateway.errors import Unavailable
from gateway.feedback.base import BaseInteraction
from gateway.feedback.code import CodeInteraction
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.native.base import ToolResponse
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.toolset import add_prefix
from gateway.types import Outcome, Task, ToolCall
from mtrl_plugins.trl.function_tools import show_error, show_value
from tests.servers.start_server import stdio_command
from tests.waiting import PATIENCE_S


class Thing:
    """An object without a text of its own."""


def _raise(error: Exception) -> Any:
    raise error


def _missing_file() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return Path(folder, "notes.txt").read_text()


PNG = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR\0\0\0\4\0\0\0\4\x08\2\0\0\0" + b"\0" * 4
BROKEN = PNG + b"\0\0\0\3IDATabc\0\0\0\0"
BEHAVIOURS: dict[str, Any] = {
    "object": Thing,
    "objects": lambda: {"thing": Thing(), "call": print, "own": _raise, "lock": threading.Lock()},
    "set": lambda: {"words": {"one", "two", "three", "four"}, "things": frozenset({("a", 1), ("b", 2)})},
    "picture": lambda: ToolResponse(image=[io.BytesIO(BROKEN)]),  # type: ignore[arg-type]
    "picture_file": lambda: ToolResponse(image=[f"{tempfile.mkdtemp()}/missing.png"]),  # type: ignore[arg-type]
    "error": lambda: _raise(ValueError(f"cannot use {Thing()!r}")),
    "missing": _missing_file,
    "unavailable": lambda: _raise(Unavailable(f"{Thing()!r} is down")),
    "connection": lambda: _raise(ConnectionRefusedError(111, "Connection refused 127.0.0.1:4711")),
    "hang": lambda: threading.Event().wait(20),
}


def make_tool(name: str, behaviour: Any) -> FunctionTool:
    def tool(count: int = 0) -> Any:
        """Does what its name says."""
        return behaviour()

    return FunctionTool(tool, name=name)


def limits_of(name: str) -> Limits:
    """Only what hangs has a deadline that a busy machine could miss."""
    return Limits(timeout_s=3 if name == "hang" else PATIENCE_S, result_limit=200)


async def native_texts() -> dict[str, str]:
    sources = [
        Source(name, add_prefix(LimitedToolset(NativeToolset([make_tool(name, behaviour)]), limits_of(name)), "my_"))  # type: ignore[arg-type]
        for name, behaviour in BEHAVIOURS.items()
    ]
    calls = {name: ("{}", name) for name in BEHAVIOURS}
    calls |= {"no JSON": ("{", "set"), "no object": ("[]", "set"), "wrong": ('{"count": "x", "z": 1}', "set")}
    texts = {}
    async with Gateway(sources) as gateway, gateway.open() as session:
        for label, (arguments, name) in calls.items():
            result = await session.call(ToolCall("1", f"my_{name}", arguments))
            texts[label] = f"{result.outcome} {result.text}"
        texts["unknown"] = (await session.call(ToolCall("1", "nothing", "{}"))).text
        texts["specs"] = json.dumps([[spec.name, spec.description, dict(spec.parameters)] for spec in session.specs])
    return texts


async def server_texts() -> dict[str, str]:
    """A call of each fault, and one after it, for which the server may be down."""
    command, args = stdio_command()
    config = Server(command=command, args=tuple(args), isolation="session", result_bytes=100_000)
    texts = {}
    async with Services() as services, McpToolset("faulty", config, services=services) as server:
        for name in ("crash", "garbage", "huge", "fail", "rpc_error", "bad_content", "ask", "hang"):
            # A session starts its own process within the first call.
            limits = Limits(timeout_s=5 if name == "hang" else PATIENCE_S, retries=0)
            async with add_prefix(LimitedToolset(server, limits), "its_").open(Task()) as session:
                for number, tool in enumerate((name, "count")):
                    result = await session.call(ToolCall("1", f"its_{tool}", "{}"))
                    texts[f"{name} {number}"] = f"{result.outcome} {result.text}"
    return texts


class Faulty(BaseInteraction):
    """An interaction that fails, or says an object."""

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        if len(messages) > 1:
            raise ValueError(f"{Thing()!r}")
        return False, {"said": Thing(), "of": {"a", "b", "c"}}, 0.0, {}


PROGRAMS = (
    "raise ValueError(object())",
    "import os; open(os.getcwd() + '/missing.txt')",
    "import time; time.sleep(30)",
    "print(",
)


async def feedback_texts() -> dict[str, str]:
    texts = {}
    tests: Sequence[Any] = ({"stdin": "", "stdout": "1"},)
    interactions = {
        "code": CodeInteraction({"wall_s": PATIENCE_S, "total_s": PATIENCE_S}),
        "slow": CodeInteraction({"wall_s": 20.0, "total_s": 2.0}),
        "faulty": Faulty({"name": "faulty"}),
    }
    async with FeedbackToolset(interactions) as toolset:
        for program in PROGRAMS:
            name = "slow" if "sleep" in program else "code"
            async with toolset.open(Task(feedback=name, feedback_args={"tests": tests})) as session:
                turn = [{"role": "assistant", "content": f"```python\n{program}\n```"}]
                texts[program] = (await session.feedback(turn)).message
        async with toolset.open(Task(feedback="faulty")) as session:
            for count in (1, 2):
                turn = [{"role": "assistant", "content": "hello"}] * count
                texts[f"faulty {count}"] = (await session.feedback(turn)).message
    return texts


def trl_texts() -> dict[str, str]:
    return {"trl value": show_value([Thing()]).text, "trl error": show_error(ValueError(Thing())).text}


async def main() -> None:
    texts = await native_texts() | await server_texts() | await feedback_texts() | trl_texts()
    failed = [name for name in BEHAVIOURS if not texts[name]]
    assert not failed and Outcome.TIMEOUT.value in texts["hang"], failed
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    anyio.run(main)
    sys.stdout.flush()
