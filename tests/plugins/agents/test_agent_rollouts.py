"""Rollouts that agents play: programs, functions and external programs, how they end, and their rewards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from pydantic import ValidationError

from gateway.errors import ConfigError
from gateway.types import ToolCall
from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.agent_runner import AgentHandle
from mtrl_plugins.agents.settings import AgentSettings
from tests.plugins.agents.agent_harness import USER, open_agents
from tests.waiting import PATIENCE_S, is_alive
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task

ASK = """
import json, os, sys, urllib.parse, urllib.request
def ask(text, fail=False):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", ASK + code)


WALL_S = (2.0, 20.0)
"""Time limits of programs that must do something before they hang: a busy machine may need the second one."""


async def play(code: str, *turns: str, limits: RolloutLimits | None = None, **settings: Any) -> Rollout:
    async with open_agents(list(turns or ("It is 7.",)), limits=limits, command=program(code), **settings) as harness:
        return await harness.run()


async def test_program_reads_the_question_and_its_output_is_kept() -> None:
    rollout = await play("print(ask(sys.stdin.read()))")
    assert (rollout.stop, rollout.infos["agent_exit"]) == (StopReason.DONE, 0)
    assert rollout.infos["agent_output"].strip() == "It is 7."
    assert rollout.ledger.messages[0]["content"] == "What is 3 + 4?"


async def test_program_knows_the_task_but_not_the_right_answer_nor_our_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "s3cret")
    code = "ask('x'); print(json.dumps({'task': json.load(sys.stdin), 'env': dict(os.environ), 'cwd': os.listdir()}))"
    rollout = await play(code, stdin="json", env={"TASK": "{task_file}", "MORE": "{prompt}"})
    seen = json.loads(rollout.infos["agent_output"])
    assert seen["task"]["columns"] == {"question": "What is 3 + 4?"} and seen["cwd"] == []
    assert seen["env"]["MORE"] == "What is 3 + 4?" and "SECRET_OF_OURS" not in seen["env"]
    assert not await anyio.Path(seen["env"]["TASK"]).exists()


async def test_program_works_in_a_copy_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("ours")
    code = "ask('x'); open('notes.txt', 'a').write('theirs'); print(open('notes.txt').read(), open('conf/a').read())"
    rollout = await play(code, cwd=tmp_path, files={"conf/a": "{model} at {base_url}"})
    assert rollout.infos["agent_output"].startswith("ourstheirs policy at http://127.0.0.1:")
    assert (tmp_path / "notes.txt").read_text() == "ours"


async def test_program_that_fails_is_lost_or_scored_as_set_but_one_that_never_asks_is_lost() -> None:
    lost = await play("ask('x'); sys.exit(3)")
    assert lost.stop is StopReason.AGENT_FAILED and "exited with 3" in lost.reason and lost.rewards == {}
    scored = await play("ask('x'); sys.exit(3)", on_failure="scored")
    assert scored.stop is StopReason.DONE and "exited with 3" in scored.infos["agent_failure"]
    silent = await play("print('no thanks')", on_failure="scored")
    assert silent.stop is StopReason.AGENT_FAILED and "without asking" in silent.reason


async def test_program_that_hangs_ends_with_its_children_at_the_time_limit(tmp_path: Path) -> None:
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
ask("x"); print(child.pid, flush=True)
open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}"); child.wait()
"""
    file = tmp_path / "pids"
    for wall_s in WALL_S:
        rollout = await play(
            code, limits=RolloutLimits(timeout_s=wall_s), env={"PIDS": str(file)}, stop_s=0.5, sandbox="none"
        )
        assert rollout.stop is StopReason.WALL_TIME and rollout.rewards == {}
        if file.exists():
            break
    pids = [int(word) for word in (await anyio.Path(file).read_text()).split()]
    assert len(pids) == 2 and not any(map(is_alive, pids))


async def test_flood_of_output_is_cut_to_its_end() -> None:
    rollout = await play("ask('x'); print('x' * 3_000_000); print('the end')", output_chars=1000)
    assert len(rollout.infos["agent_output"]) <= 1000 and "the end" in rollout.infos["agent_output"]


async def test_limit_of_turns_ends_a_program_that_goes_on() -> None:
    code = """
import time
while True:
    try: ask("x")
    except OSError: time.sleep(0.05)
