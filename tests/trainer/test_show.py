"""Tests `show`: the table of rollouts, one rollout token by token, and escaping of control characters."""

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
from mtrl_plugins.web.rollout_json import rollout_to_json
from tests.browser.sample_run import write_sample_run
from tests.trainer.rollout_strategies import rollouts
from tests.trainer.sample_rollouts import FAILED, LEDGER, RUN, SCORED, decode, policy, text_to_ids
from trainer.cli import app
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout
from trainer.storage.rollout_file import Rollouts, RolloutWriter, RunError
from trainer.view.branches import name_branches
from trainer.view.show import print_rollouts
from trainer.view.text import to_printable
from trainer.view.why import UNKNOWN_CREDIT, RolloutCredit, explain_training


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
    print_rollouts(run, console, rollout=rollout, decode=decode if text else None, credited=credited)
    return screen.getvalue()


def test_table_has_row_per_rollout_and_summary() -> None:
    head, first, second, total = (line.split() for line in render_text(RUN).splitlines())
    assert head == ["#", "task", "group", "stop", "turns", "tokens", "written", "cached", "reward", "outcomes"]
    assert first == ["0", "one", "g/1", "feedback_done", "2", "28", "12", "73%", "1.5", "1", "ok"]
    assert second == ["1", "two", "g/2", "tool_failed", "2", "28", "12", "73%", "-", "1", "ok"]
    assert " ".join(total) == "2 rollouts: 1 feedback_done, 1 tool_failed; mean reward 1.5 of 1 scored"


def test_rollout_without_a_group_has_none_in_its_heading() -> None:
    assert "task one, group g, index 1\n" in render_text(RUN, 0)
    assert "task one\nstop" in render_text([replace(RUN[0], group="")], 0)


def test_table_of_a_run_decodes_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sample_run(tmp_path / "run", steps=2)
    monkeypatch.setattr("trainer.storage.rollout_file.load_rollout", None)  # It takes ten times as long.
    done = CliRunner().invoke(app, ["show", str(tmp_path / "run")])
    assert done.exit_code == 0 and "32 rollouts: " in done.output, done.output
    assert CliRunner().invoke(app, ["show", str(tmp_path / "run"), "1"]).exit_code


def test_narrow_terminal_shows_all_columns() -> None:
    screen = io.StringIO()
    print_rollouts(RUN, Console(file=screen, width=20))
    assert screen.getvalue().splitlines()[1].split() == render_text(RUN).splitlines()[1].split()


def test_long_texts_continue_on_the_next_line_of_a_narrow_terminal() -> None:
    screen, task = io.StringIO(), "城市" + "x" * 60
    print_rollouts([replace(SCORED, task=task)], Console(file=screen, width=100))
    first, second, third = (line.split() for line in screen.getvalue().splitlines()[1:4])
    assert first[1] + second[0] + third[0] == task
    assert task in render_text([replace(SCORED, task=task)])


def test_table_is_read_without_decoding_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RolloutWriter(tmp_path) as writer:
        for rollout in RUN:
            writer.add(rollout)
    monkeypatch.setattr("trainer.storage.rollout_line.unpack_array", None)
    assert render_text(Rollouts(tmp_path)) == render_text(RUN)
    with pytest.raises(RunError, match="damaged"):
        Rollouts(tmp_path)[0]


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


