"""Agents from npm and mini-swe-agent finish a task in a box, unmodified, where only loopback is reached: a row's task,
which is graded, and one of Harbor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.plugins.agents.agent_harness import call_text, open_agents
from tests.plugins.harbor.harbor_runs import Sample, open_agent, reward, write_task
from tests.sandbox.roots import make_root
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutLimits

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".agents" / "npm" / "node_modules" / ".bin"
PYTHON_BIN = ROOT / ".agents" / "bin"
TIMEOUT_S = 300


def play(name: str, kind: str) -> dict[str, Any]:
    """Plays a rollout in a network namespace of its own."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    inside = 'ip link set lo up && exec "$@"'
    command = [*unshare, "sh", "-c", inside, "sh", sys.executable, "-m", "tests.agents.test_npm_agents", name]
    command += [str(PYTHON_BIN if name == "mini" else BIN), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    played: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return played


@pytest.mark.parametrize(
    ("name", "kind", "branches", "calls", "changed"),
    [
        ("codex", "grade", [2], ["exec_command"], {}),
        ("codex", "harbor", [2], ["exec_command"], {}),
        ("opencode", "harbor", [1, 2], ["bash"], {"arguments": 1}),  # It asks for a title first.
        ("pi", "harbor", [2], ["bash"], {"arguments": 1}),
        ("mini", "grade", [2], ["bash", "bash"], {}),
        ("mini", "harbor", [2], ["bash", "bash"], {}),
        ("qwen", "harbor", [2], ["run_shell_command"], {"arguments": 1}),
        ("gemini", "harbor", [2], ["run_shell_command"], {"arguments": 1}),
    ],
)
def test_agent_finishes_a_task_with_exact_ids(
    name: str, kind: str, branches: list[int], calls: list[str], changed: dict[str, int]
) -> None:
    played = play(name, kind)
    assert (played["stop"], played["reason"]) == ("done", ""), played
    assert played["turns"] == branches and played["calls"] == calls
    assert played["changed"] == changed and played["retokenised"] == 0
    assert played["rewards"] == {kind: 1.0}


CODEX = """model = "policy"
model_provider = "mtrl"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.mtrl]
name = "mtrl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
OPENCODE = """{
  "provider": {"mtrl": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
    "models": {"policy": {"name": "policy", "limit": {"context": 100000, "output": 2000}}}
  }},
  "model": "mtrl/policy", "autoupdate": false, "share": "disabled"
}"""
PI = """{"providers": {"mtrl": {
  "baseUrl": "{base_url}", "api": "openai-completions", "apiKey": "{api_key}",
  "models": [{"id": "policy", "contextWindow": 100000, "maxTokens": 2000}]
}}}"""
GEMINI = '{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false}}'
PROMPT = "Add the numbers of numbers.txt, and write the sum to sum.txt."
COMMAND = "awk '{s += $1} END {print s}' numbers.txt > sum.txt; echo done by mtrl"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CHECK = '[ "$(cat sum.txt)" = 42 ] && echo 1 > logs/reward.txt || echo 0 > logs/reward.txt'
AGENTS: dict[str, dict[str, Any]] = {
    "codex": {"command": ("codex", "exec", "--skip-git-repo-check", PROMPT), "env": {"CODEX_HOME": "{folder}/home"},
     "files": {"home/config.toml": CODEX}},
    "opencode": {"command": ("opencode", "run", PROMPT), "env": {"OPENCODE_CONFIG": "{folder}/opencode.json"},
     "files": {"opencode.json": OPENCODE}},
    "pi": {"command": ("pi", "--print", "--no-session", "--offline", "--model", "mtrl/policy", PROMPT),
     "env": {"PI_CODING_AGENT_DIR": "{folder}/pi"}, "files": {"pi/models.json": PI}},
    "mini": {
        "command": ("mini", "-m", "openai/policy", "-t", PROMPT, "-y", "-l", "0", "--exit-immediately"),
        "env": {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": "{folder}/mini",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        "files": {},
    },
    "qwen": {"command": ("qwen", "--auth-type", "openai", "--yolo", "--prompt", PROMPT),
     "env": {"OPENAI_MODEL": "policy"}, "files": {}},
    "gemini": {"command": ("gemini", "--yolo", "--model", "policy", "--prompt", PROMPT),
     "env": {"GEMINI_CLI_TRUST_WORKSPACE": "true"}, "files": {".gemini/settings.json": GEMINI}},
}  # fmt: skip
TOOLS = (("exec_command", "cmd"), ("shell_command", "command"), ("bash", "command"), ("run_shell_command", "command"))
"""The tools that run a command, and the argument that it is."""


def policy(prompt: str) -> str:
    """Does the task by the tool that is offered, then answers; a chat without tools wants a title."""
    tool = next(((name, field) for name, field in TOOLS if f'"name": "{name}"' in prompt), None)
    if tool is None:
        return "A title"
    name, field = tool
    is_mini = SUBMIT.split()[1] in prompt
    if "<tool_response>" in prompt:
        return call_text(name, f'{{"{field}":   "{SUBMIT}"}}') if is_mini else "The sum is 42."
    more = ', "description": "Adds"' if name in ("bash", "run_shell_command") and not is_mini else ""
    more += ', "is_background": false' if name == "run_shell_command" else ""
    return call_text(name, f'{{"{field}":   "{COMMAND}"{more}}}')


CHECK_TASK = reward('[ "$(cat sum.txt)" = 42 ]; echo $((1 - $?))')
HARBOR = Sample(
    "sum",
    files={
        "environment/numbers.txt": "40\n2\n", "task.toml.environment": 'workdir = "/app"\n', "instruction.md": PROMPT,
        "tests/test.sh": CHECK_TASK,
    },
    policies=((COMMAND,),),
)  # fmt: skip
"""The same task in Harbor's format, for a root of busybox in which this machine's programs are seen."""
SYSTEM = ("/usr", "/lib", "/lib64")


async def play_harbor(command: tuple[str, ...], env: Mapping[str, str], files: Mapping[str, str]) -> Rollout:
    """Plays the Harbor task."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = make_root(Path(folder) / "roots", patch)
        write_task(Path(folder) / "tasks", HARBOR)
        words = ["{prompt}" if word == PROMPT else word for word in command]
        agent = {"command": words, "env": env, "files": files, "stdin": "none"}
        sandbox = {"readable": SYSTEM, "memory_mb": 4096, "processes": 512, "disk_mb": 1024, "files": 100_000}
        limits = {"turn_tokens": 400, "timeout_s": 200}
        async with open_agent(
            Path(folder) / "tasks", agent, policy, limits=limits, sandbox=sandbox, roots={"busybox": root}
        ) as runs:
            rollout, score = await runs.play("sum")
    return replace(rollout, rewards={} if score is None else {"harbor": score})


