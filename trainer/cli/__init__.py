"""The command line `mtrl-train`. Commands import heavy modules when they run, so that `--help` is fast."""

from __future__ import annotations

import sys

from gateway.plugin_commands import load_commands
from gateway.process_exit import exit_despite_threads
from trainer.cli import export_command, read_commands, rollout_commands, run_command, sft_command, train_command
from trainer.cli.options import add_plugin_options, app, find_jobs
from trainer.cli.rank_command import COMMAND_WORDS

__all__ = [
    "app", "export_command", "main", "read_commands", "rollout_commands", "run_command", "sft_command", "train_command",
]  # fmt: skip

load_commands(lambda plugin: plugin.train_commands)
app.callback(invoke_without_command=True)(add_plugin_options(train_command.train))
app.info.epilog = (
    f"A run file can set everything; the jobs that come with mtrl are examples: {', '.join(sorted(find_jobs()))}."
)


def main() -> None:
    """The entry point of `mtrl-train`."""
    COMMAND_WORDS.set(sys.argv[1:])
    with exit_despite_threads():
        app()
