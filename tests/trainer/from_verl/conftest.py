"""What one test may import of verl's is not the next one's."""

from tests.imported import fresh

__all__ = ["fresh"]
