"""What one plug-in file registers is not the next test's."""

from tests.imported import fresh

__all__ = ["fresh"]
