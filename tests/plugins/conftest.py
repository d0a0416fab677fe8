"""Fixtures of plug-ins' tests: those of the trainer."""

from tests.trainer.conftest import anyio_backend, model, one_thread, place, run

__all__ = ["anyio_backend", "model", "one_thread", "place", "run"]
