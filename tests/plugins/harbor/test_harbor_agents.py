"""Agents that are programs play Harbor tasks: each in the task's own box, with its instruction, time and tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.sandbox.roots import add_root
from gateway.tool_table import Source
from tests.live_server import live_server
from tests.plugins.harbor.harbor_runs import PASSES, RIGHT, SAMPLES, Sample, make_settings, open_agent, write_task
from tests.plugins.harbor.test_harbor_tasks import environment_of, try_folder
from tests.sandbox.roots import export, make_tree
from trainer.rollout.rollout import StopReason
from trainer.setup import make_gateway

ASK = (
    'ask() { wget -Y off -q -O /tmp/answer --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type:'
    ' application/json" --post-data "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}]}"'
    " $OPENAI_BASE_URL/chat/completions && cat /tmp/answer && echo; }\n"
)
"""Asks the policy, in a root that has only busybox."""


def agent(code: str, **settings: Any) -> dict[str, Any]:
    """An agent of a few lines."""
    return {"command": ["sh", "-c", ASK + code, "agent", "{prompt}"], **settings}


async def test_agent_gets_the_instruction_and_works_where_the_task_says_and_the_tests_give_the_reward(
    tmp_path: Path,
) -> None:
    sample = Sample("workdir", SAMPLES[1].config, {**SAMPLES[1].files, "instruction.md": "Greet."})
    write_task(tmp_path, sample)
    environment = r"tr '\0' '\n' < /proc/$$/environ"
    code = f'ask "$1" && {environment} | grep ^PWD= && cat "$FOLDER/notes" && echo "$GREETING" > answer; ls /app'
    played = agent(code, env={"FOLDER": "{folder}"}, files={"notes": "in {folder}\n"})
    async with open_agent(tmp_path, played, ["Hi."]) as runs:
        rollout, score = await runs.play("workdir")
    assert (rollout.stop, rollout.reason, score) == (StopReason.DONE, "", 1.0)
    assert rollout.infos["harbor"]["rewards"] == {"reward": 1.0} and rollout.infos["counts"] == {"grade/planted": 0.0}
    answer, where, notes, *left = rollout.infos["agent_output"].splitlines()[-4:]
    assert '"Hi."' in answer and (where, notes, left) == ("PWD=/app", "in /logs/agent", ["answer"])
    assert "Greet." in str(rollout.ledger.messages[0]["content"])


async def test_agent_whose_time_is_over_gets_sigterm_and_what_it_left_is_graded(tmp_path: Path) -> None:
    write_task(tmp_path, Sample("short", "[agent]\ntimeout_sec = 2.0\n", {"tests/test.sh": PASSES}))
    code = f"trap '{RIGHT}; exit' TERM; ask x; sleep 600 & wait"
    async with open_agent(tmp_path, agent(code), ["Hi."]) as runs:
        rollout, score = await runs.play("short")
    assert (rollout.stop, score) == (StopReason.DONE, 1.0), rollout
    assert rollout.infos["agent_failure"] == "the time that the task gives was over"


async def test_each_step_starts_the_agent_anew_in_the_box_that_it_left(tmp_path: Path) -> None:
    write_task(tmp_path, SAMPLES[6])
    code = """
