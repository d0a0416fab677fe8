"""Policies that know nothing are held against tasks: those that are made, and those that are shipped."""

from __future__ import annotations

import json

import anyio
import pytest

from mtrl_plugins.demo.shelves.shelves_demo import FILES, FOLDER
from mtrl_plugins.task_maker import explore
from mtrl_plugins.task_maker.chain import Chain, Step
from mtrl_plugins.task_maker.explore import Explorer, KnowsNothing, RandomTry
from mtrl_plugins.task_maker.server_sessions import open_server
from mtrl_plugins.task_maker.values import Value
from tests.waiting import PATIENCE_S


def test_policies_that_know_nothing_are_held_against_state_and_answer() -> None:
    untouched, changed = {"s": "sha256:0"}, {"s": "sha256:1"}
    knows_nothing = KnowsNothing({"": untouched}, {"": (RandomTry(changed, "Ann"),)})
    step, answer = Step("find", {}, {}, ()), Value("ANN", "name")
    other = Value("Bob", "name")
    problems = {
        "solved by doing nothing": Chain((step,), "train", end_state=untouched),
        "solved by one random call": Chain((step,), "train", answer=answer, end_state=changed),
        "one random call leaves its end state": Chain((step,), "train", answer=other, end_state=changed),
    }
    assert {problem: knows_nothing.find_problem(chain) for problem, chain in problems.items()} == {
        problem: problem for problem in problems
    }
    assert knows_nothing.find_problem(Chain((step,), "train", answer=answer, end_state=untouched)) is None
    assert knows_nothing.find_problem(Chain((step,), "train", answer=other)) is None
    assert knows_nothing.find_problem(Chain((step,), "train", answer=answer)) == "solved by one random call"


async def test_shipped_tasks_are_not_solved_by_doing_nothing_or_by_one_random_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random calls are executed anew, of another seed; a task that asks for a value only is solved by a lucky guess."""
    monkeypatch.setattr(explore, "SURVEY_SESSIONS", 3)
    with anyio.fail_after(PATIENCE_S):
        async with open_server(FOLDER / "servers.json", "shelves", None, ()) as server:
            explorer = Explorer(server, 77)
            await explorer.survey(lambda _: None)
            knows_nothing = await explore.try_random_policies(explorer)
    untouched, tries = knows_nothing.untouched[""], knows_nothing.tries[""]
    assert len(tries) == explore.RANDOM_CALLS and any(one.end_state != untouched for one in tries)
    rows = [json.loads(line) for file in FILES.values() for line in (FOLDER / file).read_text().splitlines()]
    changing = [row for row in rows if "end_state" in row]
    assert len(changing) > 0.9 * len(rows) and all("ground_truth" in row for row in rows if row not in changing)
    for row in changing:
        assert row["end_state"] != untouched or "ground_truth" in row
        assert not any(
            one.end_state == row["end_state"] and one.answer == row.get("ground_truth", one.answer) for one in tries
        )
