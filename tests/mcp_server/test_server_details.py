"""What a server says about itself and its tools reaches clients and policies; its protocol version can be pinned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.gateway import Gateway
from gateway.types import Context
from gateway.wire import spec_from_json, spec_to_json
from tests.mcp_client.mcp_toolsets import call_tool
from tests.mcp_client.test_protocol_versions import answer_request, everything_toolset
from tests.mcp_server.clients import CLIENT_MODES, connect_client
from trainer.rollout.loop import add_instructions

NOTES_SERVER = str(Path(__file__).parents[1] / "mcp_client" / "notes_server.py")
QUESTION = {"role": "user", "content": "What is noted?"}


def load_gateway(folder: Path, *names: str, of_job: Any = None, **settings: Any) -> Gateway:
    entry = {"command": sys.executable, "args": [NOTES_SERVER, str(folder)], **settings}
    servers, tools = folder / "mcp_servers.json", folder / "tools.yaml"
    servers.write_text(json.dumps({"mcpServers": dict.fromkeys(names, entry)}))
    tools.write_text(json.dumps({"tools": [{"server": name, "prefix": f"{name}_"} for name in names]}))
    return Gateway.load(tools, servers, instructions=of_job)


@pytest.mark.parametrize("protocol", CLIENT_MODES)
async def test_instructions_and_further_fields_of_tools_reach_the_client(protocol: str, tmp_path: Path) -> None:
    with anyio.fail_after(60):
        async with load_gateway(tmp_path, "notes") as gateway, connect_client(protocol, gateway) as client:
            assert client.instructions == "Keeps one note."
            tool = (await client.list_tools()).tools[0].model_dump(mode="json", by_alias=True)
        async with load_gateway(tmp_path, "one", "two") as gateway, connect_client(protocol, gateway) as client:
            assert client.instructions == "# one\nKeeps one note.\n\n# two\nKeeps one note."
    assert tool["_meta"] == {"example.org/kind": "note"}
    if protocol == "2025":  # Later versions have no such field.
        assert tool["execution"]["taskSupport"] == "forbidden"


@pytest.mark.parametrize(
    ("of_server", "of_job", "is_shown"),
    [(None, None, False), ("system", None, True), (None, "system", True), ("none", "system", False)],
)
async def test_policy_reads_instructions_where_server_or_job_asks_for_it(
    of_server: str | None, of_job: str | None, is_shown: bool, tmp_path: Path
) -> None:
    settings = {} if of_server is None else {"instructions": of_server}
    with anyio.fail_after(60):
        gateway = load_gateway(tmp_path, "notes", of_job=of_job, **settings)
        async with gateway, gateway.open() as session:
            specs = [spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) for spec in session.specs]
    system = [{"role": "system", "content": "Keeps one note."}] if is_shown else []
    assert list(add_instructions((QUESTION,), specs)) == [*system, QUESTION]


async def test_pinned_handshake_version_keeps_elicitation_over_the_connection() -> None:
    async with everything_toolset("stdio", protocol="2025-11-25") as server:
        assert server.protocol_version == "2025-11-25"
        answer = await call_tool(server, "test_elicitation", Context(answer_request=answer_request), message="Who?")
        assert "action=accept" in answer.text and "ada" in answer.text
