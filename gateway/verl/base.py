"""The base classes of verl 0.7: those of the gateway, with the answers that verl's own methods gave.

A class may be used without overriding a method, and its `super()` calls work, with and without an instance's id.
"""

from __future__ import annotations

from typing import Any

from gateway.feedback import base as feedback
from gateway.native import base as native
from gateway.native.base import ToolResponse

ACCEPTABLE = "Your current result seems acceptable."
SCORE = 0.8
UPDATED = "Updated the tool state."


class BaseInteraction(feedback.BaseInteraction):
    """An interaction that says nothing of its own finds every turn acceptable."""

    async def generate_response(
        self, instance_id: str, messages: list[feedback.Message], **kwargs: Any
    ) -> feedback.Turn:
        return False, ACCEPTABLE, SCORE, {}

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Nothing is held."""


class BaseTool(native.BaseTool):
    """A tool that says nothing of its own answers that its state was updated."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=UPDATED), 0.0, {}
