"""The installed release of mtrl."""

from __future__ import annotations

import platform
import sys

DISTRIBUTION = "mtrl-rl"
"""Its name on the package index, where `mtrl` is another package."""


def installed_version() -> str:
    """The release, such as 0.1.0."""
    from importlib.metadata import version  # Slow to import, and `--help` does not need it.

    return version(DISTRIBUTION)


def print_version(wanted: bool) -> None:
    """Answers `--version`: prints the releases of mtrl and Python, and exits."""
    if wanted:
        sys.stdout.write(f"mtrl {installed_version()} (Python {platform.python_version()})\n")
        sys.exit(0)
