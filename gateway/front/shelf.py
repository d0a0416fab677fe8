"""What MCP servers hold besides tools is one collection: each thing listed once, and fetched from whoever has it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate
from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND

from gateway.gateway import Gateway
from gateway.types import Context
from gateway.upstream.fault import UpstreamError
from gateway.upstream.server import McpToolset

log = logging.getLogger(__name__)

MOST_PAGES = 100
Item = dict[str, Any]


class Shelf:
    """Resources, their templates and prompts of all MCP servers of a gateway, in the gateway's order."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @property
    def servers(self) -> list[McpToolset]:
        return [source.leaf for source in self._gateway.sources if isinstance(source.leaf, McpToolset)]

    def having(self, ability: str) -> list[McpToolset]:
        return [server for server in self.servers if ability in server.capabilities]

    def need(self, ability: str, method: str) -> list[McpToolset]:
        """What nobody behind us can do is no method of ours either."""
        servers = self.having(ability)
        if not servers:
            raise MCPError(METHOD_NOT_FOUND, "Method not found", method)
        return servers

    async def resources(self) -> list[tuple[McpToolset, Item]]:
        return _first_of(await self._list("resources", "resources/list", "resources"), "uri")

    async def templates(self) -> list[tuple[McpToolset, Item]]:
        found = await self._list("resources", "resources/templates/list", "resourceTemplates")
        return _first_of(found, "uriTemplate")

    async def prompts(self) -> dict[str, tuple[McpToolset, Item]]:
        """Offered name -> prompt. Of two with one name, the later server's begins with that server's name."""
        offered: dict[str, tuple[McpToolset, Item]] = {}
        for server, prompt in await self._list("prompts", "prompts/list", "prompts"):
            name = str(prompt.get("name"))
            offered.setdefault(name if name not in offered else f"{server.name}_{name}", (server, prompt))
        return offered

    async def read(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = await self.owners(str(params.get("uri")))
        return await first_that_knows(servers, "resources/read", params, context)

    async def owners(self, uri: str) -> list[McpToolset]:
        """Who lists it, or has a template for it, comes first; the others are asked when those do not know it."""
        servers = self.need("resources", "resources/read")
        if len(servers) == 1:
            return servers
        listing = [server for server, item in await self.resources() if item.get("uri") == uri]
        if not listing:
            listing = [server for server, item in await self.templates() if _matches(item.get("uriTemplate"), uri)]
        return list(dict.fromkeys((*listing, *servers)))

    async def prompt(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = self.need("prompts", "prompts/get")
        name = str(params.get("name"))
        if len(servers) == 1:
            return await ask(servers[0], "prompts/get", params, context)
        server, prompt = await self._named(name)
        return await ask(server, "prompts/get", {**params, "name": prompt["name"]}, context)

    async def complete(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = self.need("completions", "completion/complete")
        about = params.get("ref")
        if isinstance(about, Mapping) and about.get("type") == "ref/prompt" and len(self.having("prompts")) > 1:
            server, prompt = await self._named(str(about.get("name")))
            params = {**params, "ref": {**about, "name": prompt["name"]}}
            servers = [server]
        elif isinstance(about, Mapping) and "uri" in about and len(servers) > 1:
            uri = str(about["uri"])
            holding = [server for server, item in await self.templates() if item.get("uriTemplate") == uri]
            servers = list(dict.fromkeys((*(server for server in holding if server in servers), *servers)))
        return await first_that_knows(servers, "completion/complete", params, context)

    async def _named(self, name: str) -> tuple[McpToolset, Item]:
        found = (await self.prompts()).get(name)
        if found is None:
            raise MCPError(INVALID_PARAMS, f"Unknown prompt: {name}")
        return found

    async def _list(self, ability: str, method: str, key: str) -> list[tuple[McpToolset, Item]]:
        """All servers at once, in their order; one that fails hides nothing of the others."""
        servers = self.need(ability, method)
        found: dict[int, list[Item]] = {}

        async def one(place: int, server: McpToolset) -> None:
            try:
                found[place] = await _walk(server, method, key)
            except UpstreamError as error:
                log.warning("%s of %s: %s", method, server.owner, error)

        async with anyio.create_task_group() as asking:
            for place, server in enumerate(servers):
                asking.start_soon(one, place, server)
        return [(server, item) for place, server in enumerate(servers) for item in found.get(place, ())]


async def _walk(server: McpToolset, method: str, key: str) -> list[Item]:
    items: list[Item] = []
    params: dict[str, Any] = {}
    for _ in range(MOST_PAGES):
        result = await server.request(method, params)
        listed, cursor = result.get(key), result.get("nextCursor")
        items += [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        if not isinstance(cursor, str) or cursor == params.get("cursor"):
            break
        params = {"cursor": cursor}
    return items


async def ask(server: McpToolset, method: str, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
    try:
        return await server.request(method, params, context)
    except UpstreamError as error:
        raise MCPError(error.code, error.reason, error.data) from error


async def first_that_knows(
    servers: Iterable[McpToolset], method: str, params: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    """The first result; where there is none, the first refusal, which is that of the likeliest owner."""
    refusal: MCPError | None = None
    for server in servers:
        try:
            return await ask(server, method, params, context)
        except MCPError as error:
            refusal = refusal or error
    raise refusal or MCPError(METHOD_NOT_FOUND, "Method not found", method)


def _first_of(found: Iterable[tuple[McpToolset, Item]], key: str) -> list[tuple[McpToolset, Item]]:
    """Of several with one address, the first: it is also the one that answers."""
    kept: dict[str, tuple[McpToolset, Item]] = {}
    for server, item in found:
        kept.setdefault(str(item.get(key)), (server, item))
    return list(kept.values())


def _matches(template: Any, uri: str) -> bool:
    try:
        return isinstance(template, str) and UriTemplate.parse(template).match(uri) is not None
    except InvalidUriTemplate:
        return False
