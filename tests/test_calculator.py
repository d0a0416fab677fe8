"""Tests of the calculator MCP server in tool_configs/servers."""

from __future__ import annotations

import json
from pathlib import Path

import anyio

from gateway.gateway import Gateway
from gateway.types import Outcome, ToolCall, ToolResult

ROOT = Path(__file__).parent.parent
REFUSED = {
    "__import__('os').system('true')": "is not arithmetic",
    "().__class__": "is not arithmetic",
    "True + 1": "is not arithmetic",
    "1 if 2 else 3": "is not arithmetic",
    "sqrt(x=4)": "is not arithmetic",
    "two plus two": "this is not an arithmetic expression",
    "(" * 400: "this is not an arithmetic expression",
    "1" + "+1" * 250: "longer than 500 characters",
    "9 ** 9 ** 9": "more than 1000 digits",
    "round(7, -1000000000)": "more than 1000 digits",
    "(-8) ** 0.5": "a root of a number below zero",
    "1 / 0": "division by zero",
}


async def calculate(folder: Path, expressions: list[str]) -> dict[str, ToolResult]:
    """Calls the shipped server over stdio."""
    servers = json.loads((ROOT / "mcp_servers.json").read_text())["mcpServers"]
    here = folder / "mcp_servers.json"
    here.write_text(json.dumps({"mcpServers": {"calculator": servers["calculator"] | {"cwd": str(ROOT)}}}))
    calls = [
        ToolCall(str(index), "calculate", json.dumps({"expression": expression}))
        for index, expression in enumerate(expressions)
    ]
    with anyio.fail_after(60):
        async with Gateway.load(None, here) as gateway, gateway.open() as session:
            return dict(zip(expressions, await session.calls(calls), strict=True))


async def test_non_arithmetic_is_refused_and_never_executed(tmp_path: Path) -> None:
    results = await calculate(tmp_path, list(REFUSED))
    for expression, reason in REFUSED.items():
        assert results[expression].outcome is Outcome.ERROR, expression
        assert reason in results[expression].text
