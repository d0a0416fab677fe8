"""`mtrl-gateway sandboxes`: serves sandboxes of this machine to gateways on others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli import app, errors_to_exit
from gateway.errors import GatewayError


@app.command()
def sandboxes(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback, needs --token-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8766,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that clients must send.")] = None,
    most: Annotated[int, typer.Option(min=1, help="How many sandboxes may run at once.")] = 64,
    lease: Annotated[float, typer.Option(min=1, help="Seconds until a sandbox ends whose client is gone.")] = 60,
    allow_host: Annotated[list[str] | None, typer.Option(metavar="HOST", help="Host that clients may list.")] = None,
) -> None:
    """Start sandboxes on this machine for gateways on others, until Ctrl-C."""
    from gateway.sandbox.bubblewrap import find_problem
    from gateway.serving import settings_of
    from mtrl_plugins.sandboxes.sandbox_server import read_hosts, serve_sandboxes

    with errors_to_exit():
        if (problem := find_problem()) is not None:
            raise GatewayError(f"no sandbox can be started: {problem}")
        settings, hosts = settings_of(host, port, token_file), read_hosts(allow_host or ())
        serve_sandboxes(settings, most, lease, hosts, lambda url: typer.echo(f"sandboxes at {url}"))
