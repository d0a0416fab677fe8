"""The tables of the guides are written from those in code: `python -m tests.guides`; a test holds them to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gateway.verl import offered as verl_offered
from trainer.flags.table import SWIFT as SWIFT_FLAGS
from trainer.swift import offered as swift_offered
from trainer.verl.table import VERL as VERL_KEYS
from trainer.verl.told import table

ROOT = Path(__file__).parents[1]
VERL, SWIFT = (ROOT / "trainer" / room / "README.md" for room in ("verl", "swift"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def names(offered: Mapping[str, Mapping[str, str]], theirs: str) -> str:
    rows = [f"| {theirs} | Names |", "|---|---|"]
    rows += [
        f"| `{module}` | {', '.join(f'`{name}`' for name in found)} |" for module, found in offered.items() if found
    ]
    return "\n".join(rows)


def instead(known: Mapping[str, str], theirs: str) -> str:
    rows = [f"| {theirs}, not here | Instead |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {_cell(remedy)} |" for name, remedy in known.items())])


TABLES: Mapping[tuple[Path, str], Callable[[], str]] = {
    (VERL, "names"): lambda: names(verl_offered.OFFERED, "verl"),
    (VERL, "instead"): lambda: instead(verl_offered.INSTEAD, "verl"),
    (VERL, "keys"): lambda: table(VERL_KEYS),
    (SWIFT, "names"): lambda: names(swift_offered.OFFERED, "ms-swift"),
    (SWIFT, "instead"): lambda: instead(swift_offered.INSTEAD, "ms-swift"),
    (SWIFT, "keys"): lambda: table(SWIFT_FLAGS),
}


def marked(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", re.DOTALL)


def whole() -> Iterator[tuple[Path, str]]:
    """Each guide as it should be."""
    for guide in (VERL, SWIFT):
        text = guide.read_text(encoding="utf-8")
        for (file, mark), made in TABLES.items():
            if file == guide:
                parts = marked(mark).split(text)
                assert len(parts) == 5, f"{guide} has one place for {mark}"
                text = f"{parts[0]}{parts[1]}\n{made()}\n\n{parts[3]}{parts[4]}"
        yield guide, text


if __name__ == "__main__":
    for guide, text in whole():
        guide.write_text(text, encoding="utf-8")
