"""A function's hints and docstring are its schema, and nothing in them is lost."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal

import anyio
import numpy as np
import pytest
from PIL import Image as Pictures
from pydantic import BaseModel, Field

from gateway.errors import Unavailable
from gateway.native.base import ToolResponse
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.toolset import NativeToolset
from gateway.types import Context, Image, Outcome, Task, Text, ToolCall, ToolResult
from tests.drawn import png

PNG = png()


class Unit(Enum):
    CELSIUS = "c"
    KELVIN = "k"


class Place(BaseModel):
    """Somewhere."""

    city: str
    title: str = "no title"
    inside: Place | None = None


def weather(
    place: Place,
    days: Annotated[list[date], Field(min_length=1)],
    unit: Unit = Unit.CELSIUS,
    kind: Literal["short", "long"] | None = None,
) -> str:
    """Tells the weather.

    Slowly.

    Args:
        place: where
        days: which days,
            at least one

    Returns:
        A sentence.
    """
    return f"{place.city} {days[0]:%d.%m.} {unit.name} {kind}"


def quiet() -> None:
    """Says nothing."""


async def run(function: Any, arguments: str = "{}", context: Context | None = None) -> ToolResult:
    toolset = NativeToolset([FunctionTool(function)])
    async with toolset, toolset.open(Task()) as session:
        with anyio.fail_after(10):
            return await session.call(ToolCall("1", toolset.specs[0].name, arguments), context or Context())


def test_nested_optional_enumerated_and_recursive_types_survive() -> None:
    spec = FunctionTool(weather).spec
    properties = spec.parameters["properties"]
    assert spec.parameters["required"] == ["place", "days"]
    assert properties["days"]["minItems"] == 1 and properties["days"]["items"]["format"] == "date"
    assert properties["days"]["description"] == "which days,\nat least one"
    assert spec.parameters["$defs"]["Place"]["properties"]["inside"]["anyOf"][0] == {"$ref": "#/$defs/Place"}
    assert "title" in spec.parameters["$defs"]["Place"]["properties"], "a field named title is not pydantic's title"
    assert spec.parameters["$defs"]["Unit"]["enum"] == ["c", "k"]
    assert properties["kind"]["default"] is None


def test_the_docstring_is_the_description_without_its_argument_list() -> None:
    assert FunctionTool(weather).spec.description == "Tells the weather.\n\nSlowly.\n\nReturns: A sentence."


def test_a_function_without_arguments_takes_an_empty_object() -> None:
    assert FunctionTool(quiet).spec.parameters == {
        "additionalProperties": False,
        "properties": {},
        "type": "object",
    }


def test_name_description_and_schema_can_be_given_from_outside() -> None:
    spec = FunctionTool(quiet, name="hush", description="Hushes.", parameters={"type": "object"}).spec
    assert (spec.name, spec.description, spec.parameters) == ("hush", "Hushes.", {"type": "object"})


def test_an_argument_that_no_caller_can_name_is_refused() -> None:
    def positional(*words: str) -> None: ...

    with pytest.raises(TypeError, match="no name that a caller could use"):
        FunctionTool(positional)


async def test_json_arguments_become_what_the_hints_promise() -> None:
    result = await run(weather, '{"place": {"city": "Ulm"}, "days": ["2026-02-01"], "unit": "k"}')
    assert result.text == "Ulm 01.02. KELVIN None"


async def test_what_only_the_function_can_check_is_the_policys_mistake_too() -> None:
    result = await run(weather, '{"place": {"city": "Ulm"}, "days": ["the first"]}')
    assert result.outcome is Outcome.INVALID and "days.0" in result.text


async def test_a_blocking_function_runs_in_a_thread_of_its_own() -> None:
    def where() -> str:
        """Names its thread."""
        return threading.current_thread().name

    assert (await run(where)).text != threading.current_thread().name


async def test_a_function_may_take_the_sessions_context_and_report_progress() -> None:
    heard: list[tuple[float, float | None, str | None]] = []

    async def listen(done: float, total: float | None, message: str | None) -> None:
        heard.append((done, total, message))

    async def work(session: SessionContext) -> str:
        """Works."""
        await session.progress(1, 2, "half")
        return session.session_id

    result = await run(work, context=Context(progress=listen))
    assert heard == [(1, 2, "half")] and len(result.text) > 20
    assert FunctionTool(work).spec.parameters["properties"] == {}


async def test_extra_keywords_reach_a_function_that_takes_them() -> None:
    def anything(**words: int) -> dict[str, int]:
        """Takes anything."""
        return words

    assert (await run(anything, '{"a": 1}')).structured == {"a": 1}


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "parts", "structured"),
    [
        ("text", (Text("text"),), None),
        ({"a": 1}, (Text('{"a": 1}'),), {"a": 1}),
        (["é", 2], (Text('["é", 2]'),), None),
        (None, (), None),
        (Point(3), (Text('{"x": 3}'),), None),
        (Place(city="Ulm"), (Text('{"city": "Ulm", "title": "no title", "inside": null}'),), {"city": "Ulm"}),
        ([Text("a"), "b"], (Text("a"), Text("b")), None),
        (True, (Text("true"),), None),
        (np.mean([1, 2.5]), (Text("1.75"),), None),
        ({"n": np.int64(3)}, (Text('{"n": 3}'),), {"n": 3}),
        ({"chart": Image(PNG)}, (Text('{"chart": "[image 1]"}'), Image(PNG)), {"chart": "[image 1]"}),
    ],
)
async def test_whatever_a_function_returns_becomes_parts(value: Any, parts: Any, structured: Any) -> None:
    def give() -> Any:
        """Gives."""
        return value

    result = await run(give)
    assert result.parts == parts and result.outcome is Outcome.OK
    if structured:
        assert structured.items() <= result.structured.items()


async def test_a_response_with_reward_and_metrics_is_taken_apart() -> None:
    def scored() -> Any:
        """Scores."""
        return ToolResponse(text="seen", image=[Pictures.new("RGB", (2, 3))]), 0.5, {"steps": 3}

    result = await run(scored)
    assert [type(part) for part in result.parts] == [Image, Text]
    assert (result.reward, result.metrics) == (0.5, {"steps": 3})


@pytest.mark.parametrize(
    ("value", "text", "reward"),
    [
        ((np.float64(2.5), 0.5), "[2.5, 0.5]", None),
        ((np.int64(2), np.float32(0.5)), "[2, 0.5]", None),
        (("seen", np.float32(0.5)), "seen", 0.5),
        (("seen", np.int64(1), {"steps": 3}), "seen", 1.0),
        (("seen", True), '["seen", true]', None),
    ],
)
async def test_numpys_numbers_stand_at_the_places_of_others(value: Any, text: str, reward: float | None) -> None:
    def give() -> Any:
        """Gives."""
        return value

    result = await run(give)
    assert (result.text, result.reward, type(result.reward)) == (text, reward, type(reward))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no such page"), Outcome.ERROR),
        (Unavailable("database down"), Outcome.UNAVAILABLE),
        (ConnectionResetError("reset"), Outcome.UNKNOWN),
        (TimeoutError("late"), Outcome.TIMEOUT),
    ],
)
async def test_what_a_tool_raises_is_told_apart_from_the_world_failing(error: Exception, outcome: Outcome) -> None:
    def broken() -> None:
        """Breaks."""
        raise error

    result = await run(broken)
    assert result.outcome is outcome and result.text
    assert str(error) in (result.reason or "")
