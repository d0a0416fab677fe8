"""The command `worker`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from gateway.errors import ConfigError
from trainer.cli.errors import report_errors
from trainer.cli.options import app


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
) -> None:
    """Play rollouts for a training run on another machine, which has `rollout: {listen: HOST:PORT}` in its run file.

    The token of the run must be in MTRL_WORKER_TOKEN. The worker ends with the run.
    """
    import anyio

    with report_errors(stopped=lambda: "the run begins this worker's rollouts again elsewhere"):
        from trainer.workers.line_channel import Address
        from trainer.workers.worker_process import WorkerOptions, run_worker, take_token

        try:
            address = Address.parse(connect)
        except ValueError as error:
            raise ConfigError(str(error), field="--connect", remedy="copy the address that the run prints") from None
        options = WorkerOptions(address, name or f"{socket.gethostname()}-{os.getpid()}", take_token(), model, tools)
        anyio.run(run_worker, options)
