"""Of each token it is told whether it was trained, and why: as its step did, and not as it might have."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from tests.browser.made_run import Weighed, made
from tests.trainer.page.test_page_data import listed
from tests.trainer.told import SCORED, ids, policy
from trainer.ledger import Author, Entry, Ledger
from trainer.page.runs import named
from trainer.page.summary import SURROUNDS
from trainer.page.told import told
from trainer.run.credits import Credits
from trainer.run.file import Rollouts, Writer
from trainer.run.rollout import LEFT_OUT, Rollout, StopReason
from trainer.view.credited import UNKNOWN, Credited


def turns(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for ledger in one["ledgers"] for entry in ledger["entries"] if entry["author"] == "policy"]


def test_a_group_that_was_replaced_or_dropped_is_not_said_to_be_trained(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=2)
    first = Rollouts(live)[0]
    with Writer(live) as writer:
        writer.add(replace(first, group="1-1-0"))
        writer.add(replace(first, group="0-1-5"))
    run = listed(named([live])[0])
    replaced, dropped, learned = (run.rollout(place) for place in (32, 33, 0))
    assert [one["credited"] for one in (replaced, dropped, learned)] == [False, False, True]
    assert not any(turn["trained"] for one in (replaced, dropped) for turn in turns(one))
    assert all("replaced (`algorithm.dynamic`)" in turn["because"] for turn in turns(replaced))
    assert all("too stale by then (`max_staleness`)" in turn["because"] for turn in turns(dropped))
    assert all(turn["trained"] and "because_not" not in turn for turn in turns(learned))
    unwritten = replace(first, group="1-1-0", ledger=Ledger(first.ledger.entries[:1]))
    assert Credited.of(unwritten, run.credits) == UNKNOWN, "there is nothing to be learned from"


def test_tokens_without_weight_in_a_trained_turn_have_a_reason_of_their_own(tmp_path: Path) -> None:
    turn = replace(policy("abcd"), info={LEFT_OUT: [[0, 2]]})
    rollout = replace(SCORED, group="1-0-0", ledger=Ledger((Entry(Author.TASK, ids("q")), turn)))
    with Writer(tmp_path) as writer:
        writer.add(rollout)
        writer.credit(1, [Weighed(rollout.name, (0.0, 0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.0, 1.0, 1.0))])
    (one,) = turns(listed(named([tmp_path])[0]).rollout(0))
    assert one["trained"] and "counts with the rollout's reward" in one["because"]
    assert one["because_not"] == "the policy wrote it, but a plug-in left it out of what is learned"


def test_who_opens_rollouts_at_the_same_time_finds_the_credits_of_each(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=24)
    rollouts = [one for one in Rollouts(live) if one.reward is not None][-8:]
    for _ in range(20):
        credits, begin = Credits(live), Barrier(len(rollouts))

        def found(one: Rollout, credits: Credits = credits, begin: Barrier = begin) -> bool:
            begin.wait(20)
            return credits.of_rollout(one) is not None

        with ThreadPoolExecutor(len(rollouts)) as threads:
            assert all(threads.map(found, rollouts))


def test_text_that_only_begins_like_bytes_is_told_whole() -> None:
    said, url = f"data: what stands in {'this ' * 20}table?", f"data:image/png;base64,{'A' * 400}"
    message = {"role": "user", "content": [{"type": "text", "text": said}, {"image_url": {"url": url}}]}
    entry = Entry(Author.TASK, ids("q"), (message,))
    (shown,) = told(replace(SCORED, ledger=Ledger((entry,))), None, UNKNOWN)["ledgers"][0]["entries"][0]["messages"]
    assert shown["content"][0]["text"] == said
    assert shown["content"][1]["image_url"]["url"] == f"{url[:40]}…"


def test_where_the_policy_began_anew_a_row_counts_all_of_its_ledgers(tmp_path: Path) -> None:
    earlier = Ledger((Entry(Author.TASK, ids("q")), policy("xyz", cached=1)))
    with Writer(tmp_path) as writer:
        writer.add(replace(SCORED, earlier=(earlier,)))
    row = listed(named([tmp_path])[0]).rollout(0)["row"]
    assert {name: row[name] for name in ("turns", "tokens", "written", "asked", "cached")} == {
        "turns": 3, "tokens": 32, "written": 15, "asked": 34, "cached": 25,
    }  # fmt: skip


def test_an_evaluation_is_told_in_the_words_and_by_the_mark_of_its_run(tmp_path: Path) -> None:
    first = Rollouts(made(tmp_path / "run", steps=1))[0]
    with Writer(tmp_path / "run" / "eval" / "greedy") as writer:
        writer.add(replace(first, group="e-0"))
    run = listed(named([tmp_path / "run" / "eval" / "greedy"])[0])
    one = run.rollout(0)
    assert one["silent"] == "" and one["row"]["success"] in (0, 1)
    assert (run.told()["telling"], run.told()["steps"]) == ("right", None), "an evaluation makes no steps"


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop.infrastructure])
def test_whatever_surrounds_the_policy_has_a_name_when_it_fails(stop: StopReason) -> None:
    assert SURROUNDS[stop]


def test_credits_of_a_run_that_was_made_anew_are_read_anew(tmp_path: Path) -> None:
    one = made(tmp_path / "one", steps=3)
    credits = Credits(one)
    assert credits.steps == {1, 2, 3}
    lines = (one / "credits.jsonl").read_bytes().splitlines(keepends=True)
    longer = json.loads(lines[0])
    longer["rollouts"]["x"] = [[[1, 0.0, 0.0]]] * 9
    head = json.dumps(longer, separators=(",", ":")).encode() + b"\n"
    (one / "credits.jsonl").write_bytes(b"".join([head, *lines[1:]]))
    assert Credited.of(Rollouts(one)[-1], credits).ledgers
