"""Tests of the GPU benchmark that need no GPU: its parts' processes, its table, its batch and its FLOPs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu, gpu_parts
from tests.trainer.cli_data import RunCommand
from tests.trainer.conftest import place, run
from tests.trainer.model_folders import save_tiny_model
from trainer.cli.run_file import load_settings
from trainer.train.settings import TrainSettings


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[gpu.Bench]:
    """A benchmark of parts that are small scripts."""
    with (tmp_path / "gpu.jsonl").open("w") as file:
        yield gpu.Bench(gpu.parse_arguments(["--budget", "60"]), tmp_path, file)


def script_part(monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], deadline_s: float = 30) -> list[gpu.Part]:
    """Parts that run these scripts."""
    monkeypatch.setattr(gpu.Bench, "_command", lambda self, part, url: [sys.executable, "-uc", scripts[part.run]])
    return [gpu.Part(name, name, 0, deadline_s) for name in scripts]


FIGURE = "import json; print('noise'); print(json.dumps({'figure': 'x', 'value': 1, 'unit': 's'}))\n"


async def test_a_part_that_fails_hangs_or_is_cut_off_costs_no_figure_that_was_told(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripts = {
        "good": FIGURE,
        "raises": FIGURE + "raise SystemExit('no kernel image')",
        "hangs": FIGURE + "import time; time.sleep(1000)",
        "half a line": FIGURE + "import sys; sys.stdout.write('{\"figure\": ')",
    }
    await bench.run(script_part(monkeypatch, scripts, deadline_s=5))
    lines = gpu.read_lines(tmp_path / "gpu.jsonl")
    assert [line["part"] for line in lines if "value" in line] == list(scripts)
    assert bench.failed == ["raises", "hangs"]
    failed = {line["part"]: line["failed"] for line in lines if "failed" in line}
    assert "no kernel image" in failed["raises"] and "ended after its 5 s" in failed["hangs"]


__all__ = ["bench", "place", "run"]
GB = 10**9
STEP = {"step": 1, "reward/mean": 0.5, "eval/greedy": 0.25} | {
    f"machine/peak_gb/{phase}": 1.5 for phase in ("generating", "update", "publishing")
}


def test_parts_come_in_order_of_value() -> None:
    assert [part.run for part in gpu.PARTS] == [
        "floors", "gates", "rollouts", "publishing", "update", "trl", "update", "kernels", "memory",
        "learning", "resuming", "embedded",
    ]  # fmt: skip


async def test_a_part_that_the_budget_has_no_time_for_is_skipped_and_others_run(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (quick,) = script_part(monkeypatch, {"quick": FIGURE})
    await bench.run([gpu.Part("slow", "slow", 61, 90), gpu.Part("served", "slow", 61, 90, needs_server=True), quick])
    lines = gpu.read_lines(tmp_path / "gpu.jsonl")
    assert {line["part"]: line["skipped"] for line in lines if "skipped" in line} == dict.fromkeys(
        ("slow", "served"), "the budget of 60 s is spent"
    )
    assert [line["part"] for line in lines if "value" in line] == ["quick"] and not bench.failed


def test_only_the_named_parts_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu.Bench, "_command", lambda self, part, url: [sys.executable, "-uc", FIGURE])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", "--out", str(tmp_path), "--only", "memory", "floors"])
    assert gpu.main() == 0
    lines = gpu.read_lines(tmp_path / "gpu.jsonl")
    assert [line["part"] for line in lines if "value" in line] == ["floors", "memory"]
    assert lines == json.loads((tmp_path / "gpu.json").read_text())
    assert (tmp_path / "floors.log").exists(), "logs are beside the figures"


async def test_a_server_that_does_not_start_is_started_once(bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    async def start(server: gpu.ServerProcess) -> None:
        starts.append(server)
        raise gpu.EngineError("no kernel image")

    monkeypatch.setattr(gpu.ServerProcess, "__aenter__", start)
    bench.arguments.small = True
    (quick,) = script_part(monkeypatch, {"quick": FIGURE})
    await bench.run([gpu.Part(name, name, 0, 30, needs_server=True) for name in ("gates", "rollouts")] + [quick])
    assert len(starts) == 1 and bench.failed == ["gates", "rollouts"]


@pytest.mark.parametrize(
    ("words", "engine"), [(["--small"], "torch"), (["--small", "--engine", "sglang"], "sglang"), ([], "sglang")]
)
def test_jobs_run_on_sglang_where_it_is_asked_for_or_there_is_a_gpu(
    words: list[str], engine: str, bench: gpu.Bench
) -> None:
    bench.arguments = gpu.parse_arguments(words)
    command = bench._command(gpu.PARTS[0], "")
    assert command[command.index("--engine") + 1] == engine


def test_one_card_cannot_publish_by_a_process_group_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def names() -> list[str]:
        return [way.name for way in gpu_parts.ways_to_publish(tmp_path)]

    assert names() == ["tensors", "disk", "group"]
    monkeypatch.setattr(gpu_parts, "CUDA", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert names() == ["tensors", "disk", "group"] and not capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert names() == ["tensors", "disk"]
    skipped = json.loads(capsys.readouterr().out)
    assert skipped["way"] == "group" and "one card" in skipped["skipped"]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as on a CPU
def test_kernels_are_compared_and_one_that_computes_something_else_fails_the_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = gpu_parts.attention_kernels

    def with_wrong(*shape: Any) -> dict[str, Any]:
        found = kernels(*shape)
        return found | {"wrong": lambda *inputs: 2 * found["math"](*inputs)}

    monkeypatch.setattr(gpu_parts, "attention_kernels", with_wrong)
    monkeypatch.setattr(gpu_parts, "seconds", lambda work: float(work() is not None))
    with pytest.raises(RuntimeError, match="'kernel': 'wrong', 'tokens': 256, 'row': 64"):
        gpu_parts.main(["kernels", "--small", "--work", str(tmp_path)])
    lines = [line for line in read_figures(capsys) if "kernel" in line]
    apart = {line["kernel"]: line["value"] for line in lines if line["figure"].startswith("apart")}
    assert max(apart[name] for name in ("ours", "flash", "math")) < 1e-5 and apart["wrong"] > 0.1
    skipped = {line["kernel"]: line["skipped"] for line in lines if "skipped" in line}
    assert set(skipped) == {"varlen", "cudnn", "efficient"} and "CPU" in skipped["varlen"]
    assert {line["row"] for line in lines if line["kernel"] == "math"} == {64, 256}


class Runs:
    """In place of `mtrl-train`: reads the run file as it does, and leaves a run's folder behind."""

    def __init__(self) -> None:
        self.settings: list[TrainSettings] = []

    def run(self, command: Sequence[str], **_: Any) -> CompletedProcess[str]:
        file, run = (Path(command[command.index(word) + 1]) for word in ("--config", "--out"))
        settings = load_settings(TrainSettings, file, {})
        self.settings.append(settings)
        model = file.parent / "tiny"
        info = {"model": str(model), "settings": settings.model_dump(mode="json")}
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (run / "checkpoints" / str(settings.steps)).symlink_to(model)
        (run / "run.json").write_text(json.dumps(info))
        (run / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
        return CompletedProcess(command, 0, "", "")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(gpu_parts, "subprocess", SimpleNamespace(run=runs.run))
    return runs


def read_figures(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_memory_is_planned_and_measured_in_each_phase_of_each_placement(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_parts.main(["memory", "--work", str(tmp_path), "--engine", "sglang"])
    assert [settings.serving.placement for settings in runs.settings] == ["together", "beside"]
    assert all(settings.engine == "sglang" for settings in runs.settings)
    figures = {
        (line["placement"], line["phase"], line["figure"]): line["value"]
        for line in read_figures(capsys)
        if "phase" in line
    }
    assert len(figures) == 2 * 3 * 2 and all(value > 0 for value in figures.values())
    assert figures["beside", "update", "measured"] == pytest.approx(1.5 * GB / 2**30, rel=1e-4)
    assert figures["beside", "update", "planned"] > figures["beside", "generating", "planned"]


def test_a_policy_learns_word_problems_with_examples_and_is_tried_before_and_after(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--work", str(tmp_path), "--engine", "sglang", "--policy", str(tmp_path / "tiny"), "--steps", "20"]
    gpu_parts.main(["learning", *words])
    (settings,) = runs.settings
    assert (settings.steps, settings.prompts, settings.n, settings.engine) == (20, 16, 8, "sglang")
    assert settings.evaluation.every == 20 and settings.update.micro_batch_tokens is None
    for data in (settings.data, settings.evaluation.data):
        row = json.loads(Path(str(data)).read_text().splitlines()[0])
        assert sum(message["role"] == "user" for message in row["messages"]) == 5, "four examples and the question"
    figures = {line["figure"]: line["value"] for line in read_figures(capsys)}
    assert figures["reward"] == 0.5 and figures["greedy"] == 0.25


@pytest.mark.parametrize("words", [[], ["--policy", "tiny"]])
def test_a_run_of_two_epochs_is_resumed_after_the_first(
    words: list[str], runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / word) if word == "tiny" else word for word in words]
    gpu_parts.main(["resuming", "--work", str(tmp_path), *words])
    assert [settings.steps for settings in runs.settings] == [2, 1, 2]
    for settings in runs.settings:
        assert len(Path(settings.data).read_text().splitlines()) == settings.prompts == 16
    figures = {line["figure"]: line["value"] for line in read_figures(capsys)}
    assert figures == {"equal to the bit": True, "weights apart, most": 0.0, "weights moved, most": 0.0}


def test_word_problems_are_played_by_a_tiny_policy(
    run: RunCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(command: Sequence[str], **_: Any) -> CompletedProcess[str]:
        run(*command[3:])
        return CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gpu_parts, "subprocess", SimpleNamespace(run=train))
    policy = save_tiny_model(tmp_path / "policy")
    gpu_parts.main(["learning", "--small", "--work", str(tmp_path), "--policy", str(policy)])
    figures = {line["figure"]: line["value"] for line in read_figures(capsys)}
    assert {"seconds", "reward", "time/learning_s"} <= set(figures)
    [step] = gpu_parts.read_steps(tmp_path / "learning")
    assert all(step[f"machine/peak_gb/{phase}"] > 0.1 for phase in ("generating", "update", "publishing"))
    assert step["rollout/tokens"] > 100, "each rollout has read its examples"
