"""How sandboxes are confined on different machines: control groups of both versions, gateways that are not root's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import check
from gateway.build import build_plan
from gateway.sandbox import bubblewrap, cgroups
from gateway.sandbox.sandbox_settings import SandboxSettings
from tests.conftest import Write
from tests.waiting import PATIENCE_S

UNPRIVILEGED = """
import ctypes, os, subprocess, sys
from gateway.sandbox.bubblewrap import Confined, SandboxSettings, command_line, find_problem
os.setgroups([]); os.setresgid(60600, 60600, 60600); os.setresuid(60600, 60600, 60600)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # A process that has changed its user hides its descriptors from itself.
os.chdir("/")
print(find_problem())
test = "grep -h -e CapEff -e CapBnd /proc/self/status; touch /rollout/f /tmp/f /dev/shm/f && ls /rollout; touch /dev/g"
line = command_line(Confined(("/bin/sh", "-c", test), SandboxSettings(files=9)))
print(subprocess.run(line, capture_output=True, text=True).stdout)
"""
"""Becomes another user when all is imported, since our interpreter may be root's alone."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_gateway_that_is_not_roots_has_sandboxes_too() -> None:
    command = [sys.executable, "-c", UNPRIVILEGED]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=root, check=False)
    none = "0000000000000000"
    assert done.stdout.split() == ["None", "CapEff:", none, "CapBnd:", none, "f"], done.stderr


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which hierarchies of control groups are mounted, as far as a test makes any."""
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(cgroups, "find_hierarchies", cgroups.find_hierarchies.__wrapped__)
    return tmp_path


def test_version_2_is_used_where_a_parent_passes_its_controllers_on(groups: Path) -> None:
    mount = groups / "fs"
    (mount / "user" / "gateway").mkdir(parents=True)
    (mount / "user" / "gateway" / "cgroup.subtree_control").write_text("")
    (mount / "user" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (groups / "mounts").write_text(f"30 1 0:26 / {mount} rw shared:4 - cgroup2 cgroup2 rw\n")
    (groups / "own").write_text("0::/user/gateway\n")
    group = cgroups.make_group(SandboxSettings(memory_mb=64, processes=10, cpus=0.5))
    (folder,) = group.unique_folders
    assert folder.parent == mount / "user"
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert texts == {"memory.max": str(64 * 2**20), "pids.max": "18", "cpu.max": "50000 100000"}
    (folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    (folder / "pids.events").write_text("max 5\n")
    assert group.hits() == {"memory": 2, "processes": 5}


def test_version_1_has_a_group_for_each_controller(groups: Path) -> None:
    lines, own = [], []
    for number, name in enumerate(("memory", "pids", "blkio")):
        (groups / name / "box").mkdir(parents=True)
        lines.append(f"3{number} 1 0:26 / {groups / name} rw - cgroup cgroup rw,{name}")
        own.append(f"{number}:{name}:/box")
    (groups / "mounts").write_text("\n".join(lines))
    (groups / "own").write_text("\n".join(own))
    group = cgroups.make_group(SandboxSettings(memory_mb=64, processes=10))
    assert {name: folder.parent for name, folder in group.folders.items()} == {
        "memory": groups / "memory" / "box", "pids": groups / "pids" / "box",
    }  # fmt: skip
    assert (group.folders["memory"] / "memory.limit_in_bytes").read_text() == str(64 * 2**20)


def test_no_group_is_made_where_only_one_of_two_controllers_can_be_had(groups: Path) -> None:
    (groups / "pids").mkdir()
    (groups / "mounts").write_text(f"30 1 0:26 / {groups / 'pids'} rw - cgroup cgroup rw,pids\n")
    (groups / "own").write_text("1:pids:/\n")
    assert cgroups.make_group(SandboxSettings()).folders == {}


def test_memory_is_limited_by_process_only_without_groups() -> None:
    limited = bubblewrap.command_line(bubblewrap.Confined(("true",), SandboxSettings(memory_mb=64)))
    free = bubblewrap.Confined(("true",), SandboxSettings(), limits_memory_by_process=False)
    assert str(64 * 1024) in limited and "unlimited" in bubblewrap.command_line(free)


@pytest.mark.parametrize(
    ("problem", "grade", "text"),
    [
        (None, "ok", "sandboxes: bubblewrap"),
        ("bwrap is not installed\n  remedy: install bubblewrap", "wrong", "cannot be started: bwrap is not installed"),
    ],
)
async def test_check_says_whether_sandboxes_can_be_started(
    problem: str | None, grade: str, text: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_problem", lambda: problem)
    monkeypatch.setattr(check, "find_hierarchies", lambda: (cgroups.Hierarchy(Path("/"), 2, ("memory",)),))
    findings = await check.run_checks(build_plan(write("tools.yaml", "tools: [{sandbox_tools: [python]}]"), None))
    (found,) = [finding for finding in findings if "sandboxes" in finding.message]
    assert found.grade == grade and text in found.message
    assert problem is None or found.remedy == "install bubblewrap"