def test_run_is_shown_from_its_folder(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for rollout in RUN:
            writer.add(rollout)
    assert render_text(Rollouts(tmp_path)) == render_text(RUN)
    assert render_text(Rollouts(tmp_path), 1) == render_text(RUN, 1)


def test_empty_run_is_shown() -> None:
    assert render_text([]).splitlines()[-1] == "0 rollouts"


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


def test_failed_rollout_is_shown_with_reason_and_without_score() -> None:
    text = render_text(RUN, 1)
    assert "not scored: tool_failed is not the policy's fault" in text
    assert "reason: server 'calc' is down" in text
    assert "time: calling 2.5 s" in text
    text = render_text([replace(SCORED, infos={"drift": {"whitespace": 2, "truncated": 1}})], 0)
    assert "differs from what the chat template renders: 2 whitespace, 1 truncated" in text


def test_messages_are_shown_without_tokenizer() -> None:
    text = render_text(RUN, 0, text=False)
    assert "without a tokenizer" in text
    assert "user: Add 1 and 2." in text
    assert 'tool: [{"type": "text", "text": "3"}, {"type": "image"}]' in text
    bare = replace(SCORED, ledger=Ledger((Entry(Author.TASK, tuple(range(40))),)))
    assert f"ids {' '.join(map(str, range(32)))} and 8 more" in render_text([bare], 0, text=False)


def test_authors_have_colours() -> None:
    text = render_text(RUN, 0, colour=True)
    assert "\x1b[34mAdd 1 and 2.\x1b[0m" in text
    assert "\x1b[1;32mIt is 3\x1b[0m" in text
    assert "\x1b[33m3##!\x1b[0m" in text
    assert "\x1b" not in render_text(RUN, 0)


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


def test_media_without_tokens_are_shown() -> None:
    entry = Entry(Author.TOOL, text_to_ids("ab"), parts=(Audio(b"1"), Image(b"22")))
    text = render_text([replace(SCORED, ledger=Ledger((entry,)))], 0)
    assert "▣ audio (audio/wav, 1 bytes) without tokens" in text
    assert "▣ image (image/png, 2 bytes) without tokens" in text


def test_malformed_call_is_shown_with_outcome() -> None:
    answers = Entry(Author.TOOL, text_to_ids("no"), outcomes=LEDGER.entries[2].outcomes * 2)
    text = render_text([replace(SCORED, ledger=Ledger((policy("x", ToolCall("c", "f")), answers)))], 0)
    assert "→ f({}) as c  ok\n  → a malformed call  ok" in text


def test_missing_rollout_raises_index_error(tmp_path: Path) -> None:
    RolloutWriter(tmp_path).__exit__(None, None, None)
    with pytest.raises(IndexError, match="no rollout 0"):
        render_text(Rollouts(tmp_path), 0)


@given(rollouts(), st.booleans())
def test_any_rollout_is_shown(rollout: Rollout, colour: bool) -> None:
    for number in (None, 0):
        text = render_text([rollout], number, colour=colour, text=False)
        assert rollout.stop in text
        assert colour or all(char.isprintable() or char in "\n\t" for char in text)


@given(st.text(st.characters()))
def test_printable_text_is_unchanged(text: str) -> None:
    printable_text = to_printable(text)
    assert to_printable(printable_text) == printable_text
    assert (printable_text == text) == all(char.isprintable() or char in "\n\t" for char in text)


def test_failed_rollout_cannot_have_rewards() -> None:
    with pytest.raises(ValueError, match="cannot have rewards: infrastructure failed"):
        replace(FAILED, rewards={"call": 0.0})


def test_turn_shows_all_its_policy_versions() -> None:
    turn = replace(policy("xyz"), version=4, earlier_versions=((3, 1),))
    assert "version 3, then 4; cached" in render_text([replace(SCORED, ledger=Ledger((turn,)))], 0)


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


def test_all_ledgers_are_shown_and_counted() -> None:
    earlier = Ledger((Entry(Author.TASK, text_to_ids("Say it.")), policy("first", cached=3)))
    run = [replace(SCORED, earlier=(earlier,))]
    assert render_text(run).splitlines()[1].split()[4:8] == ["3", "40", "17", "68%"]
    text = render_text(run, 0)
    assert "3 turns; 40 tokens, 17 by the policy; 27 of 40 input tokens cached" in text
    first, last = text.split("══ ledger 1, where the policy saw a new history: 28 tokens")
    assert "══ ledger 0: 12 tokens" in first and "turn 0: policy  tokens 7-11" in first and "first" in first
    assert "turn 1: policy  tokens 12-16" in last and "turn 2: policy" in last


def test_zero_weight_tokens_of_trained_turn_are_shown() -> None:
    credits = ((12, 0.0, 0.0), (3, 0.5, 1.0), (2, 0.0, 0.0), (4, 0.0, 0.0), (7, 0.0, 0.0))
    text = render_text(RUN, 0, credited=RolloutCredit((credits,)))
    assert "  trained, advantage +0.5: the policy wrote it" in text
    assert "  not trained, 2 of these tokens: the policy wrote it, but `algorithm.credit.rounds`" in text
    assert "  not trained: the policy wrote it, but `algorithm.credit.rounds` gives it no weight" in text
    untrained_text = render_text(RUN, 0, credited=RolloutCredit(untrained_reason="its group was too stale"))
    assert untrained_text.count("  not trained: the policy wrote it, but its group was too stale") == 2


def test_commands_explain_untrained_rollouts(tmp_path: Path) -> None:
    write_sample_run(tmp_path / "run", steps=2)
    source_rollout = Rollouts(tmp_path / "run")[0]
    with RolloutWriter(tmp_path / "run") as writer:
        for group in ("1-1-0", "0-7-3", "3-0-0", "e-1"):
            writer.add(replace(source_rollout, group=group))
    token_index = len(source_rollout.ledger.entries[0].ids)
    reports = [
        CliRunner().invoke(app, ["why", str(tmp_path / "run"), str(rollout), str(token_index)]).stdout.splitlines()[-1]
        for rollout in (0, 32, 33, 34)
    ]
    assert reports[0].startswith("  trained ")
    assert reports[1].endswith("its group, which had no signal and was replaced (`algorithm.dynamic`)")
    assert "too stale (`max_staleness`)" in reports[2] and "step 3, for which it was collected, has not" in reports[3]
    assert "not trained: " in CliRunner().invoke(app, ["show", str(tmp_path / "run"), "32"]).output


def test_turns_after_an_image_have_their_own_advantage() -> None:
    expanded_entry = replace(LEDGER.entries[2], widths=(9,))
    run = [replace(SCORED, ledger=Ledger((*LEDGER.entries[:2], expanded_entry, *LEDGER.entries[3:])))]
    credited = RolloutCredit((((12, 0.0, 0.0), (5, 0.5, 1.0), (11, 0.0, 0.0), (7, 0.75, 1.0)),))
    text = render_text(run, 0, credited=credited)
    assert "trained, advantage +0.5:" in text and "trained, advantage +0.75:" in text and "not trained" not in text


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
