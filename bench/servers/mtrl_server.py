"""The gateway as `mtrl-gateway serve` runs it, optionally without uvloop, to measure its effect."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import anyio

CONFIG = Path(__file__).with_name("config")


def _disable_uvloop() -> None:
    run = anyio.run

    def run_plain(main: Any, *args: Any, **_: Any) -> Any:
        return run(main, *args)

    anyio.run = run_plain  # type: ignore[assignment]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--without", choices=("uvloop",), action="append", default=[])
    without = options.parse_args().without
    if "uvloop" in without:
        _disable_uvloop()
    from gateway.serving import serve_files, settings_of

    serve_files(CONFIG, CONFIG / "mcp_servers.json", settings_of("127.0.0.1", 0, None))


if __name__ == "__main__":
    main()
