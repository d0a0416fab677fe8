"""Tests of schedulers that derive from a base class of their own, as ms-swift's documentation prints it."""

from __future__ import annotations

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import policy_texts, run_scheduler
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import BaseRolloutSettings
from trainer.setup import make_stepper

pytestmark = pytest.mark.anyio

SCHEDULERS = """
    from abc import ABC, abstractmethod

    class MultiTurnScheduler(ABC):
        def __init__(self, max_turns=None, *args, **kwargs):
            self.max_turns = max_turns

        @abstractmethod
        def step(self, infer_request, result, current_turn):
            pass

        def check_finished(self, infer_request, result, current_turn):
            return result.finish_reason == 'length' or bool(self.max_turns and current_turn >= self.max_turns)

    class Again(MultiTurnScheduler):
        def step(self, infer_request, result, current_turn):
            infer_request.messages.append({'role': 'user', 'content': f'Again, {current_turn}.'})
            return infer_request, {'tries': current_turn}

    class Wrong(Again):
        def check_finished(self, turn_and_more, result):
            return False

    class Short:
        def check_finished(self):
            return True

        def step(self, turn):
            return None
"""


async def test_scheduler_on_its_own_base_class_runs(write: Write) -> None:
    file = write("plugin.py", SCHEDULERS)
    rollout = await run_scheduler(f"{file}:Again", ["8", "9"], max_turns=2)
    assert policy_texts(rollout) == ["8", "9"] and rollout.stop is StopReason.STEP_DONE
    assert rollout.infos["tries"] == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wrong", r"plugin\.py:\d+: stepper: Wrong\.check_finished too many positional arguments"),
        ("Short", r"check_finished too many positional arguments"),
    ],
)
def test_scheduler_with_other_parameters_is_refused_when_it_is_loaded(write: Write, name: str, message: str) -> None:
    file = write("plugin.py", SCHEDULERS)
    with pytest.raises(ConfigError, match=message) as caught:
        make_stepper(BaseRolloutSettings(stepper=f"{file}:{name}"))
    assert "define check_finished(self, " in str(caught.value)
