"""Fixtures for tests of measurements."""

from tests.trainer.conftest import one_thread

__all__ = ["one_thread"]
