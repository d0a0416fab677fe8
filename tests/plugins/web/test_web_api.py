"""Tests the HTTP API of the web UI: table, metrics, rollouts, access, and runs that grow or are truncated."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from gateway.errors import ConfigError
from gateway.http.settings import Settings
from mtrl_plugins.web.app import POLL_S, serve_in_thread
from mtrl_plugins.web.rollout_json import TokenTexts
from mtrl_plugins.web.runs import ViewedRun, name_runs
from mtrl_plugins.web.search import Search, iterate_texts
from mtrl_plugins.web.view_command import serve_while_training
from tests.browser.sample_run import add_step, write_sample_run
from tests.trainer.tokenizer_families import FAMILIES, save_tokenizer_folder
from tests.trainer.train.test_train_metrics import file_size_limit
from trainer.storage.rollout_file import RolloutWriter

HOSTILE_AT = 20


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("runs") / "over")


@pytest.fixture(scope="module")
def url(finished_run: Path) -> Iterator[str]:
    runs = name_runs([finished_run])
    index_run(runs[0])
    with serve_in_thread(runs, Settings(port=0)) as url:
        yield url.removesuffix("ui/") + "v1/runs/over"


def index_run(run: ViewedRun) -> ViewedRun:
    while run.update_index():
        pass
    return run


def get_json(url: str, **headers: str) -> Any:
    with urlopen(Request(url, headers=headers), timeout=20) as answer:
        return json.load(answer)


def post_notes(url: str, body: bytes) -> Any:
    with urlopen(
        Request(f"{url}/notes", data=body, headers={"content-type": "application/json"}), timeout=20
    ) as answer:
        return json.load(answer)


def test_notes_are_bounded_and_never_replace_what_cannot_be_read(url: str, finished_run: Path) -> None:
    tags = [f"tag {number}" for number in range(50)]
    assert post_notes(url, json.dumps({"notes": "a", "tags": tags}).encode()) == {"notes": "a", "tags": tags}
    for body in (json.dumps({"tags": [*tags, "more"]}), '{"tags": [""]}', '{"notes": 1}', "[]"):
        with pytest.raises(HTTPError, match="422"):
            post_notes(url, body.encode())
    (finished_run / "notes.json").write_text('{"notes": "by hand",}')
    with pytest.raises(HTTPError, match="409"):
        post_notes(url, b'{"notes": "b"}')
    assert "by hand" in (finished_run / "notes.json").read_text()
    (finished_run / "notes.json").unlink()


def get_rows(url: str, **params: Any) -> dict[str, Any]:
    found: dict[str, Any] = get_json(f"{url}/rollouts?{urlencode(params)}")
    return found


def get_error(url: str, **headers: str) -> tuple[int, str]:
    with pytest.raises(HTTPError) as raised:
        get_json(url, **headers)
    with raised.value as error:
        return error.code, json.load(error)["error"]["message"]


def test_rollouts_are_paged_and_sorted(url: str) -> None:
    found = get_rows(url, offset=100, limit=3)
    assert [row["place"] for row in found["rows"]] == [100, 101, 102]
    assert (found["total"], found["known"], found["listed"]) == (384, 384, 1.0)
    best = get_rows(url, sort="-reward", limit=500)["rows"]
    rewards = [row["reward"] for row in best if row["reward"] is not None]
    assert rewards == sorted(rewards, reverse=True) and best[-1]["reward"] is None


def test_rollouts_are_filtered(url: str) -> None:
    (broken,) = get_rows(url, stop="tool_failed")["rows"]
    assert (broken["blame"], broken["success"], broken["reward"]) == ("tool", None, None)
    assert {row["step"] for row in get_rows(url, step="3-4", limit=500)["rows"]} == {3, 4}
    assert all("draw_bars" in row["tools"] for row in get_rows(url, tool="draw_bars", limit=500)["rows"])
    assert get_rows(url, success="yes")["total"] + get_rows(url, success="no")["total"] == 383
    assert {row["blame"] for row in get_rows(url, success="no", limit=500)["rows"]} == {"policy"}
    assert {row["kind"] for row in get_rows(url, kind="far", limit=500)["rows"]} == {"far"}
    assert get_json(f"{url}/choices")["kind"] == {"far": 192, "near": 192}
    assert all(row["reward"] >= 1 for row in get_rows(url, least="1", limit=500)["rows"])


def test_search_finds_text_of_messages_and_calls(url: str) -> None:
    assert [row["place"] for row in get_rows(url, q="onerror=")["rows"]] == [HOSTILE_AT]
    assert get_rows(url, q='"year": 2024')["total"] == 384
    assert get_rows(url, q="ŌSAKA")["total"] == get_rows(url, q="Ōsaka")["total"] > 0
    assert get_rows(url, q="deflate")["total"] == 0, "ids and logprobs are no words"
    assert get_rows(url, q="100%")["total"] == 0


@pytest.mark.parametrize(
    "params", ["sort=reward;drop", "step=x", "success=maybe", "least=much", "offset=-1", f"step=0-{10**30}"]
)
def test_invalid_parameter_is_refused_with_message(url: str, params: str) -> None:
    code, said = get_error(f"{url}/rollouts?{params}")
    assert code == 422 and said


@pytest.mark.parametrize("path", [f"rollouts/{2**63}", f"rollouts/{'9' * 5000}", f"metrics?from={'9' * 5000}"])
def test_too_large_number_is_refused_with_message(url: str, path: str) -> None:
    code, said = get_error(f"{url}/{path}")
    assert code == 422 and "must be an integer from 0 to 9223372036854775807" in said


def test_rollout_has_tokens_credit_calls_and_media(url: str, finished_run: Path) -> None:
    one = get_json(f"{url}/rollouts/171")
    (ledger,) = one["ledgers"]
    policy = [entry for entry in ledger["entries"] if entry["author"] == "policy"]
    for entry in ledger["entries"]:
        assert len(entry.get("pieces", ())) == len(entry.get("ids", ()))
    assert "".join(policy[0]["pieces"]).startswith("<think>The city is named")
    assert len(policy[0]["advantages"]) == len(policy[0]["ids"]) and set(policy[0]["weights"]) == {1.0}
    assert policy[0]["trained"] and "it is trained with the rollout's reward" in policy[0]["because"]
    assert not ledger["entries"][0]["trained"]
    assert policy[1]["calls"][0]["elapsed_s"] == 0.31
    assert [sibling["place"] for sibling in one["siblings"]] == [168, 169, 170, 171]
    (picture,) = [part for entry in ledger["entries"] for part in entry.get("parts", ()) if part["kind"] == "image"]
    with urlopen(f"{url}/blobs/{picture['sha256']}", timeout=20) as answer:
        assert answer.read().startswith(b"\x89PNG")
        assert "sandbox" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["rollouts/9999", "group?name=none", "blobs/..%2frun.json", f"blobs/{'a' * 64}", "x"])
def test_missing_item_is_not_found(url: str, path: str) -> None:
    assert get_error(f"{url}/{path}")[0] == 404


def test_alarms_know_the_vocabulary_and_the_size_of_groups_as_the_training_did(tmp_path: Path) -> None:
    folder = write_sample_run(tmp_path / "noise", steps=1)
    info = json.loads((folder / "run.json").read_text())
    save_tokenizer_folder(FAMILIES["hermes"], tmp_path / "model")
    step = {"step": 1, "groups/teaching": 0, "success/sampled": 0.0}
    for logprob, says in ((-5.95, "every token is about equally likely"), (-0.5, "each has a single rollout")):
        info |= {"model": str(tmp_path / "model"), "settings": info["settings"] | {"n": 1}}
        (folder / "run.json").write_text(json.dumps(info))
        (folder / "metrics.jsonl").write_text(json.dumps(step | {"rollout/logprob": logprob}) + "\n")
        (alarm,) = name_runs([folder])[0].alarms()
        assert says in alarm["seen"]


def test_metrics_continue_from_position_and_restart_when_file_was_cut(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=2, finished=False)
    run = index_run(name_runs([live])[0])
    first = run.metrics(0)
    assert [line["step"] for line in first["lines"]] == [0, 1, 2]
    assert run.metrics(first["at"])["lines"] == []
    with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        add_step(writer, told, 3)
        told.write(b'{"step": 4, "reward/mean"')
    more = run.metrics(first["at"])
    assert [line["step"] for line in more["lines"]] == [3] and not more["again"]
    os.truncate(live / "metrics.jsonl", 20)
    restarted = {"lines": [], "at": 0, "again": True, "changed": run.metrics(0)["changed"], "now": None}
    assert run.metrics(more["at"]) == restarted


def test_index_grows_with_run_and_is_rebuilt_when_run_was_cut(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=2)
    run = index_run(name_runs([live])[0])
    assert run.index.count == 32
    with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        add_step(writer, told, 3)
    assert index_run(run).index.count == 48
    run.close()
    again = name_runs([live])[0]
    assert again.index.count == 48, "what was listed is kept beside the run"
    lines = (live / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (live / "rollouts.jsonl").write_bytes(b"".join([*lines[:16], *lines[32:], b'{"torn": ']))
    assert index_run(again).index.count == 32
    assert [row["step"] for row in again.index.select("SELECT DISTINCT step FROM rollouts ORDER BY 1")] == [1, 3]


def test_read_only_run_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = write_sample_run(tmp_path / "kept", steps=1)
    before = sorted(file.name for file in live.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    run = index_run(name_runs([live])[0])
    assert run.index.count == 16
    assert sorted(file.name for file in live.iterdir()) == before


def test_damaged_rollout_is_listed_as_damaged(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    lines = (live / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (live / "rollouts.jsonl").write_bytes(b"".join([lines[0], b"{}\n", *lines[1:]]))
    run = index_run(name_runs([live])[0])
    assert [row["stop"] for row in run.index.select("SELECT stop FROM rollouts ORDER BY place LIMIT 3")][1] == "damaged"
    assert run.index.count == 17


def test_run_is_served_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_while_training(tmp_path / "soon"):
        url = capsys.readouterr().out.split()[-1].removesuffix("ui/") + "v1/runs"
        assert get_json(url)["runs"][0]["settings"] == {}
        assert get_rows(f"{url}/soon")["total"] == 0
        write_sample_run(tmp_path / "soon", steps=1)
        assert get_json(url)["runs"][0]["steps"] == 1
        until = time.monotonic() + 20
        while (found := get_rows(f"{url}/soon"))["total"] < 16 and time.monotonic() < until:
            pass
        assert found["rows"][0]["success"] in (0, 1), "what success is was said after the page was opened"


def test_other_host_name_and_open_address_without_token_are_refused(url: str, finished_run: Path) -> None:
    assert get_error(f"{url}/alarms", host="evil.example")[0] == 403
    with (
        pytest.raises(ConfigError, match="no token"),
        serve_in_thread(name_runs([finished_run]), Settings(host="0.0.0.0", port=0)),
    ):
        pass


def test_runs_with_equal_folder_names_get_unique_names(tmp_path: Path) -> None:
    names = [run.name for run in name_runs([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"])]
    assert len(set(names)) == 3 and names[2] == "other"


def test_character_of_several_tokens_belongs_to_the_first(finished_run: Path) -> None:
    words = TokenTexts.load(finished_run / "model")
    ids = words._tokenizer.encode("Ōsaka 🙂 a\x1b[31m").ids
    pieces = words.split(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == "Ōsaka 🙂 a\\x1b[31m"
    with pytest.raises(ValueError, match="does not exist any more"):
        TokenTexts.load(finished_run / "gone")


INDEX = "rollouts.jsonl.index"


def add_steps(live: Path, *steps: int) -> None:
    with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        for step in steps:
            add_step(writer, told, step)


def overwrite(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def truncate(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [Path.unlink, overwrite, truncate])
def test_damaged_index_is_rebuilt_while_run_is_viewed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    run = index_run(name_runs([live])[0])
    damage(live / INDEX)
    add_steps(live, 2)
    assert index_run(run).index.count == 32
    run.close()
    with sqlite3.connect(live / INDEX) as kept:
        assert kept.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (32,)
    kept.close()


def test_replaced_run_is_indexed_again(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=2)
    run = index_run(name_runs([live])[0])
    assert run.rollout(31)["credited"]
    shutil.rmtree(live)
    write_sample_run(live, steps=3, seed=1)
    assert index_run(run).index.count == 48
    assert all(run.rollout(place)["credited"] for place in (0, 47))


def test_index_is_kept_in_memory_on_full_disk(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    run = index_run(name_runs([live])[0])
    add_steps(live, 2, 3)
    with file_size_limit((live / INDEX).stat().st_size):
        assert index_run(run).index.count == 48


def test_failing_index_is_logged_once_and_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    again, failed = Event(), []

    def fails(run: ViewedRun) -> bool:
        if run.folder != live:
            return False  # Of the server of the other tests.
        if failed:
            again.set()
        failed.append(run)
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(ViewedRun, "update_index", fails)
    with caplog.at_level(logging.WARNING), serve_in_thread(name_runs([live]), Settings(port=0)) as url:
        assert again.wait(20 * POLL_S)
        assert get_rows(url.removesuffix("ui/") + "v1/runs/live")["total"] == 0
    assert [one.getMessage() for one in caplog.records] == [
        f"{live}: cannot index its rollouts for now (OSError: [Errno 116] Stale file handle)"
    ]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewedRun]:
    searched = index_run(name_runs([write_sample_run(tmp_path_factory.mktemp("runs") / "searched", steps=12)])[0])
    yield searched
    searched.close()


@pytest.fixture
def rapid_thread_switches() -> Iterator[None]:
    """Makes threads switch so often that races on shared state show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("rapid_thread_switches")
