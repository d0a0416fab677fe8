"""Counts in messages, with the noun in singular or plural."""


def format_count(count: int, noun: str) -> str:
    """Such as `1 file` or `2,000 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
