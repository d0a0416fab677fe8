"""The installed release of mtrl."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "mtrl-rl"
"""Its name on the package index, where `mtrl` is another package."""


def installed_version() -> str:
    """The release, such as 0.1.0."""
    return version(DISTRIBUTION)
