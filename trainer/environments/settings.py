"""Settings of an environment that runs in a host process: where its Python is, and how long it may take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from gateway.config.base import FrozenModel


class EnvironmentSettings(FrozenModel):
    """One environment of another framework. Its rows are the data, its tools the tools, its score the reward."""

    framework: ClassVar[str]
    """The name of the settings in a run file, and of the environment's rows as `data`."""
    adapter: ClassVar[Path]
    """The file that the host process loads."""

    environment: Annotated[str, Field(min_length=1)]
    """The environment's name, as its framework knows it."""
    args: dict[str, Any] = {}
    """Its arguments."""
    python: str
    """The Python that has the framework and the environment, such as `/path/to/venv/bin/python`."""
    rows: PositiveInt = 10_000
    """Rows that are read of each of its data sets; an environment may have no end."""
    reasoning: Literal["separate", "inline"] = "separate"
    """Where the environment sees the policy's reasoning: `separate` (as `reasoning_content`, which most ignore), or
    `inline` (before the answer, in `<think>` and `</think>`)."""
    start_s: PositiveFloat = 300.0
    """Seconds that it may take to load."""
    timeout_s: PositiveFloat = 120.0
    """Seconds that it may take for its part of a turn, or for a rollout's start. The reward has its own `timeout_s`."""
