"""`python -m tests.browser.screenshots [FOLDER]`: takes a screenshot of every view, light and dark.

Those that the documentation shows are also saved, with few colours, in `docs/images/screens/`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from tests.browser.chromium import start_chromium
from tests.browser.gateway_stage import GATEWAY
from tests.browser.page import Page
from tests.browser.runs_stage import ODD_RUNS, RUNS, STARTING_RUN
from tests.browser.views import View

STAGES = (GATEWAY, RUNS, STARTING_RUN, ODD_RUNS)
FOLDER = Path("build/screens")
DOCS_FOLDER = Path(__file__).parents[2] / "docs" / "images" / "screens"
COLOURS = 128


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with start_chromium() as browser:
        for stage in STAGES:
            with stage.serve() as url:
                for view in stage.views:
                    for scheme in ("light", "dark"):
                        page = Page(browser)
                        _take_screenshot(page, view, url, scheme, folder)
                        page.close()


def _take_screenshot(page: Page, view: View, url: str, scheme: str, folder: Path) -> None:
    page.look(scheme, view.size, scale=2)
    view.show(page, url)
    file = folder / f"{view.name}-{scheme}.png"
    page.shot(file)
    if view.in_docs:
        _save_for_docs(file)
    print(file)  # noqa: T201 - a command line script


def _save_for_docs(file: Path) -> None:
    """Saves a screenshot with few colours, because the repository keeps every version of it."""
    with Image.open(file) as shot:
        half = shot.convert("RGB").resize((shot.width * 5 // 8, shot.height * 5 // 8), Image.Resampling.LANCZOS)
    # Maximum coverage keeps rare colours, such as those of error messages, apart.
    few = half.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    DOCS_FOLDER.mkdir(parents=True, exist_ok=True)
    few.save(DOCS_FOLDER / file.name, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
