"""What a policy is shown is said in the files, for each tool, server and interaction; and what is amiss is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.build import plan
from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.types import Image, Part, Task, Text, ToolCall
from tests.drawn import seen
from tests.servers.start import stdio_command

MODULE = """
import numpy as np
from PIL import Image
from gateway.native.base import BaseTool, ToolResponse

def tiles(count: int) -> ToolResponse:
    return ToolResponse(text="tiles", image=[Image.new("RGB", (100, 100), (place, 0, 0)) for place in range(count)])

def film() -> ToolResponse:
    frames = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((6, 30, 30, 3), np.uint8)
    return ToolResponse(video=[frames])

class Shows:
    def __init__(self, config): pass
    async def start_interaction(self, instance_id=None, **kwargs): return instance_id
    async def generate_response(self, instance_id, messages, **kwargs):
        return False, [Image.new("RGB", (100, 100)), "look"], 0.0, {}
    async def calculate_score(self): return 0.0
    async def finalize_interaction(self): pass
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shows", raising=False)

    def write(text: str) -> Path:
        (tmp_path / "shows.py").write_text(MODULE)
        (tmp_path / "tools.yaml").write_text(text)
        return tmp_path

    return write


async def answer(folder: Path, name: str, servers: Path | None = None, **arguments: Any) -> tuple[Part, ...]:
    made = plan(folder, servers)
    async with Gateway(made.sources, services=made.services) as gateway, gateway.open(Task(tools=(name,))) as session:
        return (await session.call(ToolCall("1", name, json.dumps(arguments)))).parts


def sizes(parts: tuple[Part, ...]) -> list[tuple[int, int]]:
    return [seen(part.data).size for part in parts if isinstance(part, Image)]


async def test_a_tools_pictures_are_as_many_and_as_large_as_its_entry_says(write: Callable[[str], Path]) -> None:
    folder = write(
        "tools:\n"
        "  - {function: 'shows:tiles', name: few, media: {most_images: 2, max_pixels: 3136}}\n"
        "  - {function: 'shows:tiles', name: large, media: {min_pixels: 40000, factor: 32}}\n"
        "  - {function: 'shows:tiles', name: none, media: {most_pixels: 9999}}\n"
    )
    few = await answer(folder, "few", count=5)
    assert sizes(few) == [(56, 56), (56, 56)]
    assert few[2:] == (Text("[3 more images left out: at most 2 of one result are shown]"), Text("tiles"))
    assert sizes(await answer(folder, "large", count=1)) == [(224, 224)]
    assert await answer(folder, "none", count=1) == (
        Text("[image left out: 100x100 pixels, more than 9999]"),
        Text("tiles"),
    )


async def test_a_tools_film_is_shown_as_pictures_where_its_entry_says_so(write: Callable[[str], Path]) -> None:
    folder = write("tools:\n  - {function: 'shows:film', media: {films: frames, fps: 1, max_frames: 3}}\n")
    told, *pictures = await answer(folder, "film")
    assert told == Text("[a film of 3 s: 3 of its 6 frames, evenly spread]")
    assert [seen(one.data).getpixel((0, 0)) for one in pictures if isinstance(one, Image)] == [
        *((0, 0, 0), (2, 2, 2), (5, 5, 5))
    ]


async def test_a_servers_pictures_are_as_its_entry_says(write: Callable[[str], Path]) -> None:
    folder = write("tools:\n  - {server: it, allow: [image], media: {max_pixels: 3136, most_pixels: 10000}}\n")
    command, args = stdio_command()
    servers = folder / "mcp_servers.json"
    servers.write_text(json.dumps({"mcpServers": {"it": {"command": command, "args": list(args)}}}))
    assert sizes(await answer(folder, "image", servers, width=99, height=99)) == [(56, 56)]
    (note,) = await answer(folder, "image", servers, width=3000, height=3000)
    assert note == Text("[image left out: 3000x3000 pixels, more than 10000]")


async def test_an_interactions_pictures_are_as_its_entry_says(write: Callable[[str], Path]) -> None:
    folder = write("interaction:\n  - {name: shows, class_name: shows.Shows, media: {max_pixels: 3136}}\n")
    made = plan(folder, None)
    async with Gateway(made.sources, services=made.services) as gateway, gateway.open(Task(feedback="shows")) as one:
        heard = await one.feedback([{"role": "assistant", "content": "?"}])
    assert sizes(heard.parts) == [(56, 56)] and heard.message == "look"


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ("{min_pixels: 9999, max_pixels: 999}", r"tools\[0\].media: `min_pixels` is more than `max_pixels`"),
        ("{max_pixels: 100}", r"tools\[0\].media: `max_pixels` is less than a square of `factor`"),
        ("{most_pixels: 1000000000}", r"tools\[0\].media.most_pixels"),
        ("{max_images: 3}", r"tools\[0\].media.max_images"),
        ("{animated: last}", r"tools\[0\].media.animated"),
    ],
)
def test_what_is_amiss_is_told_with_its_field(write: Callable[[str], Path], media: str, words: str) -> None:
    folder = write(f"tools:\n  - {{function: 'shows:tiles', media: {media}}}\n")
    with pytest.raises(ConfigError, match=words):
        plan(folder, None)
