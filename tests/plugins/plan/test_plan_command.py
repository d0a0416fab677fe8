"""`mtrl-train plan`: what it recommends, what it reads of a run, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrl_plugins.plan.plan_run import PlanOptions, plan_run
from mtrl_plugins.plan.simulate import EventQueue
from mtrl_plugins.plan.speeds import DEVICES, cache_room, measure_model, plan_rank
from mtrl_plugins.plan.workload import read_run
from tests.trainer.cli_data import RunCommand
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, Span, StopReason
from trainer.storage.rollout_file import RolloutWriter
from trainer.storage.run_files import MetricsWriter
from trainer.train.settings import TrainSettings

DECODE_S, SEQUENCE_S, UPDATE_S, TOKEN_S = 0.02, 0.003, 0.1, 0.001
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 1000,
    "tie_word_embeddings": True,
}  # fmt: skip


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def write_run(folder: Path, steps: int = 3, n: int = 4, host_s: float = 0.001, **changes: Any) -> Path:
    """A run as a machine of known speed makes it: each step has one group, whose rollouts have two turns and a tool.

    `host_s` is what the process that plays rollouts needs for a turn.
    """
    settings = TrainSettings.model_validate(
        {"model": str(write_model(folder.parent / "model")), "data": "x", "prompts": 1, "n": n, **changes}
    )
    folder.mkdir(parents=True)
    about = {"settings": settings.model_dump(mode="json"), "model": settings.model}
    (folder / "run.json").write_text(json.dumps(about))
    with RolloutWriter(folder) as writer, MetricsWriter(folder / "metrics.jsonl") as metrics:
        for step in range(1, steps + 1):
            for index in range(n):
                writer.add(make_rollout(f"{step}-0-0", index, n, host_s))
            row_tokens = n * (10 + 5 + 4 + 5) - (n - 1) * 10
            learning = UPDATE_S + 3 * TOKEN_S * row_tokens
            times = {"time/rolling_out_s": 1.0, "time/learning_s": learning, "time/publishing_s": 0.05}
            metrics.add(step, {"update/rows": n, "update/idle": 0, **times})
    return folder


def make_rollout(group: str, index: int, running: int, host_s: float) -> Rollout:
    turn_s = 5 * (DECODE_S + running * SEQUENCE_S)
    entries = (
        Entry(Author.TASK, (1,) * 10),
        Entry(Author.POLICY, (1,) * 5, logprobs=(0.0,) * 5, version=0),
        Entry(Author.TOOL, (1,) * 4),
        Entry(Author.POLICY, (1,) * 5, logprobs=(0.0,) * 5, version=0),
    )
    timeline = (
        Span("queueing", 0.0, 0.0), Span("generating", 0.0, turn_s), Span("calling", turn_s + host_s, 0.5),
        Span("queueing", turn_s + host_s + 0.5, 0.0), Span("generating", turn_s + host_s + 0.5, turn_s),
    )  # fmt: skip
    return Rollout("task", Ledger(entries), StopReason.DONE, group=group, index=index, timeline=timeline)


def test_run_is_read_as_its_turns_tokens_and_tool_seconds(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    scripts = [script for group in run.workload.groups for script in group]
    assert [tuple(turn) for turn in scripts[0]] == [(10, 5, 0.5), (19, 5, 0.0)]
    assert len(run.workload.groups) == 2 and len(scripts) == 8  # The first step is left out.
    assert run.workload.host_turn_s == pytest.approx(0.001)


def test_ranks_share_what_belongs_to_weights_and_nothing_else(tmp_path: Path) -> None:
    settings = TrainSettings.model_validate({"model": str(write_model(tmp_path / "m")), "data": "x"})
    model = measure_model(tmp_path / "m", settings)
    one, four = plan_rank(model, 1, 80e9), plan_rank(model, 4, 80e9)
    passes = sum(part.size for part in model.passes)
    sizes = {part.name: part.size for part in four.parts}
    assert sizes["weights on their way"] == min(4 * model.numbers, 2**30)  # After the pass, which needs more.
    assert (one.needed - passes) / 4 == pytest.approx(four.needed - passes - sizes["gathered layers"], rel=1e-6)
    assert plan_rank(model, 16, 80e9, shard=4).parts == four.parts  # Every four ranks have a copy.
    assert plan_rank(model, 16, 80e9, shard=1).parts == one.parts
    h100 = DEVICES["h100"]
    assert cache_room(model, 1, h100) < cache_room(model, 2, h100) / 2 * 1.1


def plan(run: RunCommand, *words: object, code: int = 0) -> str:
    return run("plan", *words, code=code).output


def test_plan_of_a_run_prints_the_recommendation_first(run: RunCommand, tmp_path: Path) -> None:
    output = plan(run, write_run(tmp_path / "run"), "--gpus", 4, "--device", "h100")
    assert output.startswith("Fastest: `mode: ")
    for text in ("engine idle", "each rank", "each device of a server", "NVIDIA H100 data sheet", "synchronous"):
        assert text in output


def test_rollout_workers_share_the_turns_that_hold_engines_up(run: RunCommand, tmp_path: Path) -> None:
    words = ("--gpus", 4, "--device", "h100")
    folders = [write_run(tmp_path / name, host_s=0.5, rollout={"workers": n}) for name, n in (("one", 0), ("four", 4))]
    speeds = [json.loads(plan(run, folder, *words, "--json"))["recommended"]["tokens_per_s"] for folder in folders]
    assert 2 < speeds[1] / speeds[0] <= 4
    assert "holds up the engines: raise `rollout.workers`" in " ".join(plan(run, folders[0], *words).split())


def test_plan_gives_the_trainer_whole_copies_of_the_weights(run: RunCommand, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", distributed={"shard": 3})
    planned = json.loads(plan(run, folder, "--gpus", 8, "--device", "h100", "--json"))
    assert {split["trainer_devices"] for split in planned["splits"]} == {3, 6}
    output = plan(run, folder, "--gpus", 2, "--device", "h100", code=2)
    assert "3 ranks share a copy of the weights, and there are 2 devices" in output


def test_plan_in_json_has_every_split_and_the_same_for_the_same_seed(run: RunCommand, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    words = (folder, "--gpus", 4, "--device", "h200", "--servers-tp", 2, "--json")
    output = plan(run, *words)
    planned = json.loads(output)
    assert planned["recommended"] in planned["splits"]
    for split in planned["splits"]:
        used = split["servers"] * split["servers_tp"]
        assert used == 4 if split["together"] else used + split["trainer_devices"] == 4
        assert 0 <= split["engine_idle"] <= 1 and 0 <= split["trainer_idle"] <= 1
    assert plan(run, *words) == output


def test_slower_tools_are_asked_for_with_an_option(run: RunCommand, tmp_path: Path) -> None:
    words = (write_run(tmp_path / "run"), "--gpus", 1, "--device", "h100", "--json")
    seconds = [json.loads(plan(run, *words, "--tool-seconds", tool))["splits"][0]["step_s"] for tool in (0.0, 10.0)]
    assert seconds[1] - seconds[0] == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--device", "h1000"), ("'h1000' is no device that is known", "h100, h200")),
        (("--gpus", 6, "--servers-tp", 4), ("6 devices cannot be divided into servers of 4", "divisor of --gpus")),
    ],
)
def test_what_cannot_be_planned_is_named_with_a_remedy(
    run: RunCommand, tmp_path: Path, words: tuple[object, ...], texts: tuple[str, ...]
) -> None:
    output = plan(run, write_run(tmp_path / "run"), *words, code=2)
    assert all(text in output for text in texts) and "remedy:" in output


def test_model_that_fits_no_split_is_an_error_with_what_to_change(run: RunCommand, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    wide = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "vocab_size": 152064}
    write_model(tmp_path / "model", **wide, num_attention_heads=64, num_key_value_heads=8)
    server = plan(run, folder, "--gpus", 8, "--device", "h100", code=2)
    assert "a server of 1 h100 has no room for the model" in server and "--servers-tp" in server
    trainer = plan(run, folder, "--gpus", 4, "--servers-tp", 4, "--device", "h100", code=2)
    assert "no split of 4 h100 fits" in trainer and "raise --gpus" in trainer


def test_run_without_steps_and_missing_target_are_named(run: RunCommand, tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", steps=0)
    assert "the run has no finished steps" in plan(run, empty, code=2)
    assert "there is no such run file or run" in plan(run, tmp_path / "nowhere.yaml", code=2)


def test_plan_needs_no_run_and_says_what_it_assumes(run: RunCommand, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(model), "data": "x", "prompts": 4, "n": 2}
    Path("run.yaml").write_text(json.dumps(settings))
    assert "no run was measured: assumed are" in plan(run, "run.yaml", "--gpus", 2)
    for name, value in {"tensor_parallel": 2, "offload": True}.items():
        Path("run.yaml").write_text(json.dumps({**settings, "distributed": {name: value}}))
        assert f"distributed.{name}: plans know no" in plan(run, "run.yaml", "--gpus", 2, code=2)


def test_plan_of_many_devices_takes_steps_in_proportion_to_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench/plan_large.py` measures the seconds of 1,024 devices with 100,000 rollouts under way."""
    events, add = [0], EventQueue.at

    def count(queue: EventQueue, *event: Any) -> None:
        events[0] += 1
        add(queue, *event)

    monkeypatch.setattr(EventQueue, "at", count)
    model, counts = write_model(tmp_path / "model"), []
    for rollouts in (60, 300):
        settings = TrainSettings.model_validate(
            {"model": str(model), "data": "x", "prompts": rollouts // 10, "n": 10, "steps": 9,
             "concurrency": {"inflight_rollouts": rollouts, "running_requests": rollouts}}
        )  # fmt: skip
        events[0] = 0
        best = plan_run(settings, model, (), PlanOptions(1024, "h100")).plan.recommended
        assert best.part == 1 and best.simulation.most_under_way >= rollouts
        counts.append(events[0])
    assert counts[1] < 5 * counts[0]
