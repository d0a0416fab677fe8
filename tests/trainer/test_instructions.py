"""What servers say about themselves is in the prompt that the policy continues."""

from __future__ import annotations

from dataclasses import replace

import anyio

from gateway.config.models import Limits
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from tests.trainer.policy_scripts import QUESTION, make_tasks, script_by_task
from tests.trainer.rollout_harness import RolloutHarness


def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


async def test_instructions_are_the_system_prompt_of_a_rollout() -> None:
    tool = FunctionTool(add)
    tool.spec = replace(tool.spec, instructions="Adds without error.")
    gateway = Gateway([Source("tools", LimitedToolset(NativeToolset([tool]), Limits()))])
    with anyio.fail_after(60):
        async with gateway:
            harness = RolloutHarness(script_by_task({"*": ("done",)}), gateway)
            [group] = await harness.run_all(make_tasks("a"), 1)
    messages = group.rollouts[0].ledger.messages
    assert messages[0] == {"role": "system", "content": "Adds without error."}
    assert list(messages[1 : 1 + len(QUESTION)]) == list(QUESTION)
