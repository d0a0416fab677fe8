"""The command `serve-policy`: what it prints, what it serves and saves, how it ends, and its errors."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked_python import ForkedPopen
from tests.trainer.cli_data import RunCommand
from trainer.storage.rollout_file import Rollouts

ROOT = Path(__file__).parents[3]


@contextmanager
def served(*args: Any, lines: int = 5) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The command in a process of its own, and what it printed at its start."""
    command = [sys.executable, "-m", "trainer.cli", "serve-policy", "--port", "0", *map(str, args)]
    pipe = subprocess.PIPE
    with ForkedPopen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment()) as process:
        try:
            assert process.stdout is not None
            yield process, read_start(process, lines)
        finally:
            if process.poll() is None:
                process.kill()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def read_start(process: subprocess.Popen[str], lines: int) -> list[str]:
    read: list[str] = []
    assert process.stdout is not None
    while len(read) < lines:
        line = process.stdout.readline()
        assert line, read
        if read or line.startswith("mtrl-train: http"):
            read.append(line.rstrip())
    return read


def post(url: str, body: Any, key: str = "any") -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_model_is_served_and_sessions_are_saved(model: Path, tmp_path: Path, run: RunCommand) -> None:
    out = tmp_path / "runs" / "served"
    with served("--model", model, "--out", out) as (process, start):
        url = start[0].split()[1]
        assert f"OPENAI_BASE_URL={url}/v1" in start[1] and f"ANTHROPIC_BASE_URL={url}" in start[2]
        assert f"GOOGLE_GEMINI_BASE_URL={url}" in start[3]
        assert f"POST {url}/sessions" in start[4] and str(out) in start[4]
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
        answers = [post(f"{url}/v1/chat/completions", chat)["choices"][0] for _ in range(2)]
        assert answers[0]["message"] == answers[1]["message"] and answers[0]["finish_reason"] in ("length", "stop")
        about = post(f"{url}/sessions", {"task": {"id": "mine", "prompt": "Hi"}})
        post(f"{about['base_url']}/chat/completions", chat, about["api_key"])
        post(f"{about['anthropic_base_url']}/reward", {"reward": 0.5}, about["api_key"])
        post(f"{about['anthropic_base_url']}/end", {}, about["api_key"])
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        rest, _ = process.communicate(timeout=120)
        assert time.monotonic() - began < 90 and process.returncode == 0 and "Traceback" not in rest
        assert "1 rollouts are saved" in rest
    (rollout,) = Rollouts(out)
    assert (rollout.task, rollout.rewards) == ("mine", {"agent": 0.5}) and len(rollout.ledger.turns) == 1
    assert "mine" in run("show", out).output


def test_port_in_use_is_told_before_the_model_is_loaded(model: Path, run: RunCommand) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = run("serve-policy", "--model", model, "--port", port, code=2).output
    assert f"127.0.0.1:{port} is in use" in output and "--port" in output


def test_errors_name_the_option_and_the_remedy(model: Path, run: RunCommand, tmp_path: Path) -> None:
    assert "there is no model to serve" in run("serve-policy", code=2).output
    missing = run("serve-policy", "--model", tmp_path / "none", code=2).output
    assert "there is no such folder" in missing and "--model" in missing
    open_host = run("serve-policy", "--model", model, "--host", "0.0.0.0", code=2).output
    assert "can be reached from other machines" in open_host and "--token-file" in open_host
    (tmp_path / "run.yaml").write_text("steps: 3\nmodell: x\nmodel: x\n")
    typo = run("serve-policy", "--config", tmp_path / "run.yaml", "--model", model, code=2).output
    assert "modell" in typo and "steps" not in typo
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "rollouts.jsonl").write_text("")
    used = run("serve-policy", "--model", model, "--out", tmp_path / "runs", code=2).output
    assert "there are rollouts already" in used