"""
    rollout = await play(code, "one", "two", limits=RolloutLimits(assistant_turns=2), stop_s=0.3)
    assert rollout.stop is StopReason.ASSISTANT_TURNS and len(rollout.turns) == 2


async def test_words_of_a_command_are_never_run_by_a_shell(tmp_path: Path) -> None:
    task = Task("t", ({"role": "user", "content": f"$(touch {tmp_path}/x) {{api_key}}; touch {tmp_path}/y"},))
    async with open_agents(["yes"], command=(*program("ask('x'); print(sys.argv[1])"), "{prompt}")) as harness:
        rollout = await harness.run(task)
    assert "{api_key}" in rollout.infos["agent_output"] and os.listdir(tmp_path) == []


async def _ask(base_url: str, session: AgentHandle) -> str:
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        response = await client.post(f"{base_url}/chat/completions", json={"messages": [USER]}, headers=headers)
        return str(response.json()["choices"][0]["message"]["content"])


async def ask_and_score(base_url: str, task: Task, session: AgentHandle, bonus: float = 0.0) -> float:
    """An agent that scores itself, and uses a tool of the gateway."""
    result = await session.tools.call(ToolCall("1", "add", '{"a": 3, "b": 4}'))
    session.reward(0.25, "tool")
    return float(result.text in await _ask(base_url, session)) + bonus


async def reward_and_fail(base_url: str, task: Task, session: AgentHandle) -> None:
    session.reward(1.0)
    raise OSError("the machine is down")


async def test_rewards_of_a_rollout_that_infrastructure_ended_are_dropped() -> None:
    async with open_agents(
        ["It is 7."], function="tests.plugins.agents.test_agent_rollouts:reward_and_fail"
    ) as harness:
        rollout = await harness.run()
    assert (rollout.stop, dict(rollout.rewards)) == (StopReason.AGENT_FAILED, {})


async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def test_function_uses_tools_and_returns_the_reward() -> None:
    name = f"{__name__}:ask_and_score"
    async with open_agents(["It is 7."], add, function=name, args={"bonus": 0.5}) as harness:
        rollout = await harness.run()
    assert rollout.stop is StopReason.DONE and rollout.rewards == {"agent": 1.5, "tool": 0.25}


async def test_session_is_opened_with_the_runs_key_alone() -> None:
    async with open_agents(["x"], external=True) as harness, httpx2.AsyncClient(timeout=PATIENCE_S) as client:
        response = await client.post(f"{harness.host.endpoint.url}/sessions", json={})
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")


async def test_rollout_that_no_program_takes_is_lost() -> None:
    async with open_agents(["x"], external=True, open_s=0.2) as harness:
        rollout = await harness.run()
    assert rollout.stop is StopReason.AGENT_FAILED and "no program opened" in rollout.reason


@pytest.mark.parametrize(
    "body", [{}, {"reward": "1"}, {"reward": True}, {"reward": float("1e999")}, {"reward": 1, "name": ""}]
)
async def test_reward_that_is_none_is_refused(body: dict[str, Any]) -> None:
    async with open_agents(["x"]) as harness, harness.session() as agent:
        url = f"{harness.host.endpoint.url}/sessions/{agent.session.id}/reward"
        headers = {"Authorization": f"Bearer {agent.session.api_key}", "content-type": "application/json"}
        response = await agent.client.post(url, content=json.dumps(body), headers=headers)
        assert response.status_code == 400 and agent.session.rewards == {}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"command": "x", "function": "a:b"},
        {"function": "a:b", "env": {"A": "b"}},
        {"command": "x", "args": {"a": 1}},
        {"command": "x", "files": {"../x": "y"}},
        {"command": "x", "files": {"/x": "y"}},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AgentSettings(**settings)


def test_function_that_is_not_there_is_told_at_once() -> None:
    with pytest.raises(ConfigError):
        AgentHost(AgentSettings(function="tests.plugins.agents.agent_harness:none"))


DAEMONS = """
import subprocess
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
def start(**changes):
    out = subprocess.DEVNULL
    return subprocess.Popen(sleep, stdin=out, stdout=out, stderr=out, **changes).pid
pids = [start(), start(start_new_session=True), start(start_new_session=True, env={})]
"""


async def test_files_are_not_written_through_links_of_the_copied_folder(tmp_path: Path) -> None:
    outside, source = tmp_path / "outside", tmp_path / "source"
    outside.mkdir()
    source.mkdir()
    (outside / "secret").write_text("theirs")
    (source / "conf").symlink_to(outside)
    (source / "notes").symlink_to(outside / "secret")
    files = {"conf/secret": "{model}", "notes": "{model}"}
    code = "ask('x'); print(open('conf/secret').read(), open('notes').read())"
    async with open_agents(["It is 7."], command=program(code), cwd=source, files=files) as harness:
        rollout = await harness.run()
    assert rollout.infos["agent_output"].strip() == "policy policy"
    assert (outside / "secret").read_text() == "theirs" and [*outside.iterdir()] == [outside / "secret"]
