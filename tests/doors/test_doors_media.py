"""Pictures, sounds and films are the same bytes in the same order through every door, and so is what is left out."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.content import content
from gateway.feedback.base import BaseInteraction, Message, Turn
from gateway.feedback.toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.limit import Limited, Limits
from gateway.media.admit import LOST
from gateway.native.base import ToolResponse
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.tape import Replay, recorded
from gateway.types import Audio, Image, Outcome, Part, Resource, Task, Text, Video
from tests.doors.kit import call
from tests.doors.ways import Door, over_mcp
from tests.drawn import SVG, bomb, moving, plain, png, saved, seen, truncated

RED, BLUE = png(color="red"), png(color="blue")
JPEG = saved(plain(64, 48, "green"), "JPEG")
FILM = Video(moving("WEBP", duration_ms=500), "video/webp")
SOUND = Audio(b"RIFF\0\0\0\0WAVE", "audio/wav")
MIXED: tuple[Part, ...] = (
    *(Text("first"), Image(RED), Image(BLUE), Text("two touched"), SOUND, FILM, Image(RED), Text("")),
    *(Image(JPEG, "image/jpeg"), Resource("file:///a.bin", "application/octet-stream", data=b"\0")),
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "bomb": (bomb(), "[image left out: 31623x31623 pixels, more than 64000000]"),
    "truncated": (truncated(), "[image left out: not a readable picture: "),
    "svg": (SVG, "[image left out: SVG is a drawing in words, not a picture of pixels; render it"),
    "html": (b"<html>", "[image left out: 6 bytes that are none of png, jpeg, webp, gif, bmp]"),
    "large": (RED + bytes(33 * 1024 * 1024), "bytes, more than 33554432]"),
}


async def mixed() -> list[Any]:
    """Media in every form that a tool may have them in."""
    uri = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    frames = [plain(4, 4, color) for color in ("red", "green", "blue")]
    third = np.zeros((3, 2, 3), np.uint8)
    third[:, :, 2] = 255
    return [
        *("first", plain(), third, {"type": "text", "text": "two touched"}, SOUND),
        *({"type": "video", "video": frames}, {"type": "image_url", "image_url": {"url": uri}}, "", JPEG),
        Resource("file:///a.bin", "application/octet-stream", data=b"\0"),
    ]


def response(folder: str) -> ToolResponse:
    """As classes written for verl answer."""
    return ToolResponse(text="look", image=[Path(folder, "a.png"), plain()], video=[[plain(4, 4)] * 2])


def hostile(kind: str) -> list[Any]:
    return ["before", Image(HOSTILE[kind][0]), Image(RED), "after"]


def animated() -> list[Any]:
    return ["before", moving("GIF"), "after"]


def album(count: int) -> ToolResponse:
    return ToolResponse(text=f"{count} pictures", image=[plain(place + 1, 1) for place in range(count)])


class Pointer(BaseInteraction):
    """Answers with a picture in its place."""

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        return False, ["Not this: ", plain(), "but", Image(bomb())], 0.5, {"kept": 1}


TOOLS = (mixed, response, hostile, animated, album)


def sources() -> Sequence[Source]:
    tools = NativeToolset([FunctionTool(function, owner="kit") for function in TOOLS])
    return [Source("native", Limited(tools, Limits())), Source("feedback", FeedbackToolset({"point": Pointer({})}))]


def raw() -> Sequence[Source]:
    """As a server that nobody of ours has looked at: whatever its tools return goes out."""
    tools = NativeToolset([FunctionTool(function, owner="kit") for function in (hostile, animated)])
    return [Source("raw", tools, admit=None)]


async def test_media_arrive_with_the_same_bytes_in_the_same_order(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        result = await session.call(call("mixed"))
    assert (result.parts, result.metrics) == (MIXED, {})


async def test_a_response_is_pictures_then_films_then_text(tool_door: Door, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(BLUE)
    async with tool_door(sources) as gateway, gateway.open() as session:
        parts = (await session.call(call("response", f'{{"folder": "{tmp_path}"}}'))).parts
    assert parts[:2] == (Image(BLUE), Image(RED)) and parts[3:] == (Text("look"),)
    assert isinstance(parts[2], Video) and parts[2].mime == "video/webp"


@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_is_hostile_is_left_out_with_a_note_and_nothing_else_is_lost(tool_door: Door, kind: str) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        result = await session.call(call("hostile", f'{{"kind": "{kind}"}}'))
    before, note, picture, after = result.parts
    assert (before, picture, after) == (Text("before"), Image(RED), Text("after"))
    assert isinstance(note, Text) and HOSTILE[kind][1] in note.text
    assert result.outcome is Outcome.OK and result.metrics == {LOST: 1}


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "large"])
async def test_what_a_server_of_others_sends_is_looked_at_here(kind: str) -> None:
    async with over_mcp(raw) as gateway, gateway.open() as session:
        result = await session.call(call("hostile", f'{{"kind": "{kind}"}}'))
        began = await session.call(call("animated"))
    assert HOSTILE[kind][1] in result.text and result.metrics[LOST] == 1
    assert Image(RED) in result.parts and result.text.startswith("before\n") and result.text.endswith("\nafter")
    assert [type(part) for part in began.parts] == [Text, Image, Text, Text]


async def test_an_animation_is_shown_as_it_begins(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        before, picture, told, after = (await session.call(call("animated"))).parts
    assert isinstance(picture, Image) and seen(picture.data).getpixel((0, 0)) == (255, 0, 0)
    assert (before, told, after) == (
        Text("before"),
        Text("[the image is animated: this is how it begins]"),
        Text("after"),
    )


async def test_of_fifty_pictures_those_beyond_the_limit_are_named(tool_door: Door) -> None:
    async with tool_door(sources) as gateway, gateway.open() as session:
        result = await session.call(call("album", '{"count": 50}'))
    *pictures, note, text = result.parts
    assert [seen(one.data).width for one in pictures if isinstance(one, Image)] == list(range(1, 17))
    assert note == Text("[34 more images left out: at most 16 of one result are shown]")
    assert text == Text("50 pictures") and result.metrics == {LOST: 34}


async def test_an_interaction_answers_with_pictures_in_their_places(door: Door) -> None:
    async with door(sources) as gateway, gateway.open(Task(feedback="point")) as session:
        heard = await session.feedback([{"role": "assistant", "content": "this?"}])
    assert heard.parts[:3] == (Text("Not this: "), Image(RED), Text("but"))
    assert heard.message.endswith("[image left out: 31623x31623 pixels, more than 64000000]")
    assert (heard.score, heard.metadata) == (0.5, {"kept": 1, LOST: 1})
    assert content(heard.parts)[1]["type"] == "image_url"  # type: ignore[index, call-overload]


async def test_a_tape_replays_the_same_bytes_in_the_same_order_and_keeps_each_once(tmp_path: Path) -> None:
    calls = [call("mixed"), call("mixed", id="c2"), call("animated", id="c3"), call("album", '{"count": 50}', "c4")]
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open() as session:
        first = [await session.call(one) for one in calls]
    async with Replay(tmp_path / "tape") as gateway, gateway.open() as session:
        again = [await session.call(one) for one in calls]
    assert [one.parts for one in again] == [one.parts for one in first] and first[0].parts == MIXED
    held = {part.data for one in first for part in one.parts if not isinstance(part, Text)}
    assert len(list((tmp_path / "tape" / "blobs").iterdir())) == len(held)
