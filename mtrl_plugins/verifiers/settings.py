"""The settings of `environment: verifiers:PACKAGE`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from mtrl_plugins.environments.settings import RunnerSettings


class VerifiersSettings(RunnerSettings):
    """An environment of PrimeIntellect's `verifiers`: a module with `load_environment`, or with a taskset."""

    framework: ClassVar[str] = "verifiers"
    adapter: ClassVar[Path] = Path(__file__).with_name("adapter.py")
