"""A task that no single context holds is learned by learning what to write into the summary."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.plugins.history.secret_page import NAMES, REQUEST, build_model
from tests.trainer.cli_data import RunCommand

MODULE = "tests.plugins.history.secret_page"
RUN = f"""
model: model
data: rows.jsonl
tools: tools
stepper: {MODULE}:Pages
template: {{parser: plain_text}}
limits: {{assistant_turns: 6, turn_tokens: 6, rollout_tokens: 76}}
reward: {{components: {{named: {{function: "{MODULE}:names_it"}}}}}}
steps: 20
prompts: 6
n: 16
record: true
algorithm: {{name: grpo}}
update: {{lr: 1.0e-3}}
evaluation: {{every: 0, final_rows: 3}}
checkpoint: {{every: 100}}
"""
HISTORY = f"history: {{at: 0.4, times: 1, request: '{REQUEST}'}}\n"


def read_metrics(run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:builtin type swigvarlink:DeprecationWarning")
def test_task_that_no_context_holds_is_learned_by_the_summary_alone(run: RunCommand, place: Path) -> None:
    build_model(place / "model")
    (place / "tools").mkdir()
    rows = [{"id": f"{name}-{number}", "prompt": "1?", "ground_truth": name} for number in range(4) for name in NAMES]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "alone.yaml").write_text(RUN)
    (place / "run.yaml").write_text(RUN + HISTORY)

    run("--config", "alone.yaml", "--out", "alone", "steps=1")
    assert read_metrics("alone")[-1]["stops/length_rollout"] == 1.0, "one context does not hold it"

    run("--config", "run.yaml", "--out", "trained")
    run("--config", "run.yaml", "--out", "masked", f"algorithm.credit.trained_turns={MODULE}:weigh_all_but_summaries")
    trained, masked = read_metrics("trained"), read_metrics("masked")
    assert min(step["history/compactions"] for step in trained[-20:]) > 0.9
    rewards = {name: [step["reward/mean"] for step in steps] for name, steps in (("t", trained), ("m", masked))}
    assert mean(rewards["m"][-5:]) < 0.42, f"without the summary's gradient it stays at chance: {rewards}"
    assert mean(rewards["t"][-5:]) > 0.5, f"it learns to name whom the page names: {rewards}"

    assert "0 differ" in run("replay", "trained", 1).output
    shown = run("show", "trained", 0).output
    assert "ledger 0, the task's chat" in shown and "ledger 1, after summary 1" in shown
