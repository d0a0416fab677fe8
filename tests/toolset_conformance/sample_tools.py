"""The tools and interactions that every kind of gateway must offer in the same way."""

from __future__ import annotations

import base64
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from anyio.lowlevel import checkpoint
from pydantic import BaseModel, Field

from gateway.config.models import Limits
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.feedback.scripted import ScriptedInteraction
from gateway.limits import LimitedToolset
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.tool_table import Source
from gateway.types import Audio, Image, Outcome, Part, Resource, Text, ToolCall, ToolResult

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
ALL_PARTS: tuple[Part, ...] = (
    Text("before"),
    Image(PNG, "image/png"),
    Text("between"),
    Audio(b"RIFF\0\0\0\0WAVE", "audio/wav"),
    Resource("file:///notes.txt", "text/plain", text="a note", name="notes"),
    Resource("file:///blob.bin", "application/octet-stream", data=b"\0\xff"),
    Resource("https://example.org/far", name="far", description="only pointed at"),
    Text("after ✓"),
)


class Colour(Enum):
    RED = "red"


class Aliased(BaseModel):
    size: int = Field(1, alias="Size")


NOT_JSON: Sequence[tuple[Callable[[], Any], Any]] = (
    (lambda: datetime(2026, 1, 2, 3, 4), "2026-01-02 03:04:00"),
    (lambda: timedelta(seconds=90), "0:01:30"),
    (lambda: Colour.RED, "Colour.RED"),
    (lambda: b"bytes", "b'bytes'"),
    (lambda: deque([1, 2]), "deque([1, 2])"),
    (lambda: re.compile("a+"), "re.compile('a+')"),
    (lambda: {math.nan: 1, None: 2, (1, 2): 3, Colour.RED: 4}, {"nan": 1, "None": 2, "(1, 2)": 3, "Colour.RED": 4}),
    (lambda: iter([1, 2]), "<list_iterator object>"),
    (Aliased, {"size": 1}),
    (lambda: 1 + 2j, "(1+2j)"),
    (lambda: {3, 1}, [1, 3]),
)
"""Values that JSON lacks, and what every gateway makes of them."""


async def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    await checkpoint()  # Tools wait.
    return a + b


async def several() -> list[Part]:
    """Every kind of part."""
    return list(ALL_PARTS)


async def facts() -> ToolResult:
    """A result with all of its fields used."""
    return ToolResult(
        (Text("facts"),),
        Outcome.OK,
        reward=0.5,
        done=True,
        structured={"deep": [1, None, {"ä": 2.5}]},
        metrics={"tokens": 7},
        reason="because",
        meta={"trace": "kept"},
    )


def fails() -> None:
    """Raises."""
    raise ValueError("no such luck")


def remember(word: str, session: SessionContext) -> list[str]:
    """Remembers a word during the rollout."""
    session.state.setdefault("words", []).append(word)
    return list(session.state["words"])


class Judge(BaseTool):
    """Gives a reward for each word, and one at the end."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.words: dict[str, list[str]] = {}
        self.released: list[str] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.words[instance_id or ""] = [str(kwargs.get("first", ""))]
        return instance_id or "", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self.words[instance_id].append(parameters["word"])
        return ToolResponse(text=" ".join(self.words[instance_id])), 0.25, {"words": len(self.words[instance_id])}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(len(self.words[instance_id]))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released.append(instance_id)


JUDGE_SCHEMA = {
    "type": "function",
    "function": {
        "name": "judge",
        "description": "Judges words.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def make_judge() -> ClassTool:
    return ClassTool(Judge({}, OpenAIFunctionToolSchema.model_validate(JUDGE_SCHEMA)), owner="kit")


def sample_sources() -> Sequence[Source]:
    functions = [FunctionTool(function, owner="kit") for function in (add, several, facts, fails, remember)]
    feedback = FeedbackToolset(
        {
            "gsm8k": Gsm8kInteraction({"name": "gsm8k"}),
            "scripted": ScriptedInteraction({"name": "scripted", "replies": [{"say": "go on"}]}),
        }
    )
    return [
        Source("native", LimitedToolset(NativeToolset([*functions, make_judge()]), Limits())),
        Source(
            "pure", LimitedToolset(NativeToolset([FunctionTool(add, name="pure_add", owner="kit")]), Limits(pure=True))
        ),
        Source("feedback", feedback),
    ]


def make_call(name: str, arguments: str = "{}", id: str = "c1") -> ToolCall:
    return ToolCall(id, name, arguments)
