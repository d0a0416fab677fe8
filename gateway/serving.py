"""What `mtrl-gateway serve` runs: the gateway of the files or of a tape, over HTTP and MCP, kept up with its files."""

from __future__ import annotations

import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from gateway.build import plan
from gateway.follow import following
from gateway.front.http import mount
from gateway.gateway import Gateway
from gateway.http.serve import run
from gateway.http.settings import Settings, read_token
from gateway.tape import Replay, recorded

TAPES = Path("tapes")
"""Where tapes are looked for, besides the one that runs."""


def settings_of(host: str, port: int, token_file: Path | None, tape: Path | None = None) -> Settings:
    token = read_token(token_file) if token_file else None
    return Settings(host=host, port=port, token=token, tapes=TAPES, tape=tape)


def serve_tape(tape: Path, settings: Settings) -> None:
    """Answers from a tape; there is nothing to watch, and nothing behind."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # whoever asks to reload asks for nothing that there is
    _serve(Replay(tape), settings)


def serve_files(tools: Path | None, servers: Path | None, settings: Settings, record: Path | None = None) -> None:
    """Serves what the files say, and follows them when they change."""
    made = plan(tools, servers)
    gateway = Gateway(made.sources, services=made.services)
    kept_up = following(gateway, made, tools, servers)
    _serve(recorded(gateway, record) if record else gateway, settings, kept_up)


def _serve(gateway: Gateway, settings: Settings, *beside: AbstractAsyncContextManager[Any]) -> None:
    app, lifespan = mount(gateway, body_bytes=settings.body_bytes)
    run(gateway, settings, mounts={"/mcp": app}, beside=(lifespan, *beside))
