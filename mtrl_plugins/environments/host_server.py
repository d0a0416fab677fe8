"""The host process: runs another framework's environments with the Python that has them, and answers JSON lines.

Run as `python host_server.py ADAPTER.py`. Only the standard library is available here, and what that Python has. What
is served depends on the adapter: episodes of environments with `reset` and `step` (`host_episodes.py`), or rollouts of
environments with a runner of their own (`host_conversations.py`).

Each line of standard input is a request, `{"id": 1, "do": "open", ...}`, and is answered by one line, in any order:
`{"id": 1, "ok": {...}}` or `{"id": 1, "error": {"problem": "...", "remedy": "..."}}`. The first request is `load`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

MAX_LINE_BYTES = 64 * 2**20
"""The longest request, which ends the process if it is longer; and the longest answer."""
EXIT_S = 5.0
"""How long environments may take to close once the trainer has gone."""
MARK = "MTRL_ENVIRONMENT_HOST"
"""The environment variable by which all processes of one host are found."""
KILL_ROUNDS = 5
CONVERSATIONS = ("host_conversations", "ConversationHost")


class HostError(Exception):
    """A request that cannot be served; the remedy is for the operator."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.remedy = remedy


def import_framework(name: str) -> Any:
    """The framework's package; raises HostError if this Python has none."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = f"run `mtrl-train env install {name}`, or name another Python as `{name}.python`"
        raise HostError(f"{sys.executable} has no {name} ({error})", remedy) from error


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
        """Sends one answer; what JSON lacks is sent as text. One that is too long costs its own request."""
        line = json.dumps({"id": id, **answer}, default=str).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            problem = f"an answer of {len(line) >> 20} MB is too long; {MAX_LINE_BYTES >> 20} MB are the most"
            line = json.dumps({"id": id, "error": {"problem": problem, "remedy": ""}}).encode() + b"\n"
        left = memoryview(line)
        while left:
            left = left[os.write(self._output, left) :]

    def send_error(self, id: int, error: BaseException) -> None:
        """Sends why a request failed; the traceback goes to standard error."""
        if not isinstance(error, HostError):
            traceback.print_exception(error)
        problem = str(error) if isinstance(error, HostError) else f"{type(error).__name__}: {error}"
        self.send(id, error={"problem": problem[:4000], "remedy": getattr(error, "remedy", "")})


def load_file(name: str, file: Path) -> ModuleType:
    """Imports a file as a module of its own, without its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise HostError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_own(name: str) -> ModuleType:
    """A module beside this one, which adapters share."""
    return sys.modules.get(name) or load_file(name, Path(__file__).with_name(f"{name}.py"))


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
        endpoint = load_own("host_endpoint").ModelEndpoint()
        adapter = load_file("host_adapter", adapter_file).load(request["environment"], request["args"], endpoint)
    except BaseException as error:  # boundary: the environment's own code; a script may exit
        wire.send_error(request["id"], error)
        raise SystemExit(1) from error
    try:
        asyncio.run(_serve(wire, request["id"], adapter, endpoint))
    finally:
        end_process(0)  # Threads of an environment may never end.


async def _serve(wire: Wire, id: int, adapter: Any, endpoint: Any) -> None:
    name, kind = ("host_episodes", "EpisodeHost") if hasattr(adapter, "make") else CONVERSATIONS
    host = getattr(load_own(name), kind)(adapter, endpoint)
    loop, stopped, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    def accept(request: dict[str, Any]) -> None:
        task = loop.create_task(_handle(wire, host, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        try:
            while (request := wire.receive()) is not None:
                loop.call_soon_threadsafe(accept, request)
            loop.call_soon_threadsafe(stopped.set)
        finally:
            time.sleep(EXIT_S)
            end_process(1)  # Whatever the environment is doing.

    async with endpoint, adapter:
        wire.send(id, ok=adapter.about())
        threading.Thread(target=read, daemon=True).start()
        await stopped.wait()
        await host.close_all()


async def _handle(wire: Wire, host: Any, request: Mapping[str, Any]) -> None:
    """Serves one request."""
    fields = {name: value for name, value in request.items() if name not in ("id", "do")}
    try:
        wire.send(request["id"], ok=await host.operations[request["do"]](**fields))
    except Exception as error:  # boundary: an environment may raise anything
        wire.send_error(request["id"], error)


def kill_marked(mark: str) -> None:
    """Kills the other processes whose environment variables have a mark: what was started in sessions of its own.

    Where there is no /proc, none is found.
    """
    entry = f"{MARK}={mark}".encode()
    for _ in range(KILL_ROUNDS):  # One may start another one meanwhile.
        found = [int(name) for name in _list_processes() if entry in _read_variables(name)]
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not found:
            return


def _list_processes() -> list[str]:
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    return [name for name in names if name.isdigit() and int(name) != os.getpid()]


def _read_variables(process: str) -> list[bytes]:
    """A process's environment variables; none of one that has ended or is not ours."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def end_process(code: int) -> None:
    """Ends this process at once, whatever its threads do, with the processes that an environment started."""
    if mark := os.environ.get(MARK):
        kill_marked(mark)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(code)


if __name__ == "__main__":
    main()
