"""Tests what the web UI says of steps and of tools by step: digests, their sums, times of calls, and their limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from statistics import fmean
from threading import Barrier
from typing import Any

import pytest

from gateway.http.settings import Settings
from gateway.types import Outcome, ToolCall
from mtrl_plugins.web import step_digest
from mtrl_plugins.web.app import serve_in_thread
from mtrl_plugins.web.rollout_json import rollout_to_json
from mtrl_plugins.web.rollout_row import BLAME_OF_STOP
from mtrl_plugins.web.runs import ViewedRun, name_runs
from tests.browser.sample_run import HOSTILE, CreditSequence, write_sample_run
from tests.plugins.web.test_web_api import get_error, get_json, get_rows, index_run
from tests.trainer.sample_rollouts import SCORED, policy, text_to_ids
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout, StopReason
from trainer.storage.rollout_file import Rollouts, RolloutWriter
from trainer.storage.token_credit import CreditReader
from trainer.view.why import UNKNOWN_CREDIT, RolloutCredit

STEPS = 8


@pytest.fixture(scope="module")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample_run(tmp_path_factory.mktemp("runs") / "over", steps=STEPS)


@pytest.fixture(scope="module")
def url(sample_run: Path) -> Iterator[str]:
    with serve_in_thread([index_run(run) for run in name_runs([sample_run])], Settings(port=0)) as url:
        yield url.removesuffix("ui/") + "v1/runs/over"


def write_run(folder: Path, rollouts: Sequence[Rollout]) -> ViewedRun:
    folder.mkdir(exist_ok=True)
    with RolloutWriter(folder) as writer:
        for rollout in rollouts:
            writer.add(rollout)
    return index_run(name_runs([folder])[0])


def make_rollout(step: int, *entries: Entry, source: str = "tasks.jsonl:3", **more: Any) -> Rollout:
    turn = policy("a", *(ToolCall("c1", entry.source) for entry in entries))
    ledger = Ledger((Entry(Author.TASK, text_to_ids("q"), source=source), turn, *entries))
    defaults: dict[str, Any] = {"stop": StopReason.DONE, "group": f"{step}-0-0"}
    return Rollout("one", ledger, **(defaults | more))


def tool_entry(name: str, elapsed_s: Any, outcome: Outcome = Outcome.OK) -> Entry:
    info = {"tools": [{"name": name, "outcome": str(outcome), "elapsed_s": elapsed_s}]}
    return Entry(Author.TOOL, text_to_ids("!"), outcomes=(outcome,), source=name, info=info)


def test_digest_of_a_step_agrees_with_its_rows(url: str) -> None:
    digests = get_json(f"{url}/steps?step=2-3")
    assert [digest["step"] for digest in digests] == [2, 3]
    for digest in digests:
        rows = get_rows(url, step=digest["step"], limit=500)["rows"]
        scored = [row for row in rows if row["reward"] is not None]
        assert (digest["rollouts"], digest["scored"]) == (len(rows), len(scored))
        for measure in ("reward", "success"):
            assert digest[measure] == pytest.approx(fmean(row[measure] for row in scored))
        assert digest["tokens"] == pytest.approx(fmean(row["tokens"] for row in rows))
        for property in ("kind", "source", "stop"):
            for name, value in digest["values"][property].items():
                having = [row for row in rows if row[property] == name]
                worst = min(having, key=lambda row: (row["reward"] is not None, row["reward"] or 0))
                assert (value["rollouts"], value["place"]) == (len(having), worst["place"])
                rewards = [row["reward"] for row in having if row["reward"] is not None]
                assert value["scored"] == len(rewards)
                assert value["reward"] == (pytest.approx(fmean(rewards)) if rewards else None)
        for property, column in (("tool", "tools"), ("outcome", "outcomes")):
            counted = {name: value["rollouts"] for name, value in digest["values"][property].items()}
            assert counted == {name: sum(name in row[column] for row in rows) for name in counted} and counted
    assert digests[0]["values"]["stop"]["tool_failed"]["reward"] is None
    assert digests[0]["values"]["blame"]["tool"]["rollouts"] == 1


def test_steps_without_rollouts_are_left_out(url: str) -> None:
    assert get_json(f"{url}/steps?step=7-900")[-1]["step"] == STEPS
    assert get_json(f"{url}/steps?step=900") == get_json(f"{url}/steps?step=4-3") == []


@pytest.mark.parametrize("step", ["x", "1-x", "-1", f"0-{10**30}", "1;drop", "1-2-3"])
def test_steps_that_are_no_range_are_refused_with_message(url: str, step: str) -> None:
    code, message = get_error(f"{url}/steps?step={step}")
    assert code == 422 and "step" in message


def test_only_the_last_steps_of_a_long_range_and_few_values_are_digested(
    sample_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_digest, "MAX_STEPS", 3)
    monkeypatch.setattr(step_digest, "MAX_VALUES", 1)
    run = index_run(name_runs([sample_run])[0])
    assert [(digest["step"], len(digest["values"]["kind"])) for digest in run.steps()] == [(6, 1), (7, 1), (8, 1)]
    assert [digest["step"] for digest in run.steps(0, 5)] == [3, 4, 5]
    run.close()


def test_rollouts_are_filtered_and_searched_by_source(url: str) -> None:
    assert get_json(f"{url}/choices")["source"] == {"cities.jsonl": 16 * STEPS}
    assert get_rows(url, source="cities.jsonl")["total"] == get_rows(url, q="cities.jsonl")["total"] == 16 * STEPS
    assert get_rows(url, source="cities")["total"] == 0


def test_times_of_calls_are_those_that_were_measured(tmp_path: Path) -> None:
    times = [*range(1, 21), -1.0, nan, inf, "soon", None]
    rollouts = [make_rollout(1, tool_entry("look_up", time), index=index) for index, time in enumerate(times)]
    run = write_run(tmp_path / "run", [*rollouts, make_rollout(1, tool_entry("never", None, Outcome.TIMEOUT))])
    (digest,) = run.steps()
    tools = digest["tools"]
    assert tools["look_up"]["calls"] == 25 and tools["look_up"]["slowest"] == 19
    assert tools["look_up"]["times"] == {"p50": 10, "p95": 19, "max": 20}
    never = tools["never"]
    assert (never["times"], never["slowest"], never["outcomes"]) == ({}, None, {"timeout": 1})
    run.close()


def test_hostile_names_are_values_and_bounded(tmp_path: Path) -> None:
    injection = "x'; DROP TABLE rollouts; --"
    rollouts = [
        make_rollout(step, tool_entry(name, 1), kind=name, source=f"{name}:1")
        for step, name in ((1, HOSTILE), (1, injection), (2, "long" * 10_000))
    ]
    run = write_run(tmp_path / "run", rollouts)
    first, second = run.steps()
    for property in ("kind", "source", "tool"):
        assert {*first["values"][property]} == {HOSTILE, injection}
    assert {*first["tools"]} == {HOSTILE, injection}
    assert len(json.dumps(second["values"]["kind"])) + len(json.dumps(second["tools"])) < 1000
    run.close()


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
