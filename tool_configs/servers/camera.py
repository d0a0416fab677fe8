"""An MCP server over stdio that returns images: the room behind a window of a house."""

from __future__ import annotations

import argparse
import base64
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, ToolAnnotations
from pydantic import Field

from mtrl_plugins.demo.sight.house import WINDOWS, draw_inside

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--show", choices=("house", "nothing", "neighbour"), default="house")
server = MCPServer("camera", instructions="Looks through windows.")


@server.tool(annotations=ToolAnnotations(read_only_hint=True, idempotent_hint=True), structured_output=False)
def zoom(
    house: Annotated[str, Field(description="the house's name")],
    window: Annotated[str, Field(description=f"one of {', '.join(WINDOWS)}")],
) -> ImageContent:
    """A picture of the room behind a window."""
    try:
        image = draw_inside(house, window, arguments.show)
    except ValueError as error:
        raise ToolError(str(error)) from error
    return ImageContent(type="image", data=base64.b64encode(image).decode(), mime_type="image/png")


if __name__ == "__main__":
    arguments = parser.parse_args()
    server.run("stdio")
