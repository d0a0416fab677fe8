"""The run file's `rollout:`: how many rollout workers there are, and where they connect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, PositiveFloat

from trainer.rollout.run_part import PlayedJob, Player, RunPart

if TYPE_CHECKING:
    from gateway.errors import ConfigError
    from trainer.engine.base import Engine
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.task import Task


def _validate_address(value: str | None) -> str | None:
    host, _, port = (value or "").rpartition(":")
    if value is not None and (not host or not port.isdecimal() or int(port) > 65535):
        raise ValueError("should be host:port, such as 10.0.0.1:8790")
    return value


class WorkerSettings(RunPart):
    """Rollout workers: processes that play rollouts with tools of their own. The training process keeps the engine,
    admission and training."""

    key: ClassVar[str] = "rollout"

    workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Workers to start on this machine, of a cluster job that of rank 0; 0 plays rollouts in the training process."""
    listen: Annotated[str | None, AfterValidator(_validate_address)] = None
    """`host:port` for workers on other machines, which `mtrl-train worker --connect HOST:PORT` starts. Both sides need
    the same token in the environment variable MTRL_WORKER_TOKEN."""
    heartbeat_timeout_s: PositiveFloat = 60.0
    """Seconds without a sign of life after which a worker counts as lost, and is killed."""
    wait_s: PositiveFloat = 300.0
    """Seconds for which workers may start, and for which rollouts wait for one if all are lost."""

    @property
    def is_used(self) -> bool:
        """Whether workers play the rollouts."""
        return self.workers > 0 or self.listen is not None

    @classmethod
    def read(cls, settings: BaseRolloutSettings) -> WorkerSettings:
        """Those of a run, or the defaults."""
        return cls.of(settings) or cls()

    def check(self, settings: BaseRolloutSettings) -> None:
        if not self.is_used:
            return
        if getattr(settings, "objects", ()):
            raise ValueError("`rollout` and Python objects exclude each other: workers load everything by its name")
        if settings.record:
            raise ValueError("`rollout` and `record` exclude each other: leave `record` out, or `rollout`")

    def describe(self) -> str:
        own = f"{self.workers} worker processes on this machine" if self.workers else ""
        others = f"workers of other machines that connect to {self.listen}" if self.listen else ""
        played = f"rollouts are played by {' and '.join(filter(None, (own, others)))}; each opens the tools itself"
        return played if self.is_used else ""

    def require_ready(self) -> None:
        from mtrl_plugins.workers.worker_pool import read_worker_token

        read_worker_token(self)

    def find_mistakes(self, tasks: Iterable[Task]) -> Sequence[ConfigError]:
        from mtrl_plugins.workers.messages import find_unsendable_values

        return find_unsendable_values(tasks) if self.is_used else ()

    @asynccontextmanager
    async def open_player(
        self, job: PlayedJob, engine: Engine, folder: Path, log: Callable[[str], None], *, is_last: bool
    ) -> AsyncIterator[Player | None]:
        """The workers; those of other machines end with the part of the run that `is_last`."""
        if not self.is_used:
            yield None
            return
        from mtrl_plugins.workers.worker_job import make_worker_job
        from mtrl_plugins.workers.worker_pool import WorkerPool

        settings = job.settings
        about = make_worker_job(settings, job.model, job.template, engine, self.heartbeat_timeout_s)
        acts_unseen = settings.stepper is not None or any(part.acts_unseen for part in settings.parts)
        async with WorkerPool(self, about, engine, folder, log, is_last=is_last, acts_unseen=acts_unseen) as pool:
            log(f"rollouts are played by rollout workers: {pool.describe()}")
            yield pool
