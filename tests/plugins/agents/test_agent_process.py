"""Programs of agents: nothing that they start outlives them, and files of the run stay in the rollout's folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from tests.plugins.agents.agent_harness import open_agents
from tests.plugins.agents.test_agent_rollouts import ASK, is_alive, program
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
DAEMONS = """
import subprocess
sleep = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
def start(**changes):
    out = subprocess.DEVNULL
    return subprocess.Popen(sleep, stdin=out, stdout=out, stderr=out, **changes).pid
pids = [start(), start(start_new_session=True), start(start_new_session=True, env={})]
"""
RUN_SCRIPT = """
import sys, anyio
from tests.plugins.agents.agent_harness import open_agents

async def main():
    code = sys.argv[1]
    async with open_agents(["It is 7."], command=(sys.executable, "-c", code), sandbox="none") as harness:
        await harness.run()

anyio.run(main)
"""


def is_folder(path: str) -> bool:
    return Path(path).is_dir()


async def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    code = f"{ASK}\n{DAEMONS}\nimport time\nask('x')\n"
    code += f"open({str(file)!r}, 'w').write(json.dumps([os.getpid(), *pids, os.getcwd()])); time.sleep(600)"
    trainer = await anyio.open_process([sys.executable, "-c", RUN_SCRIPT, code], stdin=None, stderr=None, cwd=ROOT)
    with anyio.fail_after(3 * PATIENCE_S):
        await wait_until(file.exists)
        await wait_until(lambda: file.read_text().endswith("]"))
        *pids, folder = json.loads(file.read_text())
        assert all(map(is_alive, pids)) and is_folder(folder)
        os.kill(trainer.pid, signal.SIGKILL)
        await trainer.wait()
    await trainer.aclose()
    await wait_until(lambda: not any(map(is_alive, pids)) and not is_folder(folder))


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
