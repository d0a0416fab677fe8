"""Two tools with one name: what happens is set per server, and never depends on the order in which servers arrive."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Literal

import anyio
import pytest

from gateway.build import build_plan
from gateway.check import run_checks
from gateway.errors import ConfigErrors
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.schema import NAME_LENGTH
from gateway.tool_table import Source, ToolTable, build_table
from gateway.toolset import add_prefix
from gateway.types import Task
from tests.servers.start_server import stdio_command

LONG = "read_" + "x" * NAME_LENGTH


def server(name: str, *tools: str, on_clash: Literal["prefix", "refuse", "first"] = "prefix") -> Source:
    """A source like that of an MCP server; each of its tools answers with the server's name."""

    def answer() -> str:
        """Says who answers."""
        return name

    owner = f"mcp server {name!r}"
    toolset = NativeToolset([FunctionTool(answer, name=tool, owner=owner) for tool in tools])
    return Source(name, toolset, trusted=False, name=name, on_clash=on_clash)


def owners(table: ToolTable) -> dict[str, str]:
    return {name: tool.source.key for name, tool in table.tools.items()}


def test_later_server_in_the_file_gets_its_name_as_a_prefix() -> None:
    table = build_table([server("a", "search"), server("b", "search", "fetch")], starting=True)
    assert owners(table) == {"search": "a", "b_search": "b", "fetch": "b"}
    assert dict(table.clashes) == {
        "search of mcp server 'b'": "it is offered as 'b_search', because mcp server 'a' has 'search'"
    }
    assert not table.set_aside


@pytest.mark.parametrize("arrival", list(permutations(range(3))))
def test_names_do_not_depend_on_the_order_of_arrival(arrival: tuple[int, ...]) -> None:
    sources = [server("a", "search", LONG), server("b", "search", LONG), server("c", "search", "b_search")]
    expected = owners(build_table(sources, starting=True))
    listings = [source.toolset.specs for source in sources]
    for source in sources:
        source.toolset.specs = ()  # type: ignore[misc]
    table = build_table(sources, starting=True)
    for index in arrival:
        sources[index].toolset.specs = listings[index]  # type: ignore[misc]
        table = build_table(sources, table)
    assert owners(table) == expected
    assert expected["search"] == "a" and expected["b_search"] == "c" and expected["b_search_2"] == "b"
    assert len(expected) == 6 and all(len(name) <= NAME_LENGTH for name in expected)


def test_restarted_server_gets_the_same_names_again() -> None:
    sources = [server("a", "search"), server("b", "search")]
    before = build_table(sources, starting=True)
    listing = sources[0].toolset.specs
    sources[0].toolset.specs = ()  # type: ignore[misc]
    without = build_table(sources, before)
    assert owners(without) == {"search": "b"}
    sources[0].toolset.specs = listing  # type: ignore[misc]
    assert owners(build_table(sources, without)) == owners(before) == {"search": "a", "b_search": "b"}


async def test_check_tells_each_clash_of_real_servers(tmp_path: Path) -> None:
    command, args = stdio_command()
    servers = {name: {"command": command, "args": args} for name in ("one", "two")}
    file = tmp_path / "mcp_servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    with anyio.fail_after(90):
        findings = await run_checks(build_plan(None, file))
    texts = [finding.text for finding in findings if finding.grade == "note"]
    told = "tool echo of mcp server 'two': it is offered as 'two_echo', because mcp server 'one' has 'echo'"
    assert told in texts and not [finding for finding in findings if finding.grade == "wrong"]
    servers["two"]["on_clash"] = "refuse"
    file.write_text(json.dumps({"mcpServers": servers}))
    with anyio.fail_after(90), pytest.raises(ConfigErrors) as raised:
        await run_checks(build_plan(None, file))
    assert len(raised.value.errors) == len([text for text in texts if "it is offered as" in text]) > 1


async def test_renamed_class_tool_is_created_and_rewarded_by_its_new_name() -> None:
    class Tool(BaseTool):
        async def create(self, instance_id: str | None = None, start: float = 0, **kwargs: object) -> str:  # type: ignore[override]
            self.start = start
            return str(instance_id)

        async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
            return self.start

    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "tool"}})
    toolset = add_prefix(NativeToolset([ClassTool(Tool({}, schema))]), "my_")
    async with toolset, toolset.open(Task(create={"my_tool": {"start": 3}})) as session:
        assert await session.finish() == {"my_tool": 3.0}
