"""Agents in boxes: what they see and reach, what is graded, and that nothing of them is left."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import psutil
import pytest
from pydantic import ValidationError

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.native.class_environment import ClassEnvironment, ClassEnvironmentToolset
from gateway.sandbox import cgroups, choose_provider
from gateway.tool_table import Source
from mtrl_plugins.agents import endpoint
from mtrl_plugins.agents.agent_host import AgentHost
from mtrl_plugins.agents.agent_session import AgentSession, RolloutIdentity
from mtrl_plugins.agents.settings import AgentSettings
from tests.plugins.agents.agent_harness import TASK, open_agents
from tests.plugins.agents.test_agent_rollouts import ASK, DAEMONS, WALL_S, play, program
from tests.sandbox.roots import make_root
from tests.waiting import PATIENCE_S, wait_until
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.task import Task
from trainer.train.settings import TrainSettings

ROOT = Path(__file__).parents[3]
WGET = (
    'wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json"'
    """ --post-data '{"messages": [{"role": "user", "content": "x"}]}' $OPENAI_BASE_URL/chat/completions"""
)
RUN_SCRIPT = """
import sys, anyio
from tests.plugins.agents.agent_harness import open_agents

async def main():
    async with open_agents(["It is 7."], command=(sys.executable, "-c", sys.argv[1])) as harness:
        await harness.run()

anyio.run(main)
"""


def find_marked(marker: str) -> list[int]:
    """The processes of this machine whose command line has the marker."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or ()
        if any(marker in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


async def test_agent_sees_its_task_and_its_endpoint_and_nothing_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("ours")
    code = f"""
places = {[str(tmp_path / "secret"), "/etc/passwd", "/home", str(ROOT / "README.md")]!r}
print(json.dumps([ask("x"), [place for place in places if os.path.exists(place)], os.getcwd()]))
print(json.load(open(os.environ["TASK"]))["prompt"], {{name for name in os.environ if "MTRL" in name}})
"""
    rollout = await play(code, env={"TASK": "{task_file}"})
    assert (rollout.stop, rollout.infos["agent_exit"]) == (StopReason.DONE, 0), rollout.infos
    seen, task = rollout.infos["agent_output"].splitlines()
    assert json.loads(seen) == ["It is 7.", [], "/rollout"]
    assert task == "What is 3 + 4? {'MTRL_MCP_URL'}"


async def test_file_that_a_prompt_names_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("ours")
    (tmp_path / "notes").write_text("for the agent")
    code = "ask('x'); print([os.path.exists(path) for path in sys.argv[1:]])"
    task = Task("t", ({"role": "user", "content": str(tmp_path / "secret")},))
    async with open_agents(["yes"], command=(*program(code), "{prompt}", str(tmp_path / "notes"))) as harness:
        rollout = await harness.run(task)
    assert rollout.infos["agent_output"].strip() == "[False, True]"


async def test_key_of_another_session_opens_nothing_in_a_box() -> None:
    code = """
import urllib.error
def status(path, key, body=None):
    url = os.environ["ANTHROPIC_BASE_URL"].partition("/sessions")[0] + path
    request = urllib.request.Request(url, body, {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    try: return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error: return error.code
other, key, run_key, port = sys.argv[1:]
own, mine = os.environ["ANTHROPIC_BASE_URL"].rpartition("/")[2], os.environ["OPENAI_API_KEY"]
tried = [status(f"/sessions/{own}/v1/models", mine), status(f"/sessions/{other}/v1/models", key),
         status(f"/sessions/{own}/../{other}/v1/models", key), status("/sessions", run_key, b"{}"),
         status("/v1/models", run_key), status(f"/sessions/{own}/reward", mine, b'{"reward": 1}')]
ask("x")
try: urllib.request.urlopen(f"http://127.0.0.1:{port}/")
except OSError as error: tried.append(str(error))
print(json.dumps(tried))
"""
    settings = AgentSettings(command=("x",), sandbox="none")
    async with open_agents(["It is 7."], command=program(code)) as harness:
        other = AgentSession(harness.runner, settings, RolloutIdentity("other", "group"))
        with harness.host.open(other):
            port = harness.host.endpoint.url.rpartition(":")[2]
            words = (*program(code), other.id, other.api_key, harness.host.run_key, port)
            harness.host.settings = harness.host.settings.model_copy(update={"command": words})
            rollout = await harness.run()
    tried = json.loads(rollout.infos["agent_output"])
    assert tried[:6] == [200, 404, 404, 404, 404, 401] and "refused" in tried[6]
    assert "agent" not in rollout.rewards


async def test_box_that_opens_connections_without_end_has_a_few_and_goes_on_with_others() -> None:
    code = """
import select, socket
place = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
sockets = [socket.create_connection((place.hostname, place.port)) for _ in range(100)]
while len(closed := select.select(sockets, [], [], 20)[0]) < 36: pass
print(len(closed), {each.recv(1) for each in closed})
for each in sockets: each.close()
for _ in range(100):
    try: print(ask("x")); break
    except OSError: pass  # The endpoint has not seen yet that they are closed.
"""
    rollout = await play(code)
    assert rollout.infos["agent_output"].splitlines() == ["36 {b''}", "It is 7."], rollout


@pytest.mark.parametrize("path", ["v1/chat/completions", "mcp"])
async def test_box_with_too_many_bytes_under_way_is_refused_until_some_are_answered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "BOX_BYTES", 200_000)
    code = f"""
import select, socket
place = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
def send(path, body):
    opened = socket.create_connection((place.hostname, place.port), timeout=20)
    head = f"POST {{place.path.removesuffix('v1')}}{{path}} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 100001\\r\\n"
    head += "Content-Type: application/json\\r\\nAccept: application/json, text/event-stream\\r\\n"
    head += "Connection: close\\r\\nAuthorization: Bearer " + os.environ["OPENAI_API_KEY"] + "\\r\\n\\r\\n"
    opened.sendall(head.encode() + body)
    return opened
sockets = [send("{path}", b" " * 100_000) for _ in range(3)]
answered = select.select(sockets, [], [], 20)[0]
print(answered[0].recv(12))
for each in sockets: each.close()
body = json.dumps({{"messages": [{{"role": "user", "content": "x"}}]}}).encode().ljust(100_001)
for _ in range(100):
    status = send("v1/chat/completions", body).recv(12)
    if status.endswith(b"200"): break  # Until the endpoint has seen that the others are closed.
print(status)
"""
    rollout = await play(code)
    assert rollout.infos["agent_output"].splitlines() == ["b'HTTP/1.1 503'", "b'HTTP/1.1 200'"], rollout


