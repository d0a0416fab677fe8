"""What runs in a sandbox may answer in place of its server: no answer breaks more than the sandbox."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from gateway.sandbox.cgroups import Cgroup
from gateway.sandbox.confined_process import ConfinedProcess, SandboxEnded
from gateway.sandbox.provider import LocalSandbox
from gateway.sandbox.sandbox_settings import SandboxSettings

VALUES = ([], {}, 3, None, True, "x", ["!"], [5], {"a": 1}, "\ud800", 1e300)
NAMES = ("stdout", "stderr", "stopped", "status", "images", "lost", "error", "data")


class ForgedProcess:
    """A confined process that gives one answer."""

    def __init__(self, body: bytes) -> None:
        self.body, self.settings, self.group, self.alive = body, SandboxSettings(), Cgroup(), True

    async def ask(self, message: bytes, timeout_s: float) -> bytes:
        return self.body

    def take_refusals(self) -> tuple[str, ...]:
        return ()

    async def stop(self) -> None:
        self.alive = False


def forged(body: bytes) -> LocalSandbox:
    return LocalSandbox(cast("ConfinedProcess", ForgedProcess(body)))


async def ask_everything(body: bytes) -> None:
    """Makes each request of a sandbox; only the errors that tools expect may be raised."""
    requests: list[Any] = [
        lambda sandbox: sandbox.run(["true"], b"", 1.0),
        lambda sandbox: sandbox.run_python("1", 1.0),
        lambda sandbox: sandbox.put("a", b"1"),
        lambda sandbox: sandbox.get("a", 10),
    ]
    for request in requests:
        sandbox = forged(body)
        try:
            await request(sandbox)
        except SandboxEnded:
            assert not sandbox.alive
        except OSError:
            pass  # A text for the policy.


@pytest.mark.parametrize("name", NAMES)
async def test_values_of_wrong_types_end_the_sandbox_or_are_read_as_nothing(name: str) -> None:
    for value in VALUES:
        await ask_everything(json.dumps({name: value}).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
async def test_answers_that_are_no_object_end_the_sandbox(body: bytes) -> None:
    await ask_everything(body)
    with pytest.raises(SandboxEnded, match="cannot be read"):
        await forged(body).run_python("1", 1.0)


async def test_forged_output_and_images_keep_the_limits() -> None:
    most = SandboxSettings().output_bytes
    body = json.dumps({"stdout": "x" * (most + 5), "error": "y" * (most + 5), "images": ["QQ=="] * 100}).encode()
    done = await forged(body).run_python("1", 1.0)
    assert (len(done.stdout), len(done.stderr), len(done.images)) == (most, most, 8)
