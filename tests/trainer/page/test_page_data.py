"""What the page of runs is told over HTTP, while a run is written and after it was cut."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from pydantic import SecretStr

from gateway.errors import ConfigError
from gateway.http.settings import Settings
from tests.browser.made_run import add, made
from trainer.cli.viewing import viewed
from trainer.page.runs import Run, named
from trainer.page.serve import beside
from trainer.page.words import Words
from trainer.run.file import Writer

HOSTILE_AT = 20


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "over")


@pytest.fixture(scope="module")
def at(over: Path) -> Iterator[str]:
    runs = named([over])
    listed(runs[0])
    with beside(runs, Settings(port=0)) as url:
        yield url.removesuffix("ui/") + "v1/runs/over"


def listed(run: Run) -> Run:
    while run.grow():
        pass
    return run


def got(url: str, **headers: str) -> Any:
    with urlopen(Request(url, headers=headers), timeout=20) as answer:
        return json.load(answer)


def rows(at: str, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = got(f"{at}/rollouts?{urlencode(asked)}")
    return found


def refused(url: str, **headers: str) -> tuple[int, str]:
    with pytest.raises(HTTPError) as raised:
        got(url, **headers)
    with raised.value as error:
        return error.code, json.load(error)["error"]["message"]


def test_rollouts_come_in_pages_as_they_were_asked_for(at: str) -> None:
    found = rows(at, offset=100, limit=3)
    assert [row["place"] for row in found["rows"]] == [100, 101, 102]
    assert (found["total"], found["known"], found["listed"]) == (384, 384, 1.0)
    best = rows(at, sort="-reward", limit=500)["rows"]
    rewards = [row["reward"] for row in best if row["reward"] is not None]
    assert rewards == sorted(rewards, reverse=True) and best[-1]["reward"] is None


def test_rollouts_are_chosen_by_what_is_known_of_them(at: str) -> None:
    (broken,) = rows(at, stop="tool_failed")["rows"]
    assert (broken["blame"], broken["success"], broken["reward"]) == ("tool", None, None)
    assert {row["step"] for row in rows(at, step="3-4", limit=500)["rows"]} == {3, 4}
    assert all("draw_bars" in row["tools"] for row in rows(at, tool="draw_bars", limit=500)["rows"])
    assert rows(at, success="yes")["total"] + rows(at, success="no")["total"] == 383
    assert {row["blame"] for row in rows(at, success="no", limit=500)["rows"]} == {"policy"}
    assert {row["kind"] for row in rows(at, kind="far", limit=500)["rows"]} == {"far"}
    assert got(f"{at}/choices")["kind"] == {"far": 192, "near": 192}
    assert all(row["reward"] >= 1 for row in rows(at, least="1", limit=500)["rows"])


def test_words_are_found_in_what_was_said_and_called(at: str) -> None:
    assert [row["place"] for row in rows(at, q="onerror=")["rows"]] == [HOSTILE_AT]
    assert rows(at, q='"year": 2024')["total"] == 384
    assert rows(at, q="ŌSAKA")["total"] == rows(at, q="Ōsaka")["total"] > 0
    assert rows(at, q="deflate")["total"] == 0, "ids and logprobs are no words"
    assert rows(at, q="100%")["total"] == 0


@pytest.mark.parametrize(
    "asked",
    ["sort=reward;drop", "step=x", "success=maybe", "least=much", "offset=-1", f"offset={2**63}", f"step=0-{10**30}"],
)
def test_what_makes_no_sense_is_refused_in_words(at: str, asked: str) -> None:
    code, said = refused(f"{at}/rollouts?{asked}")
    assert code == 422 and said


@pytest.mark.parametrize("path", [f"rollouts/{2**63}", f"rollouts/{'9' * 5000}", f"metrics?from={'9' * 5000}"])
def test_a_number_that_is_too_large_is_refused_in_words(at: str, path: str) -> None:
    code, said = refused(f"{at}/{path}")
    assert code == 422 and "is a whole number from 0 to 9223372036854775807" in said


def test_a_rollout_is_told_token_by_token(at: str, over: Path) -> None:
    one = got(f"{at}/rollouts/171")
    (ledger,) = one["ledgers"]
    policy = [entry for entry in ledger["entries"] if entry["author"] == "policy"]
    for entry in ledger["entries"]:
        assert len(entry.get("pieces", ())) == len(entry.get("ids", ()))
    assert "".join(policy[0]["pieces"]).startswith("<think>The city is named")
    assert len(policy[0]["advantages"]) == len(policy[0]["ids"]) and set(policy[0]["weights"]) == {1.0}
    assert policy[0]["trained"] and "counts with the rollout's reward" in policy[0]["because"]
    assert not ledger["entries"][0]["trained"]
    assert policy[1]["calls"][0]["elapsed_s"] == 0.31
    assert [sibling["place"] for sibling in one["siblings"]] == [168, 169, 170, 171]
    (picture,) = [part for entry in ledger["entries"] for part in entry.get("parts", ()) if part["kind"] == "image"]
    with urlopen(f"{at}/blobs/{picture['sha256']}", timeout=20) as answer:
        assert answer.read().startswith(b"\x89PNG")
        assert "sandbox" in answer.headers["content-security-policy"]


def test_siblings_come_together(at: str) -> None:
    assert [one["row"]["place"] for one in got(f"{at}/group?name=11-0-2")["rollouts"]] == [168, 169, 170, 171]


@pytest.mark.parametrize("path", ["rollouts/9999", "group?name=none", "blobs/..%2frun.json", f"blobs/{'a' * 64}", "x"])
def test_what_is_not_there_is_not_found(at: str, path: str) -> None:
    assert refused(f"{at}/{path}")[0] == 404


def test_alarms_are_those_that_the_training_told(at: str) -> None:
    (alarm,) = [one for one in got(f"{at}/alarms") if one["seen"].startswith("no group teaches")]
    assert alarm["step"] > 15 and alarm["remedy"].startswith("end here")


def test_metrics_are_read_on_from_where_they_were_left(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=2, over=False)
    run = listed(named([live])[0])
    first = run.metrics(0)
    assert [line["step"] for line in first["lines"]] == [0, 1, 2]
    assert run.metrics(first["at"])["lines"] == []
    with Writer(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        add(writer, told, 3)
        told.write(b'{"step": 4, "reward/mean"')
    more = run.metrics(first["at"])
    assert [line["step"] for line in more["lines"]] == [3] and not more["again"]
    os.truncate(live / "metrics.jsonl", 20)
    assert run.metrics(more["at"]) == {"lines": [], "at": 0, "again": True, "changed": run.metrics(0)["changed"]}


def test_a_list_grows_with_its_run_and_begins_anew_where_the_run_was_cut(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=2)
    run = listed(named([live])[0])
    assert run.index.known == 32
    with Writer(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        add(writer, told, 3)
    assert listed(run).index.known == 48
    run.stop()
    again = named([live])[0]
    assert again.index.known == 48, "what was listed is kept beside the run"
    lines = (live / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (live / "rollouts.jsonl").write_bytes(b"".join([*lines[:16], *lines[32:], b'{"torn": ']))
    assert listed(again).index.known == 32
    assert [row["step"] for row in again.index.ask("SELECT DISTINCT step FROM rollouts ORDER BY 1")] == [1, 3]


def test_nothing_is_written_into_a_run_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = made(tmp_path / "kept", steps=1)
    before = sorted(file.name for file in live.iterdir())
    monkeypatch.setattr(os, "access", lambda *_: False)
    run = listed(named([live])[0])
    assert run.index.known == 16
    assert sorted(file.name for file in live.iterdir()) == before


def test_a_list_of_something_else_is_made_anew(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=1)
    (live / "rollouts.jsonl.index").write_bytes(b"no database" * 100)
    assert listed(named([live])[0]).index.known == 16
    with sqlite3.connect(live / "rollouts.jsonl.index") as kept:
        assert kept.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (16,)
    kept.close()


def test_a_damaged_rollout_is_listed_as_such_and_the_others_are_there(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=1)
    lines = (live / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (live / "rollouts.jsonl").write_bytes(b"".join([lines[0], b"{}\n", *lines[1:]]))
    run = listed(named([live])[0])
    assert [row["stop"] for row in run.index.ask("SELECT stop FROM rollouts ORDER BY place LIMIT 3")][1] == "damaged"
    assert run.index.known == 17


def test_a_run_is_watched_from_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with viewed(tmp_path / "soon"):
        url = capsys.readouterr().out.split()[-1].removesuffix("ui/") + "v1/runs"
        assert got(url)["runs"][0]["settings"] == {}
        assert rows(f"{url}/soon")["total"] == 0
        made(tmp_path / "soon", steps=1)
        assert got(url)["runs"][0]["steps"] == 1
        until = time.monotonic() + 20
        while (found := rows(f"{url}/soon"))["total"] < 16 and time.monotonic() < until:
            pass
        assert found["rows"][0]["success"] in (0, 1), "what success is was said after the page was opened"


def test_only_who_has_the_token_reads_a_run_and_everyone_the_empty_page(over: Path) -> None:
    with beside(named([over]), Settings(port=0, token=SecretStr("open-sesame"))) as url:
        api = url.removesuffix("ui/") + "v1/runs"
        assert refused(api)[0] == 401
        assert got(api, authorization="Bearer open-sesame")["runs"][0]["name"] == "over"
        for address in (url, url.removesuffix("ui/")):
            with urlopen(address, timeout=20) as page:
                assert page.url == url and "default-src 'none'" in page.headers["content-security-policy"]
                assert b"over" not in page.read()


def test_another_name_than_ours_is_not_served_and_no_door_stands_open(at: str, over: Path) -> None:
    assert refused(f"{at}/alarms", host="evil.example")[0] == 403
    with pytest.raises(ConfigError, match="no token"), beside(named([over]), Settings(host="0.0.0.0", port=0)):
        pass


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = [run.name for run in named([tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"])]
    assert len(set(names)) == 3 and names[2] == "other"


def test_characters_of_several_tokens_stand_whole(over: Path) -> None:
    words = Words.of(over / "model")
    ids = words._tokenizer.encode("Ōsaka 🙂 a\x1b[31m").ids
    pieces = words.pieces(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == "Ōsaka 🙂 a\\x1b[31m"
    with pytest.raises(ValueError, match="not there any more"):
        Words.of(over / "gone")
