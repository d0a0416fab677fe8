"""Requests from a server to its client (sampling, elicitation, roots), answered by the caller of the tool.

Older protocol versions send them over the connection; modern ones return `input_required` and are called again.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp_types import CLIENT_CAPABILITIES_META_KEY, INVALID_REQUEST, METHOD_NOT_FOUND

from gateway.elicitation import ElicitationAnswers
from gateway.errors import RequestDeclined
from gateway.mcp_client.errors import PendingRequest, UpstreamError
from gateway.types import Context, Outcome, RequestHandler

CLIENT_METHODS = ("sampling/createMessage", "elicitation/create", "roots/list")
MAX_INPUT_ROUNDS = 10
_STATE_RETRY_S = 0.05


def with_answers(context: Context, answers: ElicitationAnswers | None) -> Context:
    """The context with the operator's answers, if its caller can give none; the server is told that it may ask."""
    if answers is None or context.answer_request is not None:
        return context
    meta = {**context.meta, CLIENT_CAPABILITIES_META_KEY: {"elicitation": {"form": {}}}}
    return replace(context, answer_request=answers.answer, meta=meta)


async def answer_server_request(
    method: str,
    params: Mapping[str, Any] | None,
    sender: PendingRequest | None,
    pending: Collection[PendingRequest],
    *,
    is_shared: bool,
) -> dict[str, Any]:
    """Answers a request that the server sent; `sender` is the call it belongs to, if the transport knows.

    `is_shared`: calls of several clients use the connection. A server keeps roots for as long as its connection lasts,
    so one client's would be shown to the others: on a shared connection, only a client that is alone is asked for them.
    """
    if method == "ping":
        return {}
    if method not in CLIENT_METHODS:
        raise MCPError(METHOD_NOT_FOUND, f"Method not found: {method}")
    candidates = [sender] if sender is not None else list(pending)
    if method == "roots/list" and is_shared and not all(one.context.is_only_client for one in candidates):
        raise MCPError(
            INVALID_REQUEST,
            "declined: several clients share this server, and the roots of one are not for the others; "
            "the operator can set `isolation: session` for this server",
        )
    handler = _choose_handler(method, candidates)
    try:
        return dict(await handler(method, params or {}))
    except RequestDeclined as refusal:
        raise MCPError(INVALID_REQUEST, f"declined: {refusal}") from refusal


def _choose_handler(method: str, candidates: list[PendingRequest]) -> RequestHandler:
    handlers = [pending.context.answer_request for pending in candidates]
    if not any(handlers):
        raise MCPError(INVALID_REQUEST, f"the caller of this tool cannot answer {method}")
    if handlers[0] is None or any(handler != handlers[0] for handler in handlers):
        raise MCPError(
            INVALID_REQUEST,
            f"several calls are under way on one connection, so it is not known which one {method} is meant for; "
            "the operator can set `isolation: session` for this server",
        )
    return handlers[0]


_REFUSAL = re.compile(
    r"(?:elicit|sampling|roots|server-initiated|server-to-client).{0,400}(?:\b20\d\d-\d\d-\d\d\b|back-channel)",
    re.IGNORECASE | re.DOTALL,
)


def refuses_to_ask(result: Mapping[str, Any]) -> bool:
    """Whether a tool's error says that its caller cannot be asked in a modern version; no code tells it."""
    if result.get("isError") is not True:
        return False
    match result.get("content"):
        case [{"text": str(text)}]:
            return _REFUSAL.search(text, 0, 1000) is not None
    return False


SendRequest = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


async def give_inputs(
    result: dict[str, Any], send: SendRequest, params: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    """Repeats a request, whose first result is given, with the requested inputs until the server has all it needs."""
    for _ in range(MAX_INPUT_ROUNDS):
        if result.get("resultType") != "input_required":
            return result
        extra: dict[str, Any] = {}
        requests = result.get("inputRequests")
        if isinstance(requests, Mapping) and requests:
            extra["inputResponses"] = await collect_inputs(requests, context)
        else:
            await anyio.sleep(_STATE_RETRY_S)
        if "requestState" in result:
            extra["requestState"] = result["requestState"]
        result = await send({**params, **extra})
    if result.get("resultType") == "input_required":
        raise UpstreamError(Outcome.ERROR, f"The tool still asked for input after {MAX_INPUT_ROUNDS} rounds.")
    return result


async def collect_inputs(requests: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """The caller's answers to a server's questions, by their keys; raises `UpstreamError` if it gives none."""
    methods = [request.get("method") if isinstance(request, Mapping) else None for request in requests.values()]
    if context.answer_request is None or any(method not in CLIENT_METHODS for method in methods):
        raise UpstreamError(
            Outcome.ERROR, f"The tool needs input that its caller cannot give ({_format_methods(methods)})."
        )
    try:
        if context.answer_requests is not None:
            return dict(await context.answer_requests(requests))
        return {
            key: dict(await context.answer_request(request["method"], request.get("params") or {}))
            for key, request in requests.items()
        }
    except RequestDeclined as refusal:
        reason = f"The tool asked for input ({_format_methods(methods)}), declined: {refusal}"
        raise UpstreamError(Outcome.ERROR, reason) from refusal


def _format_methods(methods: list[str | None]) -> str:
    return ", ".join(str(method) for method in methods)
