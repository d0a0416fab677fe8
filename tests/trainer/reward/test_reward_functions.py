"""Functions of the user's own: found by name, asked with a deadline, and believed only where they give a number."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from gateway.errors import ConfigError
from tests.trainer.reward.attempts import TASK, Write, saying, scored, settings
from trainer.reward.scored import ScoredGroup, metrics
from trainer.reward.scorer import Scorer

MINE = {"function": "my_rewards.py:score"}
RIGHT = {"function": "answer"}
UNLESS_RIGHT = "def score(attempt):\n    if attempt.answer == '#### 7':\n        return 1.0\n    {}\n"


def reasons(group: ScoredGroup) -> list[str]:
    return [one.reason for one in group.failed]


def indices(group: ScoredGroup) -> list[int]:
    return [one.rollout.index for one in group.scored]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", "raised ZeroDivisionError: division by zero ("),
        ("raise ValueError('it is odd')", "my_rewards.py:4)"),
        ("import sys; sys.exit(3)", "raised SystemExit: 3"),
        ("raise StopIteration", "StopIteration"),
        ("raise TimeoutError('mine')", "raised TimeoutError: mine"),
        ("raise ExceptionGroup('several', [KeyError('it')])", "raised KeyError: 'it'"),
        ("raise ValueError('x' * 9999)", "raised ValueError: xxx"),
        ("return None", "gave None"),
        ("return float('nan')", "gave nan"),
        ("return float('-inf')", "gave -inf"),
        ("return '1.0'", "gave '1.0'"),
        ("return 10**400", "gave 1000"),
        ("return 10**9999", "gave a int"),
        ("return -1e300", "gave -1e+300"),
        ("return [1.0]", "gave [1.0]"),
        ("return 1j", "gave 1j"),
        ("return (one for one in [1.0])", "gave <generator"),
        ("return type('Sly', (), {'__repr__': lambda self: 1 / 0})()", "gave a Sly"),
    ],
)
async def test_what_is_no_number_leaves_its_rollout_out_and_says_why(
    write: Write, caplog: pytest.LogCaptureFixture, body: str, says: str
) -> None:
    folder = write(UNLESS_RIGHT.format(body))
    with caplog.at_level(logging.WARNING):
        group = await scored(folder, saying("#### 7", "#### 8"), right=RIGHT, mine=MINE)
    (told,) = reasons(group)
    assert [one.reward for one in group.scored] == [2.0]
    assert says in told and told in caplog.text and len(told) < 900
    assert told.startswith("component 'mine' (my_rewards.py:score) ") and told.endswith("; rollout 0-0/one/1")
    assert metrics([group])["reward/failed"] == 1.0


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize(
    "value", ["3", "2.5", "True", "__import__('numpy').float32(0.5)", "__import__('torch').tensor(1.5)"]
)
async def test_any_finite_number_counts_and_a_function_may_be_async(write: Write, kind: str, value: str) -> None:
    folder = write(f"{kind} score(attempt, extra):\n    return {value} + extra\n")
    group = await scored(folder, saying("what"), mine=MINE | {"args": {"extra": 1}})
    assert group.scored[0].reward == eval(value) + 1


async def test_a_function_sees_the_row_the_chat_and_how_the_others_judged(write: Write) -> None:
    folder = write(
        "def score(attempt):\n"
        "    assert attempt.truth == attempt.task.truth and attempt.messages[0]['role'] == 'user'\n"
        "    assert len(attempt.ledger) and not attempt.truncated and not attempt.rewards and not attempt.infos\n"
        "    return attempt.columns['level'] * attempt.success\n"
    )
    group = await scored(folder, saying("#### 7", "#### 8"), right=RIGHT, mine=MINE)
    assert [one.components["mine"] for one in group.scored] == [2.0, 0.0]


async def test_what_the_first_could_not_score_the_others_are_not_asked(write: Write) -> None:
    folder = write(
        "asked = []\ndef score(attempt):\n    return 1.0 if attempt.answer == '#### 7' else None\n"
        "def count(attempt):\n    asked.append(attempt.rollout.index)\n    return len(asked)\n"
    )
    group = await scored(folder, saying("#### 8", "#### 7"), mine=MINE, counted={"function": "my_rewards.py:count"})
    assert indices(group) == [1] and sys.modules["my_rewards"].asked == [1]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs waits for this, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("more", [{}, {"batched": True}])
async def test_a_function_that_hangs_is_left_alone_and_so_is_what_it_should_score(
    write: Write, released: threading.Event, more: dict[str, bool]
) -> None:
    folder = write("released = None\ndef score(attempt):\n    released.wait()\n    return 1.0\n")
    scorer = Scorer(settings(right=RIGHT, mine=MINE | {"timeout_s": 0.05} | more), folder)
    sys.modules["my_rewards"].released = released  # type: ignore[attr-defined]
    with anyio.fail_after(20):
        group = await scorer.score(TASK, saying("#### 7", "#### 8"))
    assert group.scored == () and len(reasons(group)) == 2
    assert all("gave nothing within 0.05 s; rollout" in reason for reason in reasons(group))


async def test_an_async_function_that_hangs_costs_its_rollout_alone(write: Write) -> None:
    folder = write(
        "import anyio\nasync def score(attempt):\n    if attempt.answer != '#### 7':\n"
        "        await anyio.sleep_forever()\n    return 1\n"
    )
    with anyio.fail_after(20):
        group = await scored(folder, saying("#### 7", "#### 8"), mine=MINE | {"timeout_s": 1})
    assert indices(group) == [0] and "gave nothing within" in reasons(group)[0]


async def test_one_hanging_function_keeps_no_other_group_waiting(write: Write, released: threading.Event) -> None:
    folder = write("released = None\ndef score(attempt):\n    return attempt.truth == '7' or released.wait() or 0\n")
    scorer = Scorer(settings(mine=MINE), folder)
    sys.modules["my_rewards"].released = released  # type: ignore[attr-defined]
    with anyio.fail_after(20):
        async with anyio.create_task_group() as groups:
            other = type(TASK)("two", TASK.messages, truth="8")
            groups.start_soon(scorer.score, other, saying("#### 8"))
            group = await scorer.score(TASK, saying("#### 7"))
            released.set()
    assert indices(group) == [0]


async def test_a_batched_function_sees_its_group_and_each_keeps_its_number(write: Write) -> None:
    folder = write(
        "def score(attempts, by):\n    ranks = sorted(one.answer for one in attempts)\n"
        "    return [ranks.index(one.answer) * by for one in attempts]\n"
        "async def array(attempts):\n    import numpy\n    return numpy.arange(len(attempts))\n"
    )
    ranked = MINE | {"batched": True, "args": {"by": 0.5}}
    placed = {"function": "my_rewards.py:array", "batched": True}
    group = await scored(folder, saying("c", "a", "b"), ranked=ranked, placed=placed)
    assert [one.components for one in group.scored] == [
        {"ranked": 1.0, "placed": 0.0},
        {"ranked": 0.0, "placed": 1.0},
        {"ranked": 0.5, "placed": 2.0},
    ]


@pytest.mark.parametrize(
    ("body", "says", "left"),
    [
        ("return [1.0]", "gave 1 numbers for 2 rollouts; rollouts 0-0/one/0, 0-0/one/1", []),
        ("return 1.0", "gave 1.0, not a list of 2 numbers", []),
        ("return {1.0, 2.0}", "gave {1.0, 2.0}, not a list", []),
        ("raise KeyError('it')", "raised KeyError: 'it'", []),
        ("return [1.0, float('nan')]", "gave nan, which is no number that can be learned from; rollout 0-0/one/1", [0]),
    ],
)
async def test_a_batched_function_that_fails_costs_its_group(
    write: Write, body: str, says: str, left: list[int]
) -> None:
    folder = write(f"def score(attempts):\n    {body}\n")
    group = await scored(folder, saying("#### 7", "#### 8"), right=RIGHT, mine=MINE | {"batched": True})
    assert indices(group) == left and len(reasons(group)) == 2 - len(left)
    assert all(says in reason for reason in reasons(group))


SOURCE = """
class Score:
    def __call__(self, attempt):
        return 0.5
    async def later(self, attempt):
        return 0.25