async def play_row(command: tuple[str, ...], env: Mapping[str, str], files: Mapping[str, str]) -> Rollout:
    """Plays the task of a row, with a grade."""
    limits = RolloutLimits(turn_tokens=400, rollout_tokens=200_000, timeout_s=200)
    with tempfile.NamedTemporaryFile("w") as check:
        check.write(CHECK)
        check.flush()
        grade = {
            "command": ["sh", "check.sh"], "files": {"/rollout/check.sh": check.name}, "reward": "/rollout/logs",
            "artifacts": ["/rollout/sum.txt"],
        }  # fmt: skip
        files = {"numbers.txt": "40\n2\n", **files}
        async with open_agents(
            policy, limits=limits, command=command, env=env, files=files, stdin="none", sandbox={}, grade=grade
        ) as harness:
            return await harness.run()


async def main(name: str, bin_folder: Path, kind: str) -> None:
    """Plays the rollout."""
    agent = AGENTS[name]
    command = (str(bin_folder / agent["command"][0]), *agent["command"][1:])
    play = play_harbor if kind == "harbor" else play_row
    rollout = await play(command, {"HOME": "{folder}", **agent["env"]}, agent["files"])
    seen = rollout.infos.get("agent", {})
    output = str(rollout.infos.get("agent_output", ""))
    print(
        json.dumps(
            {
                "stop": rollout.stop,
                "rewards": dict(rollout.rewards),
                "retokenised": seen.get("retokenised"),
                "reason": rollout.reason,
                "turns": [len(ledger.turns) for ledger in rollout.ledgers],
                "changed": seen.get("changed_by_agent"),
                "calls": [call.name for turn in rollout.turns for call in turn.calls],
                "output": re.sub(r"\x1b\[[0-9;]*m", "", output)[-600:],
            }
        )
    )


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]), sys.argv[3])
