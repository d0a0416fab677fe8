"""Media conformance: every kind of gateway returns the same bytes in the same order, and the same notes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gateway.chat_messages import chat_content
from gateway.feedback.base import BaseInteraction, Message, Turn
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.limits import LimitedToolset, Limits
from gateway.media.media_filter import REFUSED_METRIC
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import Audio, Image, Part, Resource, Task, Text, Video
from tests.sample_images import SVG, animation, decompression_bomb, encode, plain_image, png
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
