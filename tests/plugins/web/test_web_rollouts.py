"""Tests how the web UI explains rollouts: which tokens were trained and why, rows, blame and credits."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from mtrl_plugins.web.rollout_json import rollout_to_json
from mtrl_plugins.web.rollout_row import BLAME_OF_STOP
from mtrl_plugins.web.runs import name_runs
from tests.browser.sample_run import CreditSequence, write_sample_run
from tests.plugins.web.test_web_api import index_run
from tests.trainer.sample_rollouts import SCORED, policy, text_to_ids
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout, StopReason
from trainer.storage.rollout_file import Rollouts, RolloutWriter
from trainer.storage.token_credit import CreditReader
from trainer.view.why import UNKNOWN_CREDIT, RolloutCredit


def policy_turns(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for ledger in rollout["ledgers"] for entry in ledger["entries"] if entry["author"] == "policy"]


def test_replaced_and_dropped_groups_are_shown_as_untrained(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=2)
    first = Rollouts(live)[0]
    with RolloutWriter(live) as writer:
        writer.add(replace(first, group="1-1-0"))
        writer.add(replace(first, group="0-1-5"))
    run = index_run(name_runs([live])[0])
    replaced, dropped, learned = (run.rollout(place) for place in (32, 33, 0))
    assert [rollout["credited"] for rollout in (replaced, dropped, learned)] == [False, False, True]
    assert not any(turn["trained"] for rollout in (replaced, dropped) for turn in policy_turns(rollout))
    assert all("replaced (`algorithm.dynamic_sampling`)" in turn["because"] for turn in policy_turns(replaced))
    assert all("too stale (`max_staleness`)" in turn["because"] for turn in policy_turns(dropped))
    assert all(turn["trained"] and "because_not" not in turn for turn in policy_turns(learned))
    unwritten = replace(first, group="1-1-0", ledger=Ledger(first.ledger.entries[:1]))
    assert RolloutCredit.load(unwritten, run.credits) == UNKNOWN_CREDIT, "there is nothing to be learned from"


def test_zero_weight_tokens_in_trained_turn_have_their_own_reason(tmp_path: Path) -> None:
    turn = replace(policy("abcd"), info={EXCLUDED_SPANS: [[0, 2]]})
    rollout = replace(SCORED, group="1-0-0", ledger=Ledger((Entry(Author.TASK, text_to_ids("q")), turn)))
    with RolloutWriter(tmp_path) as writer:
        writer.add(rollout)
        writer.add_credits(1, [CreditSequence(rollout.name, (0.0, 0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.0, 1.0, 1.0))])
    (rollout,) = policy_turns(index_run(name_runs([tmp_path])[0]).rollout(0))
    assert rollout["trained"] and "it is trained with the rollout's reward" in rollout["because"]
    assert rollout["because_not"] == "the policy wrote it, but a plug-in excluded it from training"


def test_credits_are_read_by_concurrent_threads(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=24)
    rollouts = [rollout for rollout in Rollouts(live) if rollout.reward is not None][-8:]
    for _ in range(20):
        credits, begin = CreditReader(live), Barrier(len(rollouts))

        def found(rollout: Rollout, credits: CreditReader = credits, begin: Barrier = begin) -> bool:
            begin.wait(20)
            return credits.read_rollout(rollout) is not None

        with ThreadPoolExecutor(len(rollouts)) as threads:
            assert all(threads.map(found, rollouts))


def test_only_data_urls_are_shortened() -> None:
    said, url = f"data: what stands in {'this ' * 20}table?", f"data:image/png;base64,{'A' * 400}"
    message = {"role": "user", "content": [{"type": "text", "text": said}, {"image_url": {"url": url}}]}
    entry = Entry(Author.TASK, text_to_ids("q"), (message,))
    (shown,) = rollout_to_json(replace(SCORED, ledger=Ledger((entry,))), None, UNKNOWN_CREDIT)["ledgers"][0]["entries"][
        0
    ]["messages"]
    assert shown["content"][0]["text"] == said
    assert shown["content"][1]["image_url"]["url"] == f"{url[:40]}…"


def test_row_counts_all_ledgers_of_a_rollout(tmp_path: Path) -> None:
    earlier = Ledger((Entry(Author.TASK, text_to_ids("q")), policy("xyz", cached=1)))
    with RolloutWriter(tmp_path) as writer:
        writer.add(replace(SCORED, earlier=(earlier,)))
    row = index_run(name_runs([tmp_path])[0]).rollout(0)["row"]
    assert {name: row[name] for name in ("turns", "tokens", "written", "asked", "cached")} == {
        "turns": 3, "tokens": 32, "written": 15, "asked": 34, "cached": 25,
    }  # fmt: skip


def test_evaluation_uses_tokenizer_and_success_criterion_of_its_run(tmp_path: Path) -> None:
    first = Rollouts(write_sample_run(tmp_path / "run", steps=1))[0]
    with RolloutWriter(tmp_path / "run" / "eval" / "greedy") as writer:
        writer.add(replace(first, group="e-0"))
    run = index_run(name_runs([tmp_path / "run" / "eval" / "greedy"])[0])
    rollout = run.rollout(0)
    assert rollout["silent"] == "" and rollout["row"]["success"] in (0, 1)
    assert (run.to_dict()["telling"], run.to_dict()["steps"]) == ("right", None), "an evaluation makes no steps"


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop.is_infrastructure])
def test_every_infrastructure_stop_reason_has_a_blame(stop: StopReason) -> None:
    assert BLAME_OF_STOP[stop]


def test_credits_are_read_again_after_run_was_replaced(tmp_path: Path) -> None:
    rollout = write_sample_run(tmp_path / "one", steps=3)
    credits = CreditReader(rollout)
    assert credits.steps == {1, 2, 3}
    lines = (rollout / "credits.jsonl").read_bytes().splitlines(keepends=True)
    longer = json.loads(lines[0])
    longer["rollouts"]["x"] = [[[1, 0.0, 0.0]]] * 9
    head = json.dumps(longer, separators=(",", ":")).encode() + b"\n"
    (rollout / "credits.jsonl").write_bytes(b"".join([head, *lines[1:]]))
    assert RolloutCredit.load(Rollouts(rollout)[-1], credits).ledgers
