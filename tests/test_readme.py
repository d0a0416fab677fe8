"""Every block of the README does what it says."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.build import plan
from gateway.config.load import load
from tests.blocks import Block, blocks_of, split, typed, written
from tests.servers.start import free_port
from tests.trainer.models import tiny_model
from tests.trainer.train import jobs

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 60

BLOCKS = blocks_of(ROOT / "README.md")
SHOWN = [block for block in BLOCKS if block.file is None]
LINES = typed(BLOCKS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user's clone is, with the files that the README tells to write."""
    place = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "tool_configs", place / "tool_configs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mcp_servers.json", place)
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, place)
    written(BLOCKS, place)
    return place


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The model and the task that the README speaks of, the model in small."""
    tiny_model(place / "models" / "Qwen2.5-0.5B-Instruct", kind="qwen2")
    (task,) = [block.text for block in SHOWN if block.language == "json" and '"prompt"' in block.text]
    (place / "tasks.jsonl").write_text(task)
    small = jobs.small(tools="tool_configs", evaluation={"every": 0, "rows": 4})
    (place / "small.json").write_text(small.model_dump_json())
    run(["mtrl-train", "--config", "small.json", "--out", "runs/default"], place)
    return place


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(words: list[str], place: Path) -> str:
    done = subprocess.run(
        words, cwd=place, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def port(place: Path) -> Iterator[int]:
    port = free_port()
    words = ["mtrl-gateway", "serve", "--port", str(port)]
    with subprocess.Popen(words, cwd=place, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and str(port) in server.stdout.readline()
            yield port
        finally:
            server.terminate()
            server.wait(TIMEOUT_S)


def serves(line: str) -> bool:
    words = shlex.split(line, comments=True)
    return words[1] == "serve" or (words[1] == "view" and "--export" not in words)


def commands(program: str) -> list[str]:
    return [line for line in LINES if shlex.split(line, comments=True)[0] == program]


def test_every_line_of_a_shell_block_is_run_by_one_of_these_tests() -> None:
    assert len(LINES) == sum(len(commands(program)) for program in ("make", "mtrl-gateway", "mtrl-train", "curl"))
    assert {block.language for block in SHOWN} == {"text", "bash", "json", "yaml", "python"}


@pytest.mark.parametrize("line", commands("make"))
def test_a_verb_of_the_makefile_is_there(line: str, place: Path) -> None:
    run(["make", "--dry-run", *split(line)[0][1:]], place)


@pytest.mark.parametrize("line", [line for line in commands("mtrl-gateway") if not serves(line)])
def test_a_command_ends_well_and_prints_what_is_said(line: str, place: Path) -> None:
    words, said = split(line)
    printed = run(words, place)
    assert said is None or printed.strip() == said


@pytest.mark.parametrize("line", [line for line in commands("mtrl-gateway") if serves(line)])
def test_a_serving_command_comes_up_and_goes_down(line: str, place: Path, tmp_path: Path) -> None:
    words, _ = split(line.replace("/tmp/tape", str(place / "tape")))
    with subprocess.Popen(
        [*words, "--port", "0"], cwd=place, env=environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None and "http://127.0.0.1:" in server.stdout.readline()
        finally:
            server.terminate()
            assert server.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    "line", [line for line in commands("mtrl-train") if "runs/first" not in line and not serves(line)]
)
def test_a_command_of_the_trainer_ends_well(line: str, trained: Path) -> None:
    assert run(split(line)[0], trained)


@pytest.mark.parametrize("line", [line for line in commands("mtrl-train") if serves(line)])
def test_a_page_of_a_run_comes_up_and_goes_down(line: str, trained: Path) -> None:
    words = [*split(line)[0], "--port", "0"]
    with subprocess.Popen(words, cwd=trained, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and "http://127.0.0.1:" in server.stdout.readline()
        finally:
            server.terminate()
            assert server.wait(TIMEOUT_S) == 0


def test_rollouts_are_made_and_read_one_command_after_the_other(trained: Path) -> None:
    printed = [run(split(line)[0], trained) for line in commands("mtrl-train") if "runs/first" in line]
    assert "4 of 4 rollouts" in printed[0] and "torch engine" in printed[0]
    assert "sum" in printed[1] and "not trained" in printed[2] and "0 of them differ" in printed[3]


@pytest.mark.parametrize("line", commands("curl"))
def test_a_request_is_answered(line: str, port: int) -> None:
    words, _ = split(line.replace("8765", str(port)))
    body = words[words.index("-d") + 1].encode() if "-d" in words else None
    url = next(word for word in words if word.startswith("http"))
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        data = json.load(answer)
    assert data.get("data") or data["results"][0]["outcome"] == "ok"


def test_the_files_that_are_shown_load(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (servers,) = [block.text for block in SHOWN if block.language == "json" and "mcpServers" in block.text]
    (place / "shown.json").write_text(servers)
    (offer,) = [block.text for block in SHOWN if block.language == "yaml"]
    (place / "my_tools" / "shown.yaml").write_text(offer)
    try:
        config = load(place / "my_tools", place / "shown.json", {})
        assert len(config.tools) == 3 and len(config.interactions) == 1 and len(config.servers) == 2
        names = [
            spec.name
            for source in plan(place / "my_tools", place / "shown.json").sources
            for spec in source.toolset.specs
        ]
    finally:
        (place / "my_tools" / "shown.yaml").unlink()
    assert set(names) == {"count", "look", "paint", "feedback_polite"}


@pytest.mark.parametrize("block", [block for block in SHOWN if block.language == "python"])
def test_a_program_that_is_shown_runs(block: Block, place: Path) -> None:
    printed = run([sys.executable, "-c", block.text], place)
    assert "('ok', '7.0'), ('invalid'" in printed and "1.0 True Your response is correct!" in printed
