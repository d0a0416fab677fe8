"""Harbor tasks in boxes: what their files say is done, and what cannot be is refused by its name and ends no run."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from gateway.config.models import Server
from gateway.errors import ConfigError, ConfigErrors, GatewayError
from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.sandbox.provider import BubblewrapProvider
from gateway.sandbox.roots import add_root, roots_folder
from gateway.tool_table import Source
from gateway.types import Task
from mtrl_plugins.harbor import task_file
from mtrl_plugins.harbor.boxes import TaskBoxes
from mtrl_plugins.harbor.harbor_toolset import END_STEP, HarborToolset
from mtrl_plugins.harbor.settings import HarborSettings
from mtrl_plugins.harbor.try_tasks import try_tasks
from tests.conftest import Write
from tests.live_server import live_server
from tests.plugins.harbor.harbor_runs import (
    PASSES,
    RIGHT,
    SAMPLES,
    SEPARATE,
    WRONG,
    Sample,
    make_settings,
    open_tasks,
    play,
    reward,
    step,
    write_task,
    write_turns,
)
from tests.sandbox.roots import export, make_tree
from tests.trainer.cli_data import RunCommand
from tests.trainer.policy_scripts import render_calls
from trainer.rollout.rollout import StopReason
from trainer.setup import load_data, make_gateway


def environment_of(folder: Path, **options: Any) -> HarborSettings:
    """The section of a run file."""
    found = HarborSettings.of(make_settings(folder, **options))
    assert isinstance(found, HarborSettings)
    return found


async def try_folder(folder: Path, **options: Any) -> str:
    """What the dry run says about the tasks of a folder."""
    settings = make_settings(folder, **options)
    async with make_gateway(settings) as gateway:
        try:
            return await environment_of(folder, **options).try_out(gateway, settings)
        except GatewayError as error:
            return str(error)


async def test_dry_run_plays_solutions_and_names_those_that_are_not_worth_one(tmp_path: Path) -> None:
    write_task(tmp_path, SAMPLES[0])
    write_task(tmp_path, Sample("steps", SAMPLES[6].config, {
        **SAMPLES[6].files, "steps/one/solution/solve.sh": "#!/bin/sh\necho 1 > /app/one\n",
        "steps/two/solution/solve.sh": "#!/bin/sh\necho 12 > /app/two\n"}))  # fmt: skip
    said = await try_folder(tmp_path)
    assert "2 tasks" in said and "the solutions of hello, steps are worth 1; shared tests of 2 tasks" in said
    write_task(tmp_path, Sample("wrong", files={"tests/test.sh": PASSES, "solution/solve.sh": "#!/bin/sh\nexit 3\n"}))
    said = await try_folder(tmp_path)
    assert said.startswith(f"{tmp_path}/wrong: its solution is worth {{'reward': 0.0}}; solve.sh: exit status 3")


BAD = {
    "no-instruction": ({"instruction.md": None}, r"no-instruction/instruction\.md: is missing"),
    "empty-instruction": ({"instruction.md": " \n"}, r"instruction\.md: is empty"),
    "broken-toml": ({"task.toml": "[environment\n"}, r"broken-toml/task\.toml(:\d+)?: is no TOML"),
    "no-toml": ({"task.toml": None}, r"no-toml/task\.toml: is missing"),
    "wrong-type": ({"task.toml": "[agent]\ntimeout_sec = 'soon'"}, "agent.timeout_sec: .*number"),
    "no-root": ({"task.toml": '[environment]\ndocker_image = "org/Image:1.2"'},
                r"environment\.docker_image: there is no root 'org-image-1\.2' of org/Image:1\.2(.|\n)*"
                r"docker pull org/Image:1\.2 && docker save org/Image:1\.2 -o org-image-1\.2\.tar && mtrl-gateway"),
    "dockerfile": ({"task.toml": "", "environment/Dockerfile": "FROM busybox"},
                   r"no root 'dockerfile' of .*Dockerfile(.|\n)*docker build -t dockerfile .*environment && docker"),
    "no-image": ({"task.toml": ""}, r"environment\.docker_image: there is no image, and no environment/Dockerfile"),
    "compose": ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml: a task has one box"),
    "gpus": ({"task.toml": "[environment]\ngpus = 1\n"}, r"environment\.gpus: 1: a box has no GPU"),
    "windows": ({"task.toml": '[environment]\nos = "Windows"\n'}, "environment.os: 'Windows': boxes are Linux"),
    "user": ({"task.toml": '[agent]\nuser = "agent"\n'}, "agent.user: 'agent': a box has one user"),
    "step-user": ({"task.toml": '[environment]\ndocker_image = "busybox"\n[[steps]]\nname = "a"\n'
                                '[steps.verifier]\nuser = 1000\n', "steps/a/instruction.md": "Do a."},
                  r"verifier\.user: the root 'busybox' has no user 1000"),
    "sidecar": ({"task.toml": 'artifacts = [{source = "/a", service = "db"}]\n'}, r"artifacts\.0\.service: 'db'"),
    "stdio": ({"task.toml": '[[environment.mcp_servers]]\nname = "s"\ntransport = "stdio"\ncommand = "x"\n'},
              r"environment\.mcp_servers\.0\.transport: 'stdio': a box starts no MCP server"),
    "host": ({"task.toml": '[environment]\ndocker_image = "busybox"\nnetwork_mode = "allowlist"\n'
                           'allowed_hosts = ["pypi.org", "example.com"]\n'},
             r"environment\.allowed_hosts: 'example\.com' is not among(.|\n)*network: \[\"example\.com\"\]"),
    "range": ({"task.toml": '[environment]\ndocker_image = "busybox"\nnetwork_mode = "allowlist"\n'
                            'allowed_hosts = ["10.0.0.0/8"]\n'}, r"environment\.allowed_hosts: cannot be kept to"),
    "secret": ({"task.toml": '[environment]\ndocker_image = "busybox"\nenv = {KEY = "${PATH}"}\n'},
               r"environment\.env: \$\{PATH\} is not known"),
    "artifact": ({"task.toml": 'artifacts = ["/tests/x"]\n[environment]\ndocker_image = "busybox"\n'
                               '[verifier]\nenvironment_mode = "separate"\n'}, "artifacts: .*would lie over"),
    "no-tests": ({"tests/test.sh": None}, r"verifier: no-tests/tests/test\.sh is missing"),
    "link": ({"instruction.md": Path("/etc/passwd")}, "instruction.md: is a link that leads out of the task"),
    "tests-link": ({"tests": Path("/etc")}, "tests: is a link that leads out of the task"),
    "solution-link": ({"solution": Path("/etc")}, "solution: is a link that leads out of the task"),
    "step-users": ({"task.toml": '[environment]\ndocker_image = "busybox"\n[[steps]]\nname = "a"\n[steps.agent]\n'
                                 'user = "alice"\n[[steps]]\nname = "b"\n', "steps/a/instruction.md": "Do a.",
                    "steps/b/instruction.md": "Do b."}, "agent.user: alice, root: the steps of a task have one user"),
    "step-link": ({"task.toml": '[environment]\ndocker_image = "busybox"\n[[steps]]\nname = "a"\n',
                   "steps/a/instruction.md": "Do a.", "steps/a/tests/stolen": Path("/etc")},
                  "steps/a/tests/stolen: is a link that leads out of the task"),
    "digits": ({"task.toml": f'[environment]\ndocker_image = "busybox"\nmemory = "{"1" * 400}G"\n'},
               r"environment\.memory_mb: .*integer"),
    "number": ({"task.toml": f"[agent]\ntimeout_sec = {'1' * 5000}\n"}, "task.toml: is no TOML"),
    "table": ({"task.toml": "[agnet]\ntimeout_sec = 1.0\n"}, "has no table 'agnet'"),
    "inner-table": ({"task.toml": '[[steps]]\nname = "a"\n[steps.verifer]\n'}, r"steps\.0: .* table 'verifer'"),
    "version": ({"task.toml": 'schema_version = "2.0"\n'}, r"schema_version: .*\^1"),
    "loop": ({"instruction.md": Path("instruction.md")}, r"instruction\.md: is missing"),
    "step-name": ({"task.toml": '[[steps]]\nname = "../hello"\n'}, r"steps\.0\.name"),
}  # fmt: skip


def spoil(folder: Path, name: str, files: dict[str, Any]) -> None:
    """Writes a task of which some files are changed, removed, or links."""
    task = write_task(folder, Sample(name, files={"tests/test.sh": PASSES}))
    for file, text in files.items():
        (task / file).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, Path) and (task / file).is_dir():
            shutil.rmtree(task / file)
        elif text is None or isinstance(text, Path):
            (task / file).unlink(missing_ok=True)
        if isinstance(text, Path):
            (task / file).symlink_to(text)
        elif text is not None:
            (task / file).write_text(text)


async def test_each_task_that_cannot_be_played_is_named_and_costs_only_its_own_rollouts(tmp_path: Path) -> None:
    for name, (files, _) in BAD.items():
        spoil(tmp_path, name, files)
    write_task(tmp_path, SAMPLES[0])
    options: dict[str, Any] = {"sandbox": {"network": ["pypi.org"]}}
    settings = environment_of(tmp_path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrl_plugins.harbor.try_tasks.SHOWN", 100)
        async with make_gateway(make_settings(tmp_path, **options)) as gateway:
            with pytest.raises(ConfigErrors) as caught:
                await try_tasks(settings, gateway)
    for name, (_, problem) in BAD.items():
        told = "\n".join(str(error) for error in caught.value.errors if f"{tmp_path}/{name}/" in str(error))
        assert re.search(problem, told), (name, told)
    assert f"{tmp_path}/hello" not in str(caught.value)
    async with open_tasks(tmp_path, **options) as runs:
        rollout, scored = await play(runs, "gpus", ["true"])
        assert (rollout.stop, scored) == (StopReason.TOOL_FAILED, None) and "a box has no GPU" in rollout.reason
        assert (await play(runs, "hello", [RIGHT]))[1] == 1.0


BROKEN_TESTS = {
    "hanging": "#!/bin/sh\nsleep 600\n",
    "nan": reward("echo nan"),
    "large": "#!/bin/sh\nhead -c 10000000 /dev/zero > /logs/verifier/reward.json\n",
    "silent": "#!/bin/sh\nexit 0\n",
}


async def test_tests_without_a_valid_reward_are_named_and_their_rollouts_not_scored(tmp_path: Path) -> None:
    for name, tests in BROKEN_TESTS.items():
        write_task(tmp_path, Sample(name, "[verifier]\ntimeout_sec = 2\n", {"tests/test.sh": tests}))
    said = await try_folder(tmp_path)
    for name in BROKEN_TESTS:
        assert f"/{name}: its solution got no valid reward: " in said
    async with open_tasks(tmp_path) as runs:
        for name in BROKEN_TESTS:
            rollout, scored = await play(runs, name, [RIGHT])
            assert (rollout.stop, scored) == (StopReason.DONE, None), rollout.reason
    async with open_tasks(tmp_path, missing=0.0) as runs:
        assert (await play(runs, "silent", [RIGHT]))[1] == 0.0


async def test_tests_that_hang_hold_the_dry_run_no_longer_than_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "[verifier]\ntimeout_sec = 1e9\n"
    write_task(tmp_path / "one", Sample("hanging", endless, {"tests/test.sh": BROKEN_TESTS["hanging"]}))
    settings = environment_of(tmp_path / "one")
    assert TaskBoxes(settings, settings.read("hanging")).grades[0].timeout_s == 3600.0
    monkeypatch.setattr("mtrl_plugins.harbor.try_tasks.TRY_S", 5.0)
    assert "hanging: its solution and tests took more than 5 seconds" in await try_folder(tmp_path / "one")
    monkeypatch.setattr("mtrl_plugins.harbor.try_tasks.TRY_S", 120.0)
    monkeypatch.setattr("mtrl_plugins.harbor.harbor_toolset.MOST_S", 1.0)
    collect = '[[verifier.collect]]\ncommand = "sleep 600"\ntimeout_sec = 1e9\n'
    sample = Sample("collected", f'artifacts = ["/app/answer"]\n{SEPARATE}{collect}', {"tests/test.sh": PASSES})
    write_task(tmp_path / "two", sample)
    assert (await try_folder(tmp_path / "two")).endswith("the solutions of collected are worth 1")


async def test_setup_of_a_later_step_that_fails_is_told_by_the_dry_run_and_too_slow_is_no_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtrl_plugins.harbor.harbor_toolset.SETUP_S", 5.0)
    for name, setup in (("broken", "exit 3\n"), ("slow", "sleep 600\n")):
        files = {**step("one", reward("echo 1")), **step("two", reward("echo 1"), **{"workdir/setup.sh": setup})}
        write_task(tmp_path, Sample(name, '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n', files))
    said = await try_folder(tmp_path)
    assert "worth {'reward': 0.5}: steps/two/workdir/setup.sh failed: exit status 3" in said
    assert "task slow: steps/two/workdir/setup.sh failed: stopped: it reached the time limit" in said
    async with open_tasks(tmp_path) as runs:
        rollout, scored = await play(runs, "slow", ["true", "true"])
    assert (rollout.stop, scored) == (StopReason.TOOL_FAILED, None), rollout.reason


def test_root_of_tests_is_not_replaced_by_another(tmp_path: Path) -> None:
    write_task(tmp_path, Sample("own", SEPARATE, {"tests/test.sh": PASSES, "tests/Dockerfile": "FROM busybox"}))
    settings = environment_of(tmp_path, sandbox={"root": "busybox"})
    with pytest.raises(ConfigError, match=r"there is no root 'own-tests' of (.|\n)*docker build -t own-tests"):
        TaskBoxes(settings, settings.read("own"))


def test_server_of_a_task_is_reached_by_a_host_that_is_named_in_full(tmp_path: Path) -> None:
    server = '[[environment.mcp_servers]]\nname = "s"\nurl = "http://x.example.com/mcp"\n'
    write_task(tmp_path, Sample("served", server, {"tests/test.sh": PASSES}))
    for hosts, is_allowed in (["*.example.com"], False), (["x.example.com"], True):
        settings = environment_of(tmp_path, mcp_hosts=hosts)
        with nullcontext() if is_allowed else pytest.raises(ConfigError, match=r"by its whole name(.|\n)*mcp_hosts"):
            boxes = TaskBoxes(settings, settings.read("served"))
            assert [box.network for box in boxes.policy_boxes + boxes.test_boxes] == ["loopback"] * 2, "it has sessions"
    settings = environment_of(tmp_path, sandbox={"network": ["x.example.com"]})
    with pytest.raises(ConfigError, match="mcp_hosts"):
        TaskBoxes(settings, settings.read("served"))


@pytest.mark.parametrize("option", [{"args": {"a": 1}}, {"start_s": 5.0}])
def test_settings_that_harbor_does_not_use_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    write_task(tmp_path, SAMPLES[0])
    with pytest.raises(ValueError, match="Extra inputs"):
        environment_of(tmp_path, **option)
    settings = environment_of(tmp_path)
    assert HarborSettings.model_validate(settings.model_dump()) == settings


async def test_root_that_is_no_linux_is_named(tmp_path: Path) -> None:
    folder = roots_folder() / "bare"
    (folder / "files").mkdir(parents=True)
    (folder / "image.json").write_text('{"env": {}, "workdir": "", "bytes": 0, "files": 0}')
    write_task(tmp_path, SAMPLES[0])
    said = await try_folder(tmp_path, roots={"busybox": "bare"})
    assert "hello: its root has no shell: No such file or directory: /bin/sh" in said


async def test_policy_cannot_plant_a_reward_end_steps_or_play_the_solution(tmp_path: Path) -> None:
    write_task(tmp_path, SAMPLES[0])
    async with open_tasks(tmp_path) as runs:
        rollout, scored = await play(runs, "hello", ["mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json"])
        assert scored == 0.0 and rollout.infos["counts"] == {"grade/planted": 1.0}, rollout.infos
        calls = [render_calls((name, {})) for name in ("harbor_solve", END_STEP)]
        rollout = await runs.run(*calls, "Done.")
    assert rollout.infos["harbor"]["rewards"] == {"reward": 0.0}
    assert [entry.outcomes[0].value for entry in rollout.ledger if entry.outcomes] == ["invalid", "invalid"]


async def test_each_step_is_a_chat_of_its_own_and_unreached_steps_are_worth_nothing(tmp_path: Path) -> None:
    tests = {**step("one", reward("echo 1")), **step("two", reward("echo 1"))}
    write_task(tmp_path, Sample("two", '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n', tests))
    async with open_tasks(tmp_path) as runs:
        whole = await runs.run(*write_turns(["echo x > file", "cat file"]))
        assert [ledger.messages[-1]["content"] for ledger in whole.ledgers] == ["Done.", "Done."]
        assert "Do one." in str(whole.ledgers[0].messages[0]) and "Do two." in str(whole.ledgers[1].messages[0])
        assert "x" in str(whole.ledgers[1].messages[2]["content"])
        assert whole.infos["harbor"]["rewards"] == {"reward": 1.0}
        limits = runs.limits.model_copy(update={"assistant_turns": 1})
        cut = await runs.run(*write_turns(["true", "true"]), limits=limits)
    assert cut.stop is StopReason.ASSISTANT_TURNS and cut.infos["harbor"]["rewards"] == {"reward": 0.5}


async def test_policy_that_spoils_the_next_step_gets_nothing_for_it(tmp_path: Path) -> None:
    for name, setup in (("blocked", {"workdir/given": "1"}), ("broken", {"workdir/setup.sh": "exit $(cat /app/code)"})):
        files = {**step("one", reward("echo 1")), **step("two", reward("echo 1"), **setup)}
        write_task(tmp_path, Sample(name, '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n', {
            **files, "task.toml.environment": 'workdir = "/app"\n'}))  # fmt: skip
    async with open_tasks(tmp_path) as runs:
        for name, command in (("broken", "echo 3 > /app/code"), ("blocked", "rm /bin/sh /bin/bash /bin/busybox")):
            (row,) = (number for number, task in enumerate(runs.tasks) if task.id == name)
            rollout = await runs.run(*write_turns([command, "true"]), row=row)
            assert not rollout.stop.is_infrastructure, (name, rollout.reason)
            assert rollout.infos["harbor"]["rewards"] == {"reward": 0.5 * (name == "broken")}, (name, rollout.infos)


async def test_time_of_a_task_ends_its_calls_and_what_is_there_is_graded(tmp_path: Path) -> None:
    write_task(tmp_path, Sample("short", "[agent]\ntimeout_sec = 1.0\n", {"tests/test.sh": PASSES}))
    async with open_tasks(tmp_path) as runs:
        slow = render_calls(("shell", {"command": f"{RIGHT}; sleep 600"}))
        rollout = await runs.run(slow, slow)
        assert rollout.stop is StopReason.TOOL_DONE and "The time for it is over" in str(rollout.ledger.messages[-1])
        assert rollout.infos["harbor"]["rewards"] == {"reward": 1.0}


ROOT_USERS = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\nchecker:x:7:7::/srv:/bin/sh\n"


def add_root_of_users(folder: Path) -> str:
    """A root with users, and files that some of them may not read."""
    tree = make_tree(folder / "tree")
    for name, text in {
        "etc/passwd": ROOT_USERS, "etc/group": "root:x:0:\nstaff:x:50:agent\n", "root/secret": "42\n",
        "home/agent/note": "mine\n", "app/shared": "ours\n", "app/key": "42\n",
    }.items():  # fmt: skip
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    rights = {"./root": (0o700, 0, 0), "./home/agent/note": (0o600, 1000, 1000), "./app/shared": (0o640, 0, 50),
              "./app/key": (0o400, 0, 0)}  # fmt: skip

    def own(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        if member.name in rights:
            member.mode, member.uid, member.gid = rights[member.name]
        return member

    with tarfile.open(folder / "users.tar", "w") as tar:
        tar.add(tree, ".", filter=own)
    return add_root("users", folder / "users.tar")[0].name


async def test_users_of_a_task_have_their_names_and_homes_and_read_nothing_that_the_image_keeps_from_them(
    tmp_path: Path,
) -> None:
    add_root_of_users(tmp_path)
    look = "echo $(whoami) $HOME $(cd; cat note) $(cat /app/shared); cat /root/secret /app/key 2> /dev/null"
    tests = """#!/bin/sh
