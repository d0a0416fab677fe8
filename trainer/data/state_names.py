"""Checks the names of prepared states in rows against what servers and sandboxes have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError
from gateway.session import AnyGateway
from gateway.tool_table import OfferedTool
from trainer.data.tasks import TaskNames, count_rows
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from gateway.state.prepared_state import PreparedStates

ADD_REMEDY = (
    "give the server or sandbox `states`, a folder with a folder or archive of this name; if the column is your own,"
    " give it another name"
)
Problem = tuple[str, str]
"""A problem with a state, and its remedy."""


@dataclass(frozen=True)
class StateSource:
    """A server or sandbox whose rollouts begin from prepared states."""

    name: str
    tools: frozenset[str]
    states: PreparedStates

    def find_problem(self, state: str) -> Problem | None:
        """Why no rollout can begin from a state."""
        from gateway.state.prepared_state import StateError  # only jobs with states need it

        try:
            self.states.find(state)
        except (StateError, OSError, ValueError) as error:
            close = closest_match(state, self.states.names())
            remedy = f"did you mean {close!r}?" if close else "write one of these, or put it into that folder"
            return f"{self.name}: {error}", remedy
        return None


def check_state_names(tasks: Iterable[Task], gateway: AnyGateway) -> list[ConfigError]:
    """One error for each state in rows that a server or sandbox does not have: its first row, and how many name it.

    Nothing is said of a served gateway, which does not tell its states, and of a column `state` where there are none.
    """
    if not getattr(gateway, "sources", ()):
        return []
    sources = list(_state_sources(gateway))
    found = count_rows(tasks, lambda names: _find_problems(names, sources) if names.state else ())
    return [
        ConfigError(problem + more, file=location, field="state", remedy=remedy)
        for (problem, remedy), (location, more) in found.items()
    ]


def _state_sources(gateway: AnyGateway) -> Iterator[StateSource]:
    table: Any = getattr(gateway, "table", None)
    tools: Mapping[str, OfferedTool] = {} if table is None else table.tools
    for source in getattr(gateway, "sources", ()):
        states = getattr(source.backend, "prepared_states", None)
        if states is not None:
            names = (name for name, tool in tools.items() if tool.source is source)
            yield StateSource(source.state_name, frozenset(names), states)


def _find_problems(names: TaskNames, sources: Iterable[StateSource]) -> Iterator[Problem]:
    used = [source for source in sources if names.tools is None or source.tools & {*names.tools}]
    if not any(source.states.states for source in used):
        if names.hash_state or any(source.states.default for source in used):
            yield f"no server or sandbox has `states`, of which {names.state!r:.80} could be one", ADD_REMEDY
        return
    for source in used:
        if source.states.states and (problem := source.find_problem(names.state)):
            yield problem
