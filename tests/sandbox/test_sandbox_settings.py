"""Settings that no sandbox can have, or that would open it, are refused when files are loaded, with line and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from tests.conftest import Write

CONTAINER = {"image": "an-image"}
PATHS = ("/", "/proc", "/proc/1/root", "/sys", "/dev", "/dev/null", "/rollout", "/tmp", "/dev/shm", "/run", "/tmp/../")


def load(write: Write, settings: dict[str, Any]) -> str:
    """The error of an entry with the settings, which begin in line 3."""
    file = write("tools.yaml", f"tools:\n  - sandbox_tools: [shell]\n    sandbox: {json.dumps(settings)}\n")
    with pytest.raises(ConfigError) as caught:
        Gateway.load(file, None)
    return str(caught.value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["readable", "writable"])
def test_paths_that_cover_what_a_sandbox_has_are_refused(name: str, path: str, write: Write) -> None:
    told = load(write, {name: ["data", path]})
    assert (
        f"tools.yaml:3: tools[0].sandbox.{name}: {Path(path)}: it " in told and "remedy: name the folder in it" in told
    )


def test_paths_lead_nowhere_else_by_links_or_from_the_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    up = "../" * len(tmp_path.parents)
    assert "link: it covers /proc" in load(write, {"writable": ["link"]})
    assert "it covers /proc" in load(write, {"readable": [up]})
    server = {"command": "cat", "isolation": "sandbox", "sandbox": {"writable": [up]}}
    with pytest.raises(ConfigError, match=r"servers.json:1: mcpServers.s.sandbox.writable: .* it covers /proc"):
        Gateway.load(None, write("servers.json", json.dumps({"mcpServers": {"s": server}})))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"readable": ["a\0b"]}, "a path has a zero byte"),
        ({"env": {"A": "x\0y"}}, "a variable's value has a zero byte or half a character: A"),
        ({"env": {"A-B": "x"}}, "a variable's name has other characters than letters, digits and `_`: 'A-B'"),
        ({"container": {**CONTAINER, "engine": ""}}, "`engine` is no command"),
        ({"container": {**CONTAINER, "engine": "podman 'a"}}, "`engine` cannot be read as a command: No closing quot"),
        ({"container": {**CONTAINER, "engine": "pod\0man"}}, "`engine` is no command"),
        ({"container": {"image": ""}}, "either an `image` or a `root`"),
        ({"container": CONTAINER, "readable": ["/data:/etc"]}, "/data:/etc: it has a `:`"),
        ({"network": ["http://pypi.org"]}, "write names such as `pypi.org`"),
        ({"network": ["pypi.org:99999"]}, "write names such as `pypi.org`"),
        ({"writable": ["/usr"]}, "tools[0].sandbox.writable: /usr: it "),
        ({"disk_mb": 10**15}, "disk_mb"),
        ({"memory_mb": 10**15}, "memory_mb"),
        ({"files": 10**20}, "files"),
        ({"cpus": 1e12}, "cpus"),
        ({"cpu_s": 10**20}, "cpu_s"),
    ],
)
def test_settings_that_no_sandbox_can_have_are_refused(settings: dict[str, Any], problem: str, write: Write) -> None:
    told = load(write, settings)
    assert "tools.yaml:3: " in told and problem in told and "remedy: " in told


def test_variables_of_a_sandboxed_server_that_no_shell_passes_on_are_refused(write: Write) -> None:
    write("more.env", "npm.config=1\n")
    server = {"command": "cat", "isolation": "sandbox"}
    for more, place in (({"env": {"npm.config": "1"}}, "s"), ({"envFile": "more.env"}, "s.envFile")):
        file = write("servers.json", json.dumps({"mcpServers": {"s": server | more}}))
        with pytest.raises(ConfigError) as caught:
            Gateway.load(None, file)
        assert f"servers.json:1: mcpServers.{place}: a variable's name" in str(caught.value)
        assert "'npm.config'" in str(caught.value)
        file = write("servers.json", json.dumps({"mcpServers": {"s": server | more | {"isolation": "process"}}}))
        assert Gateway.load(None, file)
        tools = write("tools.yaml", "tools: [{server: s, isolation: sandbox}]")
        with pytest.raises(ConfigError, match="server 's': a variable's name has other characters"):
            Gateway.load(tools, file)
