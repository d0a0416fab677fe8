"""What a person sees of a run says what is in it, and nothing in it can paint the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from gateway.types import Audio, Image, ToolCall
from tests.browser.made_run import made
from tests.trainer.rollouts import rollouts
from tests.trainer.told import FAILED, LEDGER, RUN, SCORED, decode, ids, policy
from trainer.cli import app
from trainer.ledger import Author, Entry, Ledger
from trainer.run.file import Rollouts, Writer
from trainer.run.rollout import Rollout
from trainer.view.credited import UNKNOWN, Credited
from trainer.view.show import show
from trainer.view.text import printable


def shown(
    run: list[Rollout] | Rollouts,
    rollout: int | None = None,
    *,
    colour: bool = False,
    text: bool = True,
    credited: Credited = UNKNOWN,
) -> str:
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=colour, color_system="standard" if colour else None)
    show(run, console, rollout=rollout, decode=decode if text else None, credited=credited)
    return screen.getvalue()


def test_a_table_has_a_row_for_each_rollout_and_a_sum() -> None:
    head, first, second, total = (line.split() for line in shown(RUN).splitlines())
    assert head == ["#", "task", "group", "stop", "turns", "tokens", "written", "cached", "reward", "outcomes"]
    assert first == ["0", "one", "g/1", "feedback_done", "2", "28", "12", "73%", "1.5", "1", "ok"]
    assert second == ["1", "two", "g/2", "tool_failed", "2", "28", "12", "73%", "-", "1", "ok"]
    assert " ".join(total) == "2 rollouts: 1 feedback_done, 1 tool_failed; mean reward 1.5 of 1 scored"


def test_a_narrow_terminal_loses_no_column() -> None:
    screen = io.StringIO()
    show(RUN, Console(file=screen, width=20))
    assert screen.getvalue().splitlines()[1].split() == shown(RUN).splitlines()[1].split()


def test_a_run_is_shown_from_its_folder(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        for rollout in RUN:
            writer.add(rollout)
    assert shown(Rollouts(tmp_path)) == shown(RUN)
    assert shown(Rollouts(tmp_path), 1) == shown(RUN, 1)


def test_an_empty_run_says_so() -> None:
    assert shown([]).splitlines()[-1] == "0 rollouts"


def test_one_rollout_is_shown_as_it_was_written() -> None:
    assert (
        shown(RUN, 0)
        == """\
rollout 0: task one, group g, index 1
stop feedback_done; 2 turns; 28 tokens, 12 by the policy; cached 24 of 33 asked (73%)
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

