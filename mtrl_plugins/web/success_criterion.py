"""When a rollout counts as a success, from the run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainer.storage.run_files import read_run_info


@dataclass(frozen=True, slots=True)
class SuccessCriterion:
    """When a rollout counts as a success: a reward component and its threshold, from the run's settings."""

    component: str = ""
    threshold: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> Self:
        reward = read_run_info(folder).get("settings", {}).get("reward")
        components = (reward or {}).get("components")
        if not components:
            return cls()
        return cls(reward.get("success") or next(iter(components)), reward.get("success_at", 1.0))

    def is_success(self, rewards: Mapping[str, float]) -> bool | None:
        return rewards[self.component] >= self.threshold if self.component in rewards else None
