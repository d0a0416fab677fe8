"""Tests what the live progress shows during steps that take minutes: tokens, micro-batches, remaining time."""

from __future__ import annotations

from tests.trainer.test_training_progress import RecordedProgress
from trainer.engine.base import Generation


def test_tokens_of_a_turn_that_is_being_written_move_the_panel() -> None:
    progress, sampled = RecordedProgress(width=100), [500]
    progress.read_sampled = lambda: sampled[0]
    progress.begin(1, 8)
    with progress.phase("rolling_out"):
        progress.on_state("1-0-0/t/0", "generating")
        sampled[0] += 40
        progress.clock.now += 4
        text = "\n".join(progress.panel_lines())
        assert "10 per s" in text and "40 in 0 turns" in text
        progress.clock.now += 60
        assert "40 in 0 turns" in progress.format_line(over=False)
    with progress.phase("evaluating", rollouts=3):
        sampled[0] += 7
        assert "7 in 0 turns" in "\n".join(progress.panel_lines())
    assert "40 in 0 turns" in "\n".join(progress.panel_lines())


def test_remaining_time_is_estimated_after_the_first_turn_and_with_the_update_after_the_first_step() -> None:
    progress = RecordedProgress(width=100)
    progress.begin(1, 2)
    with progress.phase("rolling_out"):
        for index in range(2):
            progress.on_state(f"1-0-0/t/{index}", "generating")
        assert progress.step_left is None
        progress.clock.now += 10
        progress.on_generation("1-0-0/t/0", Generation((1,) * 10, (0.0,) * 10, "stop"), 100)
        assert progress.step_left == (20.0, "of the rollouts")
        assert "about 0:20 left of the rollouts" in "\n".join(progress.panel_lines())
    progress.run_step(1)
    progress.begin(2, 8)
    with progress.phase("rolling_out"):
        progress.run_rollouts(4)
        progress.clock.now += 4
        assert progress.step_left == (5.0, "of the step")


def test_update_of_a_single_micro_batch_shows_its_pace_and_what_is_left() -> None:
    progress = RecordedProgress(width=100)
    progress.begin(1, 8)
    with progress.phase("learning"):
        progress.on_pass(0, 1, 0)
        progress.clock.now += 30
        progress.on_pass(0.01, 1, 5)
        assert progress.step_left is None, "the first layer shows no pace yet"
        progress.on_pass(0.25, 1, 150)
        text = "\n".join(progress.panel_lines())
        assert "0 of 1 micro-batches, 5 tokens per s" in text and "about 1:30 left of the update" in text
        assert (progress.status().passes, progress.status().left_s) == (0, 90)


def test_update_shows_its_micro_batches_its_pace_and_what_is_left() -> None:
    progress = RecordedProgress(width=100)
    progress.begin(1, 8)
    with progress.phase("learning"):
        progress.on_pass(0, 4, 0)
        assert progress.step_left is None and "0 of 4 micro-batches" in "\n".join(progress.panel_lines())
        progress.clock.now += 70
        progress.on_pass(1, 4, 7000)
        text = "\n".join(progress.panel_lines())
        assert "1 of 4 micro-batches, 100 tokens per s" in text and "about 3:30 left of the update" in text
        line = progress.format_line(over=False)
        assert "learning for 1:10, about 3:30 left of the update; 1 of 4 micro-batches, 100 tokens per s" in line
