"""Fixtures of plug-ins' tests: those of the trainer."""

from tests.trainer.conftest import model, one_thread, place, run

__all__ = ["model", "one_thread", "place", "run"]
