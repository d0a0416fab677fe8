"""Tests `show`, `why` and `compare`: rollouts in a table and token by token, why a token is trained, runs compared."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from gateway.types import ToolCall
from mtrl_plugins.web.rollout_json import rollout_to_json
from tests.browser.sample_run import write_sample_run
from tests.trainer.cli_data import RunCommand
from tests.trainer.rollout_strategies import bitwise_key, rollouts
from tests.trainer.sample_rollouts import LEDGER, RUN, SCORED, decode, policy, text_to_ids
from trainer.cli import app
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import Rollouts, RolloutWriter
from trainer.view.branches import name_branches
from trainer.view.show import print_rollout, print_table
from trainer.view.task_outcomes import Tries, bootstrap, pass_at_k, pass_hat_k, sign_test
from trainer.view.why import UNKNOWN_CREDIT, RolloutCredit, explain_token, explain_training


def render_text(
    run: list[Rollout] | Rollouts,
    rollout: int | None = None,
    *,
    colour: bool = False,
    text: bool = True,
    credited: RolloutCredit = UNKNOWN_CREDIT,
) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=colour, color_system="standard" if colour else None)
    if rollout is not None:
        print_rollout(run[rollout], rollout, console, decode if text else None, credited)
    elif isinstance(run, Rollouts):
        print_table(run, console)
    else:
        with TemporaryDirectory() as folder:
            with RolloutWriter(Path(folder)) as writer:
                for each in run:
                    writer.add(each)
            print_table(Rollouts(Path(folder)), console)
    return screen.getvalue()


def test_table_has_row_per_rollout_and_summary() -> None:
    head, first, second, total = (line.split() for line in render_text(RUN).splitlines())
    assert head == ["#", "task", "group", "stop", "turns", "tokens", "written", "cached", "reward", "outcomes"]
    assert first == ["0", "one", "g/1", "feedback_done", "2", "28", "12", "73%", "1.5", "1", "ok"]
    assert second == ["1", "two", "g/2", "tool_failed", "2", "28", "12", "73%", "-", "1", "ok"]
    assert " ".join(total) == "2 rollouts: 1 feedback_done, 1 tool_failed; mean reward 1.5 of 1 scored"


def test_damaged_and_hostile_lines_are_left_out_or_escaped(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for rollout in (*RUN, replace(SCORED, task="a\x1b[2Jb")):
            writer.add(rollout)
    file = tmp_path / "rollouts.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b'{"v":1}\n' + lines[1].replace(b"tool_failed", b"new\\u001b[2Jstop") + lines[2])
    text = render_text(Rollouts(tmp_path))
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == ["0", "2", "3"]
    assert "\x1b" not in text and "new\\x1b[2Jstop" in text and "3 rollouts: " in text


def test_rollout_is_shown_entry_by_entry() -> None:
    assert (
        render_text(RUN, 0)
        == """\
rollout 0: task one, group g, index 1
stop feedback_done; 2 turns; 28 tokens, 12 by the policy; 24 of 33 input tokens cached (73%)
reward 1.5: call 0.5, feedback 1
written by task, policy, tool, feedback

── task data.jsonl:1  tokens 0-11
Add 1 and 2.

── turn 0: policy  tokens 12-16; version 3; cached 4 of 12; stop stop
<sum>
  → add({"a": 1}) as c1  ok
  → look({}) as c2  unanswered

── tool add  tokens 17-20; ok; reward 0.5
3##!
  ▣ image (image/png, 4 bytes) at tokens 18-19

── turn 1: policy  tokens 21-27; version 3; cached 20 of 21; stop stop
It is 3

