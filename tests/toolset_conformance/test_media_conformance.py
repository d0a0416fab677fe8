"""Media conformance: every kind of gateway returns the same bytes in the same order, and the same notes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.chat_messages import chat_content
from gateway.feedback.base import BaseInteraction, Message, Turn
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.limits import LimitedToolset, Limits
from gateway.media.media_filter import REFUSED_METRIC
from gateway.native.base import ToolResponse
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Audio, Image, Outcome, Part, Resource, Task, Text, Video
from tests.sample_images import SVG, animation, decode, decompression_bomb, encode, plain_image, png
from tests.toolset_conformance.gateway_kinds import OpenGateway, over_mcp
from tests.toolset_conformance.sample_tools import make_call

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
    "large": (RED + bytes(33 * 1024 * 1024), "bytes, more than 33554432]"),
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


def response(folder: str) -> ToolResponse:
    """Returns a ToolResponse, like tools written for verl."""
    return ToolResponse(text="look", image=[Path(folder, "a.png"), plain_image()], video=[[plain_image(4, 4)] * 2])


def hostile(kind: str) -> list[Any]:
    return ["before", Image(HOSTILE[kind][0]), Image(RED), "after"]


def animated() -> list[Any]:
    return ["before", animation("GIF"), "after"]


def many_images(count: int) -> ToolResponse:
    return ToolResponse(text=f"{count} pictures", image=[plain_image(place + 1, 1) for place in range(count)])


class Pointer(BaseInteraction):
    """Responds with an image between texts."""

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        return False, ["Not this: ", plain_image(), "but", Image(decompression_bomb())], 0.5, {"kept": 1}


TOOLS = (mixed, response, hostile, animated, many_images)


def media_sources() -> Sequence[Source]:
    tools = NativeToolset([FunctionTool(function, owner="kit") for function in TOOLS])
    return [
        Source("native", LimitedToolset(tools, Limits())),
        Source("feedback", FeedbackToolset({"point": Pointer({})})),
    ]


def unchecked_sources() -> Sequence[Source]:
    """Sources like those of a third-party server, whose media is not checked."""
    tools = NativeToolset([FunctionTool(function, owner="kit") for function in (hostile, animated)])
    return [Source("raw", tools, admit=None)]


async def test_media_bytes_and_order_are_preserved(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(media_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("mixed"))
    assert (result.parts, result.metrics) == (MIXED, {})


async def test_tool_response_becomes_images_then_videos_then_text(
    open_tool_gateway: OpenGateway, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(BLUE)
    async with open_tool_gateway(media_sources) as gateway, gateway.open() as session:
        parts = (await session.call(make_call("response", f'{{"folder": "{tmp_path}"}}'))).parts
    assert parts[:2] == (Image(BLUE), Image(RED)) and parts[3:] == (Text("look"),)
    assert isinstance(parts[2], Video) and parts[2].mime == "video/webp"


@pytest.mark.parametrize("kind", ["bomb", "large"])  # All kinds: tests/media/test_media_filter.py.
async def test_hostile_media_is_replaced_by_a_note(open_tool_gateway: OpenGateway, kind: str) -> None:
    async with open_tool_gateway(media_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("hostile", f'{{"kind": "{kind}"}}'))
    before, note, picture, after = result.parts
    assert (before, picture, after) == (Text("before"), Image(RED), Text("after"))
    assert isinstance(note, Text) and HOSTILE[kind][1] in note.text
    assert result.outcome is Outcome.OK and result.metrics == {REFUSED_METRIC: 1}


@pytest.mark.parametrize("kind", ["bomb", "svg"])
async def test_media_of_third_party_servers_is_checked(kind: str) -> None:
    async with over_mcp(unchecked_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("hostile", f'{{"kind": "{kind}"}}'))
        began = await session.call(make_call("animated"))
    assert HOSTILE[kind][1] in result.text and result.metrics[REFUSED_METRIC] == 1
    assert Image(RED) in result.parts and result.text.startswith("before\n") and result.text.endswith("\nafter")
    assert [type(part) for part in began.parts] == [Text, Image, Text, Text]


async def test_animation_becomes_its_first_frame(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(media_sources) as gateway, gateway.open() as session:
        before, picture, note, after = (await session.call(make_call("animated"))).parts
    assert isinstance(picture, Image) and decode(picture.data).getpixel((0, 0)) == (255, 0, 0)
    assert (before, note, after) == (
        Text("before"),
        Text("[the image is animated: this is its first frame]"),
        Text("after"),
    )


async def test_images_beyond_the_limit_are_noted(open_tool_gateway: OpenGateway) -> None:
    async with open_tool_gateway(media_sources) as gateway, gateway.open() as session:
        result = await session.call(make_call("many_images", '{"count": 50}'))
    *pictures, note, text = result.parts
    assert [decode(item.data).width for item in pictures if isinstance(item, Image)] == list(range(1, 17))
    assert note == Text("[34 more images left out: at most 16 of one result are shown]")
    assert text == Text("50 pictures") and result.metrics == {REFUSED_METRIC: 34}


async def test_feedback_images_keep_their_order(open_gateway: OpenGateway) -> None:
    async with open_gateway(media_sources) as gateway, gateway.open(Task(feedback="point")) as session:
        heard = await session.feedback([{"role": "assistant", "content": "this?"}])
    assert heard.parts[:3] == (Text("Not this: "), Image(RED), Text("but"))
    assert heard.message.endswith("[image left out: 31623x31623 pixels, more than 64000000]")
    assert (heard.score, heard.metadata) == (0.5, {"kept": 1, REFUSED_METRIC: 1})
    assert chat_content(heard.parts)[1]["type"] == "image_url"  # type: ignore[index, call-overload]
