"""Writes the tables of the migration guides from those in code: `python -m tests.docs.migration_tables`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mtrl_plugins.swift import compat_names as swift_names
from mtrl_plugins.swift.table import SWIFT_TABLE as SWIFT_FLAGS
from mtrl_plugins.trl.table import TRL_TABLE as TRL_ARGUMENTS
from mtrl_plugins.verl import compat_names as verl_names
from mtrl_plugins.verl.table import VERL_TABLE as VERL_KEYS
from mtrl_plugins.verl.translate import format_table
from tests.docs.blocks import ROOT

VERL, SWIFT, TRL = (ROOT / "docs" / f"migration-{framework}.md" for framework in ("verl", "swift", "trl"))


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def names_table(modules: Mapping[str, Mapping[str, str]], framework: str) -> str:
    """The modules that users' files may import, with their names."""
    rows = [f"| {framework} | Names |", "|---|---|"]
    rows += [
        f"| `{module}` | {', '.join(f'`{name}`' for name in names)} |" for module, names in modules.items() if names
    ]
    return "\n".join(rows)


def remedies_table(remedies: Mapping[str, str], framework: str) -> str:
    """What to use instead of names that are not offered."""
    rows = [f"| {framework}, not here | Instead |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {_escape(remedy)} |" for name, remedy in remedies.items())])


TABLES: Mapping[tuple[Path, str], Callable[[], str]] = {
    (VERL, "names"): lambda: names_table(verl_names.OFFERED, "verl"),
    (VERL, "instead"): lambda: remedies_table(verl_names.ALTERNATIVES, "verl"),
    (VERL, "keys"): lambda: format_table(VERL_KEYS),
    (SWIFT, "names"): lambda: names_table(swift_names.OFFERED, "ms-swift"),
    (SWIFT, "instead"): lambda: remedies_table(swift_names.ALTERNATIVES, "ms-swift"),
    (SWIFT, "keys"): lambda: format_table(SWIFT_FLAGS),
    (TRL, "arguments"): lambda: format_table(TRL_ARGUMENTS),
}


def marked(mark: str) -> re.Pattern[str]:
    """The part of a page between two marks."""
    return re.compile(rf"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", re.DOTALL)


def updated_guides() -> Iterator[tuple[Path, str]]:
    """Each guide with its tables as they should be."""
    for guide in (VERL, SWIFT, TRL):
        text = guide.read_text(encoding="utf-8")
        for (file, mark), render in TABLES.items():
            if file == guide:
                parts = marked(mark).split(text)
                assert len(parts) == 5, f"{guide} has one place for {mark}"
                text = f"{parts[0]}{parts[1]}\n{render()}\n\n{parts[3]}{parts[4]}"
        yield guide, text


if __name__ == "__main__":
    for guide, text in updated_guides():
        guide.write_text(text, encoding="utf-8")
