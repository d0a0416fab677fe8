"""What a client of a server of sandboxes sends to reach its machine: all of it is refused, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from typer.testing import CliRunner

from gateway.cli import app
from gateway.types import Outcome
from mtrl_plugins.sandboxes.machines import PATH
from tests.plugins.sandboxes.conftest import TOKEN, Served
from tests.plugins.sandboxes.test_sandbox_providers import call, open_tools

LATE = {"timeout_s": 5, "answer_within_s": 10}
OUTSIDE = {
    "a port of the machine": {"network": ["127.0.0.1:22"]},
    "its name": {"network": ["localhost:22"]},
    "its port by version 6": {"network": ["[::1]:22"]},
    "an address within another": {"network": ["[::ffff:127.0.0.1]:22"]},
    "an address of its network": {"network": ["10.0.0.5"]},
    "the service of a cloud": {"network": ["169.254.169.254"]},
    "another port of an allowed host": {"network": ["pypi.org:22"]},
    "a host beside allowed ones": {"network": ["pypi.org", "evil.example"]},
    "more hosts than are allowed": {"network": ["*.org:8443"]},
    "a file of the machine": {"readable": ["/etc/shadow"]},
    "a folder of the machine": {"writable": ["/home"]},
    "a path with a zero byte": {"readable": ["/usr\0/etc"]},
    "another engine": {"container": {"image": "a", "engine": "sh -c 'touch /tmp/here'"}},
    "another server": {"remote": {"url": "http://127.0.0.1:22"}},
    "a zero byte in a value": {"env": {"A": "x\0--share-net"}},
    "a zero byte in a name": {"env": {"A\0--share-net": "x"}},
    "a function of the shell": {"env": {"BASH_FUNC_mount%%": "() { :; }"}},
    "no limit on the disk": {"disk_mb": 10**15},
    "no limit on memory": {"memory_mb": 10**15},
    "an unknown setting": {"privileged": True},
}
COMMANDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no command": ("run", {"command": []}, "422"),
    "neither command nor code": ("run", {}, "422"),
    "a command of no name": ("run", {"command": [""]}, "error"),
    "a command with a zero byte": ("run", {"command": ["echo\0", "a"]}, "error"),
    "an argument with a zero byte": ("run", {"command": ["echo", "a\0b"]}, "error"),
    "input that is no base64": ("run", {"command": ["cat"], "stdin": "?"}, "422"),
    "a run without end": ("run", {"command": ["cat"], "timeout_s": 1e9}, "422"),
    "a path with a zero byte": ("get", {"path": "/etc\0/passwd", "max_bytes": 10}, "error"),
    "a file of the machine": ("get", {"path": "/etc/passwd", "max_bytes": 10}, "error"),
    "a way out of the folder": ("get", {"path": "../../../etc/passwd", "max_bytes": 10}, "error"),
    "a file of the system": ("put", {"path": "/usr/bin/env", "data": ""}, "error"),
    "a new name with a zero byte": ("put", {"path": "a\0b", "data": ""}, "error"),
    "a part before the file": ("get", {"path": "a", "max_bytes": 10, "offset": -1}, "422"),
}


def client(served: Served) -> httpx2.AsyncClient:
    remote = served[0].remote
    assert remote is not None
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    return httpx2.AsyncClient(base_url=remote.url, headers=headers, timeout=60, trust_env=False)


async def test_client_starts_no_sandbox_with_what_is_outside_and_reaches_nothing_by_commands(server: Served) -> None:
    async with client(server) as http:
        for name, settings in OUTSIDE.items():
            answer = await http.post(PATH, content=json.dumps({"settings": settings}))
            assert answer.status_code == 422 and answer.json()["error"]["message"], (name, answer.text)
        assert (await http.get(PATH)).json()["running"] == 0
        place = (await http.post(PATH, content=b"{}")).json()["id"]
        for name, (verb, body, wanted) in COMMANDS.items():
            answer = await http.post(f"{PATH}/{place}/{verb}", content=json.dumps(LATE | body))
            found = str(answer.status_code) if answer.status_code != 200 else next(iter(answer.json()))
            assert found == wanted, (name, answer.text)
        done = await http.post(f"{PATH}/{place}/run", content=json.dumps(LATE | {"command": ["echo", "alive"]}))
        assert done.json()["stdout"] == "alive\n"
        await http.delete(f"{PATH}/{place}")


async def test_hosts_that_the_server_allows_may_be_listed_and_others_are_told(server: Served) -> None:
    allowed = ("pypi.org", "pypi.org:443", "a.example.org:8443", "*.b.example.org:8443", "10.0.0.5:8080")
    async with open_tools(server[0].model_copy(update={"network": allowed})) as session:
        assert (await call(session, "python", code="1")).text == "1"
    async with open_tools(server[0].model_copy(update={"network": ("pypi.org", "127.0.0.1:22")})) as session:
        refused = await call(session, "python", code="1")
    assert refused.outcome is Outcome.UNAVAILABLE
    problem = (
        "does not allow hosts that `network` lists: 127.0.0.1:22. Start `mtrl-gateway sandboxes` with `--allow-host"
    )
    assert problem in str(refused.reason), "the remedy reaches the client"


def test_mistake_in_an_allowed_host_is_told_with_its_option() -> None:
    done = CliRunner().invoke(app, ["sandboxes", "--port", "0", "--allow-host", "http://pypi.org"])
    assert done.exit_code == 2 and "--allow-host: " in done.output and "write names such as `pypi.org`" in done.output
