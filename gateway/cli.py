"""The `mtrl-gateway` command line. Each command imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.errors import GatewayError, unwrap_error
from gateway.plugin_commands import PluginGroup, load_commands
from gateway.process_exit import exit_despite_threads
from gateway.version import print_version

if TYPE_CHECKING:
    from gateway.build import Plan

DEFAULT_TOOLS, DEFAULT_SERVERS = Path("tool_configs"), Path("mcp_servers.json")

app = typer.Typer(
    cls=PluginGroup,
    help="Native tools, MCP servers and feedback interactions behind one OpenAI function-schema interface.",
    epilog='Try: mtrl-gateway check, then mtrl-gateway list, then mtrl-gateway call add \'{"a": 1, "b": 2}\'',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ToolsOption = Annotated[
    Path | None, typer.Option("--tools", metavar="DIR", help="Folder of YAML. Default: ./tool_configs")
]
McpOption = Annotated[
    Path | None,
    typer.Option("--mcp", metavar="FILE", help="Servers file. Default: ./mcp_servers.json, or the one next to --tools"),
]
WaitOption = Annotated[
    str,
    typer.Option(
        metavar="all|none|SECONDS",
        help="How long lists of tools and new sessions wait for servers that are starting. Everything else answers at "
        "once, and servers that are late join when they are up.",
    ),
]
DEFAULT_WAIT = "3"


def parse_wait(text: str) -> float:
    """Seconds from `all`, `none` or a number."""
    with suppress(ValueError):
        seconds = {"all": math.inf, "none": 0.0}.get(text)
        seconds = float(text) if seconds is None else seconds
        if seconds >= 0:
            return seconds
    raise GatewayError(f"--wait: {text!r} is no time\n  remedy: give `all`, `none` or a number of seconds")


@app.command()
def serve(
    tools: ToolsOption = None,
    mcp: McpOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback, needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8765,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that clients must send.")] = None,
    callers: Annotated[Path | None, typer.Option(help="JSON file of callers, with a token and tools for each.")] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web pages that may call, such as http://localhost:3000.")
    ] = None,
    record: Annotated[Path | None, typer.Option(metavar="TAPE", help="Record every call and result to a tape.")] = None,
    replay: Annotated[Path | None, typer.Option(metavar="TAPE", help="Answer from a tape; needs no servers.")] = None,
    wait: WaitOption = DEFAULT_WAIT,
) -> None:  # fmt: skip
    """Serve the tools over HTTP (/v1/tools) and MCP (/mcp), with a web UI (/ui), until Ctrl-C."""
    from gateway.serving import serve_files, serve_tape, settings_of

    with errors_to_exit():
        wait_s = parse_wait(wait)
        settings = settings_of(host, port, token_file, allow_origin or (), callers)
        if callers is not None and (record is not None or replay is not None):
            raise GatewayError("--callers excludes --record and --replay\n  remedy: give --token-file instead")
        if replay is not None:
            if record is not None:
                raise GatewayError("--record and --replay exclude each other\n  remedy: give one of them")
            serve_tape(replay, settings)
        else:
            serve_files(*_find_config_files(tools, mcp), settings, record, wait_s)


@app.command("list")
def list_tools(
    tools: ToolsOption = None,
    mcp: McpOption = None,
    json: Annotated[bool, typer.Option("--json", help="OpenAI function schemas, as GET /v1/tools gives them.")] = False,
    strict: Annotated[bool, typer.Option(help="With --json: schemas for OpenAI's strict mode.")] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="One tool a line, without colours or wrapping: name, for whom, arguments, description and owner, with "
            "a tab between them. The default where the output is no terminal.",
        ),
    ] = False,
) -> None:
    """List every tool, and what is left out with the reason.

    What is left out goes to standard error, so pipes get the tools alone: mtrl-gateway list | cut -f1
    """
    from gateway import terminal
    from gateway.check import omitted_tools
    from gateway.http.session_routes import specs_to_json

    async def main(plan: Plan) -> None:
        from gateway.gateway import Gateway

        async with Gateway(plan.sources, services=plan.services, start=terminal.show_start()) as gateway:
            if json:
                offered = [spec for spec in gateway.specs if spec.audience == "policy"]
                terminal.print_json({"object": "list", "data": specs_to_json(offered, "openai", strict=strict)})
            elif plain or not sys.stdout.isatty():
                terminal.print_plain_tools(gateway.specs)
            else:
                terminal.print_tools(gateway.specs)
            terminal.print_omitted(omitted_tools(gateway))

    _run_with_plan(main, tools, mcp)


@app.command()
def call(
    name: Annotated[str, typer.Argument(help="The tool, as `list` names it.")],
    arguments: Annotated[str, typer.Argument(help="Its arguments, a JSON object: '{\"a\": 1}'")] = "{}",
    tools: ToolsOption = None,
    mcp: McpOption = None,
    save: Annotated[Path, typer.Option(metavar="DIR", help="Folder for images and other media.")] = Path(),
) -> None:
    """Call one tool and print its result. Exits with 1 if the outcome is not `ok`."""
    from gateway import terminal
    from gateway.types import Context, Outcome, ToolCall

    outcomes = []

    async def main(plan: Plan) -> None:
        from gateway.gateway import Gateway

        # For a native tool, no server needs to be started.
        native = [
            source
            for source in plan.sources
            if source.trusted and any(spec.name == name for spec in source.toolset.specs)
        ]
        gateway = Gateway(native or plan.sources, services=plan.services, start=terminal.show_start())
        async with gateway, gateway.open() as session:
            result = await session.call(ToolCall("call_1", name, arguments), Context(audience="loop"))
            terminal.print_result(result, name, save)
            outcomes.append(result.outcome)

    _run_with_plan(main, tools, mcp)
    if outcomes != [Outcome.OK]:
        raise typer.Exit(1)


@app.command()
def check(tools: ToolsOption = None, mcp: McpOption = None) -> None:
    """Open every server, validate every schema, and report problems with remedies. Exits with 1 if there are any."""
    from gateway.check import print_findings, run_checks
    from gateway.finding import Finding
    from gateway.terminal import stdout_console

    findings: list[Finding] = []

    async def main(plan: Plan) -> None:
        findings.extend(await run_checks(plan))

    _run_with_plan(main, tools, mcp)
    if not print_findings(findings, stdout_console()):
        raise typer.Exit(1)


@app.command()
def login(
    name: Annotated[str, typer.Argument(help="The server, as the servers file names it.")],
    mcp: McpOption = None,
    browser: Annotated[bool, typer.Option(help="Open a browser; the address is printed in any case.")] = True,
    timeout_s: Annotated[float, typer.Option(min=1, max=3600, help="Seconds to wait for the login.")] = 300.0,
) -> None:
    """Log in to an MCP server with OAuth, in a browser; its tokens are kept for all runs of this user."""
    import webbrowser

    import anyio

    from gateway.login import find_server, login_server

    with errors_to_exit():
        entry = find_server(name, _find_config_files(None, mcp)[1])

        async def main() -> str:
            opener = webbrowser.open if browser else None
            return (await login_server(entry, typer.echo, open_browser=opener, timeout_s=timeout_s)).state

        if anyio.run(main) != "up":
            raise typer.Exit(1)


@app.command()
def logout(
    name: Annotated[str, typer.Argument(help="The server, as the servers file names it.")], mcp: McpOption = None
) -> None:
    """Revoke and remove the tokens of an MCP server."""
    import anyio

    from gateway.login import find_server, logout_server

    with errors_to_exit():
        anyio.run(logout_server, find_server(name, _find_config_files(None, mcp)[1]), typer.echo)


@app.command()
def stdio(tools: ToolsOption = None, mcp: McpOption = None, wait: WaitOption = DEFAULT_WAIT) -> None:
    """Serve as an MCP server on standard input and output, for desktop MCP clients."""
    from gateway.mcp_server.transports import serve_stdio
    from gateway.process_exit import hide_environment
    from gateway.server_start import ServerStart
    from gateway.serving import reload_on_change

    async def main(plan: Plan) -> None:
        from gateway.gateway import Gateway

        hide_environment()
        start = ServerStart(listen_first=True, wait_s=parse_wait(wait))
        gateway = Gateway(plan.sources, services=plan.services, start=start)
        async with gateway, reload_on_change(gateway, plan, *_find_config_files(tools, mcp)):
            await serve_stdio(gateway)

    _run_with_plan(main, tools, mcp)


def _run_with_plan(command: Callable[[Plan], Any], tools: Path | None, mcp: Path | None) -> None:
    import anyio

    from gateway.build import build_plan

    with errors_to_exit():
        anyio.run(command, build_plan(*_find_config_files(tools, mcp)))


def _find_config_files(tools: Path | None, mcp: Path | None) -> tuple[Path | None, Path | None]:
    """The files given on the command line, else the default files that exist."""
    servers = DEFAULT_SERVERS if DEFAULT_SERVERS.exists() or tools is None else tools.resolve().parent / DEFAULT_SERVERS
    tools = tools or (DEFAULT_TOOLS if DEFAULT_TOOLS.exists() else None)
    mcp = mcp or (servers if servers.exists() else None)
    if tools is None and mcp is None:
        raise GatewayError(
            f"there is neither {DEFAULT_TOOLS}/ nor {DEFAULT_SERVERS} in the working folder\n"
            "  remedy: change to the folder that has them, or name them with --tools and --mcp"
        )
    return tools, mcp


@contextmanager
def errors_to_exit() -> Iterator[None]:
    """Prints a `GatewayError` and exits with 2; other exceptions keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (GatewayError, BaseExceptionGroup) as error:
        inner = unwrap_error(error)
        if not isinstance(inner, GatewayError):
            raise
        sys.stderr.write(f"mtrl-gateway: {inner}\n")
        raise typer.Exit(2) from None


