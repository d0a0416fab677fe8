"""The command `worker`."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import app

if TYPE_CHECKING:
    from mtrl_plugins.workers.worker_process import WorkerOptions

PAUSE_S = 5.0
"""Before a worker begins anew: one that is lost again and again should not take a core."""


@app.command()
def worker(
    connect: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the training process listens.")],
    name: Annotated[str | None, typer.Option(help="The worker's name in messages. Default: host and process")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The model's folder here, if the run's is not on this machine.")
    ] = None,
    tools: Annotated[
        str | None, typer.Option(metavar="DIR|URL", help="The tools here, if the run's are not on this machine.")
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long to wait for a training process that is away.")
    ] = 300.0,
) -> None:
    """Play rollouts for a training run on another machine, which has `rollout: {listen: HOST:PORT}` in its run file.

    The token of the run must be in MTRL_WORKER_TOKEN. The worker may be started before the run, and ends with it. If
    the training process is lost, the worker waits for it, and begins anew when it is back.
    """
    import anyio

    with report_errors(stopped=lambda: "the run begins this worker's rollouts again elsewhere"):
        from mtrl_plugins.workers.line_channel import Address
        from mtrl_plugins.workers.worker_process import TrainerLostError, WorkerOptions, run_worker, take_token

        try:
            address = Address.parse(connect)
        except ValueError as error:
            raise ConfigError(str(error), field="--connect", remedy="copy the address that the run prints") from None
        name = name or f"{socket.gethostname()}-{os.getpid()}"
        options = WorkerOptions(address, name, take_token(), model, tools, wait)
        try:
            anyio.run(run_worker, options, _tell)
        except TrainerLostError as error:
            if not wait:
                raise
            _tell(f"{error.problem}; it is waited for")
            _restart(options)


def _tell(text: str) -> None:
    sys.stderr.write(f"mtrl-train: {text}\n")
    sys.stderr.flush()


def _restart(options: WorkerOptions) -> None:
    """Replaces this process by a new worker, which has imported nothing of the user's tools yet."""
    from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE

    time.sleep(PAUSE_S)
    words = ["--connect", str(options.address), "--name", options.name, "--wait", str(options.wait_s)]
    for option, value in (("--model", options.model), ("--tools", options.tools)):
        words += [option, str(value)] if value is not None else []
    environment = {**os.environ, TOKEN_VARIABLE: options.token}
    os.execve(sys.executable, [sys.executable, "-m", "trainer.cli", "worker", *words], environment)  # noqa: S606 - no shell
