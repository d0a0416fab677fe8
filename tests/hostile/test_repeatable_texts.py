"""A law over all texts that mtrl writes for a policy: equal rollouts read equal tokens, in every process."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import anyio

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "an address": r"\b0x[0-9a-f]{6,}",
    "a folder of ours": rf"/tmp/|/mtrl-|{re.escape(str(ROOT))}|site-packages",
    "a port": r"(127\.0\.0\.1|localhost|\[::1\]):\d",
    "a time": r"\b\d\d:\d\d:\d\d\b|\b20\d\d-\d\d-\d\dT|\d\.\d{3,} ?s\b",
}


async def collect_texts(number: int, folder: Path) -> dict[str, str]:
    """The texts from a process with its own hash seed, temporary folder, ports and addresses."""
    temporary = folder / f"tmp{number}"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": str(number), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    process = await anyio.run_process(
        [sys.executable, "-m", "tests.hostile.policy_texts"], env=environment, cwd=ROOT, stderr=None
    )
    texts: dict[str, str] = json.loads(process.stdout)
    return texts


async def test_every_text_for_a_policy_is_the_same_in_every_process(tmp_path: Path) -> None:
    texts: dict[int, dict[str, str]] = {}

    async def collect(number: int) -> None:
        texts[number] = await collect_texts(number, tmp_path)

    with anyio.fail_after(300):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect, 1)
            tasks.start_soon(collect, 2)
    first, second = texts[1], texts[2]
    assert {name: (text, second[name]) for name, text in first.items() if text != second[name]} == {}
    found = [problem for name, text in first.items() for problem in _find_forbidden(name, text, tmp_path)]
    assert found == []
    assert "'its_hang'" in first["hang 0"] and "unavailable" in first["crash 1"]
    assert "'my_hang'" in first["hang"]
    assert "[image left out: not a readable image: " in first["picture"]


def _find_forbidden(name: str, text: str, folder: Path) -> list[str]:
    patterns = {**FORBIDDEN, "the test's folder": re.escape(str(folder))}
    return [f"{name}: {kind} in {text!r}" for kind, pattern in patterns.items() if re.search(pattern, text)]
