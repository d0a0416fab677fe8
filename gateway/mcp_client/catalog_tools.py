"""A server's resources and prompts as tools of the policy, with the settings `resources: tools` and `prompts: tools`.

`NAME_list_resources`, `NAME_read_resource`, `NAME_list_prompts`, `NAME_get_prompt`; a tool of the server that has such
a name takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from gateway.config.models import Server
from gateway.mcp_client.connection import Connection
from gateway.mcp_client.listing import ToolListing
from gateway.types import Context, Hints, ToolSpec

Method = Literal["resources/list", "resources/read", "prompts/list", "prompts/get"]
MAX_ITEMS = 200
"""Items that a list shows; the policy is told how many more there are."""
MAX_PAGES = 20
MAX_DESCRIPTION = 200
"""Characters of an item's description in a list."""
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
READ_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"uri": {"type": "string", "description": "The resource's URI, from the list"}},
    "required": ["uri"],
    "additionalProperties": False,
}
PROMPT_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "The prompt's name, from the list"},
        "arguments": {
            "type": "object",
            "description": "The prompt's arguments by name",
            "additionalProperties": {"type": "string"},
        },
    },
    "required": ["name"],
    "additionalProperties": False,
}


def add_catalog_tools(listing: ToolListing, server: str, config: Server, connection: Connection) -> ToolListing:
    """The listing with the tools that the settings ask for and the server has a use for."""
    owner = f"mcp server {server!r}"
    prefix = re.sub(r"[^A-Za-z0-9_-]+", "_", server)
    methods: dict[str, Method] = {}
    specs = []
    for method, name, description, parameters in _catalog(config, connection.protocol.capabilities):
        full_name = f"{prefix}_{name}"
        if full_name not in listing.by_name:
            methods[full_name] = method
            text = description.format(server=server)
            specs.append(ToolSpec(full_name, text, parameters, hints=Hints(read_only=True), owner=owner))
    return replace(listing, specs=(*listing.specs, *specs), catalog=methods) if specs else listing


def _catalog(config: Server, capabilities: Mapping[str, Any]) -> Iterator[tuple[Method, str, str, Mapping[str, Any]]]:
    if config.resources == "tools" and "resources" in capabilities:
        yield "resources/list", "list_resources", "Lists the resources of {server}, each with its URI.", NO_ARGUMENTS
        yield "resources/read", "read_resource", "Reads one resource of {server}.", READ_ARGUMENTS
    if config.prompts == "tools" and "prompts" in capabilities:
        yield "prompts/list", "list_prompts", "Lists the prompts of {server}, each with its arguments.", NO_ARGUMENTS
        yield "prompts/get", "get_prompt", "Gets the text of one prompt of {server}.", PROMPT_ARGUMENTS


async def call_catalog_tool(
    connection: Connection, method: str, arguments: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    """Calls the method; its answer has the form of an answer to `tools/call`. Raises `UpstreamError`."""
    match method:
        case "resources/list":
            return await _list(connection, method, "resources", context)
        case "prompts/list":
            return await _list(connection, method, "prompts", context)
        case "resources/read":
            result = await connection.request(method, dict(arguments), context)
            contents = result.get("contents")
            items = contents if isinstance(contents, list) else []
            return {"content": [_resource_part(item) for item in items if isinstance(item, Mapping)]}
    result = await connection.request(method, dict(arguments), context)
    messages = result.get("messages")
    return {"content": list(_message_parts(messages if isinstance(messages, list) else []))}


async def _list(connection: Connection, method: str, key: str, context: Context) -> dict[str, Any]:
    items: list[Mapping[str, Any]] = []
    params: dict[str, Any] = {}
    is_complete = False
    for _ in range(MAX_PAGES):
        result = await connection.request(method, params, context)
        listed, cursor = result.get(key), result.get("nextCursor")
        items += [item for item in listed if isinstance(item, Mapping)] if isinstance(listed, list) else []
        is_complete = not isinstance(cursor, str) or cursor == params.get("cursor")
        if is_complete or len(items) > MAX_ITEMS:
            break
        params = {"cursor": cursor}
    lines = [_item_line(item) for item in items[:MAX_ITEMS]] or [f"There are no {key}."]
    if not is_complete:
        lines.append("There are more, which are not shown.")
    elif len(items) > MAX_ITEMS:
        lines.append(f"{len(items) - MAX_ITEMS} more are not shown.")
    return {"content": [{"type": "text", "text": "\n".join(lines)}]}


def _item_line(item: Mapping[str, Any]) -> str:
    """`note://1: a note (text/plain). Its description`, or a prompt's name with its arguments."""
    label = str(item.get("uri") or item.get("name") or "?")
    described = [text for text in (item.get("title") or item.get("name"), item.get("description")) if text]
    about = ". ".join(" ".join(str(text).split()) for text in described if str(text) != label)
    arguments = item.get("arguments")
    names = [
        f"{argument.get('name')}{'' if argument.get('required') else ' (optional)'}"
        for argument in (arguments if isinstance(arguments, list) else ())
        if isinstance(argument, Mapping)
    ]
    kind = f" [{item['mimeType']}]" if isinstance(item.get("mimeType"), str) else ""
    given = f" (arguments: {', '.join(names)})" if names else ""
    shown = about if len(about) <= MAX_DESCRIPTION else f"{about[:MAX_DESCRIPTION]}..."
    return f"{label}{kind}{given}{': ' if shown else ''}{shown}"


def _resource_part(item: Mapping[str, Any]) -> dict[str, Any]:
    """A resource as the content of a tool's answer: text and images as such, so that the policy reads and sees them."""
    mime = item.get("mimeType")
    if isinstance(item.get("text"), str):
        return {"type": "text", "text": item["text"]}
    for kind in ("image", "audio"):
        if isinstance(mime, str) and mime.startswith(f"{kind}/"):
            return {"type": kind, "data": item.get("blob"), "mimeType": mime}
    return {"type": "resource", "resource": dict(item)}


def _message_parts(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Mapping):
            continue
        if content.get("type") == "text":
            yield {"type": "text", "text": f"{message.get('role')}: {content.get('text')}"}
        else:
            yield dict(content)
