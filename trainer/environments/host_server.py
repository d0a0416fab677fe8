"""The host process: runs another framework's environments with the Python that has them, and answers JSON lines.

Run as `python host_server.py ADAPTER.py`. Only the standard library is available here, and what that Python has. An
environment runs with its own runner. Its model is an endpoint in this process, which asks the trainer for each turn.

Each line of standard input is a request, `{"id": 1, "do": "open", ...}`, and is answered by one line, in any order:
`{"id": 1, "ok": {...}}` or `{"id": 1, "error": {"problem": "...", "remedy": "..."}}`. The first request is `load`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_LINE_BYTES = 64 * 2**20
"""The longest request; a longer one ends the process."""
EXIT_S = 5.0
"""How long environments may take to close once the trainer has gone."""
MAX_KEPT = 8192
"""Rollouts that are kept, with their scores, until the trainer closes them."""


class HostError(Exception):
    """A request that cannot be served; the remedy is for the operator."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


class Wire:
    """The lines to and from the trainer. Whatever else is printed to standard output goes to standard error."""

    def __init__(self) -> None:
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.dup(1)
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None if the trainer has gone."""
        line = self._input.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            return None
        request: dict[str, Any] = json.loads(line)
        return request

    def send(self, id: int, **answer: Any) -> None:
        """Sends one answer; what JSON lacks is sent as text."""
        left = memoryview(json.dumps({"id": id, **answer}, default=str).encode() + b"\n")
        while left:
            left = left[os.write(self._output, left) :]

    def send_error(self, id: int, error: BaseException) -> None:
        """Sends why a request failed; the traceback goes to standard error."""
        if not isinstance(error, HostError):
            traceback.print_exception(error)
        problem = str(error) if isinstance(error, HostError) else f"{type(error).__name__}: {error}"
        self.send(id, error={"problem": problem[:4000], "remedy": getattr(error, "remedy", "")})


class Conversation:
    """One rollout: what the environment asks of its model, and what the policy answers."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.run: asyncio.Task[Any] | None = None
        self.result: Any = None
        """What the environment's runner returned; dropped once it is scored."""
        self.score: dict[str, Any] | None = None
        self.is_over = False
        """The policy writes no more turns."""
        self.problem = ""
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None

    async def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The policy's next turn, for the endpoint; None if it can write no more."""
        if self._reply is not None:
            self.problem = "the environment asked for two turns at once; a rollout is one chat"
            return None
        if self.is_over:
            return None
        self._reply = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(request)
        try:
            return await self._reply
        finally:
            self._reply = None

    def answer(self, reply: dict[str, Any] | None) -> None:
        """Gives the environment the policy's turn; None if there is none."""
        self.is_over = reply is None
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)


