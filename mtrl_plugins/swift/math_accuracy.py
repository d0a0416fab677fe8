"""ms-swift's reward `accuracy`: compares answers by `math_verify`, in a process of its own."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.util import find_spec
from threading import Lock

from gateway.errors import ConfigError
from gateway.process.pipe_process import ProcessEnded
from gateway.process.request_process import RequestProcess, RequestRefused

WORKER = ("-m", "gateway.process.child_entry", "mtrl_plugins.swift.math_worker:serve")
START_S = 60.0
"""Seconds in which a new process must give its first answer; it imports `math_verify` first."""
COMPARE_S = 15.0
"""Seconds for one comparison; one that takes longer scores 0, as in ms-swift one that exceeds its own limit."""


class AnswerComparer:
    """A worker process, started when it is first needed, and again after one that had to be killed."""

    def __init__(self) -> None:
        if find_spec("math_verify") is None:
            remedy = "run `pip install 'mtrl-rl[math]'`, or name your own reward function"
            raise ConfigError("`accuracy` needs math_verify, which is not installed", remedy=remedy)
        self._lock = Lock()
        self._process: RequestProcess | None = None

    def compare(self, text: str, solution: str) -> float:
        """1 if the text's answer equals the solution, else 0."""
        with self._lock:
            process = self._process or self._start()
            reward = _request(process, text, solution, COMPARE_S)
            if reward is None:
                self.close()
            return reward or 0.0

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.stop(0.0)

    def __del__(self) -> None:
        if "_process" in self.__dict__:
            self.close()

    def _start(self) -> RequestProcess:
        """Starts the process. Raises RuntimeError if it cannot compare: that is not the policy's fault."""
        self._process = process = RequestProcess([sys.executable, *WORKER])
        if _request(process, r"\boxed{1}", "1", START_S) != 1.0:
            self.close()
            raise RuntimeError("the process that compares answers by math_verify does not work")
        return process


def _request(process: RequestProcess, text: str, solution: str, timeout_s: float) -> float | None:
    """The worker's reply; None if it gave none in time or ended."""
    with suppress(ProcessEnded, RequestRefused, TimeoutError):
        return float(process.send([text, solution]).result(timeout_s))
    return None