── feedback gsm8k  no tokens; reward 1; never read by the policy
user: Right.
"""
    )


def test_what_failed_is_shown_with_its_reason_and_no_score() -> None:
    text = shown(RUN, 1)
    assert "not scored: tool_failed says nothing of the policy" in text
    assert "reason: server 'calc' is down" in text
    assert "time: calling 2.5 s" in text
    text = shown([replace(SCORED, infos={"drift": {"whitespace": 2, "truncated": 1}})], 0)
    assert "differs from the template's own rendering: 2 whitespace, 1 truncated" in text


def test_without_a_tokenizer_messages_are_shown_and_it_is_said() -> None:
    text = shown(RUN, 0, text=False)
    assert "no tokenizer at hand" in text
    assert "user: Add 1 and 2." in text
    assert 'tool: [{"type": "text", "text": "3"}, {"type": "image"}]' in text
    bare = replace(SCORED, ledger=Ledger((Entry(Author.TASK, tuple(range(40))),)))
    assert f"ids {' '.join(map(str, range(32)))} and 8 more" in shown([bare], 0, text=False)


def test_authors_have_their_colours() -> None:
    text = shown(RUN, 0, colour=True)
    assert "\x1b[34mAdd 1 and 2.\x1b[0m" in text
    assert "\x1b[1;32mIt is 3\x1b[0m" in text
    assert "\x1b[33m3##!\x1b[0m" in text
    assert "\x1b" not in shown(RUN, 0)


def test_control_codes_and_markup_are_shown_and_not_obeyed() -> None:
    evil = "[red]\x1b[2Jhi\u202e\r\ud800[/red]"
    call = ToolCall("\x07", f"{evil}\n", "[bold]")
    ledger = Ledger((Entry(Author.TASK, ids(evil)), policy("x", call)))
    run = [replace(SCORED, task=evil, group=evil, ledger=ledger, rewards={evil: 1.0})]
    seen = "[red]\\x1b[2Jhi\\u202e\\x0d\\ud800[/red]"
    text = shown(run, 0)
    assert f"\n{seen}\n" in text
    assert f"→ {seen}\\n([bold]) as \\x07  unanswered" in text
    for screen in (text, shown(run)):
        assert seen in screen
        assert all(char.isprintable() or char == "\n" for char in screen)


def test_media_without_a_place_are_named() -> None:
    entry = Entry(Author.TOOL, ids("ab"), parts=(Audio(b"1"), Image(b"22")))
    text = shown([replace(SCORED, ledger=Ledger((entry,)))], 0)
    assert "▣ audio (audio/wav, 1 bytes) with no place in the tokens" in text
    assert "▣ image (image/png, 2 bytes) with no place in the tokens" in text


def test_what_only_looked_like_a_call_is_shown_with_its_end() -> None:
    answers = Entry(Author.TOOL, ids("no"), outcomes=LEDGER.entries[2].outcomes * 2)
    text = shown([replace(SCORED, ledger=Ledger((policy("x", ToolCall("c", "f")), answers)))], 0)
    assert "→ f({}) as c  ok\n  → a malformed call  ok" in text


def test_a_rollout_that_is_not_there_is_refused(tmp_path: Path) -> None:
    Writer(tmp_path).__exit__(None, None, None)
    with pytest.raises(IndexError, match="no rollout 0"):
        shown(Rollouts(tmp_path), 0)


@given(rollouts(), st.booleans())
def test_any_rollout_can_be_shown(rollout: Rollout, colour: bool) -> None:
    for number in (None, 0):
        text = shown([rollout], number, colour=colour, text=False)
        assert rollout.stop in text
        assert colour or all(char.isprintable() or char in "\n\t" for char in text)


@given(st.text(st.characters()))
def test_printable_text_is_left_as_it_is(text: str) -> None:
    once = printable(text)
    assert printable(once) == once
    assert (once == text) == all(char.isprintable() or char in "\n\t" for char in text)


def test_the_failed_one_is_not_scored() -> None:
    with pytest.raises(ValueError, match="says nothing of the policy and has no rewards"):
        replace(FAILED, rewards={"call": 0.0})


def test_a_turn_that_went_on_under_new_weights_says_so() -> None:
    turn = replace(policy("xyz"), version=4, before=((3, 1),))
    assert "version 3, then 4; cached" in shown([replace(SCORED, ledger=Ledger((turn,)))], 0)


def test_a_rollout_is_shown_with_its_times_and_what_it_was_worth(tmp_path: Path) -> None:
    made(tmp_path / "run", steps=12)
    (tmp_path / "run" / "model" / "tokenizer.json").unlink()
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "169"])
    assert done.exit_code == 0, done.output
    assert "→ draw_bars(" in done.output and "ok in 310 ms" in done.output
    assert "trained, advantage +0.75: the policy wrote it, and it counts with the rollout's reward" in done.output
    assert "░██" in done.output
    done = CliRunner().invoke(app, ["why", str(tmp_path / "run"), "169", "66"])
    assert "advantage   +0.7" in done.output
    assert "advantage" not in CliRunner().invoke(app, ["why", str(tmp_path / "run"), "169", "3"]).output


def test_where_the_policy_began_anew_every_ledger_is_shown_and_counted() -> None:
    earlier = Ledger((Entry(Author.TASK, ids("Say it.")), policy("first", cached=3)))
    run = [replace(SCORED, earlier=(earlier,))]
    assert shown(run).splitlines()[1].split()[4:8] == ["3", "40", "17", "68%"]
    text = shown(run, 0)
    assert "3 turns; 40 tokens, 17 by the policy; cached 27 of 40 asked" in text
    first, last = text.split("══ ledger 1, where the policy began anew: 28 tokens")
    assert "══ ledger 0: 12 tokens" in first and "turn 0: policy  tokens 7-11" in first and "first" in first
    assert "turn 1: policy  tokens 12-16" in last and "turn 2: policy" in last


def test_tokens_that_weigh_nothing_in_a_trained_turn_are_told_beside_it() -> None:
    credits = ((12, 0.0, 0.0), (3, 0.5, 1.0), (2, 0.0, 0.0), (4, 0.0, 0.0), (7, 0.0, 0.0))
    text = shown(RUN, 0, credited=Credited((credits,)))
    assert "  trained, advantage +0.5: the policy wrote it" in text
    assert "  not trained, 2 of these tokens: the policy wrote it, but `algorithm.credit.rounds`" in text
    assert "  not trained: the policy wrote it, but `algorithm.credit.rounds` gives it no weight" in text
    nothing = shown(RUN, 0, credited=Credited(nothing="its group was too stale"))
    assert nothing.count("  not trained: the policy wrote it, but its group was too stale") == 2


def test_what_no_step_learned_from_is_told_by_the_command_line(tmp_path: Path) -> None:
    made(tmp_path / "run", steps=2)
    left = Rollouts(tmp_path / "run")[0]
    with Writer(tmp_path / "run") as writer:
        for group in ("1-1-0", "0-7-3", "3-0-0", "e-1"):
            writer.add(replace(left, group=group))
    at = len(left.ledger.entries[0].ids)
    told = [
        CliRunner().invoke(app, ["why", str(tmp_path / "run"), str(rollout), str(at)]).stdout.splitlines()[-1]
        for rollout in (0, 32, 33, 34)
    ]
    assert told[0].startswith("  trained ")
    assert told[1].endswith("its group, which taught nothing and was replaced (`algorithm.dynamic`)")
    assert "too stale by then (`max_staleness`)" in told[2] and "step 3, which it was made for, has not" in told[3]
    assert "not trained: " in CliRunner().invoke(app, ["show", str(tmp_path / "run"), "32"]).output


def test_behind_a_picture_each_turn_has_its_own_advantage() -> None:
    wide = replace(LEDGER.entries[2], widths=(9,))
    run = [replace(SCORED, ledger=Ledger((*LEDGER.entries[:2], wide, *LEDGER.entries[3:])))]
    credited = Credited((((12, 0.0, 0.0), (5, 0.5, 1.0), (11, 0.0, 0.0), (7, 0.75, 1.0)),))
    text = shown(run, 0, credited=credited)
    assert "trained, advantage +0.5:" in text and "trained, advantage +0.75:" in text and "not trained" not in text
