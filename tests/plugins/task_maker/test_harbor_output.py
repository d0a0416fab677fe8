"""Tasks that `make-tasks --harbor` writes: played with the server at its URL, and graded as Harbor's package does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from anyio import to_thread

from gateway.gateway import Gateway
from mtrl_plugins.demo.shelves.shelves_demo import FOLDER
from mtrl_plugins.harbor.task_file import list_tasks, read_task
from tests.live_server import live_server
from tests.plugins.harbor.harbor_runs import open_tasks
from tests.plugins.harbor.test_harbor_peer import compare
from tests.plugins.harbor.test_harbor_tasks import try_folder
from tests.plugins.task_maker.test_make_tasks_command import quick as quick
from tests.plugins.task_maker.test_make_tasks_command import run
from tests.sandbox.roots import make_root
from tests.trainer.policy_scripts import render_calls
from trainer.train.settings import TrainSettings

pytestmark = pytest.mark.anyio


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
            for said, worth in ((f" {answer.upper()}", 1.0), ("nothing", 0.0)):
                write = render_calls(("shell", {"command": f"echo '{said}' > answer.txt"}))
                rollout = await runs.run(asked, write, "Done.")
                assert rollout.infos["harbor"]["rewards"] == {"reward": worth}, rollout.reason
                assert answer.lower() in str(rollout.ledger.messages[2]["content"]).lower()
        shutil.copytree(folder, tmp_path / "peer" / "tasks" / "made")
        (tmp_path / "peer/tasks/made/environment").mkdir()
        jobs = [("made", "/app", [f"echo '{said}' > answer.txt"]) for said in (f" {answer.upper()}", "nothing")]
        assert await compare("made", tmp_path / "peer", tmp_path / "tree", jobs, **options) == [1.0, 0.0]


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
