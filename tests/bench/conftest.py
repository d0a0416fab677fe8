"""Fixtures for tests of measurements."""

from tests.trainer.conftest import model, one_thread

__all__ = ["model", "one_thread"]
