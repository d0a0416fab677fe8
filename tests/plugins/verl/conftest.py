"""Resets the stand-in modules for verl around each test."""

from tests.compat_imports import fresh_compat_imports

__all__ = ["fresh_compat_imports"]
