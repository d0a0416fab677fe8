"""A file names its secrets and the environment holds them; what was filled in is never read again as a name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.errors import ConfigError

Loc = tuple[str | int, ...]
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
FOUND = re.compile(
    r"\$\$\{"  # a plain `${`, written so that it stays one
    rf"|\$\{{(?P<name>{NAME})(?::-(?P<default>[^}}]*))?\}}"
    rf"|\$\{{oc\.env:(?P<verl_name>{NAME})(?:,(?P<verl_default>[^}}]*))?\}}"  # the files of verl's users have this
    r"|\$\{"
)


class Expansion:
    """One reading of one file: what is missing, and which fields were filled."""

    def __init__(self, env: Mapping[str, str], file: object) -> None:
        self.env, self.file = env, file
        self.filled: dict[Loc, str] = {}
        """Field -> the variable that its value came from; such a value is never shown."""
        self.mistakes: dict[Loc, ConfigError] = {}

    def tree(self, value: Any, loc: Loc = ()) -> Any:
        """The same tree with every text expanded; keys stay as they are."""
        match value:
            case str():
                return self.text(value, loc)
            case dict():
                return {key: self.tree(item, (*loc, key)) for key, item in value.items()}
            case list():
                return [self.tree(item, (*loc, place)) for place, item in enumerate(value)]
            case _:
                return value

    def text(self, text: str, loc: Loc = ()) -> str:
        return FOUND.sub(lambda found: self._value(found, loc), text)

    def _value(self, found: re.Match[str], loc: Loc) -> str:
        if found[0] == "$${":
            return "${"
        name = found["name"] or found["verl_name"]
        if name is None:
            self._report(loc, "`${` begins no variable", "write `${NAME}` or `${NAME:-default}`; `$${` is a plain `${`")
            return ""
        default = found["default"] if found["name"] else found["verl_default"]
        self.filled[loc] = name
        value = self.env.get(name, default)
        if value is None:
            remedy = f"export {name}, or give it a default: `${{{name}:-...}}`"
            self._report(loc, f"the environment variable {name} is not set", remedy)
            return ""
        # As a shell has it: `:-` also stands in for a variable that is set to nothing.
        return value or default or ""

    def _report(self, loc: Loc, problem: str, remedy: str) -> None:
        self.mistakes[loc] = ConfigError(problem, file=self.file, field=path(loc), remedy=remedy)

    def origin(self, loc: Loc) -> str | None:
        """The variable in whose value a mistake lies, if one is."""
        return next((name for filled, name in self.filled.items() if loc[: len(filled)] == filled), None)


def path(loc: Loc) -> str:
    """`tools[2].timeout_s`."""
    return "".join(_steps(loc)).removeprefix(".")


def _steps(loc: Loc) -> Iterator[str]:
    for step in loc:
        if isinstance(step, int):
            yield f"[{step}]"
        else:
            yield f".{step}" if re.fullmatch(r"[\w$-]+", step) else f"[{step!r}]"
