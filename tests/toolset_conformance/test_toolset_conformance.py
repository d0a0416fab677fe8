"""One test body over every kind of gateway: the results must be equal."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gateway.chat_messages import chat_content
from gateway.errors import SessionError
from gateway.feedback.base import BaseInteraction, Message, Turn
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.large_json import LARGE
from gateway.limits import LimitedToolset, Limits
from gateway.media.media_filter import REFUSED_METRIC
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Audio, Image, Outcome, Part, Resource, Task, Text, ToolResult, Video
from gateway.wire import to_plain
from tests.sample_images import SVG, animation, decompression_bomb, encode, plain_image, png
from tests.toolset_conformance.gateway_kinds import OpenGateway, over_mcp
from tests.toolset_conformance.sample_tools import ALL_PARTS, NOT_JSON, facts, make_call, sample_sources

SOLVED = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "#### 42"}]


def without_times(result: ToolResult) -> ToolResult:
    """A result without its times, which differ between runs."""
    return replace(result, elapsed_s=0.0, timing={})


async def test_specs_are_lossless(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway:
        specs = {spec.name: spec for spec in gateway.specs}
        assert list(specs) == [
            *("add", "several", "facts", "fails", "remember", "judge"),
            *("pure_add", "feedback_gsm8k", "feedback_scripted"),
        ]
        assert specs["add"].parameters["properties"]["b"] == {
            "type": "integer",
            "default": 0,
            "description": "the second",
        }
        assert specs["pure_add"].hints.pure and not specs["add"].hints.pure
        assert specs["feedback_gsm8k"].audience == "loop" and specs["add"].owner == "kit"


async def test_all_part_types_keep_their_order(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        assert (await session.call(make_call("several"))).parts == ALL_PARTS


async def test_all_result_fields_are_preserved(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        assert without_times(await session.call(make_call("facts"))) == await facts()


@pytest.mark.parametrize("beside", ["", "x" * 2 * LARGE], ids=["small", "large"])
async def test_values_that_json_lacks_are_the_same_everywhere_and_at_any_size(
    open_tool_gateway: OpenGateway, beside: str
) -> None:
    def odd() -> ToolResult:
        """Values that JSON lacks."""
        values = {"values": [make() for make, _ in NOT_JSON], "beside": beside}
        return ToolResult((Text("odd"),), structured=values, metrics=values, meta=values)

    def make_sources() -> list[Source]:
        return [Source("odd", NativeToolset([FunctionTool(odd)]))]

    plain = {"values": [value for _, value in NOT_JSON], "beside": beside}
    async with open_tool_gateway(make_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("odd"))
    assert [to_plain(value) for value in (result.structured, result.metrics, result.meta)] == [plain] * 3


async def test_failures_have_the_same_text(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        failed = await session.call(make_call("fails"))
        assert failed.outcome is Outcome.ERROR and "no such luck" in failed.text
        wrong = await session.call(make_call("add", '{"a": "one"}'))
        assert wrong.outcome is Outcome.INVALID and "Expected: {a: integer, b: integer (optional)}" in wrong.text
        broken = await session.call(make_call("add", '{"a": '))
        assert broken.outcome is Outcome.INVALID and "not valid JSON" in broken.text
        for arguments in ('""', "[]", "1", "null", "NaN", "[" * 50_000):
            assert (await session.call(make_call("add", arguments))).outcome is Outcome.INVALID
        unknown = await session.call(make_call("ad"))
        assert unknown.outcome is Outcome.INVALID and "There is no tool named 'ad'" in unknown.text


async def test_lone_surrogate_fails_only_its_own_call(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        calls = [make_call("add", '{"a": 1}'), make_call("add", '{"a": "\ud800"}'), make_call("add", '{"a": 2}')]
        results = await session.calls(calls)
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.INVALID, Outcome.OK]


async def test_many_calls_keep_their_order(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(sample_sources) as gateway, gateway.open() as session:
        calls = [make_call("add", f'{{"a": {place}}}', f"c{place}") for place in range(50)]
        results = await session.calls(calls)
        assert [result.text for result in results] == [str(place) for place in range(50)]
        assert await session.calls([]) == []


async def test_state_belongs_to_one_session(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway, gateway.open() as first, gateway.open() as second:
        await first.call(make_call("remember", '{"word": "a"}'))
        assert (await first.call(make_call("remember", '{"word": "b"}'))).text == '["a", "b"]'
        assert (await second.call(make_call("remember", '{"word": "c"}'))).text == '["c"]'
        assert first.id != second.id


async def test_rewards_of_calls_feedback_and_end_are_collected(open_gateway: OpenGateway) -> None:
    task = Task(create={"judge": {"first": "so"}}, feedback="gsm8k", feedback_args={"ground_truth": "42"})
    async with open_gateway(sample_sources) as gateway:
        session = await gateway.begin(task)
        result = await session.call(make_call("judge", '{"word": "good"}', "j1"))
        assert (result.text, result.reward, result.metrics) == ("so good", 0.25, {"words": 2})
        await session.feedback(SOLVED)
        assert await session.finish() == {"judge": 2.0}
        assert await session.finish() == {"judge": 2.0}
        await session.close()
        rewards = [(reward.source, reward.value, reward.kind) for reward in session.rewards]
        assert rewards == [("judge", 0.25, "call"), ("gsm8k", 1.0, "feedback"), ("judge", 2.0, "end")]


async def test_failure_to_open_a_session_is_explained(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway:
        with pytest.raises(SessionError, match=r"no tool named 'sub'; offered are: add"):
            async with gateway.open(Task(tools=("sub",))):
                pass
        with pytest.raises(SessionError, match="no interaction named 'nobody'"):
            async with gateway.open(Task(feedback="nobody")):
                pass


async def test_closed_session_refuses_calls(open_gateway: OpenGateway) -> None:
    async with open_gateway(sample_sources) as gateway:
        session = await gateway.begin(Task())
        await session.close()
        await session.close()
        with pytest.raises(SessionError, match="closed"):
            await session.call(make_call("add", '{"a": 1}'))


RED, BLUE = png(color="red"), png(color="blue")
JPEG = encode(plain_image(64, 48, "green"), "JPEG")
VIDEO = Video(animation("WEBP", duration_ms=500), "video/webp")
AUDIO = Audio(b"RIFF\0\0\0\0WAVE", "audio/wav")
MIXED: tuple[Part, ...] = (
    *(Text("first"), Image(RED), Image(BLUE), Text("two touched"), AUDIO, VIDEO, Image(RED), Text("")),
    *(Image(JPEG, "image/jpeg"), Resource("file:///a.bin", "application/octet-stream", data=b"\0")),
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "bomb": (decompression_bomb(), "[image left out: 31623x31623 pixels, more than 64000000]"),
    "svg": (SVG, "[image left out: SVG images are not supported; render it"),
}


async def mixed() -> list[Any]:
    """Returns media in every form that a tool may use."""
    uri = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    frames = [plain_image(4, 4, color) for color in ("red", "green", "blue")]
    third = np.zeros((3, 2, 3), np.uint8)
    third[:, :, 2] = 255
    return [
        *("first", plain_image(), third, {"type": "text", "text": "two touched"}, AUDIO),
        *({"type": "video", "video": frames}, {"type": "image_url", "image_url": {"url": uri}}, "", JPEG),
        Resource("file:///a.bin", "application/octet-stream", data=b"\0"),
    ]


def hostile(kind: str) -> list[Any]:
    return ["before", Image(HOSTILE[kind][0]), Image(RED), "after"]


def animated() -> list[Any]:
    return ["before", animation("GIF"), "after"]


class Pointer(BaseInteraction):
    """Responds with an image between texts."""

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        return False, ["Not this: ", plain_image(), "but", Image(decompression_bomb())], 0.5, {"kept": 1}


def media_sources() -> Sequence[Source]:
    tools = LimitedToolset(NativeToolset([FunctionTool(mixed)]), Limits())
    return [Source("native", tools), Source("feedback", FeedbackToolset({"point": Pointer({})}))]


def unchecked_sources() -> Sequence[Source]:
    """Sources like those of a third-party server, whose media is not checked."""
    return [Source("raw", NativeToolset([FunctionTool(hostile), FunctionTool(animated)]), admit=None)]


async def test_media_bytes_and_order_are_preserved(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(media_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("mixed"))
    assert (result.parts, result.metrics) == (MIXED, {})


@pytest.mark.parametrize("kind", ["bomb", "svg"])
async def test_media_of_third_party_servers_is_checked(kind: str) -> None:
    async with over_mcp(unchecked_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("hostile", f'{{"kind": "{kind}"}}'))
        began = await session.call(make_call("animated"))
    assert HOSTILE[kind][1] in result.text and result.metrics[REFUSED_METRIC] == 1
    assert Image(RED) in result.parts and result.text.startswith("before\n") and result.text.endswith("\nafter")
    assert [type(part) for part in began.parts] == [Text, Image, Text, Text]


async def test_feedback_images_keep_their_order(open_gateway: OpenGateway) -> None:
    async with open_gateway(media_sources) as gateway, gateway.open(Task(feedback="point")) as session:
        heard = await session.feedback([{"role": "assistant", "content": "this?"}])
    assert heard.parts[:3] == (Text("Not this: "), Image(RED), Text("but"))
    assert heard.message.endswith("[image left out: 31623x31623 pixels, more than 64000000]")
    assert (heard.score, heard.metadata) == (0.5, {"kept": 1, REFUSED_METRIC: 1})
    assert chat_content(heard.parts)[1]["type"] == "image_url"  # type: ignore[index, call-overload]
