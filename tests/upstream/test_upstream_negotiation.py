"""The era is found out by asking, and whatever is no evidence of the newer one leads to the older."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError

from gateway.types import ALONE, Context
from gateway.upstream.era import Era, negotiate
from gateway.upstream.fault import UpstreamError

OLDER = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s"}}
NEWER = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "instructions": "words"}


def unsupported(*versions: str) -> MCPError:
    return MCPError(-32022, "unsupported protocol version", {"supported": list(versions)})


async def met(*answers: Any, probe: bool = True) -> tuple[Era, list[str]]:
    """What comes of a server that answers with these, in order; and what was said to it."""
    left, said = list(answers), []

    async def send(method: str, params: dict[str, Any], options: CallOptions) -> dict[str, Any]:
        said.append(method)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    async def notify(method: str, params: dict[str, Any] | None, options: CallOptions) -> None:
        said.append(method)

    return await negotiate(send, notify, 10, probe=probe), said


HANDSHAKE = ["initialize", "notifications/initialized"]


async def test_a_server_of_the_newer_era_is_asked_once() -> None:
    era, said = await met(NEWER)
    assert (era.version, era.instructions, said) == ("2026-07-28", "words", ["server/discover"])


@pytest.mark.parametrize(
    "answer",
    [
        MCPError(-32601, "method not found"),
        MCPError(-32001, "timed out"),
        {"supportedVersions": ["2025-11-25"], "capabilities": {}},
        {"strange": True},
        unsupported("2025-11-25"),
        unsupported(),
    ],
)
async def test_whatever_is_no_evidence_leads_to_the_handshake(answer: Any) -> None:
    era, said = await met(answer, OLDER)
    assert era.version == "2025-06-18" and said == ["server/discover", *HANDSHAKE]


async def test_a_server_known_to_be_older_is_not_asked_for_the_newer_era() -> None:
    _, said = await met(OLDER, probe=False)
    assert said == HANDSHAKE


async def test_a_slow_server_that_settled_on_the_newer_era_is_believed() -> None:
    era, said = await met(MCPError(-32001, "timed out"), unsupported("2026-07-28"), NEWER)
    assert era.modern and said == ["server/discover", "initialize", "server/discover"]


async def test_a_server_of_eras_unknown_to_us_is_refused_with_its_own_error() -> None:
    with pytest.raises(MCPError, match="unsupported"):
        await met(unsupported("2031-01-01"))
    with pytest.raises(UpstreamError, match="1999"):
        await met(MCPError(-32601, "no"), {"protocolVersion": "1999"})


async def answering(method: str, params: Any) -> dict[str, Any]:
    return {}


def test_a_request_is_stamped_for_its_era() -> None:
    older = Era("2025-11-25", {}, {}, None)
    newer = Era("2026-07-28", {}, {}, None, header_maps={"t": {("a",): "A"}})
    meta = {"io.modelcontextprotocol/clientCapabilities": {"sampling": {}}, "trace": "x", "progressToken": 3}
    params = {"name": "t", "arguments": {"a": "é"}}
    plain, options = older.stamp("tools/call", params, Context(meta=meta))
    assert plain == {**params, "_meta": {"trace": "x"}}
    assert options["headers"] == {"mcp-protocol-version": "2025-11-25"}
    stamped, options = newer.stamp("tools/call", params, Context(meta=meta, ask=answering))
    assert stamped["_meta"]["io.modelcontextprotocol/clientCapabilities"] == {"sampling": {}}
    assert stamped["_meta"]["trace"] == "x" and "progressToken" not in stamped["_meta"]
    assert options["headers"]["mcp-name"] == "t" and options["headers"]["mcp-method"] == "tools/call"
    assert options["headers"]["Mcp-Param-A"].startswith("=?base64?")
    alone, _ = newer.stamp("tools/call", params, ALONE)
    assert alone["_meta"]["io.modelcontextprotocol/clientCapabilities"] == {}
