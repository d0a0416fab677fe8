"""A headless Chromium on a pipe of its own: no port, no driver, and it ends when whoever started it does.

The wire is the browser's DevTools protocol: JSON messages, each ended by a zero byte, over the descriptors 3 and 4.
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
REMEDY = "no Chromium: run `make browser`, or name one in MTRL_CHROMIUM"
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it is run as root in containers, and opens our own pages alone
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
    # Whatever else it might want of the world is not there.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
ANSWER_S = 30.0
_START = "import fcntl,os,sys; r,w=(fcntl.fcntl(int(fd),fcntl.F_DUPFD,10) for fd in sys.argv[1:3]); \
os.dup2(r,3); os.dup2(w,4); os.execv(sys.argv[3],sys.argv[3:])"
"""Chromium wants its pipe at these two numbers."""

Heard = Callable[[str, dict[str, Any]], None]


class Failed(AssertionError):
    """The browser said no, or nothing in time."""


def executable() -> str | None:
    return os.environ.get("MTRL_CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """`ask` sends one command and waits for its answer; what else is heard goes to the page that it is about."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._last = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.hears: dict[str, list[Heard]] = defaultdict(list)
        """By the session of a page."""

    def ask(self, method: str, session: str | None = None, within_s: float = ANSWER_S, /, **params: Any) -> Any:
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
            raise Failed(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def listen(self, deadline: float, otherwise: str) -> None:
        """Takes what has come, or the next that comes."""
        ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Failed(f"{otherwise} in time")
        chunk = os.read(self._read, 1 << 20)
        if not chunk:
            raise Failed("the browser has ended")
        *messages, self._rest = (self._rest + chunk).split(b"\0")
        for raw in messages:
            message = json.loads(raw)
            if "id" in message:
                self._answers[message["id"]] = message
            for hear in self.hears.get(message.get("sessionId", ""), ()):
                hear(message.get("method", ""), message.get("params", {}))


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser that knows nothing yet, for the length of a block."""
    path = executable()
    if path is None:
        raise Failed(REMEDY)
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
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """It ends by itself once its pipe is closed; its helpers, and one that hangs, are ended with its group."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(5)
