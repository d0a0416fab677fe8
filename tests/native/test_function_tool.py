"""Tests of function tools: schema and description, arguments, and results."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import anyio
import pytest
from PIL import Image as Pillow
from pydantic import BaseModel, Field

from gateway.errors import Unavailable
from gateway.native.base import ToolResponse
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.native_toolset import NativeToolset
from gateway.schema import summarize_parameters
from gateway.types import Context, Image, Outcome, Task, Text, ToolCall, ToolResult
from tests.sample_images import png

PNG = png()


def test_further_arguments_come_in_the_order_of_the_call() -> None:
    def gather(first: int = 0, **more: int) -> None: ...

    arguments = dict.fromkeys("zyxwvutsrqponmlk", 1)
    assert [*FunctionTool(gather).bind(arguments | {"first": 2})] == ["first", *arguments]


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


async def call_function(function: Any, arguments: str = "{}", context: Context | None = None) -> ToolResult:
    toolset = NativeToolset([FunctionTool(function)])
    async with toolset, toolset.open(Task()) as session:
        with anyio.fail_after(60):
            return await session.call(ToolCall("1", toolset.specs[0].name, arguments), context or Context())


def test_the_schema_has_nested_optional_enum_and_recursive_types() -> None:
    spec = FunctionTool(weather).spec
    properties = spec.parameters["properties"]
    assert spec.description == "Tells the weather.\n\nSlowly.\n\nReturns: A sentence."
    assert spec.parameters["required"] == ["place", "days"]
    assert properties["days"]["minItems"] == 1 and properties["days"]["items"]["format"] == "date"
    assert properties["days"]["description"] == "which days,\nat least one"
    assert spec.parameters["$defs"]["Place"]["properties"]["inside"]["anyOf"][0] == {"$ref": "#/$defs/Place"}
    assert "title" in spec.parameters["$defs"]["Place"]["properties"], "a field named title is not pydantic's title"
    assert spec.parameters["$defs"]["Unit"]["enum"] == ["c", "k"]
    assert properties["kind"]["default"] is None


async def test_json_arguments_are_converted_to_the_hinted_types() -> None:
    result = await call_function(weather, '{"place": {"city": "Ulm"}, "days": ["2026-02-01"], "unit": "k"}')
    assert result.text == "Ulm 01.02. KELVIN None"


async def test_a_blocking_function_runs_in_a_worker_thread() -> None:
    def where() -> str:
        """Names its thread."""
        return threading.current_thread().name

    assert (await call_function(where)).text != threading.current_thread().name


async def test_a_function_may_take_the_session_context_and_report_progress() -> None:
    progress: list[tuple[float, float | None, str | None]] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        progress.append((done, total, message))

    async def work(session: SessionContext) -> str:
        """Works."""
        await session.progress(1, 2, "half")
        return session.session_id

    result = await call_function(work, context=Context(on_progress=on_progress))
    assert progress == [(1, 2, "half")] and len(result.text) > 20
    assert FunctionTool(work).spec.parameters["properties"] == {}


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "parts", "structured"),
    [
        ("text", (Text("text"),), None),
        ({"a": 1}, (Text('{"a": 1}'),), {"a": 1}),  # Others: tests/media.
        (["é", 2], (Text('["é", 2]'),), None),
        (None, (), None),
        (Point(3), (Text('{"x": 3}'),), None),
        ([Text("a"), "b"], (Text("a"), Text("b")), None),
    ],
)
async def test_return_values_become_parts(value: Any, parts: Any, structured: Any) -> None:
    def return_value() -> Any:
        """Gives."""
        return value

    result = await call_function(return_value)
    assert result.parts == parts and result.outcome is Outcome.OK
    if structured:
        assert structured.items() <= result.structured.items()


async def test_reward_and_metrics_are_split_from_the_response() -> None:
    def scored() -> Any:
        """Scores."""
        return ToolResponse(text="seen", image=[Pillow.new("RGB", (2, 3))]), 0.5, {"steps": 3}

    result = await call_function(scored)
    assert [type(part) for part in result.parts] == [Image, Text]
    assert (result.reward, result.metrics) == (0.5, {"steps": 3})


async def test_tuple_of_a_function_is_data_and_no_reward() -> None:
    def give() -> Any:
        """Gives."""
        return "text", 0.5, {}

    result = await call_function(give)
    assert (result.text, result.reward) == ('["text", 0.5, {}]', None)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: (number for number in range(3)), "a generator: return a list"),
        (lambda: {"a": [1.0, float("nan")]}, "the number nan"),
        (lambda: [Opaque()], "an object of type Opaque"),
    ],
)
async def test_what_cannot_be_written_is_an_error(make: Any, problem: str) -> None:
    def give() -> Any:
        """Gives."""
        return make()

    result = await call_function(give)
    assert result.outcome is Outcome.ERROR and problem in result.text


class Colour(Enum):
    RED = "red"


class Home(TypedDict):
    street: str
    number: NotRequired[int]


async def test_parameters_of_users_types_have_schemas_and_arrive_as_such() -> None:
    def use(point: Point, colour: Colour, place: Place, home: Home, homes: list[Home] | None = None) -> str:
        """Uses."""
        return f"{type(point).__name__} {colour.name} {place.city} {home['street']} {homes}"

    tool = FunctionTool(use)
    known = tool.spec.parameters["$defs"]
    assert known["Colour"]["enum"] == ["red"] and known["Home"]["required"] == ["street"]
    assert known["Point"]["properties"] == {"x": {"type": "integer"}} and "city" in known["Place"]["properties"]
    assert 'colour: "red"' in summarize_parameters(tool.spec.parameters)
    arguments = {"point": {"x": 1}, "colour": "red", "place": {"city": "Ulm"}, "home": {"street": "a"}}
    assert (await call_function(use, json.dumps(arguments))).text == "Point RED Ulm a None"


def test_parameter_without_a_schema_is_refused_by_its_name() -> None:
    def use(thing: Opaque) -> None:
        """Uses."""

    with pytest.raises(TypeError, match=r"parameter `thing: .*Opaque'?` has no JSON Schema"):
        FunctionTool(use)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("no such page"), Outcome.ERROR),
        (Unavailable("database down"), Outcome.UNAVAILABLE),
        (ConnectionResetError("reset"), Outcome.UNKNOWN),
        (TimeoutError("late"), Outcome.TIMEOUT),
    ],
)
async def test_exceptions_become_outcomes(error: Exception, outcome: Outcome) -> None:
    def broken() -> None:
        """Breaks."""
        raise error

    result = await call_function(broken)
    assert result.outcome is outcome and result.text
    assert str(error) in (result.reason or "")
