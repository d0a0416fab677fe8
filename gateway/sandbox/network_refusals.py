"""Tells the policy, and the metrics of a call, which connections the proxy of its sandbox refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.types import Text, ToolResult

METRIC = "network_refused"


def add_refusals(result: ToolResult, refusals: Sequence[str]) -> ToolResult:
    """The result with what was refused meanwhile, if anything was."""
    if not refusals:
        return result
    text = Text(f"[The network of this tool refused: {'; '.join(refusals)}]")
    return replace(result, parts=(*result.parts, text), metrics={**result.metrics, METRIC: len(refusals)})
