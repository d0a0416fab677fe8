"""`python -m tests.browser.screens [FOLDER]`: a picture of every view, light and dark.

Those that the README shows are also written, with few colours, to `tests/browser/screens/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from tests.browser.chromium import chromium
from tests.browser.gateway_stage import GATEWAY
from tests.browser.page import Page
from tests.browser.runs_stage import RUNS
from tests.browser.views import View

STAGES = (GATEWAY, RUNS)
FOLDER = Path("build/screens")
KEPT = Path(__file__).parent / "screens"
COLOURS = 128


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for stage in STAGES:
            with stage.serve() as url:
                for view in stage.views:
                    for scheme in ("light", "dark"):
                        page = Page(browser)
                        _take(page, view, url, scheme, folder)
                        page.close()


def _take(page: Page, view: View, url: str, scheme: str, folder: Path) -> None:
    page.look(scheme, view.size, scale=2)
    view.show(page, url)
    file = folder / f"{view.name}-{scheme}.png"
    page.shot(file)
    if view.kept:
        _keep(file)
    print(file)  # noqa: T201 - it is what was asked for


def _keep(file: Path) -> None:
    """Screens have few colours, and a repository keeps every version of a picture for ever."""
    with Image.open(file) as shot:
        half = shot.convert("RGB").resize((shot.width * 5 // 8, shot.height * 5 // 8), Image.Resampling.LANCZOS)
    # By coverage, or the colours of the few pixels that say what is wrong would be merged with others.
    few = half.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    KEPT.mkdir(exist_ok=True)
    few.save(KEPT / file.name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