made = Score()
number = 3
def score(attempt, scale):
    return scale
"""


@pytest.mark.parametrize(("named", "worth"), [("made", 0.5), ("made.later", 0.25)])
async def test_a_function_is_anything_that_can_be_called(write: Write, named: str, worth: float) -> None:
    group = await scored(write(SOURCE), saying("what"), mine={"function": f"my_rewards.py:{named}"})
    assert group.scored[0].reward == worth


@pytest.mark.parametrize(
    ("component", "says"),
    [
        ({"function": "anwser"}, "(?s)there is no function 'anwser'.*did you mean 'answer'"),
        ({"function": "score"}, "(?s)there is no function 'score'.*name one of answer, .*`rewards.py:score`"),
        ({"function": "nowhere.py:score"}, "no such file"),
        ({"function": "no_such_module:score"}, "no module"),
        ({"function": "my_rewards.py:scor"}, "(?s)has no 'scor'.*did you mean 'score'"),
        ({"function": "my_rewards.py:Score"}, "(?s)is a class, not a function.*made already"),
        ({"function": "my_rewards.py:number"}, "is a int, not a function"),
        (MINE, r"(?s)takes \(attempt, scale\): missing a required argument: 'scale'.*remedy: define it as"),
        (MINE | {"args": {"scal": 1}}, r"(?s)missing a required argument.*def score\(attempt, scal\)"),
        (RIGHT | {"batched": True}, "(?s)scores one attempt.*leave it out"),
        (RIGHT | {"args": {"method": "loose"}}, "(?s)components.mine.args.method: .*'strict' or 'flexible'"),
        ({"function": "efficiency", "args": {"per_call": -1.0}}, "args.per_call: .*greater than or equal to 0"),
        ({"function": "efficiency", "args": {"per_call": "much"}}, "args.per_call: .*valid number"),
    ],
)
def test_a_function_that_cannot_be_asked_is_told_before_the_run(
    write: Write, component: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as told:
        Scorer(settings(mine=component), write(SOURCE))
    assert "remedy:" in str(told.value) and "reward.components.mine." in str(told.value)


def test_all_that_cannot_be_asked_is_told_at_once(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'one'.*'two'"):
        Scorer(settings(first={"function": "one"}, second={"function": "two"}), write(SOURCE))


def test_a_file_is_never_taken_for_a_module_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def dumps(attempt):\n    return 1.0\n")
    with pytest.raises(ConfigError, match=r"(?s)module named 'json' is there already.*another name"):
        Scorer(settings(mine={"function": "json.py:dumps"}), tmp_path)


def test_a_process_ends_while_a_reward_function_still_holds_a_thread(write: Write) -> None:
    folder = write("import time\ndef score(attempt):\n    time.sleep(300)\n")
    script = (
        "import sys, anyio\nfrom pathlib import Path\n"
        "from gateway.leave import leaving\nfrom tests.trainer.reward.attempts import saying, scored\n"
        "async def main():\n"
        "    mine = {'function': 'my_rewards.py:score', 'timeout_s': 0.1}\n"
        f"    print((await scored(Path({str(folder)!r}), saying('what'), mine=mine)).failed[0].reason)\n"
        "def command():\n    anyio.run(main)\n    sys.exit(3)\nleaving(command)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 3 and "gave nothing within 0.1 s" in done.stdout
    assert time.monotonic() - began < 60


async def test_what_does_not_tell_how_it_is_asked_is_asked_and_may_fail() -> None:
    group = await scored(None, saying("what"), mine={"function": "math:hypot"})
    assert "component 'mine' (math:hypot) raised TypeError: must be real number, not Attempt" in reasons(group)[0]
