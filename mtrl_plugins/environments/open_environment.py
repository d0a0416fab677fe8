"""Opens the environment that a run file names: its toolset, its stepper and its rows."""

from __future__ import annotations

from typing import cast

from gateway.toolset import Toolset
from mtrl_plugins.environments.environment_rows import read_rows
from mtrl_plugins.environments.environment_stepper import EnvironmentStepper
from mtrl_plugins.environments.environment_toolset import EnvironmentToolset
from mtrl_plugins.environments.episode_rows import make_rows
from mtrl_plugins.environments.episode_stepper import EpisodeStepper
from mtrl_plugins.environments.episode_toolset import EpisodeToolset
from mtrl_plugins.environments.host_process import get_host
from mtrl_plugins.environments.openenv_episodes import OpenEnvEpisodes
from mtrl_plugins.environments.process_episodes import ProcessEpisodes
from mtrl_plugins.environments.settings import EnvironmentSettings, EpisodeSettings, OpenEnvSettings, RunnerSettings
from trainer.data.row_media import Row
from trainer.rollout.steppers import Stepper


def make_environment_toolset(settings: EnvironmentSettings) -> Toolset:
    """The environment's tools."""
    if isinstance(settings, OpenEnvSettings):
        return EpisodeToolset(settings, OpenEnvEpisodes(settings))
    if isinstance(settings, EpisodeSettings):
        return EpisodeToolset(settings, ProcessEpisodes(get_host(settings)))
    return EnvironmentToolset(get_host(settings))


def make_environment_stepper(settings: EnvironmentSettings) -> Stepper:
    """What runs between two turns."""
    if isinstance(settings, EpisodeSettings):
        return cast(Stepper, EpisodeStepper(settings))
    return cast(Stepper, EnvironmentStepper(cast(RunnerSettings, settings)))


def find_environment_rows(settings: EnvironmentSettings, name: str) -> list[Row] | None:
    """The rows that `name` means as `data`, or None if it means a file or a data set."""
    if isinstance(settings, EpisodeSettings):
        return make_rows(settings, name)
    return read_rows(settings, name) if isinstance(settings, RunnerSettings) else None
