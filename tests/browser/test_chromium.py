"""The browser of these tests is there or is said to be missing, and leaves nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.browser.chromium import Chromium, Failed, chromium
from tests.browser.page import Page

ROOT = Path(__file__).parents[2]


def test_a_missing_browser_fails_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("MTRL_CHROMIUM", raising=False)
    with pytest.raises(Failed, match="make browser"), chromium():
        pass


def test_the_set_up_says_how_to_get_a_browser_where_it_cannot() -> None:
    command = ["/bin/bash", str(ROOT / ".ci" / "browser")]
    told = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=20, check=False)
    assert told.returncode == 1 and "remedy: install chromium" in told.stderr


def test_a_browser_ends_with_its_block() -> None:
    with chromium() as browser:
        asked = browser.ask("SystemInfo.getProcessInfo")["processInfo"]
        started = [psutil.Process(one["id"]) for one in asked]
    _, alive = psutil.wait_procs(started, timeout=10)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == [] and started


def test_what_goes_wrong_on_a_page_is_kept(browser: Chromium) -> None:
    page = Page(browser)
    page.open("data:text/html,<img src='http://elsewhere.invalid/x.png'><script>console.error('so')</script>")
    page.until("document.images[0].complete")
    page.js("setTimeout(() => { throw new Error('thrown') })")
    page.js("new Promise(resolve => setTimeout(resolve))")
    told = " ".join(page.wrong)
    assert "so" in told and "thrown" in told and "a request failed" in told
    assert page.hosts == {"elsewhere.invalid"}
    page.allow("so|thrown|request failed|ERR_")
    assert page.wrong == []
    page.close()