roots_app = typer.Typer(no_args_is_help=True, help="Root file systems of sandboxes (`sandbox: {root: NAME}`).")
app.add_typer(roots_app, name="roots")


@roots_app.command("add")
def add_root(
    name: Annotated[str, typer.Argument(help="The root's name in `sandbox: {root: NAME}`.")],
    archive: Annotated[
        Path, typer.Argument(metavar="FILE.tar", help="`docker save`, `docker export`, or an OCI archive.")
    ],
) -> None:
    """Make a root of a container image: docker save IMAGE -o FILE.tar; mtrl-gateway roots add NAME FILE.tar."""
    from gateway.sandbox import roots

    with errors_to_exit():
        root, left_out = roots.add_root(name, archive)
        typer.echo(f"{roots.describe_root(root)}{f'; {left_out}' if left_out else ''}")


@roots_app.command("list")
def list_roots() -> None:
    """List the roots, with their sizes."""
    from gateway.sandbox import roots

    with errors_to_exit():
        for root in roots.list_roots():
            typer.echo(roots.describe_root(root))


@roots_app.command("remove")
def remove_root(name: Annotated[str, typer.Argument(help="The root's name.")]) -> None:
    """Remove a root."""
    from gateway.sandbox import roots

    with errors_to_exit():
        roots.remove_root(name)


@app.callback()
def _configure_logging(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log one JSON object a line.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the release, and exit.")
    ] = False,
) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if log_json:
        from gateway.json_log import JsonFormatter

        logging.getLogger().handlers[0].setFormatter(JsonFormatter())
    if not verbose:
        for name in ("mcp", "httpx2", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """The entry point of `mtrl-gateway`."""
    with exit_despite_threads():
        app()


if __name__ == "__main__":
    from gateway.cli import main as run  # Plug-ins add their commands to this module, not to `__main__`.

    run()
else:
    load_commands(lambda plugin: plugin.gateway_commands)
