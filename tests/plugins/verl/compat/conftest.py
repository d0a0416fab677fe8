"""Resets the stand-ins for verl's modules before each test."""

from tests.compat_imports import fresh_compat_imports

__all__ = ["fresh_compat_imports"]
