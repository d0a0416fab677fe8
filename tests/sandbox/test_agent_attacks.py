"""The attacks on sandboxes fail through the door of an agent too, whose box has a loopback interface of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from tests.plugins.agents.agent_harness import TASK, open_agents
from tests.plugins.agents.test_agent_rollouts import ASK
from tests.sandbox.attacks import DISK, FILES, MEMORY_AND_PROCESSES, NETWORK, PRIVILEGES, PROCESSES, Attack
from tests.sandbox.conftest import open_session
from tests.sandbox.test_attacks import call
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task

pytestmark = pytest.mark.anyio

SMALL = {"memory_mb": 192, "processes": 40, "disk_mb": 16, "files": 500}
OWN_LOOPBACK = {"opens an IPv6 socket", "opens a datagram socket", "asks the kernel for interfaces"}
"""Attacks on what a box with a loopback interface has, by which it reaches nothing else."""
NO_LIMIT = {"prints without end"}
"""Of what an agent prints, the end is kept."""
REASONS = {"connects to a port of the machine": "Connection refused", "opens a raw socket": "Protocol not supported"}
ROOMS = {  # `TIME` is not among them: there is no call whose time would end. An agent has that of its task or rollout.
    "network": NETWORK,
    "files": FILES,
    "processes": PROCESSES,
    "privileges": PRIVILEGES,
    "disk": DISK,
    "memory": MEMORY_AND_PROCESSES,
}
ATTACKER = """
import shutil, subprocess, tempfile
ask("x")
for name, code in json.load(sys.stdin)["columns"]["attacks"].items():
    place = tempfile.mkdtemp(dir="/rollout")
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-"], cwd=place, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.STDOUT,
        start_new_session=True, text=True,
    )
    os.close(write)
    process.stdin.write(code.replace("os.getppid()", str(os.getppid())))  # The server of commands.
    process.stdin.close()
    process.wait()
    try: os.killpg(process.pid, 9)  # What it forked.
    except OSError: pass
    with os.fdopen(read, errors="replace") as output:
        print(json.dumps([name, output.read()[-2000:]]))
    for path in [place, *(os.path.join(top, file) for top in ("/tmp", "/dev/shm") for file in os.listdir(top))]:
        shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
"""


@pytest.mark.parametrize("room", ROOMS)
async def test_attacks_by_an_agent_fail_with_their_reasons(room: str, targets: Mapping[str, Any]) -> None:
    tried: dict[str, Attack] = {
        name: attack for name, attack in ROOMS[room].items() if name not in OWN_LOOPBACK | NO_LIMIT
    }
    codes = {name: attack.code.format(**targets) for name, attack in tried.items()}
    task = Task("t", TASK.messages, columns={"attacks": codes})
    command = (sys.executable, "-c", ASK + ATTACKER)
    limits = RolloutLimits(timeout_s=120.0)
    with anyio.fail_after(200):
        async with open_session() as victim:
            hide = f"echo secret > {targets['victim_file']}; sleep 600 & exec -a {targets['marker']} sleep 600 &"
            await call(victim, "shell", command=hide)
            async with open_agents(
                ["x"], limits=limits, command=command, stdin="json", sandbox=SMALL, output_chars=500_000
            ) as harness:
                rollout = await harness.run(task)
            kept = await call(victim, "shell", command=f"cat {targets['victim_file']}; pgrep -fc {targets['marker']}")
    assert (rollout.stop, rollout.infos["agent_exit"]) == (StopReason.DONE, 0), rollout.infos["agent_output"][-2000:]
    seen = dict(map(json.loads, rollout.infos["agent_output"].splitlines()))
    assert seen.keys() == tried.keys()
    for name, text in seen.items():
        assert "SUCCEEDED" not in text and REASONS.get(name, tried[name].reason) in text, (name, text)
    assert kept.text.split() == ["secret", "1"]
