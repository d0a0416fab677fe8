"""The gateway on the command line. What is heavy is imported by the command that needs it, so that help is quick."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gateway.errors import GatewayError, innermost
from gateway.leave import leaving

if TYPE_CHECKING:
    from gateway.build import Plan

TOOLS, SERVERS = Path("tool_configs"), Path("mcp_servers.json")

app = typer.Typer(
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
    typer.Option("--mcp", metavar="FILE", help="Servers file. Default: mcp_servers.json here, or beside --tools"),
]


@app.command()
def serve(
    tools: ToolsOption = None,
    mcp: McpOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8765,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that callers must send.")] = None,
    record: Annotated[Path | None, typer.Option(metavar="TAPE", help="Write every call and result to a tape.")] = None,
    replay: Annotated[Path | None, typer.Option(metavar="TAPE", help="Answer from a tape: no server, no key.")] = None,
) -> None:  # fmt: skip
    """Serve the tools over HTTP (/v1/tools, /docs), MCP (/mcp) and to people (/ui) until Ctrl-C."""
    from gateway.serving import serve_files, serve_tape, settings_of

    with told():
        settings = settings_of(host, port, token_file, replay or record)
        if replay is not None:
            if record is not None:
                raise GatewayError("--record and --replay exclude each other\n  remedy: give one of them")
            serve_tape(replay, settings)
        else:
            serve_files(*_files(tools, mcp), settings, record)


@app.command("list")
def list_tools(
    tools: ToolsOption = None,
    mcp: McpOption = None,
    json: Annotated[bool, typer.Option("--json", help="OpenAI function schemas, as GET /v1/tools gives them.")] = False,
    strict: Annotated[bool, typer.Option(help="With --json: schemas under OpenAI's strict rules.")] = False,
) -> None:
    """List every tool, and what was left out and why."""
    from gateway import show
    from gateway.check import left_out
    from gateway.http.sessions import listed

    async def main(plan: Plan) -> None:
        from gateway.gateway import Gateway

        async with Gateway(plan.sources, services=plan.services) as gateway:
            if json:
                offered = [spec for spec in gateway.specs if spec.audience == "policy"]
                show.json_text({"object": "list", "data": listed(offered, "openai", strict=strict)})
            else:
                show.tools(gateway.specs)
            show.left_out(left_out(gateway))

    _run(main, tools, mcp)


@app.command()
def call(
    name: Annotated[str, typer.Argument(help="The tool, as `list` names it.")],
    arguments: Annotated[str, typer.Argument(help="Its arguments, a JSON object: '{\"a\": 1}'")] = "{}",
    tools: ToolsOption = None,
    mcp: McpOption = None,
    save: Annotated[Path, typer.Option(metavar="DIR", help="Where pictures and other media are saved.")] = Path(),
) -> None:
    """Call one tool and print what it answers. Exits with 1 where the outcome is not `ok`."""
    from gateway import show
    from gateway.types import Context, Outcome, ToolCall

    outcomes = []

    async def main(plan: Plan) -> None:
        from gateway.gateway import Gateway

        # A native tool is known before any server is started, so none is.
        alone = [one for one in plan.sources if one.ours and any(spec.name == name for spec in one.toolset.specs)]
        async with Gateway(alone or plan.sources, services=plan.services) as gateway, gateway.open() as session:
            answer = await session.call(ToolCall("call_1", name, arguments), Context(audience="loop"))
            show.result(answer, name, save)
            outcomes.append(answer.outcome)

    _run(main, tools, mcp)
    if outcomes != [Outcome.OK]:
        raise typer.Exit(1)


@app.command()
def check(tools: ToolsOption = None, mcp: McpOption = None) -> None:
    """Open every server, validate every schema, say what is wrong and how to mend it. Exits with 1 if anything is."""
    from gateway.check import Finding, findings, show
    from gateway.show import out

    found: list[Finding] = []

    async def main(plan: Plan) -> None:
        found.extend(await findings(plan))

    _run(main, tools, mcp)
    if not show(found, out()):
        raise typer.Exit(1)


@app.command()
def stdio(tools: ToolsOption = None, mcp: McpOption = None) -> None:
    """Be an MCP server on standard input and output, for desktop MCP clients."""
    from gateway.follow import following
    from gateway.front.stdio import serve_stdio

    async def main(plan: Plan) -> None:
        from gateway.gateway import Gateway

        gateway = Gateway(plan.sources, services=plan.services)
        async with gateway, following(gateway, plan, *_files(tools, mcp)):
            await serve_stdio(gateway)

    _run(main, tools, mcp)


def _run(main: Callable[[Plan], Any], tools: Path | None, mcp: Path | None) -> None:
    import anyio

    from gateway.build import plan

    with told():
        anyio.run(main, plan(*_files(tools, mcp)))


def _files(tools: Path | None, mcp: Path | None) -> tuple[Path | None, Path | None]:
    """What was named, or the default files as far as they are there."""
    beside = SERVERS if SERVERS.exists() or tools is None else tools.resolve().parent / SERVERS
    found = tools or (TOOLS if TOOLS.exists() else None), mcp or (beside if beside.exists() else None)
    if found == (None, None):
        raise GatewayError(
            f"there is neither {TOOLS}/ nor {SERVERS} here\n"
            "  remedy: run this where they are, or name them with --tools and --mcp"
        )
    return found


@contextmanager
def told() -> Iterator[None]:
    """An operator's mistake ends in its message; anything else is ours, and keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (GatewayError, BaseExceptionGroup) as error:
        told = innermost(error)
        if not isinstance(told, GatewayError):
            raise
        fail(str(told))


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"mtrl-gateway: {message}\n")
    raise typer.Exit(2)


@app.callback()
def _logging(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what the gateway does, to standard error.")
    ] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if not verbose:
        for loud in ("mcp", "httpx2", "uvicorn.access"):
            logging.getLogger(loud).setLevel(logging.ERROR)


def main() -> None:
    leaving(app)


if __name__ == "__main__":
    main()
