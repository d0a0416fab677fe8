"""Lines and files of each room, beside the budgets: `make size`."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSES = {"gateway": "core", "trainer": "core", "mtrl_plugins": "plug-ins", "tests": "tests", "bench": "bench"}
BUDGETS = {"core": 52_000, "plug-ins": 20_000, "tests": 65_000, "JS, CSS, HTML": 3_500, "words of docs": 60_000}
PAGES = (".js", ".css", ".html")


def main() -> None:
    files = [ROOT / name for name in _tracked() if (ROOT / name).is_file()]
    rooms: dict[tuple[str, str], list[int]] = defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    for file in files:
        house, *rest = file.relative_to(ROOT).parts
        if house in HOUSES and file.suffix == ".py":
            lines = _count_lines(file)
            rooms[house, rest[0] if len(rest) > 1 else "(top)"].append(lines)
            totals[HOUSES[house]] += lines
        elif house in HOUSES and house != "tests" and file.suffix in PAGES:
            totals["JS, CSS, HTML"] += _count_lines(file)
        elif house == "docs" and file.suffix == ".md":
            totals["words of docs"] += len(file.read_text(encoding="utf-8").split())
    _print_row("room", "lines", "files")
    for (house, room), counts in rooms.items():
        _print_row(f"{house}/{room}", sum(counts), len(counts))
    _print_row("\ntotal", "count", "budget")
    for name, total in totals.items():
        _print_row(name, total, BUDGETS.get(name, ""))


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name]


def _count_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _print_row(name: str, first: object, second: object) -> None:
    print(f"{name:<36}{first!s:>8}{second!s:>8}")


if __name__ == "__main__":
    main()
