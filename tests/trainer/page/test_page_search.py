"""What is searched is what was said and called, once in each rollout, whoever else searches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tests.browser.made_run import made
from tests.trainer.page.test_page_data import listed
from trainer.page.query import query
from trainer.page.runs import Run, named
from trainer.page.said import said
from trainer.page.search import Search


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = listed(named([made(tmp_path_factory.mktemp("runs") / "run", steps=12)])[0])
    yield run
    run.stop()


def total(run: Run, words: str) -> int:
    found: int = run.rollouts(query({"q": words}))["total"]
    return found


@pytest.mark.parametrize(
    "words", ["policy", "user", "author", "feedback", "outcomes", "elapsed_s", "0.012", "tool_call_id", "feedback_done"]
)
def test_words_of_the_files_own_format_are_found_nowhere(run: Run, words: str) -> None:
    assert total(run, words) == 0


@pytest.mark.parametrize(
    ("words", "count"),
    [("never guess", 192), ("look_up", 192), ('"labels": [', 96), ("a chart of 2", 96), ("not right. look", None)],
)
def test_words_are_found_in_messages_calls_and_results(run: Run, words: str, count: int | None) -> None:
    assert total(run, words) == count or (count is None and 0 < total(run, words) < 192)


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns so often that whatever they share is seen half done."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_searches_at_the_same_time_find_each_rollout_and_no_other(run: Run) -> None:
    lines = (run.folder / "rollouts.jsonl").read_text().splitlines()
    texts = [" ".join(said(json.loads(line))).lower() for line in lines]
    for words in ("lima", "cairo", "turin", "oslo", "jaffa"):
        search, begin = Search(run.index), Barrier(4)

        def to_the_end(words: str = words, search: Search = search, begin: Barrier = begin) -> None:
            begin.wait(20)
            while search.look(words, 0.01) < run.index.known:
                pass

        with ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(to_the_end) for _ in range(4)]:
                one.result(30)
        found = {row["place"] for row in run.index.ask("SELECT place FROM found WHERE words = ?", [words])}
        assert found == {place for place, text in enumerate(texts) if words in text} and found


def test_the_bytes_of_media_and_the_places_of_messages_are_not_said() -> None:
    url = "data:image/png;base64,aGVsbG8="
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "data: what is it?"}]
    message = {"role": "user", "content": content}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = {
        "author": "policy",
        "messages": [{"role": "assistant", "tool_calls": [call]}],
        "calls": [["c1", "see", "7"]],
    }
    told = {"earlier": [{"entries": [{"author": "task", "messages": [message]}]}], "entries": [turn]}
    assert [*said(told)] == ["data: what is it?", "look", "{}", "see", "7"]
