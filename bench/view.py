"""Response times of the web UI on a large run: 200 steps of 256 generated rollouts of 2,000 tokens.

    .venv/bin/python -m bench.view [FOLDER] [--steps 30]

Makes the run in the folder unless it exists (more than a GB with 200 steps), and first measures without its index.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from gateway.http.settings import Settings
from gateway.types import Outcome, Text, ToolCall
from mtrl_plugins.web.app import serve_in_thread
from mtrl_plugins.web.runs import name_runs
from tests.browser.chromium import REMEDY, find_executable, start_chromium
from tests.browser.page import Page
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, Span, StopReason
from trainer.storage.rollout_line import BlobFolder, dump_rollout
from trainer.storage.run_files import dump_metrics as dump_metrics

GROUPS, SIBLINGS, TURNS, TOKENS = 32, 8, 5, 2000
KINDS = 64
"""The number of different rollouts, which are repeated."""
WORDS = (
    "look",
    "up",
    "the",
    "city",
    "numbers",
    "are",
    "looked",
    "and",
    "added",
    "seventeen",
    "while",
    "a",
    "lazy",
    "dog",
)


VIEWS = {
    "#/": "document.querySelectorAll('.chart path').length > 1",
    "#/RUN/rollouts": "document.querySelectorAll('.rows .line.filled').length > 10",
    "#/RUN/rollouts/50": "document.querySelectorAll('.t').length > 100",
    "#/RUN/group/7-0-3": "document.querySelectorAll('.heat-grid a').length > 10",
    "#/RUN/compare/6-7": "document.querySelectorAll('.data tbody tr').length > 10",
    "#/RUN/tools": "document.querySelectorAll('.data tbody tr').length > 10",
}
"""The views that are opened, and the condition for each to be drawn."""
FRAMES = 120
SCROLL = f"""new Promise(done => {{ let left = {FRAMES}; const list = document.querySelector(".list");
  (function step() {{ list.scrollTop += 90; --left ? requestAnimationFrame(step) : done(); }})(); }})"""


def make_run(folder: Path, steps: int) -> int:
    """Writes a run's folder; returns the size of its rollouts."""
    folder.mkdir(parents=True, exist_ok=True)
    blobs, rng = BlobFolder(folder / "blobs"), random.Random(0)
    kinds = [dump_rollout(_rollout(rng, kind), blobs) for kind in range(KINDS)]
    with (
        (folder / "rollouts.jsonl").open("wb", buffering=1 << 22) as lines,
        (folder / "metrics.jsonl").open("wb") as metrics,
    ):
        for step in range(1, steps + 1):
            for group in range(GROUPS):
                for index in range(SIBLINGS):
                    line = rng.choice(kinds)
                    line = line.replace(b'"group":"0-0-0"', b'"group":"%d-0-%d"' % (step, group), 1)
                    lines.write(line.replace(b'"index":0', b'"index":%d' % index, 1))
            metrics.write(
                dump_metrics(step, {f"area/{name}": rng.random() for name in range(60)} | {"reward/mean": step / steps})
            )
    run_info = {
        "model": "nowhere",
        "engine": "torch",
        "settings": {"steps": steps, "reward": {"components": {"right": {}}}},
    }
    (folder / "run.json").write_text(json.dumps(run_info))
    return (folder / "rollouts.jsonl").stat().st_size


def _rollout(rng: random.Random, kind: int) -> Rollout:
    ledger = Ledger((_entry(rng, Author.TASK, 200),))
    for turn in range(TURNS):
        ledger += _entry(rng, Author.POLICY, 200, turn)
        ledger += _entry(rng, Author.TOOL, 160, turn)
    ledger += _entry(rng, Author.POLICY, TOKENS - len(ledger), TURNS)
    timeline = tuple(
        Span(("queueing", "generating", "calling")[place % 3], place * 1.0, 1.0) for place in range(3 * TURNS)
    )
    right = float(rng.random() < 0.5)
    return Rollout(f"task-{kind}", ledger, StopReason.DONE, "0-0-0", 0, rewards={"right": right}, timeline=timeline)


