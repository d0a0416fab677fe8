"""Starts the training of `--ranks N` again when a rank is lost, from the latest checkpoint.

The training runs as a child process, since nothing in a process is to be trusted after its ranks have lost each other.
The child's standard input is a socket: it ends with this process, and the child's heartbeats come back through it.

Not torchrun's agent, which may start ranks all the same: with torch 2.13 and two ranks it takes 2.8 s more before they
start (1.6 s of processor time, 228 MB), and waits without end for a rank that is stopped, which is killed here after
`timeout_s`. It counts every restart against the limit, not only those without a checkpoint in between.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

from gateway.process.spawn import spawn
from trainer.distributed.rank_environment import RESTARTS, detect_environment

if TYPE_CHECKING:
    from trainer.distributed.settings import DistributedSettings

SUPERVISED = "MTRL_RESTARTED_BY"
"""Set in the environment of a training that is started again when it fails; its standard input ends with its parent."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = {-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""Exit codes of a training that somebody ended."""
LOST = 1
"""The exit code of a training that another try may save; `rank_environment.py` has the other."""
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
BEAT_S = 1.0
FIRST_BEAT_S = 300.0
"""How long the first heartbeat may take, at least: imports may take minutes from a network disk."""


@dataclass
class RestartedTraining:
    """A training, and how it is started again."""

    folder: Path
    """The run's."""
    words: Sequence[str]
    """The arguments of the command that starts it."""
    flags: Sequence[str] = ()
    """Those that a resumed one has too."""
    starts: int = 0
    program: Sequence[str] = (sys.executable, "-m", "trainer.cli")

    def next_command(self, ranks: int) -> list[str]:
        """The command of the next start: first with the user's words; later ones resume the run once there is one."""
        self.starts += 1
        if self.starts == 1 or not (self.folder / "run.json").exists():
            return [*self.program, "--out", str(self.folder), *self.words]
        return [*self.program, "--resume", "--out", str(self.folder), "--ranks", str(ranks), *self.flags]

    @property
    def saved_step(self) -> int:
        """The step of the latest checkpoint."""
        return max((int(path.name) for path in (self.folder / "checkpoints").glob("[0-9]*")), default=0)


def is_restarted(settings: DistributedSettings) -> bool:
    """Whether this process should start the training as a child: not if it is that child, or another launcher's."""
    return settings.ranks > 1 and SUPERVISED not in os.environ and not detect_environment()


def run_restarted(training: RestartedTraining, settings: DistributedSettings, log: Callable[[str], None]) -> int:
    """Runs the training to its end; returns its exit code.

    Only restarts without a checkpoint in between count.
    """
    ranks, left, delay_s, step = settings.ranks, settings.restarts, FIRST_DELAY_S, training.saved_step
    while True:
        command = training.next_command(ranks)
        code = _run_child(command, training.starts - 1, settings.timeout_s, log)
        if code in STOPPED:
            return 128 - code
        if code >= 0 and code != LOST:
            return code
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if training.saved_step > step:
            step, left, delay_s = training.saved_step, settings.restarts, FIRST_DELAY_S
        if not left and (settings.restarts or code < 0):
            log(f"the training {how}, and no restarts are left: continue with --resume --out {training.folder}")
        if not left:
            return code if code > 0 else 128 - code
        left -= 1
        log(f"the training {how}; it starts again from step {step} with {ranks} ranks ({left} restarts left)")
        try:
            time.sleep(delay_s)
        except KeyboardInterrupt:
            return 130
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def _run_child(command: Sequence[str], restarts: int, timeout_s: float, log: Callable[[str], None]) -> int:
    """Runs a command whose signals this process passes on, so that it gets each once; returns its exit code.

    One that shows no sign of life for so long is killed.
    """
    beats, stdin = socket.socketpair()
    with stdin:
        environment = {**os.environ, SUPERVISED: str(os.getpid()), RESTARTS: str(restarts)}
        child = spawn(command, env=environment, stdin=stdin.fileno(), stdout=None)

    def pass_on(number: int, _: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    with beats, child, _handled(pass_on):
        if not _hear_until_end(child, beats, timeout_s):
            name = f"rank 0 ({socket.gethostname()}, process {child.pid})"
            log(f"{name} has shown no sign of life for {timeout_s:g} s: it is stopped or hangs, and is killed")
            child.kill()
        return child.wait()


def _hear_until_end(child: Popen[bytes], beats: socket.socket, timeout_s: float) -> bool:
    """Waits until the child ends; returns False once it has been silent for too long."""
    silent_s, allowed_s = 0.0, max(FIRST_BEAT_S, timeout_s)
    while child.poll() is None and silent_s <= allowed_s:
        if not select.select([beats], [], [], BEAT_S)[0]:
            silent_s += BEAT_S  # Not by a clock, which would go on while this process is stopped.
            continue
        if not beats.recv(4096):
            return True
        silent_s, allowed_s = 0.0, timeout_s
    return child.poll() is not None


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def end_with_parent() -> None:
    """Has a training that is started again end as after Ctrl-C when the process that would do so is gone.

    That process gets heartbeats from now on.
    """
    if os.environ.pop(SUPERVISED, None):
        for work in (_wait_for_end, _send_beats):
            Thread(target=work, daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _send_beats() -> None:
    with socket.socket(fileno=os.dup(0)) as parent, suppress(BrokenPipeError, ConnectionResetError):
        while True:
            with suppress(BlockingIOError):  # The parent is stopped, and has not read the earlier ones.
                parent.send(b".", socket.MSG_DONTWAIT)
            time.sleep(BEAT_S)
