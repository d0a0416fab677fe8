"""A rollout goes back to the replica that holds what it has read, its siblings to the one that holds their opening."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

SLACK = 32
"""Requests that the replica of one's own may have more than the idlest. What one server answers at once swings by
dozens, since it writes in batches: who moved at each swing would read its history again and wait no less."""
RATIO = 1.5
"""And times as many."""


class Routes:
    """Chooses among replicas by number; `counts` tells why it chose as it did, and `chosen` whom."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter({"placed": 0, "kept": 0, "crowded": 0, "lost": 0})
        self.chosen: Counter[int] = Counter()
        self._homes: dict[str, int] = {}

    def choose(self, key: str, group: str, loads: Sequence[int], up: Sequence[int]) -> int:
        """`loads` are of all replicas, `up` are those that answer. Raises ValueError where there is none."""
        idlest = min(up, key=lambda one: (loads[one], one))
        names = [name for name in (f"rollout {key}" if key else "", f"group {group}" if group else "") if name]
        known = [self._homes[name] for name in names if name in self._homes]
        home = next((one for one in known if one in up), known[0] if known else None)
        if home is None:
            why, chosen = "placed", idlest
        elif home not in up:
            why, chosen = "lost", idlest
        elif loads[home] > loads[idlest] + SLACK and loads[home] > RATIO * loads[idlest]:
            why, chosen = "crowded", idlest
        else:
            why, chosen = "kept", home
        self.counts[why] += 1
        self.chosen[chosen] += 1
        for name in names:
            if name.startswith("rollout ") or why != "kept":
                self._homes[name] = chosen
        return chosen

    @property
    def told(self) -> dict[str, float]:
        """What was counted so far; a router's own choices are not known here."""
        names = ("placed", "kept", "crowded", "lost")
        why = {f"routes/{name}": float(self.counts[name]) for name in names}
        return why | {f"routes/server_{place}": float(many) for place, many in sorted(self.chosen.items())}

    def knows(self, key: str) -> bool:
        return f"rollout {key}" in self._homes

    def forget(self) -> None:
        """With new weights, nobody holds anything that is of use."""
        self._homes.clear()
