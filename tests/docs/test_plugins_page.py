"""The plug-in of the page on plug-ins is the example, which `tests/plugins/test_plugins.py` installs and runs."""

from __future__ import annotations

from tests.docs.blocks import ROOT, blocks_of

EXAMPLE = ROOT / "tests" / "plugins" / "example"


def test_documented_plugin_is_the_example() -> None:
    titled = {block.title: block.text.strip() for block in blocks_of(ROOT / "docs/plugins.md") if block.title}
    files = {file.relative_to(EXAMPLE).as_posix(): file.read_text().strip() for file in EXAMPLE.rglob("[a-z]*.*")}
    assert titled == files, 'the blocks of "docs/plugins.md" differ from the files in tests/plugins/example'
