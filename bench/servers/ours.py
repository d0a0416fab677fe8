"""Our gateway as `mtrl-gateway serve` runs it; without uvloop or httptools where a row asks what they are worth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import anyio

CONFIG = Path(__file__).with_name("config")


def _without_uvloop() -> None:
    run = anyio.run

    def plain(main: Any, *args: Any, **_: Any) -> Any:
        return run(main, *args)

    anyio.run = plain  # type: ignore[assignment]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--without", choices=("uvloop", "httptools"), action="append", default=[])
    without = options.parse_args().without
    if "uvloop" in without:
        _without_uvloop()
    if "httptools" in without:
        sys.modules["httptools"] = None  # type: ignore[assignment]  # uvicorn then reads HTTP with h11
    from gateway.serving import serve_files, settings_of

    serve_files(CONFIG, CONFIG / "mcp_servers.json", settings_of("127.0.0.1", 0, None))


if __name__ == "__main__":
    main()
