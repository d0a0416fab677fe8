"""Tests of the browser helper: a missing browser, clean shutdown, recorded errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from tests.browser.chromium import BrowserError, Chromium, start_chromium
from tests.browser.page import Page
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_missing_browser_fails_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("MTRL_CHROMIUM", raising=False)
    with pytest.raises(BrowserError, match="make packages"), start_chromium():
        pass


def test_setup_script_says_how_to_install_a_browser() -> None:
    command = ["/bin/bash", str(ROOT / ".ci" / "packages")]
    output = subprocess.run(
        command, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert output.returncode == 1 and "remedy: install chromium" in output.stderr


def test_browser_ends_with_its_block() -> None:
    with start_chromium() as browser:
        processes = browser.ask("SystemInfo.getProcessInfo")["processInfo"]
        started = [psutil.Process(process["id"]) for process in processes]
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == [] and started


def test_click_is_repeated_where_the_page_replaced_the_element(browser: Chromium) -> None:
    page = Page(browser)
    page.open("data:text/html,<body></body>")
    page.js(
        """(window.make = () => { document.body.innerHTML = "<button>";
        window.made = (window.made || 0) + 1;
        const node = document.querySelector("button"); node.onclick = () => { window.pressed = true; };
        if (window.made === 1) node.onmousedown = window.make; })()"""
    )
    page.click("button")
    assert page.js("window.made === 2 && window.pressed")
    page.close()


def test_condition_that_never_holds_is_reported_with_what_the_page_says(browser: Chromium) -> None:
    page = Page(browser)
    page.open("data:text/html,<body>all there is</body>")
    with pytest.raises(BrowserError, match=r"(?s)never true: 1 > 2.*all there is"):
        page.until("1 > 2", within_s=0.2)
    page.close()


def test_page_errors_are_recorded(browser: Chromium) -> None:
    page = Page(browser)
    page.open("data:text/html,<img src='http://elsewhere.invalid/x.png'><script>console.error('so')</script>")
    page.until("document.images[0].complete")
    page.js("setTimeout(() => { throw new Error('thrown') })")
    page.js("new Promise(resolve => setTimeout(resolve))")
    output = " ".join(page.wrong)
    assert "so" in output and "thrown" in output and "a request failed" in output
    assert page.hosts == {"elsewhere.invalid"}
    page.allow("so|thrown|request failed|ERR_")
    assert page.wrong == []
    page.close()
