"""The reward: a function of a finished rollout, which returns a number. The run file names it."""

from __future__ import annotations

from trainer.reward.attempt import Attempt


def right(attempt: Attempt, second_try: float = 0.5) -> float:
    """1 for the right answer behind `####`, less if it took a second try, and 0 for any other.

    `attempt.answer` is the policy's last text, `attempt.truth` the task's `ground_truth`, and `attempt.calls` are all
    of its calls; `second_try` can be set in the run file, by `args`.
    """
    if attempt.answer.rpartition("####")[2].strip() != str(attempt.truth):
        return 0.0
    tries = len([turn for turn in attempt.turns if not turn.calls])
    return 1.0 if tries <= 1 else second_try
