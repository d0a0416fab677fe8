"""Measures the gateway beside its peers, in one run, and prints a table.

make bench                              # under eight minutes; writes bench/results/
python bench/gateway.py --quick         # whether everything still runs; its numbers mean nothing
python bench/gateway.py --only native   # rows whose key begins so
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
from rounds import FULL, QUICK, Measurement, Stage, measured
from rows import ROWS
from scale import Scale, scale
from table import figures, markdown, promises

RESULTS = Path(__file__).with_name("results")
SHOWN = ("mtrl", "mcp", "anyio", "uvicorn", "uvloop", "httptools", "pydantic")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one short round, few sessions, nothing installed")
    options.add_argument("--only", default="", metavar="KEY", help="rows whose key begins so; nothing is written")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    chosen = options.parse_args()
    _room_for_connections()
    rows = [row for row in ROWS if row.key.startswith(chosen.only)]
    load_before = os.getloadavg()[0]
    peer = fastmcp(now=not chosen.quick)
    stage = Stage(peer)
    try:
        stage.start(rows)
        found = measured(stage, QUICK if chosen.quick else FULL, _say, rows)
        sessions = 20 if chosen.quick else 1000
        scaled = None if chosen.only else scale(stage.echo.url, sessions, 4)
    finally:
        stage.end()
    about = _about(peer, load_before, quick=chosen.quick)
    out = chosen.out or (None if chosen.quick or chosen.only else RESULTS)
    _tell(found, scaled, about, out)


def _tell(found: list[Measurement], scaled: Scale | None, about: dict[str, Any], out: Path | None) -> None:
    rows = figures(found)
    text = markdown(
        rows, promises(found, rows, scaled), scaled, [f"{name}: {value}  " for name, value in about.items()]
    )
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "gateway.md").write_text("# The gateway beside its peers\n\n" + text)
        whole = {"about": about, "rows": rows, "scale": scaled and scaled.fields}
        (out / "gateway.json").write_text(json.dumps(whole, indent=1) + "\n")


def _about(peer: Peer, load_before: float, *, quick: bool) -> dict[str, Any]:
    pace = QUICK if quick else FULL
    crowd = f"load {load_before:.1f} before the run" + (
        "" if load_before < 0.5 else ", so it was shared with other work"
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}; {crowd}",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in SHOWN)}",
        "peer": peer.title,
        "rounds": f"{pace.rounds} of all rows in turns; medians, with least and most; everything on one machine",
    }


def _room_for_connections() -> None:
    """A thousand rollouts have a thousand connections, here and in the gateway, which inherits the limit."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
