"""Tests full-text search in rollouts, including concurrent searches."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from mtrl_plugins.web.runs import ViewedRun, name_runs
from mtrl_plugins.web.search import Search, iterate_texts, parse_query
from tests.browser.sample_run import write_sample_run
from tests.plugins.web.test_web_api import index_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewedRun]:
    run = index_run(name_runs([write_sample_run(tmp_path_factory.mktemp("runs") / "run", steps=12)])[0])
    yield run
    run.close()


def count_matches(run: ViewedRun, words: str) -> int:
    found: int = run.rollouts(parse_query({"q": words}))["total"]
    return found


@pytest.mark.parametrize(
    "words", ["policy", "user", "author", "feedback", "outcomes", "elapsed_s", "0.012", "tool_call_id", "feedback_done"]
)
def test_search_does_not_match_words_of_the_file_format(run: ViewedRun, words: str) -> None:
    assert count_matches(run, words) == 0


@pytest.mark.parametrize(
    ("words", "count"),
    [("never guess", 192), ("look_up", 192), ('"labels": [', 96), ("a chart of 2", 96), ("not right. look", None)],
)
def test_search_matches_messages_calls_and_results(run: ViewedRun, words: str, count: int | None) -> None:
    assert count_matches(run, words) == count or (count is None and 0 < count_matches(run, words) < 192)


@pytest.fixture
def rapid_thread_switches() -> Iterator[None]:
    """Makes threads switch so often that races on shared state show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("rapid_thread_switches")
def test_concurrent_searches_find_exactly_the_matching_rollouts(run: ViewedRun) -> None:
    lines = (run.folder / "rollouts.jsonl").read_text().splitlines()
    texts = [" ".join(iterate_texts(json.loads(line))).lower() for line in lines]
    for words in ("lima", "cairo", "turin", "oslo", "jaffa"):
        search, begin = Search(run.index), Barrier(4)

        def search_to_end(words: str = words, search: Search = search, begin: Barrier = begin) -> None:
            begin.wait(20)
            while search.advance(words, 0.01) < run.index.count:
                pass

        with ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(search_to_end) for _ in range(4)]:
                one.result(30)
        found = {row["place"] for row in run.index.select("SELECT place FROM found WHERE words = ?", [words])}
        assert found == {place for place, text in enumerate(texts) if words in text} and found


def test_searched_texts_exclude_media_and_message_fields() -> None:
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
    assert [*iterate_texts(told)] == ["data: what is it?", "look", "{}", "see", "7"]
