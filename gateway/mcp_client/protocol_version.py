"""Negotiates the MCP protocol version with a server, and prepares requests for that version.

"Modern" versions (since 2026) are discovered with `server/discover` and repeat the client's details in every request;
"handshake" versions (before) use `initialize`. The names are the SDK's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    mcp_param_headers,
)
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    UNSUPPORTED_PROTOCOL_VERSION,
)
from mcp_types.version import (
    HANDSHAKE_PROTOCOL_VERSIONS,
    LATEST_HANDSHAKE_VERSION,
    LATEST_MODERN_VERSION,
    MODERN_PROTOCOL_VERSIONS,
)

from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.tasks import TASK_METHODS, TASKS_EXTENSION, declare_tasks
from gateway.types import Context, Outcome

CLIENT_CAPABILITIES: Mapping[str, Any] = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {}}
"""The client capabilities we declare; a request that no caller can answer is declined."""
_MODERN_META_KEYS = (PROTOCOL_VERSION_META_KEY, CLIENT_INFO_META_KEY, CLIENT_CAPABILITIES_META_KEY)
_CLIENT_INFO = {"name": "mtrl-gateway", "version": "0.1.0"}
_PROBE_S = 10.0

HeaderMap = Mapping[tuple[str, ...], str]
Send = Callable[[str, dict[str, Any], CallOptions], Awaitable[dict[str, Any]]]
Notify = Callable[[str, dict[str, Any] | None, CallOptions], Awaitable[None]]


@dataclass
class NegotiatedProtocol:
    """The protocol version and capabilities agreed on with one server."""

    version: str
    capabilities: Mapping[str, Any]
    instructions: str | None
    log_level: str | None = None
    """The wanted log level; modern versions send it with every request."""
    header_maps: Mapping[str, HeaderMap] = field(default_factory=dict)
    """By tool name, the arguments that are also sent as HTTP headers."""

    @property
    def is_modern(self) -> bool:
        return self.version in MODERN_PROTOCOL_VERSIONS

    @property
    def has_tasks(self) -> bool:
        """Whether long calls may become tasks."""
        return TASKS_EXTENSION in _as_mapping(self.capabilities.get("extensions"))

    def prepare_request(
        self, method: str, params: Mapping[str, Any], context: Context
    ) -> tuple[dict[str, Any], CallOptions]:
        """The params and headers of a request, as this protocol version wants them."""
        meta = {**context.meta, **(params.get("_meta") or {})}
        meta.pop("progressToken", None)
        headers = {MCP_PROTOCOL_VERSION_HEADER: self.version}
        if self.is_modern:
            self._add_modern_meta(meta, context)
            if method == "tools/call" or method in TASK_METHODS:
                meta[CLIENT_CAPABILITIES_META_KEY] = declare_tasks(meta[CLIENT_CAPABILITIES_META_KEY])
            headers[MCP_METHOD_HEADER] = method
            headers.update(self._modern_headers(method, params))
        else:
            for key in _MODERN_META_KEYS:
                meta.pop(key, None)
        prepared = {key: value for key, value in params.items() if key != "_meta"}
        if meta:
            prepared["_meta"] = meta
        return prepared, {"headers": headers}

    def _add_modern_meta(self, meta: dict[str, Any], context: Context) -> None:
        declared = meta.get(CLIENT_CAPABILITIES_META_KEY, CLIENT_CAPABILITIES) if context.answer_request else {}
        meta[PROTOCOL_VERSION_META_KEY] = self.version
        meta[CLIENT_INFO_META_KEY] = _CLIENT_INFO
        meta[CLIENT_CAPABILITIES_META_KEY] = declared
        if self.log_level is not None:
            meta.setdefault(LOG_LEVEL_META_KEY, self.log_level)

    def _modern_headers(self, method: str, params: Mapping[str, Any]) -> dict[str, str]:
        name = params.get(NAME_BEARING_METHODS.get(method) or TASK_METHODS.get(method, ""))
        if not isinstance(name, str):
            return {}
        headers = {MCP_NAME_HEADER: encode_header_value(name)}
        if method == "tools/call" and (header_map := self.header_maps.get(name)):
            headers.update(mcp_param_headers(header_map, params.get("arguments") or {}))
        return headers


async def negotiate(send: Send, notify: Notify, timeout_s: float, *, version: str | None = None) -> NegotiatedProtocol:
    """Uses the wanted version; without one, tries a modern version and falls back to the handshake."""
    if version is not None and version in MODERN_PROTOCOL_VERSIONS:
        if (modern := await _try_modern(send, version, timeout_s)) is None:
            reason = f"it does not support MCP {version}, which its `protocol` asks for"
            raise UpstreamError(Outcome.UNAVAILABLE, reason)
        return modern
    try:
        modern = await _try_modern(send, LATEST_MODERN_VERSION, timeout_s) if version is None else None
        return modern or await _initialize(send, notify, version or LATEST_HANDSHAKE_VERSION)
    except MCPError as error:
        # A server that answered our probe too late has settled on the modern version and refuses the handshake.
        common = _common_version(error)
        if error.code != UNSUPPORTED_PROTOCOL_VERSION or common is None or version is not None:
            raise
    protocol = await _try_modern(send, common, timeout_s)
    if protocol is None:
        raise UpstreamError(Outcome.UNAVAILABLE, f"it names MCP {common} as supported, then refuses it")
    return protocol


async def _try_modern(send: Send, version: str, timeout_s: float) -> NegotiatedProtocol | None:
    """The modern protocol, or None if the server gives no sign of supporting it."""
    try:
        return _parse_discovery(await _discover(send, version, min(_PROBE_S, timeout_s / 2)))
    except MCPError as error:
        if error.code != UNSUPPORTED_PROTOCOL_VERSION:
            return None
        common = _common_version(error)
        if common == version or (common is None and not _supports_handshake(error)):
            raise
    return _parse_discovery(await _discover(send, common, min(_PROBE_S, timeout_s / 2))) if common else None


async def _discover(send: Send, version: str, timeout_s: float) -> dict[str, Any]:
    meta = {
        PROTOCOL_VERSION_META_KEY: version,
        CLIENT_INFO_META_KEY: _CLIENT_INFO,
        CLIENT_CAPABILITIES_META_KEY: CLIENT_CAPABILITIES,
    }
    headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: "server/discover"}
    options: CallOptions = {"timeout": timeout_s, "cancel_on_abandon": False, "headers": headers}
    return await send("server/discover", {"_meta": meta}, options)


def _parse_discovery(result: Mapping[str, Any]) -> NegotiatedProtocol | None:
    """The modern protocol in a `server/discover` result; None if only older versions are named."""
    versions = result.get("supportedVersions")
    common = [v for v in MODERN_PROTOCOL_VERSIONS if isinstance(versions, list) and v in versions]
    if not common:
        return None
    return _parse_protocol(common[-1], result)


async def _initialize(send: Send, notify: Notify, wanted: str) -> NegotiatedProtocol:
    params = {"protocolVersion": wanted, "capabilities": dict(CLIENT_CAPABILITIES), "clientInfo": _CLIENT_INFO}
    # A modern server that is asked in the old way, too, wants the method in each request's headers.
    headers = {MCP_METHOD_HEADER: "initialize"}
    result = await send("initialize", params, {"cancel_on_abandon": False, "headers": headers})
    version = result.get("protocolVersion")
    if version not in HANDSHAKE_PROTOCOL_VERSIONS:
        raise UpstreamError(Outcome.UNAVAILABLE, f"it speaks MCP {version!r}, which this gateway does not support")
    protocol = _parse_protocol(str(version), result)
    headers = {MCP_PROTOCOL_VERSION_HEADER: protocol.version, MCP_METHOD_HEADER: "notifications/initialized"}
    await notify("notifications/initialized", None, {"headers": headers})
    return protocol


def _common_version(error: MCPError) -> str | None:
    return max(_supported_versions(error) & set(MODERN_PROTOCOL_VERSIONS), default=None)


def _supported_versions(error: MCPError) -> set[str]:
    supported = _as_mapping(error.error.data).get("supported")
    return {v for v in supported if isinstance(v, str)} if isinstance(supported, list) else set()


def _supports_handshake(error: MCPError) -> bool:
    """Whether the server may support the handshake: it names such a version, or none at all."""
    supported = _supported_versions(error)
    return not supported or bool(supported & set(HANDSHAKE_PROTOCOL_VERSIONS))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parse_protocol(version: str, result: Mapping[str, Any]) -> NegotiatedProtocol:
    """What a server says of itself in the answer to either request."""
    instructions = result.get("instructions")
    text = instructions if isinstance(instructions, str) else None
    return NegotiatedProtocol(version, _as_mapping(result.get("capabilities")), text)
