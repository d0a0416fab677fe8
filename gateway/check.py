"""Opens everything that the files name, and says of each what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from gateway.build import Plan
from gateway.config.servers import unmatched
from gateway.gateway import Gateway
from gateway.upstream.server import McpToolset

Grade = Literal["ok", "note", "wrong"]
MARKS: dict[Grade, tuple[str, str]] = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "wrong": ("FAIL", "red")}


@dataclass(frozen=True, slots=True)
class Finding:
    grade: Grade
    what: str
    remedy: str = ""


async def findings(plan: Plan) -> list[Finding]:
    """Enters the gateway, so that what is found is what a rollout would meet."""
    async with Gateway(plan.sources, services=plan.services) as gateway:
        found = [
            Finding("ok", f"{len(plan.config.files)} files: {', '.join(str(file.name) for file in plan.config.files)}"),
            *_natives(gateway),
            *_servers(plan, gateway),
        ]
        found += [
            Finding("wrong", f"tool {name}: {reason}", "mend its schema, or leave it out with `allow`")
            for name, reason in gateway.table.set_aside.items()
        ]
    return found


def _natives(gateway: Gateway) -> Iterator[Finding]:
    for source in gateway.sources:
        if source.ours:
            names = ", ".join(tool.spec.name for tool in gateway.table.of(source).values())
            yield Finding("ok", f"native: {names}")


def _servers(plan: Plan, gateway: Gateway) -> Iterator[Finding]:
    listed: dict[str, list[str]] = {}
    for source in gateway.sources:
        if not isinstance(source.leaf, McpToolset):
            continue
        status = source.leaf.status
        entry = plan.config.servers[status.name]
        if status.state == "up":
            listed[status.name] = [spec.name for spec in source.leaf.specs]
            names = ", ".join(gateway.table.of(source)) or "no tools"
            yield Finding("ok", f"server {status.name} ({status.transport}, {status.protocol_version}): {names}")
        else:
            grade: Grade = "note" if entry.server.optional else "wrong"
            yield Finding(grade, f"server {status.name} is {status.state}: {status.reason}", status.remedy)
        for tool, reason in status.quarantined.items():
            yield Finding(
                "note", f"server {status.name}: tool {tool!r} is left out: {reason}", "report it to its author"
            )
    for error in unmatched(plan.config.servers.values(), listed):
        yield Finding("wrong", f"{error.where}: {error.problem}", error.remedy)


def left_out(gateway: Gateway) -> dict[str, str]:
    """What a list of the tools does not show, and why."""
    found = dict(gateway.table.set_aside)
    for source in gateway.sources:
        if isinstance(source.leaf, McpToolset):
            status = source.leaf.status
            if status.state != "up":
                found[f"server {status.name}"] = f"it is {status.state}: {status.reason}"
            found |= {f"{tool} of server {status.name}": reason for tool, reason in status.quarantined.items()}
    return found


def show(found: list[Finding], console: Console) -> bool:
    """Prints the findings; true where nothing is wrong."""
    for finding in found:
        mark, colour = MARKS[finding.grade]
        console.print(Text.assemble((mark, colour), f" {finding.what}"))
        if finding.remedy:
            console.print(Text(f"     remedy: {finding.remedy}"))
    wrong = sum(finding.grade == "wrong" for finding in found)
    console.print(Text("everything is in order" if not wrong else f"{wrong} to mend"))
    return not wrong
