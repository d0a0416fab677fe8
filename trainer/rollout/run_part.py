"""What a plug-in does in a run: a section of the run file whose methods the core calls."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from gateway.config.base import FrozenModel
from gateway.types import EMPTY

if TYPE_CHECKING:
    from gateway.errors import ConfigError
    from gateway.session import AnyGateway
    from gateway.toolset import Toolset
    from trainer.engine.base import Engine
    from trainer.rollout.loop import RolloutRunner
    from trainer.rollout.rollout import Rollout
    from trainer.rollout.settings import BaseRolloutSettings
    from trainer.rollout.steppers import Stepper
    from trainer.rollout.task import Task
    from trainer.template import Template


class Player(Protocol):
    """Plays rollouts in its own way."""

    def wrap(self, runner: RolloutRunner) -> RolloutRunner:
        """A runner like this one, whose rollouts it plays."""
        ...

    def describe(self) -> str:
        """Its state in words, for the panel; empty if there is nothing to say."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """What happened since the last call."""
        ...


class PlayedJob(Protocol):
    """The job whose rollouts are played."""

    @property
    def settings(self) -> Any:
        """The run's settings."""
        ...

    @property
    def model(self) -> Path: ...

    @property
    def template(self) -> Template: ...


class OpenPlayer(Player, AbstractAsyncContextManager[Any], Protocol):
    """A player that is opened for the whole run."""


class RunPart(FrozenModel):
    """A section of a run file. What a plug-in does not override does nothing."""

    key: ClassVar[str]
    """The section's name."""
    brings_rows: ClassVar[bool] = False
    """Whether the tasks are its own, so that there are no rows of the user's to check."""
    has_boxes: ClassVar[bool] = False
    """Whether its tasks are played in sandboxes of their own, in which an agent's program can play them, too."""
    acts_unseen: ClassVar[bool] = False
    """Whether rollouts may act otherwise than by calls: they cannot be rehearsed, nor begun again when lost."""

    @classmethod
    def of(cls, settings: BaseRolloutSettings) -> Self | None:
        """The section of a run's settings, if the run file has it."""
        part = getattr(settings, cls.key, None)
        return part if isinstance(part, cls) else None

    @classmethod
    def prepare(cls, values: dict[str, Any], fields: Container[str]) -> dict[str, Any]:
        """The run file's values before they are validated, with defaults that follow from this section."""
        return values

    def check(self, settings: BaseRolloutSettings) -> None:
        """Raises ValueError for settings that exclude this section."""

    def describe(self) -> str:
        """What it changes about the run, in words; empty if there is nothing to say."""
        return ""

    def make_toolset(self) -> Toolset | None:
        """The tools, instead of those that the settings name."""
        return None

    def make_stepper(self) -> Stepper | None:
        """What runs between two turns, if the settings name nothing."""
        return None

    def wrap_stepper(self, stepper: Stepper) -> Stepper:
        """A stepper around the one that the settings name, or that another section makes."""
        return stepper

    def find_rows(self, name: str) -> Sequence[Mapping[str, Any]] | None:
        """The rows that `name` means as `data`; None if it means a file or a data set."""
        return None

    def record(self, *, is_on: bool) -> Callable[[Path], None] | None:
        """Records what it answers from now on, or no longer; the result is called with the tape's folder."""
        return None

    def replay(self, tape: Path) -> AbstractContextManager[None]:
        """Answers from a tape's folder in the block."""
        return nullcontext()

    def find_mistakes(self, tasks: Iterable[Task]) -> Sequence[ConfigError]:
        """What it cannot do with tasks."""
        return ()

    async def try_out(self, gateway: AnyGateway, settings: BaseRolloutSettings) -> str:
        """Tries it, for `--dry-run`; returns what it said. Raises GatewayError."""
        return ""

    def make_player(self, settings: BaseRolloutSettings) -> OpenPlayer | None:
        """What plays the rollouts; raises ConfigError if it cannot."""
        return None

    def open_player(
        self, job: PlayedJob, engine: Engine, folder: Path, log: Callable[[str], None], *, is_last: bool
    ) -> AbstractAsyncContextManager[Player | None]:
        """What plays the rollouts while an engine is up, and logs to `folder`; `is_last` is the run's last engine."""
        return nullcontext()

    def require_ready(self) -> None:
        """Raises ConfigError for what it misses on this machine."""

    def compute_metrics(self, rollouts: Iterable[Rollout]) -> Mapping[str, float]:
        """Metrics of a step's rollouts."""
        return EMPTY
