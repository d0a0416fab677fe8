"""Settings of training with several ranks."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from gateway.config.base import FrozenModel


class DistributedSettings(FrozenModel):
    """Training on several GPUs: processes (ranks) that share the model's weights, gradients and optimizer."""

    ranks: PositiveInt = 1
    """Processes that train together on this machine, each on its own GPU if there are any; or `--ranks N`. Under
    torchrun and srun their environment counts instead. A run may be resumed with another number."""
    shard: PositiveInt | None = None
    """Ranks that one copy of the weights is split over; by default all of them. With fewer, such as the GPUs of a
    machine, every group of so many ranks has a copy, and only gradients travel between groups."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that ranks wait for each other before the run ends with the name of the rank that is late."""