def _entry(rng: random.Random, author: Author, size: int, turn: int = 0) -> Entry:
    ids = tuple(rng.randrange(150_000) for _ in range(size))
    text = " ".join(rng.choice(WORDS) for _ in range(size * 3 // 4))
    policy = author is Author.POLICY
    role = {Author.TASK: "user", Author.POLICY: "assistant", Author.TOOL: "tool"}[author]
    calls = (ToolCall(f"call_{turn}", rng.choice(["look_up", "calculate"]), '{"name": "Olga"}'),) if policy else ()
    call = {"name": rng.choice(["look_up", "calculate"]), "outcome": "ok", "elapsed_s": rng.random()}
    return Entry(
        author,
        ids,
        ({"role": role, "content": text},),
        logprobs=tuple(-rng.expovariate(3) for _ in ids) if policy else None,
        version=0 if policy else None,
        finish_reason="stop" if policy else None,
        calls=calls,
        parts=(Text(text),) if author is Author.TOOL else (),
        outcomes=(Outcome.OK,) if author is Author.TOOL else (),
        info={"tools": [call]} if author is Author.TOOL else {},
    )


def print_time(title: str, action: Callable[[], int]) -> None:
    """Prints the duration of an action, and the size that it returns."""
    began = time.perf_counter()
    size = action()
    print(f"{title:<58} {(time.perf_counter() - began) * 1000:8.0f} ms {size / 1024:9.0f} KiB", flush=True)


def main(folder: Path, steps: int) -> None:
    if not (folder / "run.json").exists():
        print_time("making the run", lambda: make_run(folder, steps))
    (folder / "rollouts.jsonl.index").unlink(missing_ok=True)
    for visit in ("first visit", "second visit"):
        print(visit)
        with serve_in_thread(name_runs([folder]), Settings(port=0)) as url:
            _time_requests(url, steps)
            if visit == "second visit":
                _time_browser(url)


def _time_requests(url: str, steps: int) -> None:
    total = steps * GROUPS * SIBLINGS
    run = (
        f"{url.removesuffix('/ui/')}/v1/runs/{json.loads(_get(url.removesuffix('ui/') + 'v1/runs'))['runs'][0]['name']}"
    )

    def get(path: str) -> Callable[[], int]:
        return lambda: len(_get(run + path))

    print_time(
        "the page's files", lambda: sum(len(_get(url + name)) for name in ("", "app.js", "theme.css", "page.css"))
    )
    print_time("curves", get("/metrics?from=0"))
    print_time("alarms", get("/alarms"))
    print_time("filter choices", get("/choices"))
    print_time("the first 100 rollouts", get("/rollouts?limit=100"))
    print_time(
        "until all rollouts are listed",
        lambda: _wait_until(lambda: json.loads(_get(run + "/rollouts?limit=0"))["listed"] == 1.0),
    )
    print_time("100 rollouts in the middle", get(f"/rollouts?limit=100&offset={total // 2}"))
    print_time(
        "100 rollouts by reward, the last of them", get(f"/rollouts?limit=100&offset={total - 200}&sort=-reward")
    )
    middle = steps // 2
    failed = f"/rollouts?limit=100&step={middle}&tool=look_up&success=no"
    print_time("failed rollouts of one step with one tool", get(failed))
    print_time("two steps compared", lambda: sum(get(f"/steps?step={step}")() for step in (middle, middle + 1)))
    print_time("tools by step", get("/tools"))
    print_time("filter choices, all rollouts listed", get("/choices"))
    print_time("one rollout, 2,000 tokens", get(f"/rollouts/{total // 2}"))
    print_time("eight siblings", get(f"/group?name={middle}-0-7"))
    words = "/rollouts?limit=100&q=numbers+are+looked"
    print_time("text search: the first answer", get(words))
    print_time(
        f"text search: all {total:,} rollouts",
        lambda: _wait_until(lambda: json.loads(_get(run + words))["looked"] == total),
    )


def _time_browser(url: str) -> None:
    """Prints the CPU time of the browser's main thread, which a busy machine does not stretch."""
    if find_executable() is None:
        print(f"not measured in a browser: {REMEDY}")
        return
    name = json.loads(_get(url.removesuffix("ui/") + "v1/runs"))["runs"][0]["name"]
    with start_chromium() as browser:
        for view, drawn in VIEWS.items():
            page = Page(browser)
            page.spent_s()
            page.open(url + view.replace("RUN", name))
            page.until(drawn)
            print(f"{'the browser draws ' + view:<58} {page.spent_s() * 1000:8.0f} ms")
            if view.endswith("rollouts"):
                before = page.spent_s()
                page.js(SCROLL)
                print(f"{'a frame while scrolling':<58} {(page.spent_s() - before) / FRAMES * 1000:8.1f} ms")
            page.close()


def _wait_until(condition: Callable[[], bool]) -> int:
    for _ in range(3000):
        if condition():
            return 0
        time.sleep(0.02)
    raise TimeoutError


def _get(url: str) -> bytes:
    with urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
        return body


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if arguments.folder:
        main(arguments.folder, arguments.steps)
    else:
        with tempfile.TemporaryDirectory(prefix="mtrl-view-") as temporary:
            main(Path(temporary) / "large", arguments.steps)
