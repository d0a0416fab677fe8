"""The stand-ins for verl and ms-swift are reset around each test."""

from tests.compat_imports import fresh_compat_imports

__all__ = ["fresh_compat_imports"]
