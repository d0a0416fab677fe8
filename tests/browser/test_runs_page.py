"""Tests the web UI of runs in a browser: charts, the table, rollouts token by token, and the export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from pydantic import SecretStr

from gateway.http.settings import Settings
from mtrl_plugins.web.app import serve_in_thread
from mtrl_plugins.web.notes import Notes
from mtrl_plugins.web.runs import name_runs
from tests.browser.page import Page
from tests.browser.runs_stage import CONNECTION_REFUSED, serve_runs
from tests.browser.sample_run import PAD, STEPS, write_sample_run

FAILED_AT = 19


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("runs") / "over")


@pytest.fixture(scope="module")
def url(finished_run: Path) -> Iterator[str]:
    with serve_runs(finished_run) as url:
        yield url


def test_finished_run_shows_charts_and_alarms(page: Page, url: str) -> None:
    page.open(url)
    page.sees(f"{STEPS} of {STEPS}", ".facts")
    page.sees("finished", ".facts")
    titles = page.js("[...document.querySelectorAll('.chart h3')].map(node => node.firstChild.textContent)")
    for title in ("Reward", "Success", "Success by kind, sampled", "Entropy", "Staleness", "Speed", "Time"):
        assert title in titles
    page.sees("no group has a learning signal", ".alarm")
    page.sees("stop here, or add harder tasks", ".alarm")


def test_a_kind_that_the_last_step_lacks_is_0_in_the_mix(page: Page, url: str) -> None:
    page.open(url)
    chart = "[...document.querySelectorAll('.chart')].find(node => node.textContent.startsWith('Mix of kinds'))"
    page.until(f"!!{chart}?.querySelector('.legend li')")
    legend = page.js(f"[...{chart}.querySelectorAll('.legend li')].map(node => node.textContent)")
    assert [text.replace("\u202f", " ").replace("\xa0", " ") for text in legend] == ["far100 %", "near0 %"]


def test_charts_share_crosshair_and_zoom(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('.chart path').length > 12")
    page.sees("no group has a learning signal", ".alarm")  # What comes above moves the charts from under the pointer.
    page.hover(".plot")
    page.until("document.querySelector('.when').textContent.startsWith('step ')")
    assert page.js("new Set([...document.querySelectorAll('.when')].map(node => node.textContent)).size") == 1
    x, y = page.hover(".plot")
    page._ask("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
    page._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + 60, y=y, button="left")
    page._ask("Input.dispatchMouseEvent", type="mouseReleased", x=x + 60, y=y, button="left", clickCount=1)
    page.until("!document.querySelector('.toolbar button').hidden")
    page.press("Escape")
    page.until("document.querySelector('.toolbar button').hidden")


def test_chart_is_zoomed_by_keys(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('.chart path').length > 12")
    page.js("document.querySelector('.plot').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    for _ in range(4):
        page.press("ArrowRight", shift=True)
    page.sees("steps 2 to 6", ".when")
    page.press("Escape")
    page.sees("step 6", ".when")
    page.press("ArrowLeft", shift=True)
    page.press("Enter")
    page.until("!document.querySelector('.toolbar button').hidden")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.sees("step 5", ".when")
    page.press("Escape")
    page.until("document.querySelector('.toolbar button').hidden")
    page.press("?")
    page.sees("select steps in a chart, and zoom in", "dialog")


def test_curves_of_equal_colour_have_different_dashes(page: Page, url: str) -> None:
    page.open(url)
    looks = (
        'import("/ui/chart.js").then(chart => [...Array(36).keys()].map(at => chart.colourOf(at) + chart.dashOf(at)))'
    )
    assert len(set(page.js(looks))) == 36


def test_a_chart_of_any_metric_is_added_and_removed(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('#metric option').length > 20")
    page.choose("#metric", "update/grad_norm")
    page.sees("update/grad_norm", ".chart h3")
    page.click("button[aria-label='Remove update/grad_norm']")
    page.until("!document.querySelector('.charts').textContent.includes('update/grad_norm')")


def test_charts_go_by_tokens_or_time_and_still_open_the_step(page: Page, url: str) -> None:
    page.open(url)
    page.until("document.querySelectorAll('.chart path').length > 12")
    for along, unit in (("tokens", "2,000 tokens"), ("time", " s")):
        page.choose("#along", along)
        page.js("document.querySelector('.plot').focus()")
        for _ in range(3):
            page.press("ArrowRight")
        page.sees(unit, ".when")
    page.press("Enter")
    page.until("location.hash.includes('step=2')")


def test_notes_and_tags_are_kept_in_the_runs_folder(page: Page, url: str, finished_run: Path) -> None:
    page.open(url)
    page.until("!!document.querySelector('.notes')")
    page.js("document.querySelector('.notes').open = true")
    page.js("document.querySelector('.notes textarea').value = 'A <b>warmer</b> start.'")
    page.js("document.querySelector('.notes input').value = 'baseline, lr 1e-4'")
    page.click(".notes button")
    page.sees("saved", ".notes [role=status]")
    assert Notes.load(finished_run) == Notes(notes="A <b>warmer</b> start.", tags=("baseline", "lr 1e-4"))
    page.open("about:blank#")
    page.open(url)
    page.sees("lr 1e-4", ".run-title")
    page.until("document.querySelector('.notes textarea').value === 'A <b>warmer</b> start.'")
    (finished_run / "notes.json").unlink()


def test_unknown_run_is_reported(page: Page, url: str) -> None:
    for view in ("rollouts/17", "rollouts", ""):
        page.open("about:blank#")
        page.open(f"{url}#/elsewhere/{view}")
        page.sees("There is no run elsewhere here.", "[role=alert]")
        page.sees("opened with over", "[role=alert]")
    page.press("t")
    page.sees("384 rollouts")


def test_several_runs_share_charts_and_show_different_settings(page: Page, finished_run: Path, tmp_path: Path) -> None:
    page.allow(CONNECTION_REFUSED)
    other = write_sample_run(tmp_path / "other", steps=5, seed=3)
    with serve_runs(finished_run, other) as url:
        page.open(url)
        page.sees("over reward", ".legend")
        page.sees("other reward", ".legend")
        page.sees("seed", ".settings tbody")
        assert "limits.turn_tokens" not in page.text(".settings tbody")
        page.click(".toggle input")
        page.until("!document.querySelector('.legend').innerText.includes('over reward')")


def test_rollouts_are_filtered_searched_and_sorted(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts")
    page.sees("384 rollouts", ".summary")
    page.choose("select[name=stop]", "tool_failed")
    page.sees("1 rollout", ".summary")
    page.sees("tool", ".rows .blame")
    page.choose("select[name=stop]", "")
    page.choose("select[name=kind]", "near")
    page.sees("192 rollouts", ".summary")
    page.choose("select[name=kind]", "")
    page.type("input[type=search]", "never guess")
    page.js("document.querySelector('input[type=search]').dispatchEvent(new Event('input'))")
    page.sees("384 rollouts", ".summary")
    page.type("input[type=search]", "onerror=")
    page.until("document.querySelector('.summary').innerText.startsWith('1 rollout')")
    page.type("input[type=search]", "Lima")
    page.until(
        "/^\\d+ rollouts/.test(document.querySelector('.summary').innerText) && location.hash.includes('q=Lima')"
    )
    page.click(".head button", "Reward")
    page.until("document.querySelector('.head .reward').ariaSort === 'descending'")
    page.until("Number(document.querySelector('.rows .line.filled .reward').innerText) > 1")


def test_searches_run_one_at_a_time(page: Page, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtrl_plugins.web.runs.SEARCH_TIME_S", 1e-6)  # A rollout at each look.
    page.open(f"{url}#/over/rollouts")
    page.sees("384 rollouts", ".summary")
    page.js(
        "(ask => { window.now = window.most = window.asked = 0;"
        " const late = one => new Promise(done => setTimeout(done, 60, one));"
        " window.fetch = (...what) => { most = Math.max(most, now += 1); asked += 1;"
        " return ask(...what).then(late).finally(() => { now -= 1; }); }; })(window.fetch)"
    )
    page.type("input[type=search]", f"nobody wrote {token_hex()}")  # The server remembers what was searched for.
    page.until("/searched \\d\\d of/.test(document.querySelector('.summary').innerText)")
    assert page.js("asked") > 9
    assert page.js("most") == 1


def test_scrolling_keeps_visible_rows(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts")
    page.sees("384 rollouts", ".summary")
    page.until("document.querySelectorAll('.rows .line.filled').length > 20")
    page.js(
        "window.made = 0, new MutationObserver(seen => seen.forEach(one => made += one.addedNodes.length))"
        ".observe(document.querySelector('.rows'), {childList: true})"
    )
    page.js(
        "document.querySelector('.list').scrollTop += 3 * document.querySelector('.rows .line.filled').offsetHeight"
    )
    page.until("made > 0")
    assert page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(made))))") <= 4
    page.js("document.querySelector('.list').scrollTop = 1e6")
    page.until("document.querySelector('.rows').lastChild.ariaRowIndex === '384'")
    assert page.count(".rows .line") < 50
    order = page.js("[...document.querySelectorAll('.rows .line.filled')].map(one => Number(one.ariaRowIndex))")
    assert order == sorted(order), "read aloud in the order in which they stand"


def test_keys_move_through_table_and_rollouts(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts?stop=tool_failed")
    page.sees("1 rollout", ".summary")
    page.open(f"{url}#/over/rollouts?step=7")
    page.sees("16 rollouts", ".summary")
    page.press("j")
    page.press("j")
    page.press("k")
    page.press("Enter")
    page.until("document.title.startsWith('Rollout 97 ')")
    page.press("j")
    page.until("document.title.startsWith('Rollout 98 ')")
    page.press("c")
    page.until("location.hash.includes('/group/7-0-0')")
    page.press("?")
    page.sees("siblings side by side", "dialog")


def test_permalink_shows_its_token_and_why_it_is_trained(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts/171?token=66")
    page.until("!!document.querySelector('#t66.on')")
    page.sees("token 66", ".inspector")
    page.sees("Trained: the policy wrote it", ".inspector")
    page.sees("advantage", ".inspector")
    page.press("ArrowRight")
    page.until("location.hash.includes('token=67')")
    page.press("Escape")
    page.hover(".t[data-author=task]")
    page.sees("Not trained: it is from the task", ".inspector")


def test_rollout_that_loads_too_late_does_not_change_the_address(page: Page, url: str) -> None:
    page.open(f"{url}#/over/group/11-0-2")
    page.sees("What differs")
    page.js(
        "addEventListener('hashchange', () => { location.hash = '#/over/rollouts'; }, {once: true});"
        "location.hash = '#/over/rollouts/171?token=66'"
    )
    page.sees("384 rollouts", ".summary")
    page.js(
        "fetch('../v1/runs/over/rollouts/171').then(reply => reply.json())"
        ".then(() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))).then(() => 0)"
    )
    assert page.js("location.hash") == "#/over/rollouts"


def test_tokens_are_coloured_by_mode(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts/171")
    page.until("document.querySelector('.t[data-author=policy]') && document.querySelector('.t[data-author=tool]')")
    coloured = "[...document.querySelectorAll('.t')].filter(one => one.style.background).map(one => one.dataset.author)"
    for mode in ("trained", "logprob", "surprise", "advantage", "version", "author"):
        page.click(f".mode[data-mode={mode}]")
        page.until(f"document.querySelector('.mode[data-mode={mode}]').ariaChecked === 'true'")
        authors = {*page.js(coloured)}
        assert "policy" in authors and ("tool" in authors) == (mode == "author"), mode


def test_conversation_shows_reasoning_calls_images_and_when_each_turn_was(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts/171")
    page.sees("Reasoning, 22 words", ".entry[data-author=policy]")
    page.until("document.body.innerText.includes('draw_bars')")
    page.until("document.querySelector('.message .media img')?.naturalWidth === 320")
    page.until("document.querySelector('.ids .thumbnail img')?.naturalWidth === 320")
    assert page.js("[...document.querySelectorAll('.t:has(.thumbnail)')].map(one => one.textContent)") == [PAD]
    page.hover(".t", PAD)
    page.sees("stands for", ".inspector")
    page.sees("expanded to 12 tokens", ".inspector")
    assert "[image]" not in page.text(".message")
    page.sees("score", ".entry[data-author=feedback]")
    assert page.count(".timeline .span[data-phase=calling] .inner") == 2
    page.press("r")
    page.until("document.querySelector('details.reasoning').open")
    page.js("[...document.querySelectorAll('.timeline .span[data-phase=generating]')][1].click()")
    page.until("location.hash.includes('turn=1')")


def test_unscored_rollout_shows_what_failed(page: Page, url: str) -> None:
    page.open(f"{url}#/over/rollouts/{FAILED_AT}")
    page.sees("server 'atlas' is down: connection refused")
    page.sees("not scored", ".top")


def test_page_asks_for_token_if_needed(page: Page, finished_run: Path) -> None:
    with serve_in_thread(name_runs([finished_run]), Settings(port=0, token=SecretStr("open-sesame"))) as url:
        page.allow(f"401|{CONNECTION_REFUSED}")
        page.open(url)
        page.type("#token", "open-sesame")
        page.click("dialog button", "Continue")
        page.sees(f"{STEPS} of {STEPS}", ".facts")
        page.open(f"{url}#token=open-sesame")
        page.until("!location.hash.includes('sesame')")
