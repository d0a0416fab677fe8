"""Rewards beside Harbor's own: its verifier, steps and rewards, on the same files of the same policies.

Harbor takes Python 3.12, so what it says is recorded in `verdicts.json`. Where `make harbor-peer` put it, it plays
along, and has to say the same; entries that are missing are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from tests.plugins.harbor.harbor_runs import SAMPLES, Sample, open_tasks, play, write_task

HERE = Path(__file__).parent
PEER = HERE.parents[2] / ".harbor-peers" / "bin" / "python"
VERDICTS = HERE / "verdicts.json"


async def ask_harbor(name: str, given: dict[str, Any]) -> list[Any]:
    """What Harbor says of the jobs, as it was recorded."""
    recorded = json.loads(VERDICTS.read_text("utf-8"))
    if PEER.exists():
        with anyio.fail_after(300):
            words = [str(PEER), str(HERE / "harbor_peer.py")]
            done = await anyio.run_process(words, input=json.dumps(given).encode(), check=False)
        assert not done.returncode, done.stderr.decode()[-3000:]
        said = json.loads(done.stdout)
        if name not in recorded:
            VERDICTS.write_text(json.dumps({**recorded, name: said}, indent=1) + "\n", "utf-8")
        assert recorded.get(name, said) == said
        return list(said)
    return list(recorded[name])


async def compare(
    name: str, folder: Path, tree: Path, jobs: Sequence[tuple[str, str, Sequence[str]]], **options: Any
) -> list[Any]:
    """Plays tasks by name, working folder and commands, here and there; returns the rewards, which are equal."""
    (tree / "rollout").mkdir(exist_ok=True)  # As sandboxes have it.
    given = {
        "folder": str(folder / "peer"),
        "jobs": [
            {"task": str(folder / "tasks" / task), "tree": str(tree), "workdir": workdir, "commands": [*commands]}
            for task, workdir, commands in jobs
        ],
    }
    theirs, ours = await ask_harbor(name, given), []
    async with open_tasks(folder / "tasks", **options) as runs:
        for (task, _, commands), their in zip(jobs, theirs, strict=True):
            rollout, reward = await play(runs, task, commands)
            assert not rollout.stop.is_infrastructure, rollout.reason
            rewards = rollout.infos["harbor"]["rewards"] or None
            assert rewards == their["rewards"], (task, commands, rollout.infos, their)
            assert (reward is None) == (rewards is None)
            ours.append(reward)
    return ours


async def test_ten_tasks_get_the_rewards_of_harbors_verifier(tmp_path: Path, tree: Path) -> None:
    for sample in SAMPLES:
        write_task(tmp_path / "tasks", sample)
    jobs = [
        (sample.name, "/app" if "workdir" in sample.files.get("task.toml.environment", "") else "/rollout", commands)
        for sample in SAMPLES
        for commands in sample.policies
    ]
    rewards = await compare("tasks", tmp_path, tree, jobs)
    assert {*rewards} == {1.0, 0.0, 0.5, None}


FILES = {
    "empty.json": ("reward.json", ""),
    "number": ("reward.txt", " 0.25\n"),
    "empty": ("reward.txt", ""),
    "nan": ("reward.txt", "nan"),
    "infinite": ("reward.txt", "1e999"),
    "words": ("reward.txt", "passed"),
    "nan.json": ("reward.json", '{"reward": NaN}'),
    "huge.json": ("reward.json", '{"reward": 1e400}'),
    "text.json": ("reward.json", '{"reward": "1"}'),
    "names.json": ("reward.json", '{"style": 0.5, "tests": 1}'),
    "nothing.json": ("reward.json", "{}"),
    "broken.json": ("reward.json", '{"reward": 1'),
    "true.json": ("reward.json", '{"reward": true}'),
}


async def test_reward_files_are_read_as_harbor_reads_them(tmp_path: Path, tree: Path) -> None:
    for name, (file, text) in FILES.items():
        tests = f"#!/bin/sh\ncp /tests/given /logs/verifier/{file}\n"
        write_task(tmp_path / "tasks", Sample(name, files={"tests/test.sh": tests, "tests/given": text}))
    rewards = await compare("files", tmp_path, tree, [(name, "/rollout", ["true"]) for name in FILES])
    assert dict(zip(FILES, rewards, strict=True)) == {
        **dict.fromkeys(FILES, None), "number": 0.25, "names.json": 0.75, "true.json": 1.0
    }  # fmt: skip
