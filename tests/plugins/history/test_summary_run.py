"""A run whose task no single context holds: its summaries are trained, replayed and shown."""

from __future__ import annotations

import json
from pathlib import Path

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
steps: 2
prompts: 2
n: 8
record: true
algorithm: {{name: grpo}}
update: {{lr: 1.0e-3}}
evaluation: {{every: 0, final_rows: 3}}
checkpoint: {{every: 100}}
"""
HISTORY = f"history: {{at: 0.4, times: 1, request: '{REQUEST}'}}\n"


def read_metrics(run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_summaries_are_trained_replayed_and_shown(run: RunCommand, place: Path) -> None:
    build_model(place / "model")
    (place / "tools").mkdir()
    rows = [{"id": name, "prompt": "1?", "ground_truth": name} for name in NAMES]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "alone.yaml").write_text(RUN)
    (place / "run.yaml").write_text(RUN + HISTORY)

    run("--config", "alone.yaml", "--out", "alone", "steps=1")
    assert read_metrics("alone")[-1]["stops/length_rollout"] == 1.0, "one context does not hold it"

    run("--config", "run.yaml", "--out", "trained")
    trained = read_metrics("trained")
    assert min(step["history/compactions"] for step in trained[-2:]) > 0.7
    assert any(step["update/tokens"] for step in trained[-2:])

    assert "0 differ" in run("replay", "trained", 1).output
    shown = run("show", "trained", 0).output
    assert "ledger 0, the task's chat" in shown and "ledger 1, after summary 1" in shown
