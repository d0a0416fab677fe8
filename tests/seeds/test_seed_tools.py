"""Tests the tool examples of the documents: native classes, media, and MCP servers over SSE and stdio with tokens."""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.media.sniff import read_image_size
from gateway.types import Image, Outcome, Text, ToolCall, Video
from tests.seeds.conftest import Lay
from tests.seeds.seed_rollouts import WAIT_S, authors, load_tasks, open_runners
from tests.servers.start_server import serve_misbehaving
from trainer.rollout.rollout import StopReason

NATIVE = """
tools:
  - class_name: "example.Counter"
    config:
        type: native
        start: 3
    tool_schema:
      type: function
      function:
        name: count
        description: Counts on.
        parameters: {type: object, properties: {by: {type: integer}}, required: [by]}
"""
COUNTER = """
from typing import Any, Optional

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id, **kwargs)
        self.counts[instance_id] = self.config["start"]
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        self.counts[instance_id] += parameters["by"]
        return ToolResponse(text=str(self.counts[instance_id])), 0.1, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.counts[instance_id]
"""


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_own_native_tool_lives_as_long_as_the_rollout(lay: Lay) -> None:
    folder = lay({"conf/tools.yaml": NATIVE, "conf/example.py": COUNTER})
    async with open_runners(folder / "conf") as ready:
        for _ in range(2):
            rollout = await ready.play(
                load_tasks({"prompt": "Count."})[0], calling("count", by=1), calling("count", by=2), "6"
            )
            answers = [str(entry.messages[0]["content"]) for entry in rollout.ledger if entry.author.value == "tool"]
            assert answers == ["4", "6"], "the second call sees the first one's count, and no other rollout's"
            assert rollout.rewards == {"call": pytest.approx(0.2), "end": 6.0}
        tool: Any = ready.gateway.sources[0].toolset
        assert _innermost(tool).tools["count"].tool.counts == {}


def _innermost(toolset: Any) -> Any:
    while not hasattr(toolset, "tools"):
        toolset = toolset.inner
    return toolset


