"""Whoever sent a request stands behind it: hears its progress and its log, and is asked what it asks back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcp.server.connection import Connection, allowed_log_levels
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    LoggingLevel,
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
)
from mcp_types.methods import parse_server_request
from mcp_types.version import LATEST_MODERN_VERSION, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.errors import Refused
from gateway.front.parts import OURS
from gateway.types import Context

Asked = ServerRequestContext[Any, Any]

ANSWER_S = 600.0
"""For an answer of a person or a model; a tool's own deadline usually ends the wait before."""
DEFAULT_LEVEL: LoggingLevel = "info"
LEVEL = "mtrl/level"
"""In a connection's state: the log level that its client set."""
_ABILITY = {"sampling/createMessage": "sampling", "elicitation/create": "elicitation", "roots/list": "roots"}
_OURS_TO_STAMP = (PROTOCOL_VERSION_META_KEY, CLIENT_INFO_META_KEY, "progressToken")


class _Anything(BaseModel):
    """An answer is for the upstream to judge."""

    model_config = ConfigDict(extra="allow")


def modern(asked: Asked) -> bool:
    return asked.protocol_version in MODERN_PROTOCOL_VERSIONS


def connection(asked: Asked) -> Connection:
    """The SDK keeps it to itself, yet it alone outlives a request and knows when its client has gone."""
    return asked.session._connection


def raw_meta(asked: Asked) -> Mapping[str, Any]:
    meta = (asked.params or {}).get("_meta")
    return meta if isinstance(meta, Mapping) else {}


def behind(asked: Asked) -> Context:
    """The context of a request. `ask` is there where its client can answer anything at all."""
    meta, given = _meta(asked), raw_meta(asked)

    async def notice(method: str, params: Mapping[str, Any]) -> None:
        await _log(asked, meta, params)

    async def ask(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        refuse_unable(method, meta)
        return await _ask(asked, method, params)

    abilities = meta[CLIENT_CAPABILITIES_META_KEY]
    return Context(
        progress=asked.session.report_progress if "progressToken" in given else None,
        notice=notice if LOG_LEVEL_META_KEY in meta else None,
        ask=ask if any(ability in abilities for ability in _ABILITY.values()) else None,
        meta=meta,
    )


def _meta(asked: Asked) -> dict[str, Any]:
    """What goes on to the upstream: the client's own words and abilities; neither our handles nor its identity."""
    given = raw_meta(asked)
    meta = {key: value for key, value in given.items() if key not in _OURS_TO_STAMP and not key.startswith(OURS)}
    declared = asked.session.client_capabilities
    meta[CLIENT_CAPABILITIES_META_KEY] = (
        declared.model_dump(mode="json", by_alias=True, exclude_none=True) if declared else {}
    )
    if not modern(asked):
        meta[LOG_LEVEL_META_KEY] = connection(asked).state.get(LEVEL, DEFAULT_LEVEL)
    return meta


async def _log(asked: Asked, meta: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    if params.get("level") not in allowed_log_levels(LATEST_MODERN_VERSION, meta):
        return
    told = LoggingMessageNotificationParams.model_validate(params, by_name=False)
    await asked.session.send_notification(LoggingMessageNotification(params=told), asked.request_id)


async def _ask(asked: Asked, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Asks the client over its own connection, as it was done until 2026."""
    try:
        request = cast(Any, parse_server_request(method, asked.protocol_version, dict(params)))
        where = ServerMessageMetadata(related_request_id=asked.request_id)
        answer = await asked.session.send_request(request, _Anything, ANSWER_S, where)
    except (MCPError, NoBackChannelError, ValidationError, KeyError) as error:
        raise Refused(f"the client gave no answer to {method}: {error}") from error
    return answer.model_dump(mode="json")


def refuse_unable(method: str, meta: Mapping[str, Any]) -> None:
    """Nobody is asked for what they have not declared."""
    if _ABILITY.get(method) not in meta[CLIENT_CAPABILITIES_META_KEY]:
        raise Refused(f"the client has not declared that it can answer {method}")
