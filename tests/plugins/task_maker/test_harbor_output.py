"""Tasks that `make-tasks --harbor` writes: played with the server at its URL, and graded as Harbor's package does."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from anyio import to_thread

from gateway.gateway import Gateway
from gateway.types import ToolSpec
from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from mtrl_plugins.harbor.task_file import list_tasks, read_task
from mtrl_plugins.task_maker.chain import Chain, Step
from mtrl_plugins.task_maker.explore import KnowsNothing
from mtrl_plugins.task_maker.harbor_output import ANSWER_FILE, TESTS
from mtrl_plugins.task_maker.make_tasks import MakeSettings, TaskMaker
from mtrl_plugins.task_maker.server_sessions import Dropped, Server
from mtrl_plugins.task_maker.values import Value, split_of
from tests.live_server import live_server
from tests.plugins.harbor.harbor_runs import open_tasks
from tests.plugins.harbor.test_harbor_peer import compare
from tests.plugins.harbor.test_harbor_tasks import try_folder
from tests.plugins.task_maker.test_make_tasks import quick as quick
from tests.plugins.task_maker.test_make_tasks import run
from tests.sandbox.roots import make_root
from tests.trainer.policy_scripts import render_calls
from trainer.train.settings import TrainSettings


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        yield make_root(tmp_path, patch)


async def test_harbor_tasks_are_worth_one_by_their_solution_and_by_the_answer_that_the_servers_tools_give(
    tmp_path: Path, root: str
) -> None:
    with live_server(lambda: Gateway.load(FOLDER, FOLDER / "servers.json")) as served:
        url, out = f"{served.url}/mcp", tmp_path / "tasks"
        words = ("--server", "shelves", "--n", "4", "--levels", "1", "--out", str(out), "--harbor", url)
        code, text = await to_thread.run_sync(run, *words)
        assert code == 0, text
        values = yaml.safe_load(out.with_suffix(".yaml").read_text())
        environment = TrainSettings.model_validate({**values, "model": "mine"}).parts
        assert values["environment"]["mcp_hosts"] == [served.url.removeprefix("http://")] and environment
        options = {"mcp_hosts": values["environment"]["mcp_hosts"], "roots": {"debian:12-slim": root}}
        for split in ("train", "held_out"):
            assert "are worth 1" in await try_folder(out / split, **options)
        (name, folder), *_ = list_tasks(out / "train").items()
        _, _, call, *_ = (folder / "solution/solve.sh").read_text().splitlines()
        _, tool, arguments = call.split(" ", 2)
        answer = (folder / "tests/expected.txt").read_text().strip()
        assert answer not in read_task(name, folder).read_instruction(None)
        async with open_tasks(out / "train", **options) as runs:
            asked = render_calls((tool, json.loads(arguments)))
            for said, worth in ((f" {answer.upper()}", 1.0), ("nothing", 0.0), ("", 0.0)):
                write = render_calls(("shell", {"command": f"echo '{said}' > answer.txt"}))
                rollout = await runs.run(asked, write, "Done.")
                assert rollout.infos["harbor"]["rewards"] == {"reward": worth}, rollout.reason
                assert answer.lower() in str(rollout.ledger.messages[2]["content"]).lower()
        shutil.copytree(folder, tmp_path / "peer" / "tasks" / "made")
        (tmp_path / "peer/tasks/made/environment").mkdir()
        jobs = [("made", "/app", [f"echo '{said}' > answer.txt"]) for said in (f" {answer.upper()}", "nothing")]
        assert await compare("made", tmp_path / "peer", tmp_path / "tree", jobs, **options) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("expected", "said", "worth"),
    [
        ("12", "12", 1), ("12", "1 2", 0), ("1 2", "12", 0), ("Two Words", " two \t\n WORDS \n\n", 1), ("12", None, 0),
        ("12", "", 0), ("", "", 0), ("", None, 0), (" ", "\n", 0), ("(", "(", 1), ("-n", "-n", 1), ("日本", "日本", 1),
    ],
)  # fmt: skip
def test_answer_counts_whatever_its_case_and_wider_spaces_and_nothing_is_no_answer(
    tmp_path: Path, expected: str, said: str | None, worth: int
) -> None:
    names = {ANSWER_FILE: "answer", "/tests/expected.txt": "expected", "/logs/verifier/reward.txt": "reward"}
    tests = TESTS
    for path, name in names.items():
        tests = tests.replace(path, str(tmp_path / name))
    (tmp_path / "expected").write_text(f"{expected}\n")
    if said is not None:
        (tmp_path / "answer").write_text(said)
    for shell in (("sh",), ("busybox", "sh")):
        subprocess.run([*shell, "-c", tests], check=True, timeout=60)
        assert (tmp_path / "reward").read_text() == f"{worth}\n", shell
    (tmp_path / "answer").unlink(missing_ok=True)
    (tmp_path / "answer").symlink_to("expected")
    subprocess.run(["sh", "-c", tests], check=True, timeout=60)
    assert (tmp_path / "reward").read_text() == "0\n"


@pytest.mark.parametrize(("answer", "is_kept"), [("Éa", False), ("straße", False), (" ", False), ("日本 Ab", True)])
def test_tasks_whose_answer_no_shell_compares_are_left_out(answer: str, is_kept: bool) -> None:
    maker = TaskMaker(
        Server(None, "one", {"find": ToolSpec("find")}, has_folder=True),
        MakeSettings(1, (1,), answers_only=True),
        lambda *_: None,
    )
    maker._knows_nothing = KnowsNothing({"": {}}, {"": ()})
    step = Step("find", {}, {}, (), {"name": answer}, text=answer)
    chain = Chain((step,), split_of(answer), answer=Value(answer, "name", 0, ("name",)))
    with nullcontext() if is_kept else pytest.raises(Dropped, match="a shell cannot compare its answer"):
        assert maker._make_task(chain).chain is chain


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--harbor", "mcp"), "--harbor: is 'mcp'"),
        (("--harbor", "http://x/mcp", "--out", "tasks.jsonl"), "Harbor tasks are folders"),
    ],
)
def test_harbor_tasks_that_cannot_be_are_refused(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    code, text = run("--server", "shelves", "--out", str(tmp_path / "tasks"), *words)
    assert code == 2 and problem in " ".join(text.split())
