"""Each protection of a sandbox is needed: without it, an attack does something else than end with its reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anyio
import pytest

from gateway.sandbox import bubblewrap, cgroups
from gateway.sandbox.provider import LocalSandbox
from gateway.types import Outcome, ToolCall
from tests.sandbox.attacks import ATTACKS
from tests.sandbox.conftest import open_session
from tests.waiting import PATIENCE_S

Remove = Callable[[pytest.MonkeyPatch], None]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="other gateways have options that exclude some of these")


def without_option(name: str, values: int = 0) -> Remove:
    """Removes an option of bubblewrap with its values."""

    def remove(patch: pytest.MonkeyPatch) -> None:
        options = bubblewrap._options

        def remaining(*arguments: Any) -> Iterator[str]:
            words = iter(options(*arguments))
            for word in words:
                if word != name:
                    yield word
                    continue
                for _ in range(values):
                    next(words)

        patch.setattr(bubblewrap, "_options", remaining)

    return remove


def with_paths_of_the_machine(patch: pytest.MonkeyPatch) -> None:
    mounts = bubblewrap._mounts
    more = ("--ro-bind", "/sys", "/sys", "--ro-bind", "/var/tmp", "/var/tmp", "--ro-bind", "/tmp", "/tmp")
    patch.setattr(bubblewrap, "_mounts", lambda confined: (*mounts(confined), *more))


def without_filter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bubblewrap, "has_filter", lambda: False)


def with_rights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bubblewrap, "_drop_rights", lambda confined: ())


def with_much_disk(patch: pytest.MonkeyPatch) -> None:
    mounts_file = bubblewrap._mounts_file
    patch.setattr(bubblewrap, "_mounts_file", lambda folders, disk_mb, files: mounts_file(folders, 64, 4000))


def with_many_processes(patch: pytest.MonkeyPatch) -> None:
    limits = bubblewrap._limits
    patch.setattr(cgroups, "find_parent", lambda: None)
    patch.setattr(bubblewrap, "_limits", lambda confined: (*list(limits(confined))[:3], "999", "unlimited"))


def with_much_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalSandbox, "_limits", lambda sandbox, timeout_s: {"timeout_s": timeout_s, "output_bytes": 2**24})


NEEDED: dict[str, tuple[Remove, tuple[str, ...]]] = {
    "a network of its own": (without_option("--unshare-net"), ("connects to an abstract socket",)),
    "numbers of processes of its own": (
        without_option("--unshare-pid"),
        ("signals the gateway", "reads the gateway's environment", "finds another rollout's process"),
    ),
    "memory of System V of its own": (without_option("--unshare-ipc"), ("attaches System V memory",)),
    "a root that is read-only": (without_option("--remount-ro", 1), ("writes to the root",)),
    "only paths that are named": (
        with_paths_of_the_machine,
        (
            "lists control groups", "leaves its control group", "reads a secret file", "writes the file of a reward",
            "follows a symbolic link", "makes a hard link", "lists a folder", "connects to a socket file",
        ),
    ),
    "a filter of system calls": (
        without_filter,
        (
            "traces its own child", "types into its terminal", "types into the console", "takes disk in no time",
            "opens an IPv6 socket", "asks the kernel for interfaces", "makes a user namespace", "calls io_uring_setup",
        ),
    ),
    "no rights": (with_rights, ("has capabilities", "becomes root", "mounts")),
    "limits on disk": (with_much_disk, ("fills its folder", "makes files without end")),
    "a limit on output": (with_much_output, ("prints without end",)),
    "limits on memory and processes": (with_many_processes, ("takes memory", "forks without end")),
}  # fmt: skip


@pytest.mark.parametrize("protection", NEEDED)
async def test_attacks_end_otherwise_without_a_protection(
    protection: str, targets: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, attacks = NEEDED[protection]
    async with open_session() as victim:
        with anyio.fail_after(PATIENCE_S):
            command = json.dumps({"command": f"exec -a {targets['marker']} sleep 600 &"})
            await victim.call(ToolCall("1", "shell", command))
        remove(monkeypatch)
        for name in attacks:
            code = json.dumps({"code": ATTACKS[name].code.format(**targets)})
            async with open_session() as session:
                with anyio.fail_after(PATIENCE_S):
                    result = await session.call(ToolCall("1", "python", code))
            ended = f"{result.reason} {result.text}"
            is_stopped = result.outcome is Outcome.ERROR and ATTACKS[name].reason in ended
            assert "SUCCEEDED" in result.text or not is_stopped, (name, ended)
