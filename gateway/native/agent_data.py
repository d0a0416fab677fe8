"""What classes with the interface of verl's tools are given: keyword arguments by method, and `agent_data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from gateway.types import Task

BASE_CLASS_MODULES = ("mtrl_plugins.verl.base", "verl.tools.base_tool")
"""Modules of the base class of verl's tools: ours, or that of an installed verl."""
KWARGS_KEYS = frozenset({"create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs"})


class AgentData:
    """What the gateway knows of verl's state of a rollout. All calls of a rollout share one object."""

    def __init__(self, task: Task) -> None:
        name = {"name": task.feedback} if task.feedback else {}
        self.request_id = uuid4().hex
        self.extra_fields: dict[str, Any] = {}
        self.tools_kwargs = {tool: kwargs_by_method(row) for tool, row in task.create.items()}
        self.interaction_kwargs: dict[str, Any] = name | dict(task.feedback_args)

    def __getattr__(self, name: str) -> Any:
        available = ", ".join(vars(self))
        raise AttributeError(f"agent_data has no {name!r}, as the gateway does not see the chat; it has {available}")


def kwargs_by_method(row: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's keyword arguments in verl's form; rows in the gateway's form hold those of `create`."""
    return dict(row) if row.keys() & KWARGS_KEYS else {"create_kwargs": dict(row)}


def is_verl_tool(tool: object) -> bool:
    """Whether a tool's class was written for verl."""
    return any(base.__module__ in BASE_CLASS_MODULES for base in type(tool).__mro__)