class Host:
    """One environment and its rollouts."""

    def __init__(self, wire: Wire, adapter: Any, endpoint: Any) -> None:
        self.wire, self.adapter = wire, adapter
        self.endpoint = endpoint
        self.conversations: OrderedDict[str, Conversation] = endpoint.conversations
        self.count = 0
        self._scoring = asyncio.Lock()
        self.operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "rows": self.rows,
            "open": self.open,
            "turn": self.turn,
            "end": self.end,
            "score": self.score,
            "close": self.close,
        }

    async def handle(self, request: Mapping[str, Any]) -> None:
        """Serves one request."""
        fields = {name: value for name, value in request.items() if name not in ("id", "do")}
        try:
            self.wire.send(request["id"], ok=await self.operations[request["do"]](**fields))
        except Exception as error:  # boundary: an environment may raise anything
            self.wire.send_error(request["id"], error)

    async def rows(self, split: str, start: int, count: int) -> Any:
        """Some rows of the environment's data, each with a prompt, an answer and a digest of them."""
        rows = await asyncio.to_thread(self.adapter.rows, split, start, count)
        return [{**row, "digest": _digest(row)} for row in rows]

    async def open(self, split: str, row: int, digest: str | None = None) -> Any:
        """Starts a rollout; returns what the environment asks of its model first."""
        if digest is not None and [digest] != [found["digest"] for found in await self.rows(split, row, 1)]:
            raise HostError(f"row {row} is no longer what it was", "let the environment order its rows by a fixed seed")
        self.count += 1
        name, conversation = f"rollout-{self.count}", Conversation()
        self.conversations[name] = conversation
        while len(self.conversations) > MAX_KEPT:
            self.close_one(next(iter(self.conversations)))
        conversation.run = asyncio.create_task(self.adapter.run(split, row, name))
        return {"rollout": name, **await self._next(conversation)}

    async def turn(self, rollout: str, reply: dict[str, Any]) -> Any:
        """Gives the environment a turn of the policy; returns what it asks next, or how it ended."""
        conversation = self._find(rollout)
        conversation.answer(reply)
        return await self._next(conversation)

    async def end(self, rollout: str) -> Any:
        """Tells the environment that the policy can write no more turns; returns how it ended."""
        conversation = self._find(rollout)
        conversation.answer(None)
        while "ended" not in (step := await self._next(conversation)):
            conversation.answer(None)
        return step

    async def score(self, rollouts: list[str]) -> Any:
        """The scores of a group's rollouts, which are computed once and together."""
        async with self._scoring:
            found = [self._find(rollout) for rollout in rollouts]
            todo = [conversation for conversation in found if conversation.score is None]
            if todo:
                scores = await self.adapter.score([conversation.result for conversation in todo])
                for conversation, score in zip(todo, scores, strict=True):
                    conversation.score, conversation.result = score, None
            return [conversation.score for conversation in found]

    async def close(self, rollout: str) -> Any:
        """Ends a rollout and forgets it."""
        self.close_one(rollout)
        return {}

    def close_one(self, rollout: str) -> None:
        """Cancels the environment's runner."""
        conversation = self.conversations.pop(rollout, None)
        if conversation is not None and conversation.run is not None:
            conversation.is_over = True
            conversation.run.cancel()

    def _find(self, rollout: str) -> Conversation:
        if rollout not in self.conversations:
            raise HostError(f"{rollout} is not known here", "it was closed, or the environment's process was restarted")
        return self.conversations[rollout]

    async def _next(self, conversation: Conversation) -> dict[str, Any]:
        """What the environment asks next, or how its runner ended."""
        run = conversation.run
        if run is None:
            raise HostError("the rollout has not started")
        asked = asyncio.ensure_future(conversation.asked.get())
        try:
            await asyncio.wait({asked, run}, return_when=asyncio.FIRST_COMPLETED)
            if conversation.problem:
                raise HostError(conversation.problem, "see what the guide says cannot be had")
            if not run.done():
                return asked.result()
        finally:
            asked.cancel()
        conversation.result = run.result()
        return {"ended": self.adapter.describe(conversation.result)}


def _digest(row: Mapping[str, Any]) -> str:
    return sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]


def load_file(name: str, file: Path) -> ModuleType:
    """Imports a file as a module of its own, without its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise HostError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Loads the environment and serves requests until standard input ends."""
    adapter_file = Path(sys.argv[1])
    here = os.getcwd()
    sys.path[0] = here  # Instead of this file's folder, whose modules are none of the environment's.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # For its children.
    sys.modules["host_server"] = sys.modules["__main__"]
    wire = Wire()
    request = wire.receive()
    if request is None:
        return
    try:
        endpoint = load_file("host_endpoint", Path(__file__).with_name("host_endpoint.py")).ModelEndpoint()
        adapter = load_file("host_adapter", adapter_file).load(request["environment"], request["args"], endpoint)
    except BaseException as error:  # boundary: the environment's own code; a script may exit
        wire.send_error(request["id"], error)
        raise SystemExit(1) from error
    try:
        asyncio.run(_serve(wire, request["id"], adapter, endpoint))
    finally:
        os._exit(0)  # Threads of an environment may never end.


async def _serve(wire: Wire, id: int, adapter: Any, endpoint: Any) -> None:
    host = Host(wire, adapter, endpoint)
    loop, stopped, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def accept(request: dict[str, Any]) -> None:
        task = loop.create_task(host.handle(request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        try:
            while (request := wire.receive()) is not None:
                loop.call_soon_threadsafe(accept, request)
            loop.call_soon_threadsafe(stopped.set)
        finally:
            time.sleep(EXIT_S)
            os._exit(1)  # Whatever the environment is doing.

    async with endpoint, adapter:
        wire.send(id, ok=adapter.about())
        threading.Thread(target=read, daemon=True).start()
        await stopped.wait()
        for rollout in [*host.conversations]:
            host.close_one(rollout)


if __name__ == "__main__":
    main()
