"""Puts the newest results into the README, between its marks, with `--write`; without it, only compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / name).read_text(encoding="utf-8"))


def costs() -> str:
    """CPU of a call with 64 at once, beside the peer's over the same server."""
    written = results("gateway.json")
    cpu = {(row["title"], row["behind"]): row["at"]["64"]["cpu_ms"] for row in written["rows"]}
    peer = written["about"]["peer"].partition(",")[0]
    rows = (
        ("a native tool in process", cpu["mtrl in process", "native"]),
        ("a native tool over HTTP", cpu["mtrl over HTTP", "native"]),
        ("a stdio MCP tool over HTTP, pooled", cpu["mtrl over HTTP", "stdio"]),
        (f"the same tool behind a {peer} proxy", cpu["FastMCP proxy", "stdio"]),
        ("an HTTP MCP tool over HTTP", cpu["mtrl over HTTP", "http"]),
        (f"the same tool behind a {peer} proxy", cpu["FastMCP proxy", "http"]),
    )
    lines = [f"| {what} | {cpu_ms:.2f} ms |" for what, cpu_ms in rows]
    return "\n".join(["| | CPU for a call |", "|---|--:|", *lines])


def conformance() -> str:
    lines = [
        f"| {score['requirements']} | {score['required']['passed']} of {score['required']['total']} "
        f"| {score['checks']['passed']} | {score['checks']['failed']} |"
        for score in results("conformance.json")["scores"]
    ]
    head = "| Requirements | Required server scenarios | Checks passed | Checks failed |"
    return "\n".join([head, "|---|--:|--:|--:|", *lines])


def scale() -> str:
    """Every wave of calls that was under way at one moment, and what a session costs that does nothing."""
    written = results("gateway.json")["scale"]
    waves = [
        f"| {wave['calls']:,} calls at one moment through `{wave['tool']}` | {wave['answered']:,} answered, "
        f"{wave['lost']} lost, {wave['duplicated']} doubled |"
        for wave in written["waves"]
    ]
    idle = f"| an idle session | {written['idle_kib']:.1f} KiB |"
    return "\n".join([f"| {written['sessions']:,} sessions on one process | |", "|---|--:|", *waves, idle])


PARTS: Mapping[str, Callable[[], str]] = {"costs": costs, "scale": scale, "conformance": conformance}


def filled(readme: str) -> str:
    for name, table in PARTS.items():
        mark = re.compile(rf"(<!-- {name} -->\n\n).*?(\n\n<!-- /{name} -->)", re.DOTALL)
        readme, found = mark.subn(lambda marks, table=table: marks[1] + table() + marks[2], readme)  # type: ignore[misc]
        if found != 1:
            raise SystemExit(f"README.md: the marks <!-- {name} --> ... <!-- /{name} --> stand there {found} times")
    return readme


def main() -> int:
    now = README.read_text(encoding="utf-8")
    new = filled(now)
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
        return 0
    if new != now:
        print("README.md has other numbers than bench/results; run: python bench/readme.py --write")
    return int(new != now)


if __name__ == "__main__":
    raise SystemExit(main())