[ "$(cat /app/answer)" = "agent /home/agent mine ours" ] && [ "$(whoami) $HOME" = "checker /srv" ] &&
[ "$(cat /root/secret)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt
"""
    config = f'artifacts = ["/app/answer"]\n[agent]\nuser = "agent"\n{SEPARATE}user = 7\n'
    write_task(tmp_path / "tasks", Sample("users", config, {"tests/test.sh": tests}, ((f"({look}) > /app/answer",),)))
    async with open_tasks(tmp_path / "tasks", roots={"busybox": "users"}) as runs:
        rollout, scored = await play(runs, "users", [f"({look}) > /app/answer; cat /app/answer"])
        assert scored == 1.0, rollout.ledger.messages
        assert "the solutions of users are worth 1" in await try_folder(tmp_path / "tasks", roots={"busybox": "users"})
    image = roots_folder() / "users/image.json"
    image.write_text(json.dumps({**json.loads(image.read_text()), "closed": None}))
    said = await try_folder(tmp_path / "tasks", roots={"busybox": "users"})
    assert "agent.user: the root 'users' does not say what its users may read: remove it, and add it again" in said


async def test_tests_with_an_image_of_their_own_see_of_the_policys_box_its_artifacts_alone(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tree / "tests").mkdir()
    (tree / "tests/test.sh").write_text(
        '#!/bin/sh\n[ "$(cat /app/answer)" = "$(cat /etc/expected)" ] && [ ! -e /etc/policy ]\n'
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    (tree / "etc/expected").write_text("42\n")
    add_root("checker", export(tree, tmp_path / "checker.tar"))
    config = f'artifacts = ["/app/answer"]\n{SEPARATE}[verifier.environment]\ndocker_image = "checker"\n'
    write_task(tmp_path / "tasks", Sample("own", config))
    async with open_tasks(tmp_path / "tasks") as runs:
        for command, reward in ((RIGHT, 1.0), (WRONG, 0.0), ("cp /etc/expected /app/answer", 0.0)):
            rollout, scored = await play(runs, "own", [f"{command}; touch /etc/policy; cat /etc/expected"])
            assert scored == reward, rollout
            assert "No such file" in str(rollout.ledger.messages), "the policy's root is another"
    assert "the solutions of own are worth 1" in await try_folder(tmp_path / "tasks")


async def test_box_has_what_the_task_says_and_no_more_than_the_run_file_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = '[verifier]\nnetwork_mode = "no-network"\n[environment]\n'
    config = (
        'docker_image = "busybox"\nmemory = "1G"\nstorage_mb = 8\ncpus = 0.5\nworkdir = "/srv"\n'
        'network_mode = "allowlist"\nallowed_hosts = ["a.pypi.org"]\nenv = {A = "${TOKEN}", B = "${NONE:-b}"}\n'
    )
    folder = write_task(tmp_path, Sample("boxed", files={"tests/test.sh": PASSES}))
    (folder / "task.toml").write_text(task + config)
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setenv("NONE", "hidden")
    settings = environment_of(tmp_path, sandbox={"network": ["*.pypi.org"]}, env=["TOKEN"])
    boxes = TaskBoxes(settings, settings.read("boxed"))
    (box,), (tests,) = boxes.policy_boxes, boxes.test_boxes
    assert (box.root, box.workdir, box.network) == ("busybox", "/srv", ("a.pypi.org",))
    assert (box.memory_mb, box.disk_mb, box.cpus) == (256, 8, 0.5) and box.env == {"A": "secret", "B": "b"}
    assert tests.network == "loopback" and boxes.grades[0].timeout_s == 600.0


async def test_policy_gets_the_tools_of_a_tasks_mcp_servers(tmp_path: Path) -> None:
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word} is 42"

    def shell(command: str) -> str:
        """Not the sandbox's."""
        return "other"

    tools = NativeToolset([FunctionTool(look_up), FunctionTool(shell)])
    with live_server(lambda: Gateway([Source("tools", tools)])) as served:
        host = served.url.removeprefix("http://")
        servers = f'[[environment.mcp_servers]]\nname = "words"\ntransport = "http"\nurl = "{served.url}/mcp"\n'
        write_task(tmp_path, Sample("served", servers, {"tests/test.sh": PASSES}))
        write_task(tmp_path, SAMPLES[0])
        said = await try_folder(tmp_path)
        assert f"'{host}' is not among the hosts of MCP servers" in said
        async with open_tasks(tmp_path, mcp_hosts=[host]) as runs:
            (row,) = (number for number, task in enumerate(runs.tasks) if task.id == "served")
            calls = [
                ("words_look_up", {"word": "it"}),
                ("words_shell", {"command": "x"}),
                ("shell", {"command": RIGHT}),
            ]
            rollout = await runs.run(*(render_calls(call) for call in calls), "Done.", row=row)
            assert rollout.infos["harbor"]["rewards"] == {"reward": 1.0}, rollout.reason
            answers = [message["content"] for message in rollout.ledger.messages if message["role"] == "tool"]
            assert answers == ["it is 42", "other", "[no output]"]
            async with runs.gateway.open(Task("hello")) as session:
                assert [spec.name for spec in session.specs] == ["shell"]


async def test_rollout_that_ends_while_its_server_is_silent_keeps_it_from_no_other(tmp_path: Path) -> None:
    async def connect(url: str) -> str:
        values = {"url": url, "transport": "http", "isolation": "session"}
        return (await toolset._connect("words", Server.model_validate(values))).status.state

    write_task(tmp_path, SAMPLES[0])
    with socket.create_server(("127.0.0.1", 0)) as silent, live_server(lambda: Gateway([])) as served:
        port = silent.getsockname()[1]
        with anyio.fail_after(60):
            async with HarborToolset(environment_of(tmp_path)) as toolset:
                async with anyio.create_task_group() as rollouts:
                    rollouts.start_soon(connect, f"http://127.0.0.1:{port}/mcp")
                    connection, _ = await to_thread.run_sync(silent.accept)
                    assert await connect(f"{served.url}/mcp") == "up"
                    rollouts.cancel_scope.cancel()
                connection.close()
                silent.close()
                with live_server(lambda: Gateway([]), Settings(port=port)) as later:
                    assert await connect(f"{later.url}/mcp") == "up"


def test_thousand_tasks_are_listed_without_reading_their_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1000):
        task = tmp_path / f"task-{number:04}"
        task.mkdir()
        (task / "task.toml").write_text("")
        (task / "instruction.md").write_text(f"Do {number}.")
    monkeypatch.setattr(task_file.tomllib, "loads", lambda text: pytest.fail("a task was parsed"))
    tasks = load_data(make_settings(tmp_path), "environment")
    assert len(tasks) == 1000 and tasks[7].messages[0]["content"] == "Do 7."