ask "$1"
if [ -e /app/one ]; then echo "$(cat /app/one)$(cat /app/given)" > /app/two; else echo 1 > /app/one; fi"""
    async with open_agent(tmp_path, agent(code), ["One.", "Two."]) as runs:
        rollout, score = await runs.play("steps")
    assert (rollout.stop, score) == (StopReason.DONE, 1.0), rollout
    asked = [str(ledger.messages[0]["content"]) for ledger in rollout.ledgers]
    assert ["Do one." in text for text in asked] == [True, False] and "Do two." in asked[1]


async def test_artifacts_of_an_agent_that_had_to_be_ended_are_collected(tmp_path: Path) -> None:
    write_task(tmp_path, SAMPLES[5])
    code = f"ask x; {RIGHT}; ask x; trap '' TERM; sleep 600"
    async with open_agent(tmp_path, agent(code, stop_s=0.5), ["One."], limits={"assistant_turns": 1}) as runs:
        rollout, score = await runs.play("published")
    assert (rollout.stop, score) == (StopReason.ASSISTANT_TURNS, 1.0), rollout


async def test_agent_that_fails_is_no_zero_and_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    write_task(tmp_path, SAMPLES[0])
    async with open_agent(tmp_path, agent("ask x; exit 3"), ["Hi."]) as runs:
        rollout, score = await runs.play("hello")
    assert (rollout.stop, score) == (StopReason.AGENT_FAILED, None) and "exited with 3" in rollout.reason
    missing = {"command": ["no-such-agent"]}
    async with open_agent(tmp_path, missing, []) as runs:
        rollout, score = await runs.play("hello")
    assert (rollout.stop, score) == (StopReason.AGENT_FAILED, None)
    told = "the root 'busybox' has no program 'no-such-agent'"
    assert told in rollout.reason and told in await try_folder(tmp_path, agent=missing)
    assert "the solutions of hello are worth 1" in await try_folder(tmp_path, agent=agent("ask x"))


async def test_program_of_a_root_that_cannot_start_is_told_by_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = make_tree(tmp_path / "tree")
    folder = tree / "app"
    (folder / "broken").symlink_to("/no/such/file")
    (folder / "outside").symlink_to(sys.executable)
    (folder / "text").write_text("#!/bin/sh\n")
    for name, line in {
        "node-script": "#!/usr/bin/node\n", "by-env": "#!/bin/env node\n", "no-env": "#!/usr/bin/env sh\n",
        "windows": "#!/bin/sh\r\n", "nested": "#!/app/node-script\n", "good": "#!/bin/env -S sh -e\n",
    }.items():  # fmt: skip
        (folder / name).write_text(line)
        (folder / name).chmod(0o755)
    (folder / "linked").symlink_to("/app/../app/good")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "more-data"))
    add_root("busybox", export(tree, tmp_path / "more.tar"))
    tasks = tmp_path / "tasks"
    write_task(tasks, SAMPLES[0])
    for name, missing in {
        "broken": "/app/broken", "outside": "/app/outside", "text": "/app/text", "node-script": "/usr/bin/node",
        "by-env": "node", "no-env": "/usr/bin/env", "windows": r"/bin/sh\r", "nested": "/usr/bin/node",
    }.items():  # fmt: skip
        said = await try_folder(tasks, agent={"command": [f"/app/{name}"]})
        assert f"the root 'busybox' has no program '{missing}'" in said, (name, said)
    for name in ("good", "linked"):
        assert "are worth 1" in await try_folder(tasks, agent={"command": [f"/app/{name}"]})


async def test_dry_run_tells_where_the_time_of_rollouts_ends_an_agent_before_its_tasks_does(tmp_path: Path) -> None:
    write_task(tmp_path, Sample("long", "[agent]\ntimeout_sec = 600\n", {"tests/test.sh": PASSES}))
    write_task(tmp_path, SAMPLES[0])
    settings = make_settings(tmp_path, agent=agent("ask x", stop_s=5.0))
    async with make_gateway(settings) as gateway:
        section = environment_of(tmp_path)
        for timeout_s, told in ((605.0, True), (606.0, False)):
            limits = settings.limits.model_copy(update={"timeout_s": timeout_s})
            said = await section.try_out(gateway, settings.model_copy(update={"limits": limits}))
            assert ("ends agents before the time of 1 task is over" in said and "more than 605" in said) is told, said


async def test_agent_reaches_the_tools_of_a_tasks_mcp_servers_by_the_endpoint_or_is_refused(tmp_path: Path) -> None:
    def look_up(word: str) -> str:
        """Looks a word up."""
        return f"{word} is 42"

    post = (
        'post() { wget -Y off -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type:'
        ' application/json" --header "Accept: application/json, text/event-stream" --post-data "$1" $TOOLS; }\n'
    )
    params = '{"name": "look_up", "arguments": {"word": "it"}}'
    call = f'{{"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {params}}}'
    code = f"{post}ask x; post '{call}' > /tmp/said; grep -o 'it is 42' /tmp/said | head -1 | cut -c 7- > /app/answer"
    with live_server(lambda: Gateway([Source("tools", NativeToolset([FunctionTool(look_up)]))])) as served:
        servers = f'[[environment.mcp_servers]]\nname = "words"\ntransport = "http"\nurl = "{served.url}/mcp"\n'
        write_task(tmp_path, Sample("served", servers, {"tests/test.sh": PASSES}))
        hosts = [served.url.removeprefix("http://")]
        told = agent(code, env={"TOOLS": "{mcp_url}"})
        async with open_agent(tmp_path, told, ["Hi."], mcp_hosts=hosts) as runs:
            rollout, score = await runs.play("served")
            assert (rollout.stop, score) == (StopReason.DONE, 1.0), rollout
        said = await try_folder(tmp_path, agent=agent(code), mcp_hosts=hosts)
    assert "the agent is not told of the tools words_" in said and "name `{mcp_url}`" in said


@pytest.mark.parametrize(
    ("played", "options", "problem"),
    [
        ({"function": "x:y"}, {}, "are played by an `agent` with a `command`"),
        ({"command": ["sh"], "sandbox": {}}, {}, r"remove `agent\.sandbox`"),
        ({"command": ["sh"], "sandbox": "none"}, {}, r"remove `agent\.sandbox`"),
        ({"command": ["sh"], "cwd": "."}, {}, r"remove `agent\.cwd`"),
        ({"command": ["sh"]}, {"tools": ["shell"]}, r"remove `environment\.tools`"),
        ({"command": ["sh"]}, {"sandbox": {"container": {"image": "x"}}}, "do not run in a `container`"),
    ],
)
def test_settings_that_do_not_go_with_an_agent_are_refused(
    tmp_path: Path, played: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    write_task(tmp_path, SAMPLES[0])
    with pytest.raises(ValueError, match=problem):
        make_settings(tmp_path, agent=played, **options)
