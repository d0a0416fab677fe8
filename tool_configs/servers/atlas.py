"""An MCP server over HTTP: a small atlas. Start it with `make atlas` or `python tool_configs/servers/atlas.py`."""

from __future__ import annotations

import argparse
import math

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

CITIES = {
    "berlin": (52.52, 13.40, 3_669_000),
    "cairo": (30.04, 31.24, 10_100_000),
    "lima": (-12.05, -77.04, 10_092_000),
    "nairobi": (-1.29, 36.82, 4_397_000),
    "oslo": (59.91, 10.75, 709_000),
    "quito": (-0.18, -78.47, 2_011_000),
    "tokyo": (35.68, 139.69, 13_960_000),
}
EARTH_KM = 6371.0
READ_ONLY = ToolAnnotations(read_only_hint=True, idempotent_hint=True)

server = MCPServer("atlas", instructions="Places and distances of seven cities.")


def _find(city: str) -> tuple[float, float, int]:
    try:
        return CITIES[city.strip().lower()]
    except KeyError:
        raise ToolError(f"{city} is not in the atlas; it has {', '.join(CITIES)}") from None


@server.tool(annotations=READ_ONLY)
def population(city: str) -> int:
    """How many people live in a city."""
    return _find(city)[2]


@server.tool(annotations=READ_ONLY)
def distance_km(one: str, other: str) -> float:
    """The distance between two cities along the ground, in kilometres."""
    (lat_a, lon_a, _), (lat_b, lon_b, _) = _find(one), _find(other)
    a, b, across = math.radians(lat_a), math.radians(lat_b), math.radians(lon_b - lon_a)
    cosine = math.sin(a) * math.sin(b) + math.cos(a) * math.cos(b) * math.cos(across)
    return round(EARTH_KM * math.acos(max(-1.0, min(1.0, cosine))), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("streamable-http", "sse"), default="streamable-http")
    parser.add_argument("--port", type=int, default=8931)
    arguments = parser.parse_args()
    server.run(arguments.transport, host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
