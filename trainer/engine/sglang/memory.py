"""A server that ran out of memory says so in many ways; what to turn is always the same."""

from __future__ import annotations

import re

_SAID = re.compile(
    r"out of memory|MemoryError|can't allocate memory|not enough memory|bad_alloc|cudaErrorMemoryAlloc", re.I
)
REMEDY = (
    "it ran out of memory; give it less to hold (`serving: {options: [--mem-fraction-static, '0.7']}`, on a CPU"
    " `--max-total-tokens`), or less at once (`admission: {writing: 32}`)"
)


def short(words: str) -> bool:
    return _SAID.search(words) is not None


def remedied(told: str, words: str = "") -> str:
    """With what to do about it, where what it said was of memory."""
    return f"{told}\n  remedy: {REMEDY}" if short(words or told) else told
