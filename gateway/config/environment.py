"""Expands environment variables in configuration files: `${NAME}`, `${NAME:-default}` and verl's `${oc.env:NAME}`.

Expanded values are not expanded again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.errors import ConfigError

Loc = tuple[str | int, ...]
NAME = r"[A-Za-z_][A-Za-z0-9_]*"
VARIABLE_PATTERN = re.compile(
    r"\$\$\{"  # an escaped `${`
    rf"|\$\{{(?P<name>{NAME})(?::-(?P<default>[^}}]*))?\}}"
    rf"|\$\{{oc\.env:(?P<verl_name>{NAME})(?:,(?P<verl_default>[^}}]*))?\}}"  # OmegaConf's form, in verl's files
    r"|\$\{"
)

ROLLOUT_NAMES = ("MTRL_ROLLOUT_DIR", "MTRL_ROLLOUT_ID", "MTRL_SEED")
"""Variables with a value for each rollout (`rollout_variables.py`)."""
_START_FIELDS = ("command", "args", "env", "cwd")
"""What a server of a servers file is started with."""


class Expansion:
    """Expands one file; records missing variables and which fields were filled."""

    def __init__(
        self,
        env: Mapping[str, str],
        file: object,
        *,
        questions: Mapping[str, str] | None = None,
        location_in_file: Callable[[Loc], Loc] = lambda loc: loc,
    ) -> None:
        self.env, self.file = env, file
        self.questions = questions or {}
        """Variables that stand for what another client asks its user, each with the question."""
        self.location_in_file = location_in_file
        """Finds where a location of the tree is in the file, if keys were translated."""
        self.suggest_key: Callable[[str], str | None] = lambda key: None
        """The known key that was probably meant by an unknown one of a server."""
        self.filled: dict[Loc, str] = {}
        """The variable of each filled field; such values are never shown in messages."""
        self.errors: dict[Loc, ConfigError] = {}

    def expand_tree(self, value: Any, loc: Loc = ()) -> Any:
        """The tree with every string expanded; keys are unchanged."""
        match value:
            case str():
                return self.expand_text(value, loc)
            case dict():
                return {key: self.expand_tree(item, (*loc, key)) for key, item in value.items()}
            case list():
                return [self.expand_tree(item, (*loc, place)) for place, item in enumerate(value)]
            case _:
                return value

    def expand_text(self, text: str, loc: Loc = ()) -> str:
        return VARIABLE_PATTERN.sub(lambda match: self._resolve(match, loc), text)

    def _resolve(self, match: re.Match[str], loc: Loc) -> str:
        if match[0] == "$${":
            return "${"
        name = match["name"] or match["verl_name"]
        if name is None:
            self._add_error(
                loc, "`${` does not begin a variable", "write `${NAME}` or `${NAME:-default}`; `$${` is a plain `${`"
            )
            return ""
        default = match["default"] if match["name"] else match["verl_default"]
        is_start_field = len(loc) >= 3 and isinstance(loc[1], str) and loc[2] in _START_FIELDS
        if name in ROLLOUT_NAMES and is_start_field:
            return match[0]  # Known when a rollout's process starts.
        self.filled[loc] = name
        value = self.env.get(name, default)
        if value is None and name in ROLLOUT_NAMES:
            problem = f"`${{{name}}}` has a value only where a rollout's own process is started"
            remedy = "use it in `command`, `args`, `env` or `cwd` of a server with `isolation: process`"
            self._add_error(loc, problem, remedy)
        elif value is None:
            question = f", the answer to {self.questions[name]}" if name in self.questions else ""
            remedy = f"export {name}{question}, or give it a default: `${{{name}:-...}}`"
            self._add_error(loc, f"the environment variable {name} is not set", remedy)
            return ""
        # As in a shell, the default of `:-` also replaces an empty value.
        return value or default or ""

    def _add_error(self, loc: Loc, problem: str, remedy: str) -> None:
        field = format_loc(self.location_in_file(loc))
        self.errors[loc] = ConfigError(problem, file=self.file, field=field, remedy=remedy)

    def variable_at(self, loc: Loc) -> str | None:
        """The variable from which the value at a location came, if any."""
        return next((name for filled, name in self.filled.items() if loc[: len(filled)] == filled), None)


def format_loc(loc: Loc) -> str:
    """Formats a location as `tools[2].timeout_s`."""
    return "".join(_format_steps(loc)).removeprefix(".")


def _format_steps(loc: Loc) -> Iterator[str]:
    for step in loc:
        if isinstance(step, int):
            yield f"[{step}]"
        else:
            yield f".{step}" if re.fullmatch(r"[\w$-]+", step) else f"[{step!r}]"
