"""Writes the tables of the migration guides from those in code: `python -m tests.docs.migration_tables`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from mtrl_plugins.scripts.key_table import Effect, KeyTable
from mtrl_plugins.swift import compat_names as swift_names
from mtrl_plugins.swift.conversions import SWIFT_TABLE as SWIFT_FLAGS
from mtrl_plugins.trl.conversions import TRL_TABLE as TRL_ARGUMENTS
from mtrl_plugins.verl import compat_names as verl_names
from mtrl_plugins.verl.conversions import VERL_TABLE as VERL_KEYS
from tests.docs.blocks import ROOT

VERL, SWIFT, TRL = (ROOT / "docs" / f"migration-{framework}.md" for framework in ("verl", "swift", "trl"))


def names_table(modules: Mapping[str, Mapping[str, str]], framework: str) -> str:
    """The modules that users' files may import, with their names."""
    rows = [f"| {framework} | Names |", "|---|---|"]
    alike: dict[str, list[str]] = {}
    for module, names in modules.items():
        alike.setdefault(_code(names), []).append(module)
    rows += [f"| {_code(of)} | {names} |" for names, of in alike.items() if names]
    return "\n".join(rows)


def keys_table(table: KeyTable) -> str:
    """The keys that do something else here; `mtrl-train translate --table` has the others."""
    rows = [f"| {table.framework} | mtrl | what differs, and why |", "|---|---|---|"]
    alike: dict[tuple[str, str], list[str]] = {}
    for rule in table.rules:
        if rule.effect is Effect.CHANGED:
            setting = f"`{rule.setting}`" if rule.setting else "-"
            alike.setdefault((setting, rule.note.replace("|", "\\|")), []).extend(rule.names)
    rows += [f"| {_code(names)} | {setting} | {note} |" for (setting, note), names in alike.items()]
    return "\n".join(rows)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


TABLES: Mapping[tuple[Path, str], Callable[[], str]] = {
    (VERL, "names"): lambda: names_table(verl_names.OFFERED, "verl"),
    (VERL, "keys"): lambda: keys_table(VERL_KEYS),
    (SWIFT, "names"): lambda: names_table(swift_names.OFFERED, "ms-swift"),
    (SWIFT, "keys"): lambda: keys_table(SWIFT_FLAGS),
    (TRL, "arguments"): lambda: keys_table(TRL_ARGUMENTS),
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
