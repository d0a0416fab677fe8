"""The run file's `history:`: its forms, what it cannot go with, and what a run tells about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.errors import ConfigError
from mtrl_plugins.history.compaction import Compaction
from mtrl_plugins.history.settings import HistorySettings
from tests.plugins.history.long_chats import TASK
from trainer.ledger import Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutSettings
from trainer.rollout.steppers import ThinkAgain, ToolsAndFeedback
from trainer.setup import make_stepper


def read(**values: Any) -> RolloutSettings:
    return RolloutSettings.model_validate({"model": "m", "data": "d", "out": Path("o"), **values})


def is_right(answer: str, task: object) -> bool:
    return True


again = ThinkAgain(is_right)


@pytest.mark.parametrize("stepper", [None, f"{__name__}:again"])
def test_history_wraps_whatever_answers_the_policy(stepper: str | None) -> None:
    made = make_stepper(read(history="window", stepper=stepper))
    assert isinstance(made, Compaction) and made.settings.kind == "window"
    assert made.inner is again if stepper else isinstance(made.inner, ToolsAndFeedback)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"history": "compress"}, "summarise, window, or a function"),
        ({"history": {"at": 1.0}}, "less than 1"),
        ({"history": "summarise", "agent": {"command": ["x"]}}, "an agent keeps its own history"),
        ({"history": {"at": 0.9}}, "lower it to 0.75, or lower `limits.turn_tokens`"),
        ({"history": {}, "limits": {"turn_tokens": 3000}}, "raise `limits.rollout_tokens`"),
        ({"history": {}, "limits": {"response_tokens": 600}}, "raise `limits.response_tokens`"),
        ({"history": "window", "template": {"history": "inference_template"}}, "use `template.history: full`, or"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        read(**values)


def test_function_that_is_not_there_is_named_before_the_run_starts() -> None:
    with pytest.raises(ConfigError, match=r"history\.kind"):
        make_stepper(read(history="no_such.py:shorten"))


def test_metrics_are_means_of_rollouts_and_of_summaries() -> None:
    infos = [
        {"history": {"compactions": 2, "summaries": 2, "summary_tokens": 30, "empty_summaries": 1}},
        {"history": {}},
        {},
    ]
    rollouts = [Rollout(TASK.id, Ledger(), StopReason.DONE, infos=info) for info in infos]
    assert HistorySettings().compute_metrics(rollouts) == {
        "history/compactions": 1.0,
        "history/summary_tokens": 15.0,
        "history/empty_summaries": 1.0,
        "history/ignored_calls": 0.0,
    }
    assert HistorySettings().compute_metrics(rollouts[2:]) == {}
    assert "70% of its context" in HistorySettings().describe()
