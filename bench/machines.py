"""Two "machines" on this one: network namespaces joined by a veth pair, and services that start again when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import psutil

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "eth"
END_WAIT_S = 30.0
ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""A service would go on starting ranks for ever after this process was killed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A network namespace."""

    namespace: str
    address: str
    interface: str

    def command(self, words: Sequence[str]) -> list[str]:
        """A command that runs on this machine."""
        return ["ip", "netns", "exec", self.namespace, *words]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other, and nothing else. Needs the right to make network namespaces."""
    number = os.getpid()
    names = [f"mtrl-{number}-{side}" for side in "ab"]
    links = [f"m{number}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            for words in (f"addr add {address}/24 dev {link}", f"link set {link} up", "link set lo up"):
                _ip("-n", name, *words.split())
        first, second = (Machine(*values) for values in zip(names, ADDRESSES, links, strict=True))
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Service:
    """A process on a machine, started again whenever it ends, as a service manager does, until it is done."""

    name: str
    machine: Machine
    words: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    starts: int = 0
    is_done: Event = field(default_factory=Event)
    """Set once it ended well, or is not needed any more."""
    code: int | None = None
    """The last exit code."""
    may_end: bool = False
    """Whether exit code 0 means that it is done."""
    delay_s: float = 1.0

    def start(self) -> None:
        """Starts the process and its watch."""
        self._thread = Thread(target=self._keep_running, daemon=True)
        self._start_process()
        self._thread.start()

    def _start_process(self) -> None:
        self.starts += 1
        words = [*ENDS_WITH_US, *self.machine.command(self.words)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=self.folder, env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _keep_running(self) -> None:
        while not self.is_done.is_set():
            self.code = self.process.wait()
            if self.is_done.is_set() or (self.may_end and self.code == 0):
                self.is_done.set()
                return
            time.sleep(self.delay_s)
            if not self.is_done.is_set():
                self._start_process()

    def end(self) -> None:
        """Ends the process with all that it started."""
        self.is_done.set()
        left = self.find_processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, END_WAIT_S)

    def find_processes(self) -> list[psutil.Process]:
        """The process and all that it started."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


PYTHON = sys.executable
