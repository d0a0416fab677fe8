"""Servers of sandboxes as processes that can be killed, stopped, started again, and cut off in a network namespace."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from gateway.sandbox.sandbox_settings import SandboxSettings

TOKEN = "a-token-of-the-tests"
ROOT = Path(__file__).parents[3]


class ServerProcess:
    """`mtrl-gateway sandboxes`, at an address that stays."""

    def __init__(
        self, folder: Path, *options: object, host: str = "127.0.0.1", port: int = 0, enter: Sequence[str] = ()
    ) -> None:
        self.token_file = folder / "token.txt"
        self.token_file.write_text(TOKEN)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = port or probe.getsockname()[1]
        self.name = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.url = f"http://{self.name}"
        command = (sys.executable, "-m", "gateway.cli", "sandboxes", "--host", host, "--port", self.port)
        self._command = list(map(str, (*enter, *command, "--token-file", self.token_file, *options)))
        self.start()

    def start(self) -> None:
        """Starts it, again if it was killed."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("sandboxes at")

    def send(self, number: int) -> None:
        """Sends a signal; waits for the end of one that it ends."""
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.communicate(timeout=60)

    def kill(self) -> None:
        """Kills it, and what it started: its machine is gone."""
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.communicate(timeout=60)

    def close(self) -> None:
        """Ends it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.send(signal.SIGTERM)


def settings_of(*servers: ServerProcess | str, **more: object) -> SandboxSettings:
    """Settings that lead to these machines."""
    urls = ",".join(server if isinstance(server, str) else server.url for server in servers)
    return SandboxSettings.model_validate({"remote": {"url": urls, "token": TOKEN}, **more})


def can_make_machines() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    with made_namespace(f"mtrl-probe-{os.getpid()}") as made:
        return made


@contextmanager
def made_namespace(name: str) -> Iterator[bool]:
    """A network namespace for a block."""
    try:
        yield subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def separate_machine(folder: Path, number: int) -> Iterator[tuple[ServerProcess, list[str]]]:
    """A server in a network namespace of its own; and the `ip` command there that drops its answers, with a `{}` for
    `add` or `delete`."""
    name, link = f"mtrl-{os.getpid()}-{number}", f"m{os.getpid()}n{number}"
    network = f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"  # Others may test here, too.
    here, there = f"{network}.{4 * number + 1}", f"{network}.{4 * number + 2}"
    with made_namespace(name):
        inside = ["ip", "-n", name]
        for words in (
            f"ip link add {link} type veth peer name eth0 netns {name}",
            f"ip addr add {here}/30 dev {link}",
            f"ip link set {link} up",
            f"ip -n {name} addr add {there}/30 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(words.split(), check=True)
        enter = ("nsenter", f"--net=/run/netns/{name}")  # `ip netns exec` would hide the control groups.
        server = ServerProcess(folder, host=there, enter=enter)
        try:
            yield server, [*inside, "route", "{}", "blackhole", f"{here}/32"]
        finally:
            server.close()
