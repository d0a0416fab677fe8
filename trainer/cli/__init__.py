"""The command line `mtrl-train`. Commands import heavy modules when they run, so that `--help` is fast."""

from __future__ import annotations

from gateway.process_exit import run_and_exit
from trainer.cli import (
    export_command,
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

__all__ = [
    "app",
    "export_command",
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
    run_and_exit(app)
