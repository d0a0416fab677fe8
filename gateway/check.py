"""`mtrl-gateway check`: opens every configured tool and server, and reports what is wrong and how to fix it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from anyio import to_thread
from rich.console import Console
from rich.text import Text

from gateway.build import Plan
from gateway.config.configured_server import find_unknown_tools
from gateway.config.load_object import load_object
from gateway.finding import Finding, Grade, print_finding
from gateway.gateway import Gateway
from gateway.isolation_check import check_isolation
from gateway.mcp_client.mcp_toolset import McpToolset, mcp_servers
from gateway.native.sandboxed_toolset import SandboxedToolset
from gateway.plural import format_count
from gateway.sandbox import bubblewrap
from gateway.sandbox.cgroups import make_group, remove_group
from gateway.sandbox.choose_provider import describe_provider, find_provider_problem
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_toolset import SandboxToolset
from gateway.sandbox.system_call_filter import has_filter
from gateway.state.prepared_state import find_full_copy
from gateway.terminal import show_start

COPY_REMEDY = "use a folder whose files have one owner, and Linux 5.19 or newer, to start large states quickly"
SHARE_REMEDY = "put the state and TMPDIR on one file system that shares blocks, such as XFS or Btrfs, as a folder"

OWN_PACKAGES = ("gateway", "mtrl_plugins", "trainer")


async def run_checks(plan: Plan) -> list[Finding]:
    """Runs all checks on an entered gateway, as a rollout would use it."""
    async with Gateway(plan.sources, services=plan.services, start=show_start()) as gateway:
        names = [str(file.name) for file in plan.config.files]
        findings = [
            Finding("ok", f"{format_count(len(names), 'file')}: {', '.join(names)}"),
            *(Finding("note", note) for note in plan.config.notes),
            *_check_native_tools(gateway),
            *_check_stand_ins(plan),
            *_check_servers(plan, gateway),
            *[finding async for finding in _check_sandboxes(gateway)],
            *[finding async for finding in _check_server_states(gateway)],
            *[finding async for finding in _check_isolation(gateway)],
        ]
        findings += [
            Finding("wrong", f"tool {name}: {reason}", "fix its schema, or leave it out with `allow`")
            for name, reason in gateway.table.set_aside.items()
            if name not in gateway.table.clashes
        ]
        remedy = "give the server a `prefix`, leave the tool out with `allow`, or set `on_clash`"
        findings += [Finding("note", f"tool {name}: {text}", remedy) for name, text in gateway.table.clashes.items()]
    return findings


def _check_native_tools(gateway: Gateway) -> Iterator[Finding]:
    for source in gateway.sources:
        if source.trusted:
            names = ", ".join(tool.spec.name for tool in gateway.table.tools_of(source).values())
            yield Finding("ok", f"native: {names}")


def _check_stand_ins(plan: Plan) -> Iterator[Finding]:
    """Tells which classes of other packages are mtrl's own in their place; names that differ are refused."""
    named = [
        entry.class_name for entry in (*plan.config.tools, *plan.config.interactions) if hasattr(entry, "class_name")
    ]
    for offer in (offer for server in plan.config.servers.values() for offer in server.offers):
        named += [hook for hook in (*offer.parse_tools.values(), offer.hook_for("")) if hook]
    for name in dict.fromkeys(name for name in named if name.partition(".")[0] not in OWN_PACKAGES):
        if load_object(name).__module__.partition(".")[0] in OWN_PACKAGES:
            package = name.partition(".")[0]
            about = f"mtrl's own class in its place, with the same results ({package} is not installed)"
            yield Finding("ok", f"{name}: {about}")


def _check_servers(plan: Plan, gateway: Gateway) -> Iterator[Finding]:
    listed: dict[str, list[str]] = {}
    for source in gateway.sources:
        if not isinstance(source.backend, McpToolset):
            continue
        status = source.backend.status
        entry = plan.config.servers[status.name]
        if status.state == "up":
            listed[status.name] = [spec.name for spec in source.backend.specs]
            names = ", ".join(gateway.table.tools_of(source)) or "no tools"
            yield Finding("ok", f"server {status.name} ({status.transport}, {status.protocol_version}): {names}")
        else:
            grade: Grade = "note" if entry.server.optional else "wrong"
            yield Finding(grade, f"server {status.name} is {status.state}: {status.reason}", status.remedy)
        for tool, reason in status.quarantined.items():
            yield Finding(
                "note", f"server {status.name}: tool {tool!r} is left out: {reason}", "report it to its author"
            )
    for error in find_unknown_tools(plan.config.servers.values(), listed):
        yield Finding("wrong", f"{error.where}: {error.problem}", error.remedy)


