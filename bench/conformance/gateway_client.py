"""The gateway as the client of the conformance suite: connects to the suite's server, logs in, calls every tool.

The suite starts it with the server's URL, the scenario's name in the environment, and a context with credentials.
A person is played by a request that follows the login's redirects, as a browser would.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.build import build_plan
from gateway.errors import GatewayError
from gateway.gateway import Gateway
from gateway.login import find_server, login_server
from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Outcome, Task, ToolCall, ToolSpec

NAME = "suite"
MAX_LOGINS = 3
LOGIN_REMEDY = f"mtrl-gateway login {NAME}"
CLIENT_METADATA_URL = "https://conformance-test.local/client-metadata.json"
"""The client ID metadata document that the suite expects."""
EXAMPLES: Mapping[str, Any] = {
    "string": "text",
    "integer": 3,
    "number": 2.5,
    "boolean": True,
    "array": [],
    "object": {},
}


def write(line: str) -> None:
    """Says what the client does, for the suite's record of the scenario."""
    sys.stdout.write(f"{line}\n")


def server_entry(url: str, scenario: str, context: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the servers file that a user would write with these credentials."""
    oauth: dict[str, Any] = {"client_metadata_url": CLIENT_METADATA_URL}
    names = {"client_id": "client_id", "client_secret": "client_secret", "private_key_pem": "private_key"}
    names["issuer"] = "issuer"
    oauth |= {field: context[key] for key, field in names.items() if key in context}
    if {"client_secret", "private_key"} & set(oauth) and "issuer" not in oauth:
        oauth["issuer"] = named_issuer(url)
    if "client-credentials" in scenario:
        oauth["grant"] = "client_credentials"
    return {"url": url, "oauth": oauth, "answers": "defaults"}


def named_issuer(url: str) -> str:
    """The authorization server that a person would look up for a client whose credentials come without it."""
    parts = urlsplit(url)
    for path in (parts.path, ""):
        address = f"{parts.scheme}://{parts.netloc}/.well-known/oauth-protected-resource{path}"
        with suppress(OSError), urllib.request.urlopen(address, timeout=10) as answer:
            return str(json.load(answer)["authorization_servers"][0])
    return f"{parts.scheme}://{parts.netloc}"


def calls_to_make(specs: Iterable[ToolSpec], context: Mapping[str, Any]) -> Iterator[ToolCall]:
    """The calls that the scenario asks for, by default each tool once with arguments that fit its schema."""
    offered = {spec.name: spec for spec in specs}
    wanted = context.get("toolCalls")
    if wanted is None:
        wanted = [{"name": name, "arguments": example_arguments(spec)} for name, spec in offered.items()]
    for number, call in enumerate(wanted):
        yield ToolCall(f"call_{number}", call["name"], json.dumps(call["arguments"]))


def example_arguments(spec: ToolSpec) -> dict[str, Any]:
    properties = spec.parameters.get("properties", {})
    required = spec.parameters.get("required", [])
    return {name: EXAMPLES.get(properties.get(name, {}).get("type"), "text") for name in required}


async def use_server(file: Path, context: Mapping[str, Any]) -> str:
    """Calls the tools through a gateway; returns what went wrong, empty if nothing did."""
    plan = build_plan(None, file)
    problems = []
    async with Gateway(plan.sources, services=plan.services) as gateway:
        (backend,) = (source.backend for source in gateway.sources if isinstance(source.backend, McpToolset))
        if backend.status.state != "up":
            return f"{backend.status.reason}: {backend.status.remedy}"
        await read_all(backend)
        # The suite's own calls have a null that its schema forbids, so they skip the gateway's check of arguments.
        async with backend.open(Task()) if "toolCalls" in context else gateway.open() as session:
            for call in calls_to_make(session.specs, context):
                result = await session.call(call)
                write(f"{call.name}: {result.outcome.value} {result.reason or ''}")
                if result.outcome not in (Outcome.OK, Outcome.ERROR):
                    problems.append(f"{call.name}: {result.reason}")
    return "; ".join(problems)


async def read_all(server: McpToolset) -> None:
    """Lists and reads resources and prompts, as a client of the gateway's MCP endpoint would, where there are any."""
    with suppress(UpstreamError):
        if "resources" in server.capabilities:
            for resource in (await server.request("resources/list", {}))["resources"]:
                await server.request("resources/read", {"uri": resource["uri"]})
        if "prompts" in server.capabilities:
            for prompt in (await server.request("prompts/list", {}))["prompts"]:
                await server.request("prompts/get", {"name": prompt["name"], "arguments": {}})


def follow_redirects(url: str) -> bool:
    """What a browser does where the authorization server asks the person nothing."""
    with urllib.request.urlopen(url, timeout=10) as page:
        page.read()
    return True


async def main(url: str, scenario: str, context: Mapping[str, Any]) -> str:
    """Plays the scenario's user; returns what went wrong, empty if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        file = Path(folder) / "mcp_servers.json"
        file.write_text(json.dumps({"mcpServers": {NAME: server_entry(url, scenario, context)}}))
        problem = await use_server(file, context)
        for _ in range(MAX_LOGINS):
            if LOGIN_REMEDY not in problem:
                break
            write(f"{problem}\n$ {LOGIN_REMEDY}")
            try:
                await login_server(find_server(NAME, file), write, open_browser=follow_redirects, timeout_s=10)
            except GatewayError as error:
                return str(error)
            before, problem = problem, await use_server(file, context)
            if problem == before:
                break
        return problem
