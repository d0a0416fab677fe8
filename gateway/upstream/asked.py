"""A tool may ask back; the one who can answer stands behind the call, and nobody else is ever asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_REQUEST, METHOD_NOT_FOUND

from gateway.errors import Refused
from gateway.types import Ask, Context, Outcome
from gateway.upstream.fault import Flight, UpstreamError

QUESTIONS = ("sampling/createMessage", "elicitation/create", "roots/list")
MOST_ROUNDS = 10
_STATE_ONLY_S = 0.05


async def answer(
    method: str, params: Mapping[str, Any] | None, flight: Flight | None, flights: Collection[Flight]
) -> dict[str, Any]:
    """What a request of the server itself gets for an answer."""
    if method == "ping":
        return {}
    if method not in QUESTIONS:
        raise MCPError(METHOD_NOT_FOUND, f"Method not found: {method}")
    ask = _whom(method, [flight] if flight is not None else list(flights))
    try:
        return dict(await ask(method, params or {}))
    except Refused as refusal:
        raise MCPError(INVALID_REQUEST, f"declined: {refusal}") from refusal


def _whom(method: str, flights: list[Flight]) -> Ask:
    asks = [flight.context.ask for flight in flights]
    if not any(asks):
        raise MCPError(INVALID_REQUEST, f"nobody behind this call can answer {method}")
    if asks[0] is None or any(ask != asks[0] for ask in asks):
        raise MCPError(
            INVALID_REQUEST,
            f"several calls are under way on one connection, so it is not known whom {method} is meant for; "
            "the operator can declare `isolation: session` for this server",
        )
    return asks[0]


Once = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


async def rounds(once: Once, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Asks until the server has all the input that it wants, or nobody can give it."""
    result = await once(params)
    for _ in range(MOST_ROUNDS):
        if result.get("resultType") != "input_required":
            return result
        more: dict[str, Any] = {}
        wanted = result.get("inputRequests")
        if isinstance(wanted, Mapping) and wanted:
            more["inputResponses"] = await _inputs(wanted, context)
        else:
            await anyio.sleep(_STATE_ONLY_S)
        if "requestState" in result:
            more["requestState"] = result["requestState"]
        result = await once({**params, **more})
    if result.get("resultType") == "input_required":
        raise UpstreamError(Outcome.ERROR, f"The tool still asked for input after {MOST_ROUNDS} rounds of it.")
    return result


async def _inputs(wanted: Mapping[str, Any], context: Context) -> dict[str, Any]:
    methods = [question.get("method") if isinstance(question, Mapping) else None for question in wanted.values()]
    if context.ask is None or any(method not in QUESTIONS for method in methods):
        raise UpstreamError(Outcome.ERROR, f"The tool needs input that nobody here can give ({_words(methods)}).")
    try:
        if context.inputs is not None:
            return dict(await context.inputs(wanted))
        return {
            key: dict(await context.ask(asked["method"], asked.get("params") or {})) for key, asked in wanted.items()
        }
    except Refused as refusal:
        reason = f"The tool asked for input ({_words(methods)}), declined: {refusal}"
        raise UpstreamError(Outcome.ERROR, reason) from refusal


def _words(methods: list[str | None]) -> str:
    return ", ".join(str(method) for method in methods)