def test_folders_without_tasks_are_refused_by_name(tmp_path: Path) -> None:
    for folder, problem in ((tmp_path, "has no tasks"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=problem):
            load_data(make_settings(folder), "environment")
    with pytest.raises(ConfigError, match="no held-out tasks"):
        write_task(tmp_path, SAMPLES[0])
        load_data(make_settings(tmp_path), "environment:eval")


def test_held_out_tasks_are_those_of_another_folder(tmp_path: Path) -> None:
    write_task(tmp_path / "train", SAMPLES[0])
    write_task(tmp_path / "eval", SAMPLES[1])
    settings = make_settings(tmp_path / "train", held_out=tmp_path / "eval")
    assert settings.evaluation.data == "environment:eval"
    assert [task.id for task in load_data(settings, "environment:eval")] == ["workdir"]


RUN = """
model: {model}
environment: {{name: "harbor:tasks", sandbox: {{memory_mb: 256, disk_mb: 16}}}}
limits: {{turn_tokens: 8, rollout_tokens: 2000}}
"""


def test_tape_is_replayed_without_boxes(
    model: Path, run: RunCommand, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(Path("tasks"), SAMPLES[0])
    write("run.yaml", RUN.format(model=model))
    run("rollout", "--config", "run.yaml", "--out", "runs/x", "--n", "2", "--record", "--engine", "torch")
    monkeypatch.setattr(BubblewrapProvider, "start", lambda *_, **__: pytest.fail("a box was started"))
    assert "2 rollouts replayed, 0 of them differ" in run("replay", "runs/x").output
