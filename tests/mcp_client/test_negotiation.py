"""Negotiation of the protocol version, with scripted server answers."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError

from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.protocol_version import NegotiatedProtocol, negotiate
from gateway.types import DEFAULT_CONTEXT, Context

HANDSHAKE_RESULT = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s"}}
DISCOVER_RESULT = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "instructions": "words"}


def unsupported_version(*versions: str) -> MCPError:
    return MCPError(-32022, "unsupported protocol version", {"supported": list(versions)})


async def negotiate_with(*answers: Any, version: str | None = None) -> tuple[NegotiatedProtocol, list[str]]:
    """Negotiates with a server that gives these answers in order; returns the protocol and the methods it was sent,
    each of which is in a header, too."""
    remaining, methods = list(answers), []

    async def send(method: str, params: dict[str, Any], options: CallOptions) -> dict[str, Any]:
        methods.append((options.get("headers") or {})["mcp-method"])
        answer = remaining.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    async def notify(method: str, params: dict[str, Any] | None, options: CallOptions) -> None:
        methods.append((options.get("headers") or {})["mcp-method"])

    return await negotiate(send, notify, 10, version=version), methods


HANDSHAKE_METHODS = ["initialize", "notifications/initialized"]


@pytest.mark.parametrize(
    "answer",
    [
        MCPError(-32601, "method not found"),
        {"supportedVersions": ["2025-11-25"], "capabilities": {}},
        {"strange": True},
        unsupported_version("2025-11-25"),
        unsupported_version(),
    ],
)
async def test_no_evidence_of_a_modern_version_leads_to_the_handshake(answer: Any) -> None:
    protocol, methods = await negotiate_with(answer, HANDSHAKE_RESULT)
    assert protocol.version == "2025-06-18" and methods == ["server/discover", *HANDSHAKE_METHODS]


async def test_pinned_version_is_not_given_up_and_versions_that_nobody_knows_end_with_the_reason() -> None:
    assert (await negotiate_with(HANDSHAKE_RESULT, version="2025-11-25"))[1] == HANDSHAKE_METHODS
    with pytest.raises(UpstreamError, match="does not support MCP 2026-07-28, which its `protocol` asks for"):
        await negotiate_with(MCPError(-32601, "no"), version="2026-07-28")
    with pytest.raises(UpstreamError, match="speaks MCP '1999'"):
        await negotiate_with(MCPError(-32601, "no"), {"protocolVersion": "1999"})
    with pytest.raises(MCPError, match="unsupported"):
        await negotiate_with(unsupported_version("2031-01-01"))


async def test_slow_modern_server_is_discovered_again_after_a_failed_handshake() -> None:
    protocol, methods = await negotiate_with(
        MCPError(-32001, "timed out"), unsupported_version("2026-07-28"), DISCOVER_RESULT
    )
    assert protocol.is_modern and methods == ["server/discover", "initialize", "server/discover"]


async def answer_request(method: str, params: Any) -> dict[str, Any]:
    return {}


def test_request_is_prepared_for_its_protocol_version() -> None:
    handshake = NegotiatedProtocol("2025-11-25", {}, None)
    modern = NegotiatedProtocol("2026-07-28", {}, None, header_maps={"t": {("a",): "A"}})
    meta = {"io.modelcontextprotocol/clientCapabilities": {"sampling": {}}, "trace": "x", "progressToken": 3}
    params = {"name": "t", "arguments": {"a": "é"}}
    plain, options = handshake.prepare_request("tools/call", params, Context(meta=meta))
    assert plain == {**params, "_meta": {"trace": "x"}}
    assert options["headers"] == {"mcp-protocol-version": "2025-11-25"}
    prepared, options = modern.prepare_request("tools/call", params, Context(meta=meta, answer_request=answer_request))
    declared = {"sampling": {}, "extensions": {"io.modelcontextprotocol/tasks": {}}}
    assert prepared["_meta"]["io.modelcontextprotocol/clientCapabilities"] == declared
    assert prepared["_meta"]["trace"] == "x" and "progressToken" not in prepared["_meta"]
    assert options["headers"]["mcp-name"] == "t" and options["headers"]["mcp-method"] == "tools/call"
    assert options["headers"]["Mcp-Param-A"].startswith("=?base64?")
    _, options = modern.prepare_request("tasks/get", {"taskId": "7"}, DEFAULT_CONTEXT)
    assert options["headers"]["mcp-name"] == "7"
    without_handler, _ = modern.prepare_request("tools/call", params, DEFAULT_CONTEXT)
    declared = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
    assert without_handler["_meta"]["io.modelcontextprotocol/clientCapabilities"] == declared
