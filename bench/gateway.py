"""Measures the CPU time of a tool call through the gateway and through its peers, and prints a table.

make bench                              # under eight minutes; writes bench/results/
python bench/gateway.py --quick         # smoke test; its numbers mean nothing
python bench/gateway.py --only native   # rows whose key starts with this
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import Peer, fastmcp
from rounds import FULL, QUICK, Measurement, MeasurementSetup, measure_rows
from rows import ROWS
from scale import Scale, measure_scale
from table import compute_figures, format_promises, format_table

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("mtrl-rl", "mcp", "anyio", "uvicorn", "uvloop", "httptools", "pydantic")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one short round, few sessions, nothing is installed")
    options.add_argument(
        "--only", default="", metavar="KEY", help="rows whose key starts with this; several with commas"
    )
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    _raise_file_limit()
    rows = [row for row in ROWS if row.key.startswith(tuple(args.only.split(",")))]
    load_before = os.getloadavg()[0]
    peer = fastmcp(install=not args.quick)
    setup = MeasurementSetup(peer)
    try:
        setup.start(rows)
        measurements = measure_rows(setup, QUICK if args.quick else FULL, _log, rows)
        sessions, waiting = (20, 512) if args.quick else (1000, 9950)
        scale = None if args.only else measure_scale(setup.echo.url, sessions, 4, waiting)
    finally:
        setup.stop()
    about = describe_environment(peer, load_before, quick=args.quick)
    out = args.out or (None if args.quick or args.only else RESULTS)
    _report(measurements, scale, about, out)


def _report(measurements: list[Measurement], scale: Scale | None, about: dict[str, Any], out: Path | None) -> None:
    rows = compute_figures(measurements)
    promises = format_promises(measurements, rows, scale)
    text = format_table(rows, promises, scale, [f"{name}: {value}  " for name, value in about.items()])
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gateway.md").write_text("# The gateway and its peers\n\n" + text)
        content = {"about": about, "rows": rows, "scale": scale and scale.fields}
        (out / "gateway.json").write_text(json.dumps(content, indent=1) + "\n")


def describe_environment(peer: Peer, load_before: float, *, quick: bool) -> dict[str, Any]:
    """Date, machine, versions and number of rounds."""
    pace = QUICK if quick else FULL
    load = f"load {load_before:.1f} before the run" + (
        "" if load_before < 0.5 else ", so it was shared with other work"
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}; {load}",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}",
        "peer": peer.title,
        "rounds": f"{pace.rounds} of all rows in turns, one caller at a time in every {pace.few_every}th; medians, "
        "with quartiles; everything on one machine",
    }


def _raise_file_limit() -> None:
    """Allows a thousand connections, here and in the gateway, which inherits the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
