"""A headless Chromium controlled over a pipe with the DevTools protocol, without a port or driver.

Messages are JSON, each ended by a zero byte, on the file descriptors 3 and 4. The browser ends with its parent.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
REMEDY = "no Chromium: run `make packages`, or name one in MTRL_CHROMIUM"
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # runs as root in containers, and opens only our own pages
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-sync",
    "--force-color-profile=srgb",
    # Block all other hosts.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
RESPONSE_TIMEOUT_S = 120.0
_START = "import fcntl,os,sys; r,w=(fcntl.fcntl(int(fd),fcntl.F_DUPFD,10) for fd in sys.argv[1:3]); \
os.dup2(r,3); os.dup2(w,4); os.execv(sys.argv[3],sys.argv[3:])"
"""Starts Chromium with its pipe on the descriptors 3 and 4."""

EventHandler = Callable[[str, dict[str, Any]], None]


class BrowserError(AssertionError):
    """The browser reported an error or did not respond in time."""


def find_executable() -> str | None:
    return os.environ.get("MTRL_CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser; `ask` sends a command and waits for its response, events go to the handlers of their page."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._last = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.hears: dict[str, list[EventHandler]] = defaultdict(list)
        """Event handlers by page session."""

    def ask(
        self, method: str, session: str | None = None, within_s: float = RESPONSE_TIMEOUT_S, /, **params: Any
    ) -> Any:
        self._last += 1
        id = self._last
        message = {"id": id, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + within_s
        while id not in self._answers:
            self.listen(deadline, f"no answer to {method}")
        answer = self._answers.pop(id)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def listen(self, deadline: float, otherwise: str) -> None:
        """Reads the messages that have arrived, or waits for the next."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise BrowserError(f"{otherwise} in time")
        chunk = os.read(self._read, 1 << 20)
        if not chunk:
            raise BrowserError("the browser has ended")
        *messages, self._rest = (self._rest + chunk).split(b"\0")
        for raw in messages:
            message = json.loads(raw)
            if "id" in message:
                self._answers[message["id"]] = message
            for hear in self.hears.get(message.get("sessionId", ""), ()):
                hear(message.get("method", ""), message.get("params", {}))


@contextmanager
def start_chromium() -> Iterator[Chromium]:
    """A browser with an empty profile, for a `with` block."""
    path = find_executable()
    if path is None:
        raise BrowserError(REMEDY)
    with tempfile.TemporaryDirectory(prefix="mtrl-chromium-", ignore_cleanup_errors=True) as home:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [sys.executable, "-IS", "-c", _START, str(theirs_in), str(theirs_out), path, *FLAGS]
        child = subprocess.Popen(
            [*command, f"--user-data-dir={home}/data", "about:blank"],
            env={"PATH": os.environ["PATH"], "HOME": home, "TZ": "UTC", "LANG": "C.UTF-8"},
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (theirs_in, theirs_out):
            os.close(fd)
        try:
            yield Chromium(ours_in, ours_out)
        finally:
            for fd in (ours_in, ours_out):
                os.close(fd)
            _terminate(child)


def _terminate(child: subprocess.Popen[bytes]) -> None:
    """The browser exits when its pipe is closed; its process group is killed in case it hangs or leaves helpers."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(5)
