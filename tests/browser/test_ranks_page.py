"""The web UI of a run with ranks and workers: who waits for whom; of many ranks, the outermost."""

from __future__ import annotations

from pathlib import Path

from tests.browser.page import Page
from tests.browser.runs_stage import serve_runs
from tests.browser.sample_run import add_metrics_of_ranks, write_sample_run

RANKS, SLOW, SHOWN = 40, 25, 12


def test_charts_show_idle_shares_by_role_rank_and_worker(page: Page, tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "many")
    add_metrics_of_ranks(run, RANKS, SLOW)
    with serve_runs(run) as url:
        page.open(url)
        page.sees("Speed of ranks")
        charts = {
            title: page.js(f"[...document.querySelectorAll('.chart')].find({has_title(title)})?.innerText ?? ''")
            for title in ("Idle", "Idle ranks", "Speed of ranks", "Idle workers", "Turns of workers", "Publishing")
        }
    assert "trainer" in charts["Idle"] and "engine" in charts["Idle"]
    assert "worker-0" in charts["Idle workers"] and "far" in charts["Turns of workers"]
    assert "gathering" in charts["Publishing"] and "to the engine" in charts["Publishing"]
    shown = [line for line in charts["Speed of ranks"].splitlines() if line.startswith("rank ")]
    assert len(shown) == SHOWN and f"rank {SLOW}" in shown
    assert shown == sorted(shown, key=lambda name: int(name.split()[1]))


def has_title(title: str) -> str:
    return f"chart => chart.querySelector('h3').firstChild.textContent.trim() === {title!r}"