SHOWING = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Gallery(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        from PIL import Image
        from verl.utils.dataset.vision_utils import process_image, process_video

        img1 = process_image({"image": Image.new("RGB", (100, 50), "red"), "min_pixels": 784, "max_pixels": 6272})
        video1 = process_video({"video": [Image.new("RGB", (56, 56), color) for color in ("red", "blue")]})
        return instance_id, ToolResponse(image=[img1], video=[video1], text="The gallery.")

    async def execute(self, instance_id, parameters, **kwargs):
        from PIL import Image
        from verl.utils.dataset.vision_utils import process_image, process_video

        img1 = process_image({"image": Image.new("RGB", (100, 50), "green"), "min_pixels": 784, "max_pixels": 6272})
        video1 = process_video({"video": [Image.new("RGB", (56, 56), color) for color in ("red", "blue")]})
        return ToolResponse(image=[img1], video=[video1], text="A picture and a film."), 0, {}
"""
GALLERY = """
tools:
  - class_name: gallery.Gallery
    config: {type: native}
    tool_schema:
      {type: function, function: {name: look, description: d, parameters: {type: object, properties: {}}}}
"""


async def test_tool_returns_preprocessed_images_and_videos(lay: Lay) -> None:
    folder = lay({"conf/gallery.yaml": GALLERY, "conf/gallery.py": SHOWING})
    with anyio.fail_after(WAIT_S):
        async with Gateway.load(folder / "conf", None) as gateway, gateway.open() as session:
            first = await session.call(ToolCall("1", "look", "{}"))
            second = await session.call(ToolCall("2", "look", "{}"))
    assert first.outcome is second.outcome is Outcome.OK
    kinds = [type(part) for part in second.parts]
    assert kinds == [Image, Video, Text] and second.text == "A picture and a film."
    assert [read_image_size(part.data) for part in second.parts if isinstance(part, Image)] == [(112, 56)], (
        "multiples of 28"
    )
    assert [type(part) for part in first.parts] == kinds * 2, "what `create` showed comes with the first result"
    assert first.text.split("\n") == ["The gallery.", "A picture and a film."]


READS_ENVIRONMENT = """
import json
import os
import sys

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    method, params = asked["method"], asked.get("params") or {}
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "keyed", "version": "0.2.1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "key", "inputSchema": {"type": "object", "properties": {}}}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": os.environ["SERVER_API_KEY"] + " " + " ".join(sys.argv[1:])}]}
    else:
        error = {"code": -32601, "message": "no such method"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
MCP = """
tools:
  - class_name: "{kind}"
    config:
        type: mcp
    mcp:
        mcp_servers_config_path: ./mcp_server.json
{selected}
"""
TOKEN = "your_server_api_token"
SELECTED = ["", "        tool_selected_list: {}", "        tool_selected_list: [key, echo]"]


def _servers(url: str) -> str:
    stdio = {
        "command": sys.executable,
        "args": ["server.py", "server-mcp@0.2.1"],
        "env": {"SERVER_API_KEY": TOKEN},
    }
    return json.dumps({"mcpServers": {"SSE Server": {"url": url, "auth_token": TOKEN}, "STDIO Server": stdio}})


@pytest.fixture
async def sse() -> Any:
    """A real SSE server that needs a token."""
    async with serve_misbehaving("sse", "--require-token", TOKEN) as url:
        yield url


async def test_mcp_servers_over_sse_and_stdio_work_as_documented(sse: str, lay: Lay) -> None:
    folder = lay({"server.py": READS_ENVIRONMENT, "conf/mcp_server.json": _servers(sse)})
    offered: list[set[str]] = []
    for selected in SELECTED:
        lay({"conf/mcp_tool_config.yaml": MCP.format(kind="", selected=selected)})
        with anyio.fail_after(WAIT_S):
            async with Gateway.load(folder / "conf", None) as gateway, gateway.open() as session:
                offered.append({spec.name for spec in session.specs})
                keyed = await session.call(ToolCall("1", "key", "{}"))
                echoed = await session.call(ToolCall("2", "echo", '{"text": "hello"}'))
        assert keyed.text == f"{TOKEN} server-mcp@0.2.1", "its environment and its arguments are its own"
        assert echoed.outcome is Outcome.OK and "hello" in echoed.text
    assert offered[0] == offered[1] > offered[2] == {"key", "echo"}


READING = """
from typing import Tuple

from verl.tools.mcp_base_tool import MCPBaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema


class MCPYourTool(MCPBaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)

    def _parse_tool_result(self, content: list) -> Tuple[str, dict]:
        texts = [part.text for part in content if part.type == "text"]
        return " | ".join(texts).upper(), {"parts": len(texts)}
"""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("reading.MCPYourTool", f"{TOKEN} server-mcp@0.2.1".upper()),
        ("verl.tools.mcp_search_tool.MCPSearchTool", ""),  # It keeps nothing but `results`, which this answer lacks.
    ],
)
async def test_result_is_parsed_by_the_configured_class(kind: str, text: str, lay: Lay) -> None:
    servers = json.loads(_servers("http://127.0.0.1:9/sse"))
    del servers["mcpServers"]["SSE Server"]
    folder = lay({
        "server.py": READS_ENVIRONMENT, "conf/mcp_server.json": json.dumps(servers), "conf/reading.py": READING,
        "conf/mcp_tool_config.yaml": MCP.format(kind=kind, selected=""),
    })  # fmt: skip
    async with open_runners(folder / "conf") as ready:
        rollout = await ready.play(load_tasks({"prompt": "The key?"})[0], calling("key"), "Thanks.")
    assert authors(rollout) == ["task", "policy", "tool", "policy"] and rollout.stop is StopReason.DONE
    assert rollout.ledger.messages[2]["content"] == text
