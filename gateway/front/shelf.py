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
LIST_S = 20.0
"""One server that does not answer must not hide for long what the others have."""
Item = dict[str, Any]
Held = tuple[McpToolset, Item]


class Shelf:
    """Resources, their templates and prompts of all MCP servers of a gateway, in the gateway's order."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.forget()

    def forget(self) -> None:
        """What was listed may have changed."""
        self._resources: dict[str, Held] = {}
        self._templates: dict[str, Held] = {}
        self._prompts: dict[str, Held] = {}

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

    async def resources(self) -> list[Item]:
        """Of several with one address the first is shown: it is also the one that answers."""
        self._resources = _first_of(await self._list("resources", "resources/list", "resources"), "uri")
        return [item for _, item in self._resources.values()]

    async def templates(self) -> list[Item]:
        found = await self._list("resources", "resources/templates/list", "resourceTemplates")
        self._templates = _first_of(found, "uriTemplate")
        return [item for _, item in self._templates.values()]

    async def prompts(self) -> list[Item]:
        """Of two with one name, the later server's begins with that server's name."""
        offered: dict[str, Held] = {}
        for server, prompt in await self._list("prompts", "prompts/list", "prompts"):
            name = str(prompt.get("name"))
            offered.setdefault(name if name not in offered else f"{server.name}_{name}", (server, prompt))
        self._prompts = offered
        return [{**prompt, "name": name} for name, (_, prompt) in offered.items()]

    async def read(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = await self.owners(str(params.get("uri")))
        return await first_that_knows(servers, "resources/read", params, context)

    async def owners(self, uri: str) -> list[McpToolset]:
        """Who lists it, or has a template for it, comes first; the others are asked when those do not know it."""
        servers = self.need("resources", "resources/read")
        if len(servers) == 1:
            return servers
        likely = self._likely(uri)
        if not likely:
            await self.resources()
            await self.templates()
            likely = self._likely(uri)
        return _in_front(likely, servers)

    def _likely(self, uri: str) -> list[McpToolset]:
        if uri in self._resources:
            return [self._resources[uri][0]]
        return [server for template, (server, _) in self._templates.items() if _matches(template, uri)]

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
        about = about if isinstance(about, Mapping) else {}
        if "name" in about and len(self.having("prompts")) > 1:
            server, prompt = await self._named(str(about["name"]))
            return await ask(
                server, "completion/complete", {**params, "ref": {**about, "name": prompt["name"]}}, context
            )
        if "uri" in about and len(servers) > 1:
            owners = await self.owners(str(about["uri"]))
            servers = _in_front([server for server in owners if server in servers], servers)
        return await first_that_knows(servers, "completion/complete", params, context)

    async def _named(self, name: str) -> Held:
        if name not in self._prompts:
            await self.prompts()
        if name not in self._prompts:
            raise MCPError(INVALID_PARAMS, f"Unknown prompt: {name}")
        return self._prompts[name]

    async def _list(self, ability: str, method: str, key: str) -> list[Held]:
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
        result = await server.request(method, params, timeout_s=LIST_S)
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


def _first_of(found: Iterable[Held], key: str) -> dict[str, Held]:
    kept: dict[str, Held] = {}
    for server, item in found:
        kept.setdefault(str(item.get(key)), (server, item))
    return kept


def _in_front(likely: Iterable[McpToolset], servers: Iterable[McpToolset]) -> list[McpToolset]:
    return list(dict.fromkeys((*likely, *servers)))


def _matches(template: str, uri: str) -> bool:
    if template == uri:
        return True
    try:
        return UriTemplate.parse(template).match(uri) is not None
    except InvalidUriTemplate:
        return False
