"""Commands of a page that serve until they are stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

TIMEOUT_S = 60
URL = re.compile(r"http://[\w.]+:(\d+)")


class Server:
    """A serving command on a free port, from the moment that it prints its address until it is stopped."""

    def __init__(self, words: list[str], place: Path) -> None:
        self.words, port = _without_port(words)
        self.shown_port = port or ("8766" if "view" in words else "8765")
        self.place = place
        self.url = ""

    def __enter__(self) -> Self:
        words = [*self.words, "--port", "0"]
        if words[:2] == ["mtrl-gateway", "serve"] and "--replay" not in words:
            words += ["--wait", "all"]  # on a busy machine, servers may start after the page's first request
        self.process = subprocess.Popen(
            words, cwd=self.place, env=installed(), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )
        watchdog = threading.Timer(TIMEOUT_S, self.process.kill)
        watchdog.start()
        try:
            assert self.process.stdout is not None
            match = URL.search(self.process.stdout.readline())
            assert match, f"{' '.join(self.words)} printed no address"
            self.url = f"http://127.0.0.1:{match[1]}"
        except BaseException:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
            if self.process.stdout is not None:
                self.process.stdout.close()
            raise
        finally:
            watchdog.cancel()
        return self

    def __exit__(self, *raised: object) -> None:
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
            raise
        finally:
            self.process.stdout.close()
        assert code == 0, f"{' '.join(self.words)} ended with {code}"


def installed() -> dict[str, str]:
    """The environment, with this Python's commands on the PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def serves(words: list[str]) -> bool:
    if words[0] == "mtrl-gateway":
        return "serve" in words
    return words[0] == "mtrl-train" and words[1] == "view"


def _without_port(words: list[str]) -> tuple[list[str], str | None]:
    if "--port" not in words:
        return words, None
    at = words.index("--port")
    return [*words[:at], *words[at + 2 :]], words[at + 1]
