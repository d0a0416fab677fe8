"""No attempt to get out of a sandbox succeeds, each ends with its reason, and outside of one it would succeed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.sandbox import cgroups, sandboxed_command
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.toolset import Session
from gateway.types import Outcome
from tests.sandbox.attacks import ATTACKS, MEMORY_AND_PROCESSES, NETWORK, PRIVILEGES, TIME, UNCOUNTED, Attack
from tests.sandbox.conftest import SMALL, call, open_session
from tests.sandbox.roots import make_root
from tests.waiting import PATIENCE_S

CALL_S, SHORT_S = 50.0, 6.0
OWN_SYSTEM = {
    "makes a hard link to a program", "writes among the system's programs", "writes to the root",
    "runs a program as its owner",
}  # fmt: skip
"""Attacks on the machine's programs, which a box with a root has not: it may change its own, in memory."""
OWN_LOOPBACK = {"opens an IPv6 socket", "opens a datagram socket", "asks the kernel for interfaces"}
"""What a box with a loopback interface may do, as an agent's has, by which it reaches nothing else."""
LOOPBACK_REASONS = {
    "connects to a port of the machine": "Connection refused",
    "opens a raw socket": "Protocol not supported",
}
OUTSIDE = [name for name, attack in ATTACKS.items() if attack.runs_outside]


@pytest.fixture(scope="module")
async def victim(targets: Mapping[str, Any], anyio_backend: str) -> AsyncIterator[Session]:
    """Another rollout, with a file and a process."""
    async with open_session() as session:
        command = f"echo secret > {targets['victim_file']}; sleep 600 & exec -a {targets['marker']} sleep 600 &"
        await call(session, "shell", command=command)
        yield session


@pytest.fixture(scope="module")
async def attacker(victim: Session) -> AsyncIterator[Session]:
    async with open_session() as session:
        yield session


@pytest.fixture(scope="module")
async def attacker_with_loopback(anyio_backend: str) -> AsyncIterator[Session]:
    async with open_session(SMALL.model_copy(update={"network": "loopback"})) as session:
        yield session


@pytest.fixture(scope="module")
async def attacker_without_groups(anyio_backend: str) -> AsyncIterator[Session]:
    """A rollout on a machine where control groups cannot be made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cgroups, "find_parent", lambda: None)
        async with open_session() as session:
            yield session


@pytest.fixture(scope="module")
def settings_with_a_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxSettings]:
    with pytest.MonkeyPatch.context() as patch:
        yield SMALL.model_copy(update={"root": make_root(tmp_path_factory.mktemp("roots"), patch)})


async def assert_fails(session: Session, attack: Attack, targets: Mapping[str, Any], within_s: float = CALL_S) -> None:
    result = await call(session, "python", within_s, code=attack.code.format(**targets))
    assert "SUCCEEDED" not in result.text
    assert result.outcome is Outcome.ERROR, result
    assert attack.reason in f"{result.reason} {result.text}", result


@pytest.mark.parametrize("name", ATTACKS)
async def test_attack_fails_with_its_reason(name: str, attacker: Session, targets: Mapping[str, Any]) -> None:
    await assert_fails(attacker, ATTACKS[name], targets, SHORT_S if name in TIME else CALL_S)


@pytest.mark.parametrize("name", [*MEMORY_AND_PROCESSES, *UNCOUNTED, "fills shared memory"])
async def test_attack_fails_where_there_are_no_control_groups(
    name: str, attacker_without_groups: Session, targets: Mapping[str, Any]
) -> None:
    await assert_fails(attacker_without_groups, (ATTACKS | UNCOUNTED)[name], targets)


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - OWN_SYSTEM))
async def test_attack_fails_in_a_box_with_a_root(
    name: str, settings_with_a_root: SandboxSettings, victim: Session, targets: Mapping[str, Any]
) -> None:
    async with open_session(settings_with_a_root) as session:  # Each its own: all of its folders share one disk.
        await assert_fails(session, ATTACKS[name], targets, SHORT_S if name in TIME else CALL_S)


@pytest.mark.parametrize("name", sorted((NETWORK | PRIVILEGES).keys() - OWN_LOOPBACK))
async def test_attack_fails_in_a_box_with_a_loopback_interface(
    name: str, attacker_with_loopback: Session, targets: Mapping[str, Any]
) -> None:
    attack = ATTACKS[name]
    reason = LOOPBACK_REASONS.get(name, attack.reason)
    await assert_fails(attacker_with_loopback, attack._replace(reason=reason), targets)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can do outside what some attacks do")
@pytest.mark.parametrize("name", OUTSIDE)
def test_attack_would_succeed_outside(name: str, victim: Session, targets: Mapping[str, Any], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ATTACKS[name].code.format(**targets)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        pass_fds=(targets["descriptor"],),
        check=False,
    )
    Path(targets["secret"]).write_text("secret")
    assert "SUCCEEDED" in done.stdout, done.stderr


async def test_after_all_attacks_the_other_rollout_is_as_it_was(victim: Session, targets: Mapping[str, Any]) -> None:
    result = await call(victim, "shell", command=f"cat {targets['victim_file']}; pgrep -fc {targets['marker']}")
    assert result.text.split() == ["secret", "1"]


async def test_no_sandbox_is_started_unconfined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxed_command, "find_problem", lambda: "bwrap is not installed\n  remedy: install it")
    async with open_session() as session:
        result = await call(session, "python", code="1")
    assert result.outcome is Outcome.UNAVAILABLE and "bwrap is not installed" in str(result.reason)
