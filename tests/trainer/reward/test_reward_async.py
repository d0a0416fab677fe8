"""Async functions of the user's own: whatever they do in their loop, the run's own loop goes on."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

import anyio
import pytest

from tests.trainer.reward.attempts import TASK, Write, saying, scored, settings
from trainer.reward.scored import ScoredGroup
from trainer.reward.scorer import Scorer

MINE = {"function": "my_rewards.py:score"}
SAID: ContextVar[str] = ContextVar("what is told to whoever is asked", default="nothing")


def scorer(folder: Path, timeout_s: float = 20.0, **known: object) -> Scorer:
    made = Scorer(settings(mine=MINE | {"timeout_s": timeout_s}), folder)
    for name, value in known.items():
        setattr(sys.modules["my_rewards"], name, value)
    return made


def reasons(group: ScoredGroup) -> list[str]:
    return [one.reason for one in group.failed]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs waits for this, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


BLOCKING = "released = None\nasync def score(attempt):\n    if attempt.answer == '#### 8':\n        {}\n    return 1\n"


async def test_an_async_function_that_blocks_past_its_deadline_costs_its_rollout_and_no_later_one(
    write: Write, released: threading.Event
) -> None:
    asked = scorer(write(BLOCKING.format("released.wait()")), 0.05, released=released)
    with anyio.fail_after(20):
        group = await asked.score(TASK, saying("#### 8"))
        assert "gave nothing within 0.05 s; rollout" in reasons(group)[0] and group.scored == ()
        later = asked._components["mine"]
        later.settings = later.settings.model_copy(update={"timeout_s": 20.0})  # It is not to be tried how quick it is.
        assert [one.reward for one in (await asked.score(TASK, saying("#### 7"))).scored] == [1.0]


async def test_while_an_async_function_blocks_everything_else_goes_on(write: Write, released: threading.Event) -> None:
    begun = threading.Event()
    blocked = BLOCKING.format("begun.set(); released.wait()")
    asked = scorer(write(blocked), released=released, begun=begun)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as scoring:
            scoring.start_soon(asked.score, TASK, saying("#### 8"))
            await anyio.to_thread.run_sync(begun.wait, 15)
            released.set()  # By the loop that a blocked one would have kept from it.


async def test_async_functions_are_asked_at_the_same_time_and_in_the_same_loop(write: Write) -> None:
    folder = write(
        "import anyio, asyncio\nhere, loops, all = [], set(), None\n"
        "async def score(attempt):\n"
        "    global all\n"
        "    all = all or anyio.Event()\n"
        "    here.append(attempt)\n    loops.add(asyncio.get_running_loop())\n"
        "    if len(here) >= 3:\n        all.set()\n"
        "    await all.wait()\n    return len(loops)\n"
    )
    asked = scorer(folder)
    for _ in range(2):
        group = await asked.score(TASK, saying("a", "b", "c"))
        assert [one.reward for one in group.scored] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_functions_see_what_was_set_for_whoever_asks(write: Write, kind: str) -> None:
    SAID.set("seven")
    folder = write(f"said = None\n{kind} score(attempt):\n    return len(said.get())\n")
    group = await scorer(folder, said=SAID).score(TASK, saying("what"))
    assert [one.reward for one in group.scored] == [5.0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", "raised ZeroDivisionError: division by zero ("),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("raise TimeoutError('mine')", "raised TimeoutError: mine"),
        ("import asyncio; raise asyncio.CancelledError", "raised CancelledError"),
        ("return 'much'", "gave 'much'"),
        ("return score(attempt)", "gave <coroutine"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_an_async_function_that_fails_costs_its_rollout_alone(write: Write, body: str, says: str) -> None:
    asked = scorer(write(BLOCKING.format(body)))
    for _ in range(2):  # Whatever it did, its loop still turns.
        with anyio.fail_after(20):
            group = await asked.score(TASK, saying("#### 7", "#### 8"))
        assert [one.rollout.index for one in group.scored] == [0] and says in reasons(group)[0]


async def test_what_waited_behind_one_that_blocks_is_not_asked_once_nobody_waits(
    write: Write, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.reward.apart.LOOK_S", 0.01)
    folder = write(
        "released, asked = None, []\nasync def score(attempt):\n    asked.append(attempt)\n"
        "    released.wait()\n    return 1\n"
    )
    group = await scorer(folder, 1, released=released).score(TASK, saying("a", "b", "c"))
    assert len(group.failed) == 3 and all("gave nothing within 1 s" in reason for reason in reasons(group))
    (loop,) = [one for one in threading.enumerate() if one.name == "rewards" and one.is_alive()][-1:]
    released.set()
    await anyio.to_thread.run_sync(loop.join, 20)
    assert not loop.is_alive() and len(sys.modules["my_rewards"].asked) == 1


async def test_a_loop_ends_once_its_scorer_is_gone(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.reward.apart.LOOK_S", 0.01)
    before = set(threading.enumerate())
    await scored(write("async def score(attempt):\n    return 1\n"), saying("a"), mine=MINE)
    gc.collect()
    for loop in [one for one in threading.enumerate() if one.name == "rewards" and one not in before]:
        await anyio.to_thread.run_sync(loop.join, 20)
        assert not loop.is_alive()
