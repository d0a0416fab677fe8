"""Run folders, tapes, checkpoints and run files that an earlier version wrote still open.

`fixtures/old_run/README.md` lists the files. The tests use what users use: commands, HTTP, files on disk, and the names
that guides and run files hold.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from tests.compat_imports import fresh_compat_imports

__all__ = ["fresh_compat_imports"]
ROOT = Path(__file__).parent.parent
OLD = Path(__file__).with_name("fixtures") / "old_run"
TIMEOUT_S = 60
Mtrl = Callable[..., str]
TRAINED, AHEAD, ROLLED = "runs/trained", "runs/ahead", "runs/rolled"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, and the working folder."""
    copy = tmp_path / "old"
    shutil.copytree(OLD, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("COLUMNS", "200")
    return copy


@pytest.fixture
def mtrl(old: Path) -> Iterator[Mtrl]:
    """Runs `mtrl-train` and returns its output."""
    import torch

    from trainer.cli import app

    def run(*words: object, codes: tuple[int, ...] = (0,)) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code in codes, f"{done.output}\n{done.exception!r}"
        return done.output

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


@contextmanager
def serving(module: str, *words: str) -> Iterator[str]:
    """The address of a server that `python -m MODULE WORDS` starts; it is stopped at the end."""
    command = [sys.executable, "-m", module, *words, "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = Timer(TIMEOUT_S, process.kill)
    timer.start()
    try:
        output = ""
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield found[0]
                break
        else:
            pytest.fail(f"no server was started: {output}")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
        timer.cancel()


def ask(url: str, body: Any = None, method: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {} if body is None else {"content-type": "application/json"}
    request = Request(url, data, headers, method=method or ("GET" if body is None else "POST"))
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        content = answer.read()
        return json.loads(content) if answer.headers["content-type"] == "application/json" else content


def list_rollouts(url: str) -> list[int]:
    """The indices of all rollouts, once the server has listed them."""
    until = time.monotonic() + TIMEOUT_S
    while (table := ask(url))["listed"] < 1 and time.monotonic() < until:
        time.sleep(0.01)
    return [row["place"] for row in table["rows"]]


def lines(file: str) -> list[Any]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_rollouts_of_an_old_run_can_be_shown(mtrl: Mtrl) -> None:
    table = mtrl("show", TRAINED)
    assert "24 rollouts" in table and "judged-2-755" in table and "feedback_done" in table
    text = mtrl("show", TRAINED, 0)
    assert '{"name": "look_up", "arguments": {"name": "Izmir"}}' in text and "306" in text
    with_image = mtrl("show", ROLLED, 2)
    assert "draw_bars" in with_image and "image/png, 724 bytes" in with_image


def test_every_rollout_of_an_old_run_is_read(mtrl: Mtrl) -> None:
    for run in (TRAINED, AHEAD, ROLLED):
        for number, line in enumerate(lines(f"{run}/rollouts.jsonl")):
            text = mtrl("show", run, number)
            assert line["task"] in text and line["stop"] in text
            assert all(call[0] in text for entry in line["entries"] for call in entry.get("calls", ()))


def test_the_credits_of_an_old_step_are_shown_with_a_token(mtrl: Mtrl) -> None:
    token = mtrl("why", TRAINED, 0, 40)
    assert "policy" in token and "version 0" in token and "-0.866024" in token
    assert "0.558335" in mtrl("why", AHEAD, 8, 37), "of a critic, in an asynchronous run"
    assert "0.866024" not in mtrl("why", TRAINED, 0, 3), "the task wrote this one"


def test_the_curves_of_an_old_run_are_drawn(mtrl: Mtrl) -> None:
    assert "reward" in mtrl("plot", TRAINED, "--out", "curves.svg").lower()
    assert "<svg" in Path("curves.svg").read_text()


def test_an_old_run_is_read_into_tables(old: Path) -> None:
    pytest.importorskip("pandas")
    from trainer.view import load

    tables = load(old / TRAINED)
    assert list(tables.steps.get("step", tables.steps.index)) == [0, 1, 2]
    assert len(tables.rollouts) == 24 and len(tables.calls) > 24


@pytest.mark.parametrize("index", ["as it was written", "removed"])
def test_the_page_shows_old_runs(index: str, old: Path) -> None:
    if index == "removed":
        for file in old.rglob("rollouts.jsonl.*"):
            file.unlink()
    with serving("trainer.cli", "view", TRAINED, AHEAD, ROLLED) as url:
        names = {run["name"]: run for run in ask(f"{url}/v1/runs")["runs"]}
        assert set(names) == {"trained", "ahead", "rolled"}
        assert names["trained"]["settings"]["algorithm.name"] == "dapo" and names["trained"]["steps"] == 2
        run_url = f"{url}/v1/runs/trained"
        assert [line["step"] for line in ask(f"{run_url}/metrics")["lines"]] == [0, 1, 2]
        ask(f"{run_url}/alarms")
        assert list_rollouts(f"{run_url}/rollouts?limit=500") == list(range(24))
        assert ask(f"{run_url}/rollouts?kind=judged&success=yes")["total"] == 6
        assert ask(f"{run_url}/choices")["tool"].keys() >= {"look_up", "calculate"}
        assert len(ask(f"{run_url}/group?name=1-0-0")["rollouts"]) == 4
        assert "-0.866024" in json.dumps(ask(f"{run_url}/rollouts/0"))
        digest = next((old / ROLLED / "blobs").iterdir()).name
        assert len(ask(f"{url}/v1/runs/rolled/blobs/{digest}")) == 724
        assert ask(f"{url}/")[:15].lower() == b"<!doctype html>"


def test_an_old_run_is_exported_as_one_html_file(mtrl: Mtrl) -> None:
    mtrl("view", TRAINED, ROLLED, "--export", "run.html", "--rollout", 0)
    page = Path("run.html").read_text()
    assert "judged-2-755" in page and "Izmir" in page


@pytest.mark.parametrize(("run", "step", "rollouts"), [(TRAINED, 1, 12), (TRAINED, 2, 12), (AHEAD, 2, 6)])
def test_a_step_of_an_old_run_is_replayed(run: str, step: int, rollouts: int, mtrl: Mtrl) -> None:
    """Every id, mask and reward is the same; the last bits of the loss may differ on another machine."""
    if run == AHEAD:
        pytest.importorskip("peft")
    output = mtrl("replay", run, step, codes=(0, 1))
    assert re.search(rf"\b{rollouts}\b.*\b0\b.*differ", output), output
    changes = re.findall(r"^\S+ was (\S+), and is now (\S+)$", output, re.MULTILINE)
    assert changes or "as recorded" in output, output
    assert all(float(now) == pytest.approx(float(before), rel=1e-3) for before, now in changes), output


def test_old_rollouts_are_replayed_from_their_tape(mtrl: Mtrl) -> None:
    assert re.search(r"\b4\b.*\b0\b.*differ", mtrl("replay", ROLLED))


@pytest.mark.parametrize("run", [TRAINED, AHEAD])
def test_training_resumes_from_an_old_checkpoint(run: str, mtrl: Mtrl) -> None:
    """Weights, optimizer, critic, random states and the place in the data, with the old tool files."""
    if run == AHEAD:
        pytest.importorskip("peft")
    before = Path(f"{run}/rollouts.jsonl").read_bytes()
    measured = lines(f"{run}/metrics.jsonl")
    mtrl("--resume", "--out", run, "--steps", 3)
    after = Path(f"{run}/rollouts.jsonl").read_bytes()
    assert after.startswith(before) and after.count(b"\n") > before.count(b"\n")
    assert lines(f"{run}/metrics.jsonl")[:-1] == measured
    last = lines(f"{run}/metrics.jsonl")[-1]
    assert last["step"] == 3 and last.keys() >= {"reward/mean", "success/sampled", "loss", "update/grad_norm"}
    assert [line["step"] for line in lines(f"{run}/credits.jsonl")] == [1, 2, 3]
    state = json.loads(Path(f"{run}/checkpoints/000003/state.json").read_text())
    assert state["step"] == 3 and state["state"]["rollouts"] == len(after)
    assert {"optimizer.pt", "chance.pt"} <= state["files"].keys()
    assert Path(f"{run}/tapes/000003/tape.jsonl").exists()


def test_an_old_run_is_not_resumed_with_other_settings(mtrl: Mtrl) -> None:
    output = mtrl("--resume", "--out", TRAINED, "--config", "ahead.yaml", codes=(2,))
    assert "algorithm.name" in output and "n was 4" in output


def test_an_old_evaluation_is_read_and_repeated(mtrl: Mtrl) -> None:
    before = json.loads(Path(f"{TRAINED}/eval/comparison.json").read_text())
    for variant in ("sampled_before", "greedy_before", "sampled", "greedy"):
        table = mtrl("show", f"{TRAINED}/eval/{variant}")
        assert "6 rollouts" in table and "sum-1000000-1" in table
        assert "<|im_start|>user" in mtrl("show", f"{TRAINED}/eval/{variant}", 0), "spelled with the run's tokenizer"
    mtrl("eval", TRAINED, "--json")
    after = json.loads(Path(f"{TRAINED}/eval/comparison.json").read_text())
    assert after.keys() == before.keys() and after["by_kind"].keys() == before["by_kind"].keys()
    same = ("tasks", "lost", "held_out", "step")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert after["greedy_before"] == before["greedy_before"] == 1.0, "the checkpoint's weights and the model's are read"


def tool_call(id: str, name: str, **arguments: Any) -> Any:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def test_an_old_tape_answers_calls_and_feedback(old: Path) -> None:
    with serving("gateway.cli", "serve", "--replay", "tapes/served") as url:
        call_result = ask(f"{url}/v1/calls", {"tool_calls": [tool_call("1", "add", a=1, b=2)]})
        assert call_result["messages"][0]["content"] == "3.0"
        session = ask(f"{url}/v1/sessions", {"feedback": "gsm8k", "feedback_args": {"ground_truth": "7"}})
        session_url = f"{url}/v1/sessions/{session['id']}"
        calls = [tool_call("a", "add", a=3, b=4), tool_call("b", "draw_bars", values=[3, 4])]
        calls += [tool_call("c", "calculate", expression="3 + 4"), tool_call("d", "nope")]
        answers = ask(f"{session_url}/calls", {"tool_calls": calls})
        assert [result["outcome"] for result in answers["results"]] == ["ok", "ok", "ok", "invalid"]
        contents = [message["content"] for message in answers["messages"]]
        assert contents[0] == "7.0" and contents[2] == "7"
        assert contents[1][0]["text"] == "A chart of 2 bars, the highest 4."
        assert contents[1][1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
        chat = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "It is #### 8"}]
        reply = ask(f"{session_url}/feedback", {"messages": chat})
        assert (reply["score"], reply["done"]) == (0.0, False)
        reply = ask(
            f"{session_url}/feedback", {"messages": [chat[0], {"role": "assistant", "content": "It is #### 7"}]}
        )
        assert (reply["score"], reply["done"], reply["message"]) == (1.0, True, "Your response is correct!")
        rewards = ask(session_url, method="DELETE")["rewards"]
        assert [reward["value"] for reward in rewards if reward["source"] == "gsm8k"] == [0.0, 1.0]
        assert "served" in json.dumps(ask(f"{url}/v1/tapes"))


@pytest.mark.filterwarnings("ignore:.*was renamed:FutureWarning")
@pytest.mark.parametrize("file", ["trained.yaml", "ahead.yaml", "translated/verl.yaml", "translated/swift.yaml"])
def test_an_old_run_file_is_accepted(file: str, mtrl: Mtrl) -> None:
    """Run files from `mtrl-train translate` name functions of mtrl by their module."""
    if file != "trained.yaml":
        pytest.importorskip("peft")
    mtrl("--config", file, "--dry-run")


NAMES = (
    "gateway:Gateway",
    "gateway:Task",
    "gateway:ToolCall",
    "gateway.client:RemoteGateway",
    "gateway.feedback.attempts:AttemptsInteraction",
    "gateway.feedback.base:BaseInteraction",
    "gateway.feedback.gsm8k:Gsm8kInteraction",
    "gateway.media.process:process_image",
    "gateway.native.base:BaseTool",
    "gateway.native.base:OpenAIFunctionToolSchema",
    "gateway.native.base:ToolResponse",
    "gateway.upstream.hook:MCPBaseTool",
    "mtrl_plugins.demo.facts.lookup:LookUp",
    "mtrl_plugins.demo.sight.look:Look",
    "trainer.parse.family:Family",
    "trainer.reward.attempt:Attempt",
    "trainer.steps:ToolsAndFeedback",
    "trainer.view:load",
)


@pytest.mark.filterwarnings("ignore:.*was renamed:FutureWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_name_from_guides_or_messages_can_be_imported(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert hasattr(import_module(module), attribute)
