"""Tests of the `media` key in tool files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.build import build_plan
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import Image, Part, Task, Text, ToolCall
from tests.conftest import Write
from tests.sample_images import decode

MODULE = """
from PIL import Image
from gateway.native.base import ToolResponse

class Shows:
    def __init__(self, config): pass
    async def start_interaction(self, instance_id=None, **kwargs): return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, [Image.new("RGB", (100, 100)), "look"], 0.0, {}
    async def finalize_interaction(self, instance_id, **kwargs): pass

def tiles(count: int) -> ToolResponse:
    return ToolResponse(text="tiles", image=[Image.new("RGB", (100, 100), (index, 0, 0)) for index in range(count)])
"""


async def call_tool(folder: Path, name: str, **arguments: Any) -> tuple[Part, ...]:
    async with Gateway.load(folder, None) as gateway, gateway.open(Task(tools=(name,))) as session:
        return (await session.call(ToolCall("1", name, json.dumps(arguments)))).parts


def image_sizes(parts: tuple[Part, ...]) -> list[tuple[int, int]]:
    return [decode(part.data).size for part in parts if isinstance(part, Image)]


async def test_number_and_size_of_a_tools_images_follow_its_entry(write: Write) -> None:
    write("shows.py", MODULE)
    folder = write(
        "tools.yaml",
        "tools:\n"
        "  - {function: 'shows:tiles', name: few, media: {most_images: 2, max_pixels: 3136}}\n"
        "  - {function: 'shows:tiles', name: large, media: {min_pixels: 40000, factor: 32}}\n"
        "  - {function: 'shows:tiles', name: none, media: {most_pixels: 9999}}\n",
    )
    few = await call_tool(folder, "few", count=5)
    assert image_sizes(few) == [(56, 56), (56, 56)]
    assert few[2:] == (Text("[3 more images left out: at most 2 of one result are shown]"), Text("tiles"))
    assert image_sizes(await call_tool(folder, "large", count=1)) == [(224, 224)]
    assert await call_tool(folder, "none", count=1) == (
        Text("[image left out: 100x100 pixels, more than 9999]"),
        Text("tiles"),
    )


async def test_an_interactions_images_follow_its_entry(write: Write) -> None:
    write("shows.py", MODULE)
    file = write("tools.yaml", "interaction: [{name: it, class_name: shows.Shows, media: {max_pixels: 3136}}]\n")
    async with Gateway.load(file, None) as gateway, gateway.open(Task(feedback="it")) as session:
        feedback = await session.feedback([{"role": "assistant", "content": "?"}])
    assert image_sizes(feedback.parts) == [(56, 56)] and feedback.message == "look"


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ("{min_pixels: 9999, max_pixels: 999}", r"tools\[0\].media: `min_pixels` is more than `max_pixels`"),
        ("{max_pixels: 100}", r"tools\[0\].media: `max_pixels` is less than the square of `factor`"),
        ("{most_pixels: 1000000000}", r"tools\[0\].media.most_pixels"),
        ("{max_images: 3}", r"tools\[0\].media.max_images"),
        ("{animated: last}", r"tools\[0\].media.animated"),
    ],
)
def test_a_mistake_is_reported_with_its_field(write: Write, media: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(write("tools.yaml", f"tools:\n  - {{function: 'shows:tiles', media: {media}}}\n"), None)
