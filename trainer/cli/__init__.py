"""The command line `mtrl-train`. Commands import heavy modules when they run, so that `--help` is fast."""

from __future__ import annotations

import sys

from gateway.process_exit import run_and_exit
from trainer.cli import (
    env_command,
    export_command,
    init_command,
    make_tasks_command,
    plan_command,
    read_commands,
    render_command,
    rollout_commands,
    serve_command,
    train_command,
    translate_command,
    worker_command,
)
from trainer.cli.options import app
from trainer.cli.restart import COMMAND_WORDS

__all__ = [
    "app",
    "env_command",
    "export_command",
    "init_command",
    "main",
    "make_tasks_command",
    "plan_command",
    "read_commands",
    "render_command",
    "rollout_commands",
    "serve_command",
    "train_command",
    "translate_command",
    "worker_command",
]


def main() -> None:
    """The entry point of `mtrl-train`."""
    COMMAND_WORDS.set(sys.argv[1:])
    run_and_exit(app)