def test_concurrent_searches_find_exactly_the_matching_rollouts(searched: ViewedRun) -> None:
    lines = (searched.folder / "rollouts.jsonl").read_text().splitlines()
    texts = [" ".join(iterate_texts(json.loads(line))).lower() for line in lines]
    for words in ("lima", "cairo", "turin", "oslo", "jaffa"):
        search, begin = Search(searched.index), Barrier(4)

        def search_to_end(words: str = words, search: Search = search, begin: Barrier = begin) -> None:
            begin.wait(20)
            while search.advance(words, 0.01) < searched.index.count:
                pass

        with ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(search_to_end) for _ in range(4)]:
                one.result(30)
        found = {row["place"] for row in searched.index.select("SELECT place FROM found WHERE words = ?", [words])}
        assert found == {place for place, text in enumerate(texts) if words in text} and found


def test_searched_texts_exclude_media_and_message_fields() -> None:
    url = "data:image/png;base64,aGVsbG8="
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "data: what is it?"}]
    message = {"role": "user", "content": content}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turn = {
        "author": "policy",
        "messages": [{"role": "assistant", "tool_calls": [call], "tool_call_id": "c1"}],
        "calls": [["c1", "see", "7"]], "outcomes": ["ok"], "info": {"elapsed_s": 0.012},
    }  # fmt: skip
    told = {"earlier": [{"entries": [{"author": "task", "messages": [message]}]}], "entries": [turn]}
    assert [*iterate_texts(told)] == ["data: what is it?", "look", "{}", "see", "7"]