async def _check_server_states(gateway: Gateway) -> AsyncIterator[Finding]:
    """How the processes of servers begin with their prepared states."""
    servers = mcp_servers(gateway.sources)
    for server, state in [(one, state) for one in servers for state in one.prepared_states.examples()]:
        try:
            yield await to_thread.run_sync(_check_server_state, server, state)
        except OSError as error:
            text = f"server {server.name}: the state {state} cannot be read: {error}"
            yield Finding("wrong", text, "let the gateway read all of it")


def _check_server_state(server: McpToolset, state: Path) -> Finding:
    name = f"server {server.name}: each rollout gets a copy of the state {state}"
    copy = find_full_copy(state)
    if not copy.reason:
        return Finding("ok", f"{name}, whose blocks are shared")
    if not copy.is_large:
        return Finding("ok", f"{name} of {copy.bytes / 2**20:.1f} MB: {copy.reason}")
    return Finding("note", f"{name} of {copy.bytes / 2**20:.0f} MB: {copy.reason}", SHARE_REMEDY)


async def _check_states(backends: Iterable[object]) -> AsyncIterator[Finding]:
    """How sandboxes of bubblewrap begin with their prepared states."""
    for backend in backends:
        if isinstance(backend, SandboxToolset):
            prepared = backend.prepared_states if backend.provider.mounts_states else None
        else:
            prepared = backend.prepared_states if isinstance(backend, SandboxedToolset) else None
        for state in () if prepared is None else prepared.examples():
            reason = await to_thread.run_sync(bubblewrap.find_copy_reason, state)
            if not reason:
                yield Finding("ok", f"sandboxes: nothing of the state {state} is copied: it lies under an overlay")
            else:
                text = f"sandboxes: each rollout gets a copy of the state {state}: {reason}"
                yield Finding("note", text, COPY_REMEDY)


async def _check_sandboxes(gateway: Gateway) -> AsyncIterator[Finding]:
    """Whether sandboxes can be started, if there are tools that need one, by each provider, and what limits them."""
    backends = [source.backend for source in gateway.sources]
    wanted = [backend.settings for backend in backends if isinstance(backend, SandboxToolset)]
    is_local = any(isinstance(backend, SandboxedToolset) for backend in backends)
    if is_local or any(server.config.isolation == "sandbox" for server in mcp_servers(gateway.sources)):
        wanted.append(SandboxSettings())
    for name, settings in {describe_provider(settings): settings for settings in wanted}.items():
        problem = await to_thread.run_sync(find_provider_problem, settings)
        text, _, remedy = (problem or "").partition("\n  remedy: ")
        if problem:
            yield Finding("wrong", f"sandboxes cannot be started: {text}", remedy)
        elif settings.provider is not None:
            yield Finding("ok", f"sandboxes: {name}")
        else:
            start_s = await to_thread.run_sync(bubblewrap.measure_start)
            for finding in _check_bubblewrap("" if start_s is None else f"; one starts in {start_s * 1000:.0f} ms"):
                yield finding
            async for finding in _check_states(backends):
                yield finding


def _check_bubblewrap(start: str) -> Iterator[Finding]:
    """What limits the sandboxes of this machine, and how long one takes to start, as text."""
    group = make_group(SandboxSettings())
    if group.folder is not None:
        remove_group(group.folder)
        yield Finding("ok", f"sandboxes: bubblewrap, with limits by control groups{start}")
    else:
        limits = f"{group.problem}, so that memory is limited for each process, and not for all together"
        yield Finding("note", f"sandboxes: bubblewrap; {limits}{start}", "let the gateway's user write a control group")
    if not has_filter():
        text = "sandboxes: system calls are not filtered on this processor; `network: none` is as `loopback`"
        yield Finding("note", text, "use x86_64 or aarch64")


async def _check_isolation(gateway: Gateway) -> AsyncIterator[Finding]:
    """Whether the sessions of servers that are to be isolated share files."""
    for server in mcp_servers(gateway.sources):
        if server.status.state == "up" and (finding := await check_isolation(server)) is not None:
            yield finding


def omitted_tools(gateway: Gateway) -> dict[str, str]:
    """Tools and servers missing from the gateway's list, with the reason."""
    omitted = dict(gateway.table.set_aside)
    for status in (server.status for server in mcp_servers(gateway.sources)):
        if status.state != "up":
            omitted[f"server {status.name}"] = f"it is {status.state}: {status.reason}"
        omitted |= {f"{tool} of server {status.name}": reason for tool, reason in status.quarantined.items()}
    return omitted


def print_findings(findings: list[Finding], console: Console) -> bool:
    """Prints the findings; returns whether nothing is wrong."""
    for finding in findings:
        print_finding(finding, console)
    wrong = sum(finding.grade == "wrong" for finding in findings)
    console.print(Text("everything is in order" if not wrong else f"{wrong} to fix"))
    return not wrong
