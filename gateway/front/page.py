"""A list is answered in pages, and one item that this era's wire cannot carry hides no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS
from mcp_types.methods import serialize_server_result
from pydantic import ValidationError

log = logging.getLogger(__name__)

PAGE = 500
COMPLETE: Mapping[str, Any] = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""What results carry since 2026; older wires leave it out."""


def page(method: str, version: str, key: str, items: Sequence[dict[str, Any]], cursor: Any) -> dict[str, Any]:
    start = _start(cursor)
    listed = {**COMPLETE, key: list(items[start : start + PAGE])}
    if not _carried(method, version, listed):
        sound = [item for item in listed[key] if _carried(method, version, {**COMPLETE, key: [item]})]
        log.warning("%s: %d items do not fit MCP %s", method, len(listed[key]) - len(sound), version)
        listed[key] = sound
    return {**listed, "nextCursor": str(start + PAGE)} if start + PAGE < len(items) else listed


def _start(cursor: Any) -> int:
    if cursor is None:
        return 0
    if not (isinstance(cursor, str) and cursor.isascii() and cursor.isdigit() and len(cursor) < 10):
        raise MCPError(INVALID_PARAMS, "Unknown cursor")
    return int(cursor)


def _carried(method: str, version: str, result: Mapping[str, Any]) -> bool:
    try:
        serialize_server_result(method, version, result)
    except ValidationError:
        return False
    return True
