"""The trainer on the command line. What is heavy is imported by the command that needs it, so that help is quick."""

from __future__ import annotations

from gateway.leave import leaving
from trainer.cli import moving, reading, rolling, training, viewing
from trainer.cli.options import app

__all__ = ["app", "main", "moving", "reading", "rolling", "training", "viewing"]


def main() -> None:
    leaving(app)
