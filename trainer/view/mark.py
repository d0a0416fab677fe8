"""What success is, as the settings say of the run that a folder is, or is an evaluation of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainer.run.about import about


@dataclass(frozen=True, slots=True)
class Mark:
    telling: str = ""
    """The component of the reward."""
    at: float = 1.0

    @classmethod
    def of(cls, folder: Path) -> Self:
        reward = about(folder).get("settings", {}).get("reward")
        components = (reward or {}).get("components")
        if not components:
            return cls()
        return cls(reward.get("success") or next(iter(components)), reward.get("success_at", 1.0))

    def success(self, rewards: Mapping[str, float]) -> bool | None:
        return rewards[self.telling] >= self.at if self.telling in rewards else None
