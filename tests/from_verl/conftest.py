"""Each test begins where nothing of verl has been imported yet."""

from tests.imported import fresh

__all__ = ["fresh"]