@contextmanager
def web_server() -> Iterator[int]:
    """A server of the machine, at another address than the endpoint's."""
    with ThreadingHTTPServer(("127.0.0.2", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


async def test_agent_reaches_the_hosts_of_its_list_and_no_others() -> None:
    code = """
ask("x")
for port in sys.argv[1:]:
    try: print(urllib.request.urlopen(f"http://127.0.0.2:{port}/").status)
    except OSError as error: print(type(error).__name__)
"""
    with web_server() as port, web_server() as other:
        command = (*program(code), str(port), str(other))
        for network, seen in (([f"127.0.0.2:{port}"], ["200", "HTTPError"]), ("loopback", ["URLError", "URLError"])):
            async with open_agents(["It is 7."], command=command, sandbox={"network": network}) as harness:
                rollout = await harness.run()
            assert rollout.infos["agent_output"].split() == seen, rollout.infos


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "limited by process"])
async def test_agent_may_reserve_more_memory_than_it_may_write_and_fails_by_itself_when_it_takes_too_much(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not counts:
        monkeypatch.setattr(cgroups, "find_parent", lambda: None)
    reserves = "import mmap; mmap.mmap(-1, 2**35, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0); ask('x')"
    assert (await play(reserves, sandbox={"memory_mb": 256})).stop is StopReason.DONE
    rollout = await play("ask('x'); data = bytearray(b'x' * 2**30)", sandbox={"memory_mb": 256})
    assert rollout.stop is StopReason.AGENT_FAILED and "emory" in rollout.reason


async def test_agent_whose_memory_shall_all_be_counted_is_not_started_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "find_parent", lambda: None)
    rollout = await play("ask('x')", sandbox={"control_groups": "required"})
    assert rollout.stop is StopReason.TOOL_FAILED and "`control_groups` is `required`" in rollout.reason


