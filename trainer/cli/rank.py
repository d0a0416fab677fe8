"""The command line of a rank that torchrun or srun started beside rank 0: it prints nothing, and follows rank 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.errors import GatewayError
from trainer.distributed.rank_environment import detect_environment

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings


def is_other_rank() -> bool:
    """Whether a launcher started this process as another rank than 0."""
    environment = detect_environment()
    return environment is not None and environment.rank > 0


def follow_rank_0(load: Callable[[], tuple[TrainSettings, str]]) -> int:
    """Runs this rank; returns its exit code. Rank 0 reports what is wrong with this rank's settings."""
    from trainer.distributed.follow import follow
    from trainer.distributed.settings import DistributedSettings

    environment = detect_environment()
    if environment is None:
        return 2
    try:
        settings, _ = load()
    except GatewayError as error:
        return follow(environment, DistributedSettings(), None, str(error))
    return follow(environment, settings.distributed, settings.model_dump(mode="json"))
