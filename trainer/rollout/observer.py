"""What is notified of events in rollouts, such as progress displays."""

from __future__ import annotations

from typing import Protocol

from trainer.engine.base import Generation
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import Step


class RolloutObserver(Protocol):
    """Is notified of events in rollouts, as for progress displays; cannot influence them."""

    def on_state(self, key: str, state: str) -> None: ...
    def on_generation(self, key: str, generation: Generation, prompt_tokens: int) -> None: ...
    def on_step(self, key: str, step: Step, seconds: float) -> None: ...
    def on_end(self, key: str, rollout: Rollout) -> None: ...


class NullObserver:
    """An observer that does nothing."""

    def on_state(self, key: str, state: str) -> None: ...
    def on_generation(self, key: str, generation: Generation, prompt_tokens: int) -> None: ...
    def on_step(self, key: str, step: Step, seconds: float) -> None: ...
    def on_end(self, key: str, rollout: Rollout) -> None: ...
