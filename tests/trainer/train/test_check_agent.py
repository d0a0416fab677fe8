"""The check of an agent before training, the dry run, and mistakes that are found at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.errors import ConfigError
from gateway.types import Task as SessionTask
from mtrl_plugins.agents.check_agent import check_agent
from mtrl_plugins.agents.settings import AgentSettings
from tests.trainer.train.jobs import small_job
from tests.trainer.train.test_agent_training import AGENT, agent_job, anyio_backend, tools
from tests.trainer.train.test_modes import string_console
from trainer.rollout.task import Task
from trainer.train.dry_run import dry_run

pytestmark = pytest.mark.anyio
__all__ = ["anyio_backend", "tools"]


async def never_asks(base_url: str, task: Any, session: Any) -> float:
    return 1.0


async def test_check_plays_one_rollout_and_shows_authors_branches_and_changes(tools: str, one_thread: None) -> None:
    console = string_console()
    assert await check_agent(agent_job(tools), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("the function tests.plugins", "retry of turn 1", "main line", "── turn 0: policy"):
        assert shown in text
    assert "retokenised 0" in text and "the agent can be trained" in text
    if "the agent changed arguments" in text:
        assert "trained as it was sampled" in text


async def test_check_of_an_agent_that_never_asks_fails_with_the_reason(tools: str, one_thread: None) -> None:
    console = string_console()
    assert not await check_agent(agent_job(tools, agent={"function": f"{__name__}:never_asks"}), console)
    assert "without asking the policy" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_check_of_a_run_without_an_agent_is_an_error(tools: str) -> None:
    with pytest.raises(ConfigError, match="has no agent"):
        await check_agent(small_job(), string_console())


async def test_dry_run_says_that_an_agent_plays(tools: str) -> None:
    console = string_console()
    assert await dry_run(agent_job(tools), console)
    assert "an agent plays the rollouts: the function" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"command": "no-such-agent --now"}, "there is no program 'no-such-agent'"),
        ({"command": "./mine.sh"}, "there is no program './mine.sh'"),
        ({"command": ()}, "give one of"),
        ({"function": "no_such_module:run"}, "no_such_module"),
    ],
)
async def test_agent_that_cannot_be_started_is_an_error_at_the_start(
    agent: dict[str, Any], said: str, tools: str
) -> None:
    with pytest.raises((ConfigError, ValidationError), match=said):
        await dry_run(agent_job(tools, agent=agent), string_console())


async def test_program_in_the_agents_own_folder_is_found(tools: str, tmp_path: Path) -> None:
    (tmp_path / "agent.sh").write_text("#!/bin/sh\n")
    (tmp_path / "agent.sh").chmod(0o755)
    assert await dry_run(agent_job(tools, agent={"command": "./agent.sh", "cwd": str(tmp_path)}), string_console())


def test_row_with_an_interaction_is_an_error_if_an_agent_plays() -> None:
    rows = [Task("a", ()), Task("b", (), session_task=SessionTask(feedback="gsm8k"))]
    assert AgentSettings(external=True).find_mistakes(rows[:1]) == []
    assert "the task 'b' has an interaction" in str(AgentSettings(external=True).find_mistakes(rows)[0])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"agent": AGENT, "stepper": "a:b"}, "`stepper` and `agent` exclude each other"),
        ({"agent": {"external": True}, "record": True}, "`record` and `agent.external` exclude each other"),
    ],
)
def test_settings_that_an_agent_excludes_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        small_job(**more)
