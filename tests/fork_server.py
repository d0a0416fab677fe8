"""The process that `tests/forked_python.py` forks children from: `python fork_server.py SOCKET`."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

PRELOADED = (
    "trainer.train.start", "trainer.distributed.lead", "trainer.distributed.sharded_policy", "trainer.train.evaluate",
    "trainer.engine.torch", "trainer.policy.update", "trainer.cli", "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen2.modeling_qwen2", "gateway.serving", "tokenizers",
)  # fmt: skip
"""What children most often need; whatever else they import, they import themselves."""


def main(descriptor: int) -> None:
    """Forks a child for each request, and tells of each child that ended, until the socket is closed."""
    sys.path[0] = str(Path(__file__).parents[1])
    sys.dont_write_bytecode = True
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    for module in PRELOADED:
        importlib.import_module(module)
    connection = socket.socket(fileno=descriptor)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    request = serve(connection, reader)
    if request is not None:  # this is the child
        signal.set_wakeup_fd(-1)
        for fd in (reader, writer):
            os.close(fd)
        connection.close()
        become(*request)


def serve(connection: socket.socket, wakeups: int) -> tuple[dict[str, Any], list[int]] | None:
    """In the server, None when the socket is closed; in a child, its request."""
    import select

    pending = b""
    while True:
        ready, _, _ = select.select([connection, wakeups], [], [])
        if wakeups in ready:
            os.read(wakeups, 4096)
            tell_ended(connection)
        if connection in ready:
            received, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
            if not received and not streams:
                return None
            pending += received
            while not pending.endswith(b"\n"):
                pending += connection.recv(2**20)
            request, pending = json.loads(pending), b""
            pid = os.fork()
            if pid == 0:
                return request, streams
            for fd in streams:
                os.close(fd)
            connection.sendall(json.dumps({"started": pid}).encode() + b"\n")


def tell_ended(connection: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        answer = {"ended": pid, "code": os.waitstatus_to_exitcode(status)}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Makes this child what `python ARGV` would be."""
    os.setsid()
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
    os.closerange(3, max(streams) + 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    start_coverage(request["coverage"])
    words: list[str] = request["argv"]
    sys.path[0] = request["cwd"] if words[0] == "-m" else str(Path(words[0]).parent)
    sys.path[1:1] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if words[0] == "-m":
        sys.modules.pop(words[1], None)
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def start_coverage(variables: dict[str, str]) -> None:
    """As its line in site-packages does at the start of a Python; not in processes that this one starts."""
    if variables or any(name.startswith("COVERAGE_PROCESS") for name in os.environ):
        import coverage

        os.environ.update(variables)
        coverage.process_startup(force=True)
        for name in variables:
            del os.environ[name]


if __name__ == "__main__":
    main(int(sys.argv[1]))
