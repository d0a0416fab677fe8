"""Tests that errors in plug-in files for ms-swift are reported with file and line."""

from __future__ import annotations

import pytest

from gateway.errors import ConfigError
from tests.conftest import Write
from tests.plugins.swift.scheduler_rollouts import run_scheduler
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import BaseRolloutSettings
from trainer.setup import make_stepper

pytestmark = pytest.mark.anyio

HEAD = """
from swift.plugin.multi_turn import MultiTurnScheduler, multi_turns
class Wrong(MultiTurnScheduler):
"""
STEP = "    def step(self, infer_request, result, current_turn):\n"
STEPS = {
    "raises": (STEP + "        return 1 / 0\n", "ZeroDivisionError", 5),
    "misspells": (STEP + "        return self.infer_enigne\n", "'Wrong' object has no attribute 'infer_enigne'", 5),
    "gives nothing": (STEP + "        pass\n", "`step` returned None", 4),
    "masks": (
        STEP + "        return {'infer_request': infer_request, "
        "'response_token_ids': [1], 'response_loss_mask': [1, 0]}\n", "2 numbers for 1 `response_token_ids`", 4,
    ),
    "run gives nothing": (
        "    async def run(self, infer_request, request_config):\n        pass\n", "returned None", 4,
    ),
    "asks twice": (
        "    async def run(self, infer_request, request_config):\n        import asyncio\n        return await "
        "asyncio.gather(*[self.infer_engine.infer_async(infer_request, request_config) for _ in range(2)])\n",
        "requests two turns at once", 4,
    ),
    "samples otherwise": (
        "    async def run(self, infer_request, request_config):\n        from dataclasses import replace\n"
        "        await self.infer_engine.infer_async(infer_request, replace(request_config, temperature=0.1))\n",
        "changes its `request_config`", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text, expected, line", STEPS.values(), ids=STEPS)
async def test_scheduler_error_is_reported_with_its_line(write: Write, text: str, expected: str, line: int) -> None:
    file = write("plugin.py", HEAD + text)
    rollout = await run_scheduler(f"{file}:Wrong", ["8", "9"])
    assert rollout.stop is StopReason.ERROR
    assert expected in rollout.reason and f"{file}:{line}" in rollout.reason, rollout.reason


IMPORTS = {
    "from swift.plugin.multi_turn import MultiTurnSchedular": ("MultiTurnScheduler", 1),
    "import swift.megatron": ("swift.rollout", 1),
    "\nfrom swift.loss_scale import LossScale": ("`algorithm.credit.trained_turns`", 2),
    "from swift.plugin import (": ("SyntaxError", 1),
}


@pytest.mark.parametrize("text", IMPORTS)
def test_unavailable_import_is_reported_with_its_line_and_alternatives(write: Write, text: str) -> None:
    expected, line = IMPORTS[text]
    file = write("plugin.py", text + "\n")
    with pytest.raises(ConfigError) as caught:
        make_stepper(BaseRolloutSettings(stepper=f"{file}:Any"))
    assert expected in str(caught.value) and f"{file}:{line}" in str(caught.value)
    assert "SyntaxError" in str(caught.value) or "install ms-swift" in str(caught.value)


def test_unregistered_scheduler_is_reported_with_closest_name(write: Write) -> None:
    file = write("plugin.py", HEAD + "    pass\nmulti_turns['wrong_one'] = Wrong\n")
    args = {"plugins": [str(file)], "name": "wrong_on"}
    with pytest.raises(ConfigError, match="unknown scheduler 'wrong_on'") as caught:
        make_stepper(BaseRolloutSettings(stepper="mtrl_plugins.swift.stepper:named", stepper_args=args))
    assert str(file) in str(caught.value) and "did you mean 'wrong_one'" in str(caught.value)


def test_failing_scheduler_init_is_reported_with_its_line(write: Write) -> None:
    file = write("plugin.py", HEAD + "    def __init__(self, *args, **kwargs):\n        raise KeyError('url')\n")
    with pytest.raises(ConfigError, match="Wrong cannot be instantiated: KeyError: 'url'") as caught:
        make_stepper(BaseRolloutSettings(stepper=f"{file}:Wrong"))
    assert f"{file}:5" in str(caught.value)


def test_unavailable_class_reports_alternative_when_used(write: Write) -> None:
    file = write("plugin.py", """
        from swift.llm import PtEngine, RequestConfig, Template, to_device
        from swift.plugin.rm_plugin import DefaultRMPlugin
        class Mine(DefaultRMPlugin):
            pass
        class Uses:
            def __init__(self):
                PtEngine('model')
            def check_finished(self, turn): pass
            def step(self, turn): pass
        """)  # fmt: skip
    with pytest.raises(NotImplementedError, match="call another model over HTTP"):
        make_stepper(BaseRolloutSettings(stepper=f"{file}:Uses"))
