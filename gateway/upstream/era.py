"""Two protocol eras are spoken; which one is found out once, and every request is stamped for it."""

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
    SERVER_INFO_META_KEY,
    UNSUPPORTED_PROTOCOL_VERSION,
)
from mcp_types.version import (
    HANDSHAKE_PROTOCOL_VERSIONS,
    LATEST_HANDSHAKE_VERSION,
    LATEST_MODERN_VERSION,
    MODERN_PROTOCOL_VERSIONS,
)

from gateway.types import Context, Outcome
from gateway.upstream.fault import UpstreamError

ABILITIES: Mapping[str, Any] = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {}}
"""What we say we can answer; where nobody is there to answer, the question is declined."""
_ENVELOPE = (PROTOCOL_VERSION_META_KEY, CLIENT_INFO_META_KEY, CLIENT_CAPABILITIES_META_KEY)
_OURS = {"name": "mtrl-gateway", "version": "0.1.0"}
_PROBE_S = 10.0

HeaderMap = Mapping[tuple[str, ...], str]
Send = Callable[[str, dict[str, Any], CallOptions], Awaitable[dict[str, Any]]]
Notify = Callable[[str, dict[str, Any] | None, CallOptions], Awaitable[None]]


@dataclass
class Era:
    """What was agreed on with one server."""

    version: str
    capabilities: Mapping[str, Any]
    info: Mapping[str, Any]
    instructions: str | None
    log_level: str | None = None
    """Since 2026 a client asks for log messages request by request."""
    header_maps: Mapping[str, HeaderMap] = field(default_factory=dict)
    """By tool, which arguments travel as headers too."""

    @property
    def modern(self) -> bool:
        return self.version in MODERN_PROTOCOL_VERSIONS

    def stamp(self, method: str, params: Mapping[str, Any], context: Context) -> tuple[dict[str, Any], CallOptions]:
        """The request as this era writes it, and its headers."""
        meta = {**context.meta, **(params.get("_meta") or {})}
        meta.pop("progressToken", None)
        headers = {MCP_PROTOCOL_VERSION_HEADER: self.version}
        if self.modern:
            self._envelope(meta, context)
            headers[MCP_METHOD_HEADER] = method
            headers.update(self._named_headers(method, params))
        else:
            for key in _ENVELOPE:
                meta.pop(key, None)
        stamped = {key: value for key, value in params.items() if key != "_meta"}
        if meta:
            stamped["_meta"] = meta
        return stamped, {"headers": headers}

    def _envelope(self, meta: dict[str, Any], context: Context) -> None:
        declared = meta.get(CLIENT_CAPABILITIES_META_KEY, ABILITIES) if context.ask else {}
        meta[PROTOCOL_VERSION_META_KEY] = self.version
        meta[CLIENT_INFO_META_KEY] = _OURS
        meta[CLIENT_CAPABILITIES_META_KEY] = declared
        if self.log_level is not None:
            meta.setdefault(LOG_LEVEL_META_KEY, self.log_level)

    def _named_headers(self, method: str, params: Mapping[str, Any]) -> dict[str, str]:
        name = params.get(NAME_BEARING_METHODS.get(method, ""))
        if not isinstance(name, str):
            return {}
        headers = {MCP_NAME_HEADER: encode_header_value(name)}
        if method == "tools/call" and (header_map := self.header_maps.get(name)):
            headers.update(mcp_param_headers(header_map, params.get("arguments") or {}))
        return headers


async def negotiate(send: Send, notify: Notify, timeout_s: float, *, probe: bool = True) -> Era:
    """Asks for the newest era first; whatever is no evidence of it leads to the handshake of the older one."""
    try:
        newest = await _newest(send, LATEST_MODERN_VERSION, timeout_s) if probe else None
        return newest or await _initialize(send, notify)
    except MCPError as error:
        # A server that settled on the newer era only after our probe had given up refuses the handshake.
        mutual = _mutual(error)
        if error.code != UNSUPPORTED_PROTOCOL_VERSION or mutual is None:
            raise
    era = await _newest(send, mutual, timeout_s)
    if era is None:
        raise UpstreamError(Outcome.UNAVAILABLE, f"it names MCP {mutual}, then refuses to speak it")
    return era


async def _newest(send: Send, version: str, timeout_s: float) -> Era | None:
    """The newer era, or None where nothing speaks for it."""
    try:
        return _discovered(await _discover(send, version, min(_PROBE_S, timeout_s / 2)))
    except MCPError as error:
        if error.code != UNSUPPORTED_PROTOCOL_VERSION:
            return None
        mutual = _mutual(error)
        if mutual == version or (mutual is None and not _speaks_handshake(error)):
            raise
    return _discovered(await _discover(send, mutual, min(_PROBE_S, timeout_s / 2))) if mutual else None


async def _discover(send: Send, version: str, timeout_s: float) -> dict[str, Any]:
    meta = {
        PROTOCOL_VERSION_META_KEY: version,
        CLIENT_INFO_META_KEY: _OURS,
        CLIENT_CAPABILITIES_META_KEY: ABILITIES,
    }
    headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: "server/discover"}
    options: CallOptions = {"timeout": timeout_s, "cancel_on_abandon": False, "headers": headers}
    return await send("server/discover", {"_meta": meta}, options)


def _discovered(result: Mapping[str, Any]) -> Era | None:
    """None where the server answers the question but names only older versions."""
    versions = result.get("supportedVersions")
    mutual = [v for v in MODERN_PROTOCOL_VERSIONS if isinstance(versions, list) and v in versions]
    if not mutual:
        return None
    info = _mapping(result.get("_meta")).get(SERVER_INFO_META_KEY)
    return Era(mutual[-1], _mapping(result.get("capabilities")), _mapping(info), _text(result.get("instructions")))


async def _initialize(send: Send, notify: Notify) -> Era:
    params = {"protocolVersion": LATEST_HANDSHAKE_VERSION, "capabilities": dict(ABILITIES), "clientInfo": _OURS}
    result = await send("initialize", params, {"cancel_on_abandon": False})
    version = result.get("protocolVersion")
    if version not in HANDSHAKE_PROTOCOL_VERSIONS:
        raise UpstreamError(Outcome.UNAVAILABLE, f"it speaks MCP {version!r}, which this gateway does not")
    era = Era(
        str(version),
        _mapping(result.get("capabilities")),
        _mapping(result.get("serverInfo")),
        _text(result.get("instructions")),
    )
    await notify("notifications/initialized", None, {"headers": {MCP_PROTOCOL_VERSION_HEADER: era.version}})
    return era


def _mutual(error: MCPError) -> str | None:
    return max(_named_versions(error) & set(MODERN_PROTOCOL_VERSIONS), default=None)


def _named_versions(error: MCPError) -> set[str]:
    named = _mapping(error.error.data).get("supported")
    return {v for v in named if isinstance(v, str)} if isinstance(named, list) else set()


def _speaks_handshake(error: MCPError) -> bool:
    """A server that names no version may still speak the older era."""
    named = _named_versions(error)
    return not named or bool(named & set(HANDSHAKE_PROTOCOL_VERSIONS))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
