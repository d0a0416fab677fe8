"""Tests of the calculator MCP server in tool_configs/servers."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from mcp.server.mcpserver.exceptions import ToolError

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


@pytest.mark.parametrize("expression", REFUSED)
def test_non_arithmetic_is_refused_and_never_executed(expression: str) -> None:
    calculate = runpy.run_path(str(ROOT / "tool_configs/servers/calculator.py"))["calculate"]
    with pytest.raises(ToolError, match=re.escape(REFUSED[expression])):
        calculate(expression)