async def test_nothing_is_left_in_or_of_a_box_when_the_trainer_is_killed(tmp_path: Path) -> None:
    marker = token_hex(8)
    code = f"{ASK}\n{DAEMONS}\nimport time  #{marker}\nask('x')\ntime.sleep(600)"
    code = code.replace('time.sleep(600)"]', f'time.sleep(600) #{marker}"]')
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    trainer = await anyio.open_process(
        [sys.executable, "-c", RUN_SCRIPT, code], stdin=None, stderr=None, cwd=ROOT, env=env
    )
    with anyio.fail_after(3 * PATIENCE_S):
        await wait_until(lambda: len(find_marked(marker)) >= 5)  # The trainer, the agent, and three that it started.
        os.kill(trainer.pid, signal.SIGKILL)
        await trainer.wait()
        await wait_until(lambda: not find_marked(marker) and not [*tmp_path.glob("mtrl-agent-*")])
    await trainer.aclose()


CHECK = '[ "$(cat answer.txt)" = 7 ] && echo 1 > logs/reward.txt || echo 0.25 > logs/reward.txt'


def make_grade(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    (tmp_path / "check.sh").write_text(CHECK)
    return {
        "command": ["sh", "check/check.sh"], "files": {"/rollout/check/check.sh": str(tmp_path / "check.sh")},
        "reward": "/rollout/logs", "artifacts": ["/rollout/answer.txt"], **settings,
    }  # fmt: skip


async def test_what_an_agent_leaves_in_its_box_is_graded(tmp_path: Path) -> None:
    writes = "ask('x'); open('answer.txt', 'w').write(sys.argv[1])"
    plants = "import os; os.mkdir('logs'); open('logs/reward.txt', 'w').write('1')"
    for code, answer, reward, planted in ((writes, "7", 1.0, 0.0), (f"{writes}; {plants}", "8", 0.25, 1.0)):
        command, grade = (*program(code), answer), make_grade(tmp_path)
        async with open_agents(["It is 7."], command=command, grade=grade) as harness:
            rollout = await harness.run()
        assert (rollout.stop, dict(rollout.rewards)) == (StopReason.DONE, {"grade": reward}), rollout
        assert rollout.infos["counts"] == {"grade/planted": planted} and rollout.infos["agent_grade"] == ""


async def test_agent_that_goes_on_after_its_last_turn_is_graded_by_what_it_left(tmp_path: Path) -> None:
    code = "open('answer.txt', 'w').write('7')\nwhile True:\n try: ask('x')\n except OSError: pass"
    limits = RolloutLimits(assistant_turns=1)
    rollout = await play(code, limits=limits, stop_s=0.3, grade=make_grade(tmp_path))
    assert (rollout.stop, dict(rollout.rewards)) == (StopReason.ASSISTANT_TURNS, {"grade": 1.0}), rollout


class Hanging:
    """An environment whose reward never comes."""

    def reset(self) -> None: ...

    async def look(self) -> str:
        """Looks."""
        return ""

    async def get_reward(self) -> float:
        await anyio.sleep_forever()
        return 1.0


@pytest.mark.parametrize("kind", ["unconfined", "graded"])
async def test_time_limit_holds_for_the_rewards_of_tools_after_the_agent_has_ended(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sandbox": "none"} if kind == "unconfined" else {"grade": make_grade(tmp_path)}
    for wall_s in WALL_S:
        gateway = Gateway([Source("tools", ClassEnvironmentToolset(ClassEnvironment(Hanging, {})))])
        limits, command = RolloutLimits(timeout_s=wall_s), program("ask('x'); open('answer.txt', 'w').write('7')")
        async with open_agents(["It is 7."], gateway=gateway, limits=limits, command=command, **settings) as harness:
            rollout = await harness.run()
        if "agent_exit" in rollout.infos:
            break
    assert (rollout.stop, rollout.infos["agent_exit"]) == (StopReason.WALL_TIME, 0), rollout
    assert rollout.infos.get("agent_grade") == ("" if kind == "graded" else None)


async def test_agent_works_in_the_root_that_its_row_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(tmp_path, monkeypatch)
    (tmp_path / "check.sh").write_text("grep -q agent /etc/motd && echo 1 > /logs/verifier/reward.txt")
    grade = {"command": ["sh", "/tests/check.sh"], "files": {"/tests/check.sh": str(tmp_path / "check.sh")}}
    sandbox = {"root_column": "image"}
    command = ("sh", "-c", f"cat notes; cat /etc/motd; {WGET} && echo the agent > /etc/motd")
    options: dict[str, Any] = {"command": command, "sandbox": sandbox, "files": {"notes": "{folder}\n"}}
    task = Task("t", TASK.messages, columns={"image": root})
    async with open_agents(["It is 7."], **options, grade={**grade, "mode": "same"}) as harness:
        rollout = await harness.run(task)
        assert rollout.stop is StopReason.DONE, rollout
        assert rollout.infos["agent_output"].split()[:2] == ["/rollout", "hello"]
        assert rollout.rewards == {"grade": 1.0}
        lost = await harness.run(Task("t", TASK.messages, columns={"image": "../busybox"}))
        assert lost.stop is StopReason.AGENT_FAILED and "there is no root" in lost.reason
    [mistake] = AgentSettings(**options).find_mistakes([task, Task("u", TASK.messages, columns={"image": "none"})])
    assert "the task 'u' names its root in `image`: there is no root 'none'" in str(mistake)


def test_program_that_is_not_seen_inside_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_root(tmp_path, monkeypatch)
    script = tmp_path / "agent"
    script.write_text("#!/usr/bin/env no-such-interpreter\n")
    script.chmod(0o755)
    in_root, run = {"root": root}, TrainSettings(model="mine", data="tasks.jsonl")
    for command, sandbox, problem in (
        ("no-such-agent", None, "there is no program 'no-such-agent'"),
        (str(script), None, f"there is no program 'no-such-interpreter', which {script} needs"),
        ("perl", in_root, "the root 'busybox' has no program '/usr/bin/perl'"),
        ("no-such-agent", in_root, "the root 'busybox' has no program 'no-such-agent'"),
        (" ", None, "has no words"),
    ):
        with pytest.raises(ConfigError, match=problem):
            AgentSettings.model_validate({"command": command, "sandbox": sandbox}).make_player(run)
    AgentSettings.model_validate({"command": "sh -c true", "sandbox": in_root}).make_player(run)


def test_agents_are_not_confined_without_bubblewrap_which_is_said_and_refused_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    problem = "bwrap is not installed\n  remedy: install bubblewrap"
    monkeypatch.setattr(choose_provider, "find_problem", lambda: problem)
    with caplog.at_level(logging.WARNING):
        assert AgentHost(AgentSettings(command=("sh",))).box is None
    assert "as your user, with your files" in caplog.text and "install bubblewrap" in caplog.text
    for settings in ({"sandbox": {}}, {"grade": make_grade(tmp_path)}):
        with pytest.raises(ConfigError, match="bwrap is not installed"):
            AgentHost(AgentSettings.model_validate({"command": ["sh"], **settings}))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        AgentHost(AgentSettings(command=("sh",), sandbox="none"))
    assert "`agent.sandbox: none`" in caplog.text and "as your user" in caplog.text


def test_folder_that_is_too_large_for_a_box_is_refused_at_the_start(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(41 * 2**20)
    settings = {"command": program(""), "cwd": tmp_path}
    with pytest.raises(ConfigError, match=r"more than 40 MB.*\n.*agent\.sandbox\.readable"):
        AgentHost(AgentSettings(**settings))
    AgentHost(AgentSettings(**settings, sandbox="none"))


def test_file_of_a_grade_that_is_not_there_is_told_at_the_start(tmp_path: Path) -> None:
    grade = make_grade(tmp_path, files={"/rollout/check.sh": str(tmp_path / "none.sh")})
    with pytest.raises(ConfigError, match=r"agent\.grade\.files(.|\n)*there is no .*none\.sh"):
        AgentHost(AgentSettings.model_validate({"command": ["sh"], "grade": grade}))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sandbox": {"network": "none"}}, "loopback"),
        ({"sandbox": {"container": {"image": "x"}}}, "do not run in a `container`"),
        ({"sandbox": "none", "grade": {"command": ["true"], "reward": "/rollout/x"}}, "remove `sandbox: none`"),
        ({"grade": {"command": ["true"]}}, "since only `/rollout` of this sandbox"),
        ({"command": None, "external": True, "sandbox": {}}, "is for a `command`"),
    ],
)
def test_boxes_that_cannot_be_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        AgentSettings.model_validate({"command": ["sh"], **settings})
