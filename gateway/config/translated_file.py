"""A servers file of another MCP client in our form, as a plug-in translates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.config.environment import Loc
from gateway.errors import ConfigError


@dataclass
class TranslatedFile:
    """A servers file in our form, with what to tell of the translation."""

    tree: Any
    """The file with the keys of `ServersFile`; unchanged if it has no servers."""
    notes: list[ConfigError] = field(default_factory=list)
    """What was ignored, and what was decided."""
    origins: dict[Loc, Loc] = field(default_factory=dict)
    """Locations in the tree, each with its location in the file."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Environment variables that stand for a client's questions to its user, each with the question."""
    suggest_key: Callable[[str], str | None] = lambda key: None
    """The known key that was probably meant by one that is unknown."""

    def location_in_file(self, loc: Loc) -> Loc:
        """Where a location of the tree is in the file."""
        for length in range(len(loc), 0, -1):
            if (origin := self.origins.get(loc[:length])) is not None:
                return (*origin, *loc[length:])
        return loc
