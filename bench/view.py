"""What the page of a large run costs: 200 steps of 256 rollouts of 2,000 tokens, made up, and each request timed.

    .venv/bin/python -m bench.view [FOLDER]

The run is made where it is not there yet (more than a GB), and read first as one that nobody has looked at.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

from gateway.http.settings import Settings
from gateway.types import Outcome, Text, ToolCall
from tests.browser.chromium import REMEDY, chromium, executable
from tests.browser.page import Page
from trainer.ledger import Author, Entry, Ledger
from trainer.page.runs import named
from trainer.page.serve import beside
from trainer.run.blobs import Folder
from trainer.run.history import dump as dump_metrics
from trainer.run.line import dump
from trainer.run.rollout import Rollout, Span, StopReason

STEPS, GROUPS, EACH, TURNS, TOKENS = 200, 32, 8, 5, 2000
KINDS = 64
"""So many different rollouts stand for all of them."""
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
    "#/RUN/rollouts": "document.querySelectorAll('.rows a.line').length > 10",
    "#/RUN/rollouts/50": "document.querySelectorAll('.t').length > 100",
}
"""What is opened, and when it is there."""
FRAMES = 120
SCROLL = f"""new Promise(done => {{ let left = {FRAMES}; const list = document.querySelector(".list");
  (function step() {{ list.scrollTop += 90; --left ? requestAnimationFrame(step) : done(); }})(); }})"""


def made(folder: Path) -> int:
    """How large it is."""
    folder.mkdir(parents=True, exist_ok=True)
    blobs, chance = Folder(folder / "blobs"), random.Random(0)
    kinds = [dump(_rollout(chance, kind), blobs) for kind in range(KINDS)]
    with (
        (folder / "rollouts.jsonl").open("wb", buffering=1 << 22) as lines,
        (folder / "metrics.jsonl").open("wb") as told,
    ):
        for step in range(1, STEPS + 1):
            for group in range(GROUPS):
                for index in range(EACH):
                    line = chance.choice(kinds)
                    line = line.replace(b'"group":"0-0-0"', b'"group":"%d-0-%d"' % (step, group), 1)
                    lines.write(line.replace(b'"index":0', b'"index":%d' % index, 1))
            told.write(
                dump_metrics(
                    step, {f"area/{name}": chance.random() for name in range(60)} | {"reward/mean": step / 200}
                )
            )
    about = {
        "model": "nowhere",
        "engine": "torch",
        "settings": {"steps": STEPS, "reward": {"components": {"right": {}}}},
    }
    (folder / "run.json").write_text(json.dumps(about))
    return (folder / "rollouts.jsonl").stat().st_size


def _rollout(chance: random.Random, kind: int) -> Rollout:
    ledger = Ledger((_entry(chance, Author.TASK, 200),))
    for turn in range(TURNS):
        ledger += _entry(chance, Author.POLICY, 200, turn)
        ledger += _entry(chance, Author.TOOL, 160, turn)
    ledger += _entry(chance, Author.POLICY, TOKENS - len(ledger), TURNS)
    timeline = tuple(
        Span(("queueing", "generating", "calling")[place % 3], place * 1.0, 1.0) for place in range(3 * TURNS)
    )
    right = float(chance.random() < 0.5)
    return Rollout(f"task-{kind}", ledger, StopReason.DONE, "0-0-0", 0, rewards={"right": right}, timeline=timeline)


def _entry(chance: random.Random, author: Author, size: int, turn: int = 0) -> Entry:
    ids = tuple(chance.randrange(150_000) for _ in range(size))
    text = " ".join(chance.choice(WORDS) for _ in range(size * 3 // 4))
    policy = author is Author.POLICY
    role = {Author.TASK: "user", Author.POLICY: "assistant", Author.TOOL: "tool"}[author]
    calls = (ToolCall(f"call_{turn}", chance.choice(["look_up", "calculate"]), '{"name": "Olga"}'),) if policy else ()
    return Entry(
        author,
        ids,
        ({"role": role, "content": text},),
        logprobs=tuple(-chance.expovariate(3) for _ in ids) if policy else None,
        version=0 if policy else None,
        stop="stop" if policy else None,
        calls=calls,
        parts=(Text(text),) if author is Author.TOOL else (),
        outcomes=(Outcome.OK,) if author is Author.TOOL else (),
    )


def timed(what: str, act: Callable[[], int]) -> None:
    began = time.perf_counter()
    size = act()
    print(f"{what:<58} {(time.perf_counter() - began) * 1000:8.0f} ms {size / 1024:9.0f} KiB", flush=True)


def main(folder: Path) -> None:
    if not (folder / "run.json").exists():
        timed("the run is made", lambda: made(folder))
    (folder / "rollouts.jsonl.index").unlink(missing_ok=True)
    for visit in ("first visit", "second visit"):
        print(visit)
        with beside(named([folder]), Settings(port=0)) as url:
            _visit(url)
            if visit == "second visit":
                _browsed(url)


def _visit(url: str) -> None:
    run = (
        f"{url.removesuffix('/ui/')}/v1/runs/{json.loads(_got(url.removesuffix('ui/') + 'v1/runs'))['runs'][0]['name']}"
    )

    def get(path: str) -> Callable[[], int]:
        return lambda: len(_got(run + path))

    timed("the page's files", lambda: sum(len(_got(url + name)) for name in ("", "app.js", "look.css", "page.css")))
    timed("curves", get("/metrics?from=0"))
    timed("alarms", get("/alarms"))
    timed("what rollouts can be filtered by", get("/choices"))
    timed("the first 100 rollouts", get("/rollouts?limit=100"))
    timed("all are listed", lambda: _until(lambda: json.loads(_got(run + "/rollouts?limit=0"))["listed"] == 1.0))
    timed("100 rollouts in the midst", get("/rollouts?limit=100&offset=30000"))
    timed("100 rollouts by reward, the last of them", get("/rollouts?limit=100&offset=51000&sort=-reward"))
    timed("those of one step with one tool, failed", get("/rollouts?limit=100&step=120&tool=look_up&success=no"))
    timed("what they can be filtered by, all listed", get("/choices"))
    timed("one rollout, 2,000 tokens", get("/rollouts/40000"))
    timed("eight siblings", get("/group?name=100-0-7"))
    words = "/rollouts?limit=100&q=numbers+are+looked"
    timed("words in what was said: the first answer", get(words))
    timed(
        "words in what was said: all 51,200",
        lambda: _until(lambda: json.loads(_got(run + words))["looked"] == STEPS * GROUPS * EACH),
    )


def _browsed(url: str) -> None:
    """What the browser itself works for it: its main thread's own time, which a busy machine does not stretch."""
    if executable() is None:
        print(f"not measured in a browser: {REMEDY}")
        return
    name = json.loads(_got(url.removesuffix("ui/") + "v1/runs"))["runs"][0]["name"]
    with chromium() as browser:
        for view, drawn in VIEWS.items():
            page = Page(browser)
            page.spent_s()
            page.open(url + view.replace("RUN", name))
            page.until(drawn)
            print(f"{'the browser draws ' + view:<58} {page.spent_s() * 1000:8.0f} ms")
            if view.endswith("rollouts"):
                before = page.spent_s()
                page.js(SCROLL)
                print(f"{'a frame while it is scrolled':<58} {(page.spent_s() - before) / FRAMES * 1000:8.1f} ms")
            page.close()


def _until(true: Callable[[], bool]) -> int:
    for _ in range(3000):
        if true():
            return 0
        time.sleep(0.02)
    raise TimeoutError


def _got(url: str) -> bytes:
    with urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
        return body


if __name__ == "__main__":
    given = sys.argv[1:]
    if given:
        main(Path(given[0]))
    else:
        with tempfile.TemporaryDirectory(prefix="mtrl-view-") as temporary:
            main(Path(temporary) / "large")