── feedback gsm8k  no tokens; reward 1; the policy never read it
user: Right.
"""
    )


def test_control_codes_and_markup_are_escaped() -> None:
    evil = "[red]\x1b[2Jhi\u202e\r\ud800[/red]"
    call = ToolCall("\x07", f"{evil}\n", "[bold]")
    ledger = Ledger((Entry(Author.TASK, text_to_ids(evil)), policy("x", call)))
    run = [replace(SCORED, task=evil, group=evil, ledger=ledger, rewards={evil: 1.0})]
    escaped = "[red]\\x1b[2Jhi\\u202e\\x0d\\ud800[/red]"
    text = render_text(run, 0)
    assert f"\n{escaped}\n" in text
    assert f"→ {escaped}\\n([bold]) as \\x07  unanswered" in text
    for screen in (text, render_text(run)):
        assert escaped in screen
        assert all(char.isprintable() or char == "\n" for char in screen)


@given(rollouts(), st.booleans())
def test_any_rollout_is_shown(rollout: Rollout, colour: bool) -> None:
    for number in (None, 0):
        text = render_text([rollout], number, colour=colour, text=False)
        assert rollout.stop in text
        assert colour or all(char.isprintable() or char in "\n\t" for char in text)


def test_rollout_is_shown_with_times_and_advantages(tmp_path: Path) -> None:
    write_sample_run(tmp_path / "run", steps=12)
    (tmp_path / "run" / "model" / "tokenizer.json").unlink()
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "169"])
    assert done.exit_code == 0, done.output
    assert "→ draw_bars(" in done.output and "ok in 310 ms" in done.output
    assert "trained, advantage +0.75: the policy wrote it, and it is trained with the rollout's reward" in done.output
    assert "░██" in done.output
    done = CliRunner().invoke(app, ["why", str(tmp_path / "run"), "169", "66"])
    assert "advantage   +0.7" in done.output
    assert "advantage" not in CliRunner().invoke(app, ["why", str(tmp_path / "run"), "169", "3"]).output


def test_branches_of_an_agents_rollout_are_named_with_what_the_agent_changed() -> None:
    prompt, other = Entry(Author.TASK, text_to_ids("Say it.")), Entry(Author.TASK, text_to_ids("A title?"))
    first = replace(policy("first"), info={"changed_by_agent": ["arguments"]})
    copy = Entry(Author.TASK, first.ids, source="branch")
    question = Entry(Author.FEEDBACK, text_to_ids("More."), source="agent")
    side, fork = Ledger((other, policy("A title"))), Ledger((prompt, first, question, policy("one")))
    retry = Ledger((prompt, policy("other")))
    main = Ledger((prompt, copy, question, policy("two"), question, policy("x")))
    rollout = replace(SCORED, ledger=main, earlier=(side, fork, retry), infos={"agent": {}})
    assert name_branches(rollout) == ("side call", "fork of turn 1", "retry of turn 1", "main line")
    text = render_text([rollout], 0)
    assert "══ ledger 1, fork of turn 1: " in text and "══ ledger 3, main line: " in text
    assert "changed by the agent: arguments" in text
    assert explain_training(rollout, copy) == (
        False,
        "the policy wrote it in another branch of the rollout, and it is trained there",
    )
    shown = rollout_to_json(rollout, None, UNKNOWN_CREDIT)["ledgers"]
    assert [ledger["branch"] for ledger in shown] == list(name_branches(rollout))
    assert "branch" not in rollout_to_json(SCORED, None, UNKNOWN_CREDIT)["ledgers"][0]


def test_policy_token_is_trained_with_rewards() -> None:
    assert (
        str(explain_token(RUN, 0, 15, decode))
        == """\
token 15 of rollout 0: id 109, text 'm'
  within       1 and 2.<su»m«>3##!It is 3
  written by  policy, turn 0
  sampled     under version 3, logprob -0.5
  cached      for 1 of 1 later requests
  trained     the policy wrote it, and it will be trained with the rollout's reward 1.5 \
(call 0.5, feedback 1); its turn got 0.5"""
    )


@given(rollouts())
def test_report_agrees_with_the_ledger_mask(rollout: Rollout) -> None:
    ledger = rollout.ledger
    scored = rollout.reward is not None and not rollout.stop.is_infrastructure
    for token in range(len(ledger)):
        report = explain_token([rollout], 0, token)
        assert report.trained == (ledger.mask[token] and scored)
        assert report.id == ledger.ids[token]
        assert bitwise_key(report.logprob) == bitwise_key(ledger.logprobs[token] if ledger.mask[token] else None)
        assert str(report).count("\n") < 6


def test_untrained_rollout_has_its_reason() -> None:
    report = explain_token(RUN, 0, 15, None, RolloutCredit(untrained_reason="step 3 did not learn from it"))
    assert (report.trained, report.reason) == (False, "the policy wrote it, but step 3 did not learn from it")
    assert explain_token(RUN, 1, 15, None, RolloutCredit(untrained_reason="it was dropped")).reason.endswith(
        "(server 'calc' is down)"
    )


@pytest.mark.parametrize("tried", [1, 3, 5])
def test_pass_at_k_and_pass_hat_k_are_means_over_all_choices_of_k_tries(tried: int) -> None:
    for succeeded, k in product(range(tried + 1), range(1, tried + 1)):
        outcomes = {"a": Tries(succeeded, tried)}
        chosen = [sum(choice) for choice in combinations([True] * succeeded + [False] * (tried - succeeded), k)]
        assert pass_at_k(outcomes, k) == pytest.approx(sum(count > 0 for count in chosen) / len(chosen))
        assert pass_hat_k(outcomes, k) == pytest.approx(sum(count == k for count in chosen) / len(chosen))
    assert pass_at_k({"a": Tries(1, tried)}, tried + 1) is None
    mixed = {"a": Tries(1, 1), "b": Tries(0, 2)}
    assert pass_at_k(mixed, 2) == pass_hat_k(mixed, 2) == 0, "a task with too few tries is not counted"


def test_interval_by_bootstrap_covers_the_mean_and_repeats() -> None:
    draw = Random(0)
    covered = 0
    for _ in range(40):
        chances = [draw.random() for _ in range(40)]
        low, high = bootstrap([float(draw.random() < chance) for chance in chances])
        covered += low <= 0.5 <= high
    assert covered >= 34
    assert bootstrap([0.0, 1.0, 1.0]) == bootstrap([0.0, 1.0, 1.0])


