"""What a worker is told when it connects: the settings of the run's rollouts, its model, and the engine's limits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.config.base import FrozenModel
from trainer.engine.base import Capabilities
from trainer.rollout.settings import BaseRolloutSettings


class PlayedSettings(BaseRolloutSettings):
    """The settings of rollouts, as workers read them; rows come with each rollout."""

    data: str = ""


class EngineLimits(FrozenModel):
    """The capabilities of the training process's engine."""

    name: str
    is_exact: bool
    supports_images: bool
    context_length: int
    notes: tuple[str, ...]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(**dict(self))


class WorkerJob(FrozenModel):
    """All that a worker needs to open its gateway, template and stepper."""

    settings: PlayedSettings
    model: Path
    kind_column: str
    engine: EngineLimits
    silent_s: float
    """How long either side may be silent."""

    def to_plain(self) -> dict[str, Any]:
        """The job as JSON."""
        return self.model_dump(mode="json")


def make_worker_job(
    settings: BaseRolloutSettings, model: Path, kind_column: str, capabilities: Capabilities, silent_s: float
) -> WorkerJob:
    """The job of a run's workers."""
    content = {name: getattr(settings, name) for name in BaseRolloutSettings.model_fields}
    return WorkerJob(
        settings=PlayedSettings.model_validate(content),
        model=model,
        kind_column=kind_column,
        engine=EngineLimits(**asdict(capabilities)),
        silent_s=silent_s,
    )
