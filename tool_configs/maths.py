"""A Python function as a tool."""

from __future__ import annotations


async def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b
