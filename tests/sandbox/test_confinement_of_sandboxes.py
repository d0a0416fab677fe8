"""How sandboxes are confined on different machines: control groups, gateways that are not root's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from gateway.errors import Unavailable
from gateway.sandbox import bubblewrap, cgroups, sandboxed_command
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_statistics import STATISTICS
from gateway.types import Outcome
from tests.sandbox.conftest import SMALL, call, open_session
from tests.waiting import PATIENCE_S

ATTACKS_OF_UNPRIVILEGED = """
import os, shutil, tempfile
from pathlib import Path
from gateway.sandbox import bubblewrap
place = tempfile.TemporaryDirectory(dir="/var/tmp")  # The checkout may be below a folder that is root's alone.
os.chmod(place.name, 0o755)
bubblewrap.MASKED_FILES = tuple(Path(shutil.copy(file, place.name)) for file in bubblewrap.MASKED_FILES)
import ctypes, json, select, subprocess, sys
from gateway.process.child_entry import HEADER, pack_header
from gateway.sandbox.provider import SCRIPTS
from gateway.sandbox.bubblewrap import Confined, SandboxSettings, find_problem, open_command_line
from tests.sandbox.attacks import ATTACKS
entry, script, _ = scripts = [shutil.copy(file, place.name) for file in SCRIPTS]
os.chown(place.name, 60600, 60600)
os.setgroups([]); os.setresgid(60600, 60600, 60600); os.setresuid(60600, 60600, 60600)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
os.chdir("/")
print(find_problem())
python = sys.argv[1]
command = (python, "-I", "-S", "-B", entry, f"{script}:serve")
with open_command_line(Confined(command, SandboxSettings(), scripts, is_first_process=True)) as line:
    with subprocess.Popen(line.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        def receive():
            return json.loads(server.stdout.read(HEADER.unpack(server.stdout.read(HEADER.size))[1]))
        receive()
        for name in sys.argv[2:]:
            command = [python, "-c", ATTACKS[name].code.format(secret="/secret")]
            request = {"do": "run", "command": command, "stdin": "", "timeout_s": 60, "output_bytes": 9999, "env": {}}
            body = json.dumps(request).encode()
            server.stdin.write(pack_header(1, body) + body)
            server.stdin.flush()
            done = receive()
            print("held" if done["status"] == 1 and ATTACKS[name].reason in done["stderr"] else f"{name}: {done}")
        first = os.pidfd_open(line.first_process)
        server.kill()
        print("ended" if select.select([first], [], [], 60)[0] else "alive")
"""
"""Becomes another user when all is imported, since our interpreter may be root's alone."""
SYSTEM_PYTHON = "/usr/bin/python3"
OWN_USER = (
    "signals the sandbox's first process", "limits the first process",
    "opens the pipes of the first process", "opens the memory of the first process",
    "opens the pipes of the server of commands", "opens the memory of the server of commands",
    "reads the first process's environment", "goes through the root of another process", "traces a process",
    "has capabilities",
)  # fmt: skip
"""Attacks on processes of ours inside, which are of the same user where the gateway is not root's."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason="our interpreter may be root's alone")
def test_programs_of_a_gateway_that_is_not_roots_cannot_open_its_processes() -> None:
    command = [sys.executable, "-c", ATTACKS_OF_UNPRIVILEGED, SYSTEM_PYTHON, *OWN_USER]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=root, check=False)
    assert done.stdout.splitlines() == ["None", *["held"] * len(OWN_USER), "ended"], done.stdout + done.stderr


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which control groups are mounted, if a test does so."""
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(cgroups, "find_parent", cgroups.find_parent.__wrapped__)
    return tmp_path


def mount_groups(groups: Path) -> Path:
    """The group whose controllers are passed on."""
    mount = groups / "fs"
    (mount / "user" / "gateway").mkdir(parents=True)
    (mount / "user" / "gateway" / "cgroup.subtree_control").write_text("")
    (mount / "user" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (groups / "mounts").write_text(f"30 1 0:26 / {mount} rw shared:4 - cgroup2 cgroup2 rw\n")
    (groups / "own").write_text("0::/user/gateway\n")
    return mount / "user"


def test_group_is_made_where_a_parent_passes_its_controllers_on(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = mount_groups(groups)
    monkeypatch.setattr(cgroups, "OPTIONAL", ("memory.swap.max",))
    group = cgroups.make_group(SandboxSettings(memory_mb=64, processes=10, cpus=0.5))
    folder = group.folder
    assert folder is not None and folder.parent == parent
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    assert texts == {"memory.max": str(64 * 2**20), "pids.max": "18", "cpu.max": "50000 100000"}
    (folder / "memory.events").write_text("oom 3\noom_kill 2\n")
    (folder / "pids.events").write_text("max 5\n")
    assert group.hits() == {"memory": 2, "processes": 5} and not group.ran_out_of_memory
    (folder / "memory.events").write_text("oom 0\noom_kill 2\n")  # By the machine, which had no memory left.
    assert group.hits() == {"memory": 0, "processes": 5} and group.ran_out_of_memory


@pytest.mark.parametrize("died", [False, True])
async def test_memory_that_the_machine_lacks_is_no_limit_that_the_policy_hit(
    died: bool, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mount_groups(groups)
    (folder / "memory.events").write_text("oom 0\noom_kill 0\n")
    monkeypatch.setattr(sandboxed_command, "make_group", lambda _: cgroups.Cgroup(folder))
    monkeypatch.setattr(sandboxed_command, "remove_group", lambda *_: True)
    (folder / "cgroup.procs").write_text("")
    async with open_session() as session:
        assert (await call(session, "shell", command="echo")).outcome is Outcome.OK
        (folder / "memory.events").write_text("oom 0\noom_kill 1\n")
        result = await call(session, "shell", command="kill -9 $PPID" if died else "echo")
        assert result.outcome is Outcome.UNKNOWN and "the machine has no memory left" in str(result.reason), result


async def test_secrets_of_the_environment_are_in_no_command_line() -> None:
    settings = SMALL.model_copy(update={"env": {"TOKEN": "s3cret-of-the-tool"}})
    async with open_session(settings) as session:
        code = (
            "import os, pathlib\nprint(os.environ['TOKEN'])\n"
            "print([p for p in pathlib.Path('/proc').glob('[0-9]*/cmdline') if b's3cret' in p.read_bytes()])"
        )
        assert (await call(session, "python", code=code)).text == "s3cret-of-the-tool\n[]"
        lines = [words for process in psutil.process_iter(["cmdline"]) for words in process.info["cmdline"] or ()]
    assert lines and not any("s3cret-of-the-tool" in line for line in lines)


async def test_variables_of_the_settings_do_not_decide_what_gives_rights_up(tmp_path: Path) -> None:
    ours = tmp_path / "bin"
    ours.mkdir()
    for name in ("mount", "setpriv"):
        (ours / name).write_text("#!/bin/sh\nid -u > /tmp/ran\n")
        (ours / name).chmod(0o755)
    env = {"PATH": f"{ours}:/usr/bin:/bin", "LD_PRELOAD": f"{ours}/none.so", "QUOTED": "a \"$(b)\" 'c'\n`d`"}
    settings = SMALL.model_copy(update={"env": env, "readable": (ours,)})
    async with open_session(settings) as session:
        code = "import os\nprint({name: os.environ[name] for name in " + repr([*env]) + "} == " + repr(env)
        code += ", os.path.exists('/tmp/ran'), [name for name in os.environ if name.startswith('MTRL')])"
        result = await call(session, "python", code=code)
    assert result.text.splitlines()[-1] == "True False []", result


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"BASH_FUNC_mount%%": "() { :; }"}, {"A": "x\0--share-net"}])
def test_variables_that_bubblewrap_or_a_shell_would_read_otherwise_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="a variable's"):
        SandboxSettings(env=env)
    confined = bubblewrap.Confined(("true",), SandboxSettings(), env={"A": "x\0--share-net"})
    with pytest.raises(OSError, match="zero byte"), bubblewrap.open_command_line(confined):
        pass


@pytest.mark.parametrize("setting", ["cpus", "processes"])
def test_limits_that_no_control_group_takes_are_refused(setting: str) -> None:
    with pytest.raises(ValidationError, match=setting):
        SandboxSettings.model_validate({setting: 0.001 if setting == "cpus" else 10**7})


async def test_missing_groups_are_warned_once_counted_and_may_be_refused(
    groups: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxed_command, "_warned", set())
    before = STATISTICS.without_group
    for _ in range(2):
        async with sandboxed_command.open_command(bubblewrap.Confined(("true",), SandboxSettings()), None):
            pass
    told = [record.getMessage() for record in caplog.records if "control groups cannot be written" in record.message]
    assert len(told) == 1 and STATISTICS.without_group == before + 2
    required = bubblewrap.Confined(("true",), SandboxSettings(control_groups="required"))
    with pytest.raises(Unavailable, match="control groups cannot be written, and `control_groups` is `required`"):
        async with sandboxed_command.open_command(required, None):
            pass
