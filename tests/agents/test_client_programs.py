"""Agents nobody here wrote finish a tool task, unmodified: one ledger, exact ids, each sampled token trained once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.types import Text, ToolResult
from tests.plugins.agents.agent_harness import call_text, open_agents
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits

PROGRAMS = Path(__file__).with_name("programs")
PYTHON = str(Path(__file__).parents[2] / ".agents" / "bin" / "python")
CALL = call_text("add", '{"a":3,   "b": 4}')
CASES = [
    ("openai_loop.py",),
    ("openai_loop.py", "stream"),
    ("openai_responses.py",),
    ("openai_responses.py", "stream"),
    ("openai_responses.py", "previous"),
    ("anthropic_loop.py",),
    ("anthropic_loop.py", "stream"),
    ("google_loop.py",),
    ("google_loop.py", "stream"),
    ("agents_sdk.py",),
    ("agents_sdk.py", "chat", "stream"),
    ("langgraph_agent.py",),
    ("ag2_agent.py", "stream"),
]


@pytest.mark.parametrize("words", CASES, ids=lambda words: "-".join(words))
async def test_agent_finishes_a_task(words: tuple[str, ...]) -> None:
    command = (PYTHON, str(PROGRAMS / words[0]), *words[1:])
    async with open_agents([CALL, "It is 7."], command=command) as harness:
        rollout = await harness.run()
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.infos["agent_output"].strip() == "It is 7."
    assert rollout.earlier == () and len(rollout.turns) == 2


def in_fields(**fields: str) -> str:
    """What DSPy reads: fields between headings."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**fields, "completed": ""}.items())


async def test_each_step_of_dspy_is_a_chat_and_a_branch_of_its_own() -> None:
    steps = [
        in_fields(next_thought="Add.", next_tool_name="add", next_tool_args='{"a": 3,   "b": 4}'),
        in_fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
        in_fields(reasoning="It is the sum.", answer="It is 7."),
    ]
    command = (PYTHON, str(PROGRAMS / "dspy_agent.py"))
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": "{folder}"}
    async with open_agents(steps, command=command, env=env) as harness:
        rollout = await harness.run()
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.infos["agent_output"].strip() == "It is 7."
    assert [len(ledger.turns) for ledger in rollout.ledgers] == [1, 1, 1]


async def test_openhands_runs_a_command_in_its_box() -> None:
    python = Path(PYTHON).parents[1] / "openhands" / "bin" / "python"
    if not python.exists():
        pytest.skip("OpenHands needs a Python of 3.12 or newer, which was not there when .agents was made")
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
    limits = RolloutLimits(turn_tokens=400, rollout_tokens=100_000, timeout_s=200)
    turns = [call_text("terminal", '{"command":   "echo $((3 + 4))"}'), "It is 7."]
    command = (str(python), str(PROGRAMS / "openhands_agent.py"))
    async with open_agents(turns, command=command, env=env, limits=limits) as harness:
        rollout = await harness.run()
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.infos["agent_output"].splitlines()[-1] == "It is 7."
    assert rollout.earlier == () and len(rollout.turns) == 2
    assert str(rollout.ledger.entries[2].messages[0]["content"]).startswith("7\n")


async def add(a: int, b: int) -> ToolResult:
    """Adds."""
    return ToolResult((Text(str(a + b)),), reward=0.5)


async def test_agent_of_the_agents_sdk_calls_the_rollouts_tools_over_mcp() -> None:
    command = (PYTHON, str(PROGRAMS / "agents_sdk_mcp.py"))
    async with open_agents([CALL, "It is 7."], add, command=command) as harness:
        rollout = await harness.run()
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.infos["agent_output"].strip() == "It is 7."
    assert rollout.rewards["call"] == 0.5
    assert "7" in str(rollout.ledger.entries[2].messages)
