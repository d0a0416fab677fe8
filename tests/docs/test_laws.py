"""Laws about all pages: every block is run or only shown, every page is followed by a test, every link works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import EXECUTED, ROOT, SHOWN, blocks_of, pages

HERE = Path(__file__).parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} (.+?)(?: \{#([\w-]+)\})?$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)

PAGES = [str(page.relative_to(ROOT)) for page in pages()]


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_readers_would_run_are_run_by_a_test(page: str) -> None:
    blocks = blocks_of(ROOT / page)
    unknown = {block.language for block in blocks} - {*EXECUTED, *SHOWN}
    assert not unknown, f"{page}: {unknown}: name a language that is run, {EXECUTED}, or only shown, {SHOWN}"
    if any(block.language in EXECUTED for block in blocks):
        followed = "\n".join(test.read_text(encoding="utf-8") for test in HERE.glob("test_*.py"))
        assert f'"{page}"' in followed, f'no test in tests/docs follows it: follow("{page}")'


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target in _links(file):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (file.parent / path).resolve() if path else file
        assert linked.exists(), f"{page}: there is no {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in _anchors(linked), f"{page}: {path or page} has no heading {anchor!r}"


def _links(file: Path) -> set[str]:
    text = FENCED.sub("", file.read_text(encoding="utf-8"))
    return {link or source for link, source in LINK.findall(re.sub(r"`[^`]*`", "", text))}


def _anchors(file: Path) -> set[str]:
    """The headings of a page as GitHub and MkDocs name them."""
    text = FENCED.sub("", file.read_text(encoding="utf-8"))
    return {name or _slug(title) for title, name in HEADING.findall(text)}


def _slug(title: str) -> str:
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", bare))
