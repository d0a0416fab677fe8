"""Native tools, MCP servers and feedback interactions behind one interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.gateway import Gateway as Gateway

from gateway.types import Context as Context
from gateway.types import Feedback as Feedback
from gateway.types import Outcome as Outcome
from gateway.types import Task as Task
from gateway.types import ToolCall as ToolCall
from gateway.types import ToolResult as ToolResult
from gateway.types import ToolSpec as ToolSpec


def __getattr__(name: str) -> Any:
    """Imports `Gateway` on first use, so that importing the types alone stays quick."""
    if name == "Gateway":
        from gateway.gateway import Gateway

        return Gateway
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
