"""verl 0.7 hands a tool the state of the rollout that calls it; of that, this is what a gateway knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from gateway.types import Task

BASES = ("gateway.verl.base", "verl.tools.base_tool")
"""Where the base class of such a tool stands: ours, or that of an installed verl."""
METHODS = frozenset({"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"})


class AgentData:
    """The same object at each call, so that what a tool keeps here is there for the next one, and for other tools."""

    def __init__(self, task: Task) -> None:
        named = {"name": task.feedback} if task.feedback else {}
        self.request_id = uuid4().hex
        self.extra_fields: dict[str, Any] = {}
        self.tools_kwargs = {tool: by_method(row) for tool, row in task.create.items()}
        self.interaction_kwargs: dict[str, Any] = named | dict(task.feedback_args)

    def __getattr__(self, name: str) -> Any:
        there = ", ".join(vars(self))
        raise AttributeError(f"agent_data has no {name!r} here, as a gateway does not see the chat; it has {there}")


def by_method(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rows written for verl say by method what a tool is given; others say what `create` is."""
    return dict(row) if row.keys() & METHODS else {"create_kwargs": dict(row)}


def hears(tool: object) -> bool:
    """Whether its class was written for verl."""
    return any(kind.__module__ in BASES for kind in type(tool).__mro__)
