"""MCP servers as forks of one Python that has imported the SDK, which takes a second of processor time.

`forked_command(SCRIPT, ...)` stands for `python SCRIPT ...` or `python -m MODULE ...`: a small process that hands its
streams and signals to a fork, and ends with it, as the fork does with the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

PRELOADED = (
    "mcp.server.stdio", "mcp.server.runner", "mcp.server.subscriptions", "mcp.server.mcpserver", "uvicorn",
    "gateway.cli", "gateway.serving", "gateway.mcp_server.transports",
)  # fmt: skip
PARENTS: dict[int, tuple[str, object, int]] = {}
"""The address of the parent of forks, itself, and what it watches, by the process that started it."""


def forked_command(script: object, *arguments: str) -> tuple[str, list[str]]:
    """The command and arguments that start a Python script as a fork; outside sandboxes only."""
    return sys.executable, ["-I", "-S", __file__, _parent(), str(script), *arguments]


def _parent() -> str:
    """The address of the parent of this process's forks, which ends with this process."""
    import subprocess

    owner = os.getpid()
    if owner not in PARENTS:
        address = f"mtrl-forks-{owner}-{os.urandom(8).hex()}"
        reader, writer = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, os.fdopen(reader) as watched:
            listener.bind(f"\0{address}")
            listener.listen(64)
            environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
            command = [sys.executable, __file__, str(listener.fileno())]
            parent = subprocess.Popen(
                command, stdin=watched, pass_fds=[listener.fileno()], env=environment, start_new_session=True
            )
        PARENTS[owner] = address, parent, writer
    return PARENTS[owner][0]


def ask_for_fork(address: str, words: list[str]) -> None:
    """Hands this process's streams to a fork, and waits for its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        request = {"argv": words, "cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        pid, _, code = connection.recv(20).partition(b"\n")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: os.kill(int(pid), number))
        os._exit((code or connection.recv(1) or b"\1")[0])


def fork_on_request(descriptor: int) -> None:
    """Forks a child for each connection, and tells its exit code, until the process ends that started this one."""
    import importlib
    import select
    from contextlib import suppress

    sys.dont_write_bytecode = True
    for module in PRELOADED:
        importlib.import_module(module)
    listener = socket.socket(fileno=descriptor)
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([listener, 0, *children], [], [])
        if 0 in ready:
            return
        if listener in ready:
            connection, _ = listener.accept()
            if (pid := os.fork()) == 0:
                listener.close()
                become(connection)
                return
            children[os.pidfd_open(pid)] = pid, connection
        for child in children.keys() & set(ready):
            pid, connection = children.pop(child)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(child)
            with connection, suppress(BrokenPipeError):
                connection.send(bytes([code % 256]))


def become(connection: socket.socket) -> None:
    """Makes this fork what the request asks for."""
    import runpy
    import threading

    pending, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
    while not pending.endswith(b"\n"):
        pending += connection.recv(2**20)
    request = json.loads(pending)
    os.setsid()
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    connection.send(b"%d\n" % os.getpid())
    threading.Thread(target=lambda: connection.recv(1) or os.killpg(0, signal.SIGKILL), daemon=True).start()
    sys.argv = request["argv"]
    if sys.argv[0] == "-m":
        sys.path[0] = request["cwd"]
        sys.argv = sys.argv[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        fork_on_request(int(sys.argv[1]))
    else:
        ask_for_fork(sys.argv[1], sys.argv[2:])
