"""What success is, as the settings say of the run that a folder is, or is an evaluation of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ABOUT = "run.json"


def run_of(folder: Path) -> Path:
    """The folder that says how it was made: its own, or the one of the run whose evaluation it is."""
    return next((one for one in (folder, *folder.absolute().parents[:2]) if (one / ABOUT).exists()), folder)


def about(folder: Path) -> Mapping[str, Any]:
    """How it was made; empty as long as it has not begun."""
    try:
        read = json.loads((run_of(folder) / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


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
