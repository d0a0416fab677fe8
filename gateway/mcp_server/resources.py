"""Resources, prompts and completions of all MCP servers as one catalog; requests go to the owning server."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import anyio
from mcp.shared.exceptions import MCPError
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate
from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND

from gateway.gateway import Gateway
from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.mcp_toolset import McpToolset, mcp_servers
from gateway.types import Context

log = logging.getLogger(__name__)

MAX_PAGES = 100
LIST_TIMEOUT_S = 20.0
"""Timeout of one server, so that a hung one does not delay the others' lists for long."""
Item = dict[str, Any]
OwnedItem = tuple[McpToolset, Item]


class ResourceCatalog:
    """The resources, resource templates and prompts of all MCP servers of a gateway, in the gateway's order."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._declared: set[str] = set()
        """Capabilities that a client was told of before any server had them."""
        self.clear_cache()

    def clear_cache(self) -> None:
        """Forgets the listed items, which may have changed."""
        self._resources: dict[str, OwnedItem] = {}
        self._templates: dict[str, OwnedItem] = {}
        self._prompts: dict[str, OwnedItem] = {}

    @property
    def servers(self) -> list[McpToolset]:
        return mcp_servers(self._gateway.sources)

    def servers_with(self, capability: str) -> list[McpToolset]:
        return [server for server in self.servers if capability in server.capabilities]

    def declare(self, capability: str) -> bool:
        """Whether clients are told that there is this capability; a server that is still starting may have it."""
        if self._gateway.start.names:
            self._declared.add(capability)
        return bool(self.servers_with(capability)) or capability in self._declared

    def require_capability(self, capability: str, method: str) -> list[McpToolset]:
        """The servers with a capability; without any, the method does not exist for our clients."""
        servers = self.servers_with(capability)
        if not servers:
            raise MCPError(METHOD_NOT_FOUND, "Method not found", method)
        return servers

    async def list_resources(self) -> list[Item]:
        """All resources. If several servers list the same URI, the first one is shown and read."""
        self._resources = _first_by_key(await self._list_all("resources", "resources/list", "resources"), "uri")
        return [item for _, item in self._resources.values()]

    async def list_templates(self) -> list[Item]:
        listed = await self._list_all("resources", "resources/templates/list", "resourceTemplates")
        self._templates = _first_by_key(listed, "uriTemplate")
        return [item for _, item in self._templates.values()]

    async def list_prompts(self) -> list[Item]:
        """All prompts. If a name is taken, the later server's name is put in front of its prompt's."""
        offered: dict[str, OwnedItem] = {}
        for server, prompt in await self._list_all("prompts", "prompts/list", "prompts"):
            name = str(prompt.get("name"))
            offered.setdefault(name if name not in offered else f"{server.name}_{name}", (server, prompt))
        self._prompts = offered
        return [{**prompt, "name": name} for name, (_, prompt) in offered.items()]

    async def read_resource(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = await self.find_owners(str(params.get("uri")))
        return await first_success(servers, "resources/read", params, context)

    async def find_owners(self, uri: str) -> list[McpToolset]:
        """The servers to try for a resource: those that list it or have a matching template, then all others."""
        servers = self.require_capability("resources", "resources/read")
        if len(servers) == 1:
            return servers
        known = self._known_owners(uri)
        if not known:
            await self.list_resources()
            await self.list_templates()
            known = self._known_owners(uri)
        return _order_owners(known, servers)

    def _known_owners(self, uri: str) -> list[McpToolset]:
        if uri in self._resources:
            return [self._resources[uri][0]]
        return [server for template, (server, _) in self._templates.items() if _matches_template(template, uri)]

    async def get_prompt(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = self.require_capability("prompts", "prompts/get")
        name = str(params.get("name"))
        if len(servers) == 1:
            return await request_upstream(servers[0], "prompts/get", params, context)
        server, prompt = await self._find_prompt(name)
        return await request_upstream(server, "prompts/get", {**params, "name": prompt["name"]}, context)

    async def complete(self, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
        servers = self.require_capability("completions", "completion/complete")
        reference = params.get("ref")
        reference = reference if isinstance(reference, Mapping) else {}
        if "name" in reference and len(self.servers_with("prompts")) > 1:
            server, prompt = await self._find_prompt(str(reference["name"]))
            return await request_upstream(
                server, "completion/complete", {**params, "ref": {**reference, "name": prompt["name"]}}, context
            )
        if "uri" in reference and len(servers) > 1:
            owners = await self.find_owners(str(reference["uri"]))
            servers = _order_owners([server for server in owners if server in servers], servers)
        return await first_success(servers, "completion/complete", params, context)

    async def _find_prompt(self, name: str) -> OwnedItem:
        if name not in self._prompts:
            await self.list_prompts()
        if name not in self._prompts:
            raise MCPError(INVALID_PARAMS, f"Unknown prompt: {name}")
        return self._prompts[name]

    async def _list_all(self, capability: str, method: str, key: str) -> list[OwnedItem]:
        """The items of all servers in their order, requested concurrently; servers that fail are skipped."""
        await self._gateway.start.settle()
        servers = self.servers_with(capability)
        if not servers and capability not in self._declared:
            self.require_capability(capability, method)
        items_by_server: dict[int, list[Item]] = {}

        async def list_one(index: int, server: McpToolset) -> None:
            try:
                items_by_server[index] = await _list_pages(server, method, key)
            except UpstreamError as error:
                log.warning("%s of %s: %s", method, server.owner, error)

        async with anyio.create_task_group() as tasks:
            for index, server in enumerate(servers):
                tasks.start_soon(list_one, index, server)
        return [(server, item) for index, server in enumerate(servers) for item in items_by_server.get(index, ())]


async def _list_pages(server: McpToolset, method: str, key: str) -> list[Item]:
    items: list[Item] = []
    params: dict[str, Any] = {}
    for _ in range(MAX_PAGES):
        result = await server.request(method, params, timeout_s=LIST_TIMEOUT_S)
        listed, cursor = result.get(key), result.get("nextCursor")
        items += [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        if not isinstance(cursor, str) or cursor == params.get("cursor"):
            break
        params = {"cursor": cursor}
    return items


async def request_upstream(
    server: McpToolset, method: str, params: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    """Sends a request to one server; its error becomes a JSON-RPC error for our client."""
    try:
        return await server.request(method, params, context)
    except UpstreamError as error:
        raise MCPError(error.code, error.reason, error.data) from error


async def first_success(
    servers: Iterable[McpToolset], method: str, params: Mapping[str, Any], context: Context
) -> dict[str, Any]:
    """The first successful result; if all servers fail, the first error, which is the likeliest owner's."""
    refusal: MCPError | None = None
    for server in servers:
        try:
            return await request_upstream(server, method, params, context)
        except MCPError as error:
            refusal = refusal or error
    raise refusal or MCPError(METHOD_NOT_FOUND, "Method not found", method)


def _first_by_key(listed: Iterable[OwnedItem], key: str) -> dict[str, OwnedItem]:
    first: dict[str, OwnedItem] = {}
    for server, item in listed:
        first.setdefault(str(item.get(key)), (server, item))
    return first


def _order_owners(known: Iterable[McpToolset], servers: Iterable[McpToolset]) -> list[McpToolset]:
    return list(dict.fromkeys((*known, *servers)))


def _matches_template(template: str, uri: str) -> bool:
    if template == uri:
        return True
    try:
        return UriTemplate.parse(template).match(uri) is not None
    except InvalidUriTemplate:
        return False