def test_sign_test_counts_the_throws_of_a_coin() -> None:
    for better, worse in product(range(5), range(5)):
        throws = list(product((True, False), repeat=better + worse))
        uneven = [abs(2 * sum(throw) - len(throw)) >= abs(better - worse) for throw in throws]
        assert sign_test(better, worse) == pytest.approx(min(1.0, sum(uneven) / len(throws)))


def ask(question: str, *, system: str = "") -> Ledger:
    """The ledger with another question, perhaps after a system prompt."""
    messages = ({"role": "system", "content": system},) * bool(system) + ({"role": "user", "content": question},)
    return Ledger((replace(LEDGER.entries[0], messages=messages), *LEDGER.entries[1:]))


def write_rollouts(folder: Path, outcomes: dict[str, Sequence[int]], ledger: Ledger = LEDGER) -> Path:
    """Rollouts of tasks, each with what its tries scored."""
    with RolloutWriter(folder) as writer:
        for number, (task, scores) in enumerate(outcomes.items()):
            for index, score in enumerate(scores):
                rewards = {"answer": float(score)}
                writer.add(Rollout(task, ledger, StopReason.DONE, f"e-{number}", index, rewards=rewards))
            writer.add(Rollout(task, ledger, StopReason.TOOL_FAILED, f"e-{number}", len(scores)))  # Counts nowhere.
    return folder


def test_runs_are_compared_task_by_task(run: RunCommand) -> None:
    for name in ("sampled", "greedy"):
        write_rollouts(Path("a/eval") / name, {"one": [1, 1], "two": [0, 0], "three": [0, 1], "four": [1], "old": [1]})
        write_rollouts(Path("b/eval") / name, {"one": [1, 1], "two": [0, 1], "three": [1, 1], "four": [0], "new": [1]})
    found = json.loads(run("compare", "a", "b", "--json").stdout)
    assert found.keys() == {"sampled", "greedy"}
    sampled = found["sampled"]
    assert sampled["changed"] == {"four": [[1, 1], [0, 1]], "three": [[1, 2], [2, 2]], "two": [[0, 2], [1, 2]]}
    assert (sampled["tasks"], sampled["better"], sampled["worse"], sampled["p_value"]) == (4, 2, 1, 1.0)
    assert (sampled["first"], sampled["second"], sampled["difference"]) == (0.625, 0.625, 0.0)
    assert sampled["interval"][0] < 0 < sampled["interval"][1] and sampled["only_first"] == sampled["only_second"] == 1
    shown = run("compare", "a/eval/greedy", "b/eval/greedy").output
    assert "0.625 to 0.625 on 4 tasks, +0.000" in shown and "2 better, 1 worse, p = 1 (sign test)" in shown
    assert "four" in shown and "1/1" in shown and "│ one" not in shown


def test_one_common_task_has_no_interval_and_another_system_prompt_is_no_other_task(run: RunCommand) -> None:
    write_rollouts(Path("a"), {"one": [0], "old": [1]})
    write_rollouts(Path("b"), {"one": [1]}, ask("Add 1 and 2.", system="Think."))
    shown = run("compare", "a", "b").output
    assert "0.000 to 1.000 on 1 tasks, +1.000 -; 1 better, 0 worse" in shown
    assert json.loads(run("compare", "a", "b", "--json").stdout)["rollouts"]["interval"] is None


def test_tasks_that_ask_something_else_under_one_id_are_left_out(run: RunCommand) -> None:
    write_rollouts(Path("a"), {"one": [0], "two": [0]})
    write_rollouts(Path("b"), {"one": [1]})
    write_rollouts(Path("b"), {"two": [1]}, ask("Add 1 and 3."))
    shown = run("compare", "a", "b").output
    assert "on 1 tasks" in shown and "the two ask something else under the same id: 1 task" in shown


def test_what_cannot_be_compared_is_named_with_its_remedy(run: RunCommand) -> None:
    write_rollouts(Path("a/eval/greedy"), {"one": [1]})
    write_rollouts(Path("b/eval/sampled"), {"one": [1]})
    write_rollouts(Path("c"), {"two": [1]})
    Path("d").mkdir()
    with RolloutWriter(Path("e")) as writer:
        writer.add(Rollout("one", LEDGER, StopReason.DONE, "e-0", 0))
    write_rollouts(Path("f"), {"new": [1], "one": [1]}, ask("Add 1 and 3."))
    for first, second, message in (
        ("a", "d", "d: has no evaluation remedy: make one with `mtrl-train eval d`"),
        ("a", "nowhere", "nowhere: there is no such run"),
        ("nowhere", "a", "nowhere: there is no such run"),
        ("a/eval/greedy", "f", "f: has no task that a/eval/greedy has too: under the same ids it asks something else"),
        ("a", "b", "has no evaluation of a kind that a has"),
        ("c", "a/eval/greedy", "has no task that c has too"),
        ("e", "c", "no rollout has a score of 'answer'"),
    ):
        assert message in " ".join(run("compare", first, second, code=2).output.split())
